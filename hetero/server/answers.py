"""Parts of bodies that go out: events of a stream, counts, log-probabilities."""

from __future__ import annotations

import json
import math
import time
import uuid
from codecs import getincrementaldecoder
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hetero.engine.logprobs import TokenLogprob
from hetero.engine.request import Result
from hetero.model.tokenizer import Tokenizer

DONE = "data: [DONE]\n\n"
# JSON has no infinity, and clients of the field expect this for a token that cannot be.
NEVER = -9999.0


_encoded = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def sse(body: Mapping[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {_encoded(body)}\n\n"


def usage(results: Sequence[Result], choices: int = 1) -> dict[str, Any]:
    """Counts of a call; each ``choices`` results share their prompt, which counts once."""
    prompt = sum(result.usage.prompt_tokens for result in results[::choices])
    made = sum(result.usage.completion_tokens for result in results)
    cached = sum(result.usage.cached_tokens for result in results[::choices])
    return {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


@dataclass(frozen=True, slots=True)
class Head:
    """What all bodies of one answer begin with."""

    prefix: str
    name: str
    model: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def body(self, choices: list[dict[str, Any]], name: str | None = None) -> dict[str, Any]:
        return {
            "id": f"{self.prefix}-{self.id}",
            "object": name or self.name,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


def chat_logprobs(entries: Sequence[TokenLogprob], tokenizer: Tokenizer) -> dict[str, Any]:
    """In the form of a chat's choice."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        raw = tokenizer.token_bytes(token)
        return {"token": raw.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(raw)}

    content = [
        one(entry.token, entry.logprob) | {"top_logprobs": [one(*pair) for pair in entry.top]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


class TextLogprobs:
    """In the form of a completion's choice; tokens may come in parts, and offsets count through."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def part(self, entries: Sequence[TokenLogprob | None], first: int | None = None) -> dict[str, Any]:
        """Of the next tokens. ``first``: the token of an entry that is None, which nothing precedes."""
        body: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for entry in entries:
            token = entry.token if entry is not None else first
            assert token is not None
            body["tokens"].append(self._name(token))
            body["text_offset"].append(self._offset)
            body["token_logprobs"].append(None if entry is None else _finite(entry.logprob))
            body["top_logprobs"].append(None if entry is None else self._top(entry))
            self._offset += len(self._decoder.decode(self._bytes(token)))
        return body

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        # The token itself is always there, as the API says.
        pairs = dict(entry.top) | {entry.token: entry.logprob}
        return {self._name(token): _finite(value) for token, value in pairs.items()}

    def _bytes(self, token: int) -> bytes:
        return b"" if self._tokenizer is None else self._tokenizer.token_bytes(token)

    def _name(self, token: int) -> str:
        """Its text; by its bytes when they are no text, by its id when there is none: names must differ."""
        raw = self._bytes(token)
        try:
            return raw.decode() or f"token_id:{token}"
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _finite(value: float) -> float:
    return value if math.isfinite(value) else NEVER
