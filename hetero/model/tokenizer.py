"""The tokenizer of a checkpoint folder: text to ids, chat to ids, ids to text."""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import decoders
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hetero import jsonfile
from hetero.core import InputError
from hetero.model.detokenize import (
    ByteDetokenizer,
    Detokenizer,
    TextDetokenizer,
    VisibleDetokenizer,
    unicode_bytes,
)
from hetero.model.gguf_file import locate, opened
from hetero.model.gguf_tokenizer import read_tokenizer
from hetero.model.longest import longest_token
from hetero.model.template import RENDER_S, OverdueError, tighten_sandbox, time_limit

# How vocabularies with a byte fallback write a byte that is no character.
_SINGLE_BYTE = re.compile("<0x([0-9A-F]{2})>")
_ARGUMENTS = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "tiktoken.model")

_MORE = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.json")

tighten_sandbox()


class Tokenizer:
    """A thin cover of transformers' tokenizer: what the engine needs and no more."""

    def __init__(self, inner: PreTrainedTokenizerBase, where: str) -> None:
        self._inner = inner
        self._where = where
        self._token_bytes: dict[int, bytes] = {}
        # The library's encoder is shared state, and a server encodes from several threads.
        self._encoding = threading.Lock()
        self._backend: Any = getattr(inner, "backend_tokenizer", None)
        if self._backend is not None:
            # Its file may ask for either; a prompt is never cut or filled up.
            self._backend.no_truncation()
            self._backend.no_padding()

    @property
    def eos_id(self) -> int | None:
        """Id of the end-of-text token, if there is one."""
        token = self._inner.eos_token_id
        return None if token is None else int(token)

    @property
    def has_template(self) -> bool:
        return bool(self._inner.chat_template)

    @property
    def template(self) -> str:
        """Text of the chat template, of all of them where the tokenizer has several; empty without one."""
        template = self._inner.chat_template or ""
        return "\n".join(template.values()) if isinstance(template, dict) else str(template)

    def encode(self, text: str) -> list[int]:
        """Ids of a plain text, with the begin-of-text token where the tokenizer adds one.

        Raises InputError for text that is no valid Unicode.
        """
        return self._encode(text, special=True)

    def least_tokens(self, text: str) -> int:
        """At least as many tokens ``encode`` makes of ``text``; 0 where nothing is known of the tokenizer."""
        longest = self._longest
        return 0 if longest is None else -(-len(text) // longest)

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids of a conversation, ending where the assistant's turn begins. Errors: as ``render``."""
        return self.encode_rendered(self.render(messages))

    def encode_rendered(self, text: str) -> list[int]:
        """Ids of a text that the template made: it writes the special tokens itself."""
        return self._encode(text, special=False)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation, ending where the assistant's turn begins.

        ``tools``: each {"type": "function", "function": {...}}. ``variables``: what else the template reads,
        such as enable_thinking. Raises InputError without a chat template, for a variable that is none, and
        when the template refuses the messages. Templates come with the checkpoint and are not trusted:
        transformers renders them in jinja's sandbox.
        """
        variables = variables or {}
        # A caller of a server must not choose the template itself, nor what the library does with it.
        if taken := sorted(_ARGUMENTS & set(variables)):
            raise InputError(f"chat_template_kwargs: '{taken[0]}' is not a variable of a chat template")
        if not self.has_template:
            raise InputError(_no_template(self._where))
        try:
            with time_limit():
                text = self._inner.apply_chat_template(
                    [dict(message) for message in messages],
                    tools=None if not tools else [dict(tool) for tool in tools],
                    tokenize=False,
                    add_generation_prompt=True,
                    **variables,
                )
        except OverdueError:
            raise InputError(
                f"the chat template of {self._where} does not come to an end within {RENDER_S:g} seconds"
            ) from None
        except Exception as error:
            # Whatever it raises, memory and recursion included, is the template's affair.
            raise InputError(f"the chat template of {self._where} refuses these messages: {error}") from None
        return str(text)

    def _encode(self, text: str, *, special: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(f"the text is not valid Unicode at character {error.start}") from None
        if self._backend is not None:
            # This call of the library lets other threads run while a long text is read, and shares nothing.
            return list(self._backend.encode_batch_fast([text], add_special_tokens=special)[0].ids)
        with self._encoding:
            return [int(token) for token in self._inner.encode(text, add_special_tokens=special)]

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of a whole answer, special tokens left out, an incomplete character at the end dropped."""
        detokenizer = self.detokenizer()
        return "".join(map(detokenizer.feed, tokens)) + detokenizer.finish()

    def token_bytes(self, token: int) -> bytes:
        """Bytes of one token's text, maybe of a part of a character; of a special token as it is written."""
        if token in self._special:
            return self._written(token).encode()
        if self._byte_level:
            return self._bytes_of(token)
        if token >= len(self._inner):
            return b""
        written = self._written(token)
        single = _SINGLE_BYTE.fullmatch(written)
        return bytes([int(single[1], 16)]) if single else written.replace("\u2581", " ").encode()

    @property
    def serialized(self) -> str | None:
        """The tokenizer as the text of a tokenizer.json; None for one that has no such form."""
        return None if self._backend is None else str(self._backend.to_str())

    def special(self, texts: Iterable[str]) -> frozenset[int]:
        """Ids of those special tokens, which text leaves out, that are written as one of ``texts``."""
        wanted = set(texts)
        return frozenset(token for token in self._special if self._written(token) in wanted)

    def detokenizer(self, visible: Collection[int] = ()) -> Detokenizer:
        """A fresh one for one answer. ``visible``: special tokens that are to show as they are written."""
        if visible:
            return VisibleDetokenizer(self._fresh, {token: self._written(token) for token in visible})
        return self._fresh()

    def _fresh(self) -> Detokenizer:
        if self._byte_level:
            return ByteDetokenizer(self._bytes_of)
        return TextDetokenizer(self._plain_decode, self._replacement)

    @cached_property
    def _longest(self) -> int | None:
        return None if self.serialized is None else longest_token(self.serialized)

    @cached_property
    def _byte_level(self) -> bool:
        backend = getattr(self._inner, "backend_tokenizer", None)
        return backend is not None and isinstance(backend.decoder, decoders.ByteLevel)

    @cached_property
    def _replacement(self) -> list[int]:
        # After a letter, since some vocabularies put a space before the first character of a text.
        alone, both = (self._encode(text, special=False) for text in ("a", "a\ufffd"))
        return both[len(alone) :]

    @cached_property
    def _unicode_bytes(self) -> dict[str, int]:
        return unicode_bytes()

    @cached_property
    def _special(self) -> frozenset[int]:
        added = self._inner.added_tokens_decoder
        return frozenset(self._inner.all_special_ids) | {i for i, token in added.items() if token.special}

    def _written(self, token: int) -> str:
        return str(self._inner.convert_ids_to_tokens(token))

    def _plain_decode(self, tokens: Sequence[int]) -> str:
        kept = [token for token in tokens if token not in self._special]
        text = self._inner.decode(kept, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text)

    def _bytes_of(self, token: int) -> bytes:
        known = self._token_bytes.get(token)
        if known is None:
            known = b"" if token in self._special else self._look_up(token)
            self._token_bytes[token] = known
        return known

    def _look_up(self, token: int) -> bytes:
        # Models pad their vocabulary beyond the tokenizer's: such an id has no text.
        written = self._inner.convert_ids_to_tokens(token) if token < len(self._inner) else None
        if written is None:
            return b""
        table = self._unicode_bytes
        # An added token is literal text, and may hold what no byte is written as, such as a space.
        if any(char not in table for char in written):
            return str(written).encode()
        return bytes(table[char] for char in written)


def load_tokenizer(folder: str | Path) -> Tokenizer | None:
    """The tokenizer of a checkpoint folder or GGUF file, or None when it has none.

    Raises InputError for a broken one.
    """
    folder = Path(folder)
    if (gguf := locate(folder)) is not None:
        described = read_tokenizer(opened(gguf))
        return None if described is None else Tokenizer(described, gguf.name)
    if not any((folder / name).is_file() for name in _FILES):
        return None
    try:
        inner = _load(folder)
    except InputError:
        raise
    except Exception as error:
        # transformers raises whatever its parsers do; all of it means that the files are at fault.
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(f"{_culprit(folder)}: the tokenizer cannot be read: {reason}") from None
    # Its name alone: what is wrong with a conversation is told to clients, who need not know our folders.
    return Tokenizer(inner, folder.resolve().name)


def no_tokenizer(model: Path) -> str:
    """The message for a folder or GGUF file that has none."""
    where = "take a file whose metadata has one" if locate(model) else "put its tokenizer.json there"
    return f"{model} has no tokenizer; give token ids (--prompt-ids 1,2,3) or {where}"


def _no_template(where: str) -> str:
    other = "put a chat_template.jinja into the folder"
    if where.endswith(".gguf"):
        other = "take a file whose metadata has tokenizer.chat_template"
    return (
        f"{where} has no chat template; give the prompt as it is (hetero run --raw -p TEXT, or "
        f"/v1/completions), or {other}"
    )


def _culprit(folder: Path) -> Path:
    """The file that is at fault: the first that is no JSON, else the first that makes a tokenizer."""
    there = [folder / name for name in (*_FILES, *_MORE) if (folder / name).is_file()]
    for file in there:
        if file.suffix == ".json":
            try:
                jsonfile.parse(file.read_bytes())
            except (OSError, ValueError):
                return file
    return there[0]


def _load(folder: Path) -> PreTrainedTokenizerBase:
    configured = any((folder / name).is_file() for name in ("tokenizer_config.json", "config.json"))
    if not configured and (folder / "tokenizer.json").is_file():
        return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
