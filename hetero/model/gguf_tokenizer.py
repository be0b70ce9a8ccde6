"""The tokenizer that a GGUF file's metadata describe: vocabulary, merges, special tokens, chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any, NoReturn

import numpy as np
from gguf.constants import Keys, TokenType
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import PreTrainedTokenizerFast

from hetero.core import InputError
from hetero.model.gguf_file import GgufFile
from hetero.model.gguf_pretokenizers import WAYS, Way

_NONE = ("none", "no_vocab")
_KINDS = ("gpt2", "llama", "gemma4")
_SPACE = "\u2581"  # how vocabularies of sentencepiece write a space
_SPECIAL = {
    "bos_token": Keys.Tokenizer.BOS_ID,
    "eos_token": Keys.Tokenizer.EOS_ID,
    "unk_token": Keys.Tokenizer.UNK_ID,
    "pad_token": Keys.Tokenizer.PAD_ID,
}
# Ids that a file has where it names none, by the kind of its vocabulary.
_DEFAULT_IDS = {
    "llama": {Keys.Tokenizer.BOS_ID: 1, Keys.Tokenizer.EOS_ID: 2, Keys.Tokenizer.UNK_ID: 0},
    "gpt2": {},
    "gemma4": {},
}


def read_tokenizer(found: GgufFile) -> PreTrainedTokenizerFast | None:
    """The tokenizer, None where the file has no vocabulary.

    Raises InputError for a kind or a pre-tokenizer that is not supported, and for metadata at odds.
    """
    kind = found.metadata.get(Keys.Tokenizer.MODEL)
    if kind is None or kind in _NONE:
        return None
    if kind not in _KINDS:
        raise InputError(
            f"{found.path}: tokenizer {kind!r} is not supported; supported: {', '.join(_KINDS)} "
            "(hetero run takes --prompt-ids)"
        )
    return _Vocabulary(found, kind).tokenizer()


class _Vocabulary:
    """The metadata of one file."""

    def __init__(self, found: GgufFile, kind: str) -> None:
        self.found = found
        self.kind = kind
        self.tokens: list[str] = self._list(Keys.Tokenizer.LIST)
        types = found.metadata.get(Keys.Tokenizer.TOKEN_TYPE)
        if types is None:
            types = np.full(len(self.tokens), int(TokenType.NORMAL))
        if not isinstance(types, np.ndarray) or len(types) != len(self.tokens):
            self.wrong(Keys.Tokenizer.TOKEN_TYPE, f"must be {len(self.tokens)} numbers, one a token")
        self.types = types
        self.ids = {token: index for index, token in enumerate(self.tokens)}

    def wrong(self, key: str, what: str) -> NoReturn:
        raise InputError(f"{self.found.path}: metadata {key} {what}")

    def _list(self, key: str) -> list[str]:
        value = self.found.metadata.get(key)
        if not isinstance(value, list) or not value:
            self.wrong(key, "must be a list of strings")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.found.metadata.get(key, default)
        if not isinstance(value, bool):
            self.wrong(key, "must be true or false")
        return value

    def id_of(self, key: str) -> int | None:
        value = self.found.metadata.get(key, _DEFAULT_IDS[self.kind].get(key))
        if value is None:
            return None
        if type(value) is not int:
            self.wrong(key, f"is {value!r}, must be a token's id")
        # Ids beyond the vocabulary are how some files say that there is none.
        return int(value) if 0 <= value < len(self.tokens) else None

    def tokenizer(self) -> PreTrainedTokenizerFast:
        try:
            inner = self._byte_level() if self.kind == "gpt2" else self._merging()
            self._add_tokens(inner)
            self._add_ends(inner)
            special = {
                name: self.tokens[token]
                for name, key in _SPECIAL.items()
                if (token := self.id_of(key)) is not None
            }
            # transformers would copy it, by way of JSON, which takes seconds for a large vocabulary.
            vars(inner)["__deepcopy__"] = lambda memo: inner
            fast = PreTrainedTokenizerFast(
                tokenizer_object=inner, clean_up_tokenization_spaces=False, **special
            )
        except InputError:
            raise
        except Exception as error:  # the library's own, for merges of unknown tokens and the like
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise InputError(
                f"{self.found.path}: the tokenizer cannot be made of the metadata: {reason}"
            ) from None
        fast.chat_template = self._template()
        return fast

    def _way(self) -> Way:
        name = self.found.metadata.get(Keys.Tokenizer.PRE, "default")
        if name not in WAYS:
            raise InputError(
                f"{self.found.path}: pre-tokenizer {name!r} is not supported; supported: "
                f"{', '.join(sorted(WAYS))} (hetero run takes --prompt-ids)"
            )
        return WAYS[name]

    def _byte_level(self) -> Tokenizer:
        way = self._way()
        merges = [_pair(merge) for merge in self._list(Keys.Tokenizer.MERGES)]
        inner = Tokenizer(models.BPE(self.ids, merges, ignore_merges=way.whole))
        cuts: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in way.patterns]
        cuts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        inner.pre_tokenizer = pre_tokenizers.Sequence(cuts)
        inner.decoder = decoders.ByteLevel()
        return inner

    def _merging(self) -> Tokenizer:
        """Sentencepiece's pairs, merged by the score of what they make, or in the order of a list."""
        unknown = self.id_of(Keys.Tokenizer.UNK_ID)
        inner = Tokenizer(
            models.BPE(
                self.ids,
                self._merges(),
                unk_token=None if unknown is None else self.tokens[unknown],
                fuse_unk=True,
                byte_fallback=bool((self.types == TokenType.BYTE).any()),
            )
        )
        prefix = self.flag(Keys.Tokenizer.ADD_PREFIX, self.kind == "llama")
        spaces = normalizers.Replace(" ", _SPACE)
        inner.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefix else spaces
        steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        inner.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
        return inner

    def _merges(self) -> list[tuple[str, str]]:
        if self.kind == "gemma4":
            return [_pair(merge) for merge in self._list(Keys.Tokenizer.MERGES)]
        scores = self.found.metadata.get(Keys.Tokenizer.SCORES)
        if not isinstance(scores, np.ndarray) or len(scores) != len(self.tokens):
            self.wrong(Keys.Tokenizer.SCORES, f"must be {len(self.tokens)} numbers, one a token")
        return _merges_by_score(self.tokens, self.ids, scores, self.types)

    def _add_tokens(self, inner: Tokenizer) -> None:
        """Tokens that are taken from a text as they are written; control ones do not show in answers."""
        for kind in (TokenType.CONTROL, TokenType.USER_DEFINED):
            special = kind == TokenType.CONTROL
            added = [
                AddedToken(self.tokens[i], special=special, normalized=False)
                for i in np.flatnonzero(self.types == kind)
                # One that writes spaces in sentencepiece's way is found by merging: texts have real ones.
                if self.tokens[i]
                and self.ids[self.tokens[i]] == i
                and (special or _SPACE not in self.tokens[i])
            ]
            inner.add_tokens(added)

    def _add_ends(self, inner: Tokenizer) -> None:
        """Tokens that go before and after a plain text."""
        pairs = self.kind != "gpt2"  # of sentencepiece
        bos = self.flag(Keys.Tokenizer.ADD_BOS, pairs or self._way().bos)
        eos = self.flag(Keys.Tokenizer.ADD_EOS, False)
        first = self.id_of(Keys.Tokenizer.BOS_ID) if bos else None
        last = self.id_of(Keys.Tokenizer.EOS_ID) if eos else None
        ends = {self.tokens[i]: i for i in (first, last) if i is not None}
        if not ends:
            return
        before = [self.tokens[first]] if first is not None else []
        after = [self.tokens[last]] if last is not None else []
        inner.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after], special_tokens=list(ends.items())
        )

    def _template(self) -> str | dict[str, str] | None:
        main = self.found.metadata.get(Keys.Tokenizer.CHAT_TEMPLATE)
        named: Mapping[str, Any] = {
            name: self.found.metadata.get(Keys.Tokenizer.CHAT_TEMPLATE_N.format(name=name))
            for name in self.found.metadata.get(Keys.Tokenizer.CHAT_TEMPLATES, ())
            if isinstance(name, str)
        }
        templates = {"default": main, **named}
        kept = {name: text for name, text in templates.items() if isinstance(text, str) and text}
        if set(kept) <= {"default"}:
            return kept.get("default")
        return kept


def _pair(merge: str) -> tuple[str, str]:
    """The two tokens of a merge; the first may begin with a space."""
    at = merge.find(" ", 1)
    return merge[:at], merge[at + 1 :]


def _merges_by_score(
    tokens: Sequence[str], ids: Mapping[str, int], scores: np.ndarray[Any, Any], types: np.ndarray[Any, Any]
) -> list[tuple[str, str]]:
    """Every pair of tokens that makes a token, that of the highest score first."""
    whole = {int(kind) for kind in (TokenType.CONTROL, TokenType.BYTE, TokenType.UNKNOWN)}
    found: list[tuple[float, int, str, str]] = []
    for index, (token, score, kind) in enumerate(zip(tokens, scores.tolist(), types.tolist(), strict=True)):
        if kind in whole:
            continue
        for at in range(1, len(token)):
            left = token[:at]
            if left in ids and (right := token[at:]) in ids:
                found.append((-score, index, left, right))
    found.sort(key=itemgetter(0, 1))
    return [(left, right) for _, _, left, right in found]
