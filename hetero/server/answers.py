"""Bodies that go out: whole answers, chunks of a stream, errors."""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import dataclass, field
from typing import Any, Literal

from hetero.engine.request import Result

Kind = Literal["chat", "text"]

DONE = "data: [DONE]\n\n"


def sse(body: dict[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    # A message may quote the request, whose JSON can escape half a surrogate pair: no UTF-8 has that.
    message = message.encode("utf-8", "backslashreplace").decode()
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclass(frozen=True, slots=True)
class Writer:
    """Bodies of one answer; they share its id and time."""

    kind: Kind
    model: str
    include_usage: bool = False
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, result: Result) -> dict[str, Any]:
        text = result.text or ""
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": result.finish_reason}
        if self.kind == "chat":
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        return self._body([choice], chunk=False) | {"usage": usage(result)}

    def opening(self) -> dict[str, Any]:
        """The first chunk of a chat says who speaks."""
        return self._chunk({"role": "assistant", "content": ""}, "", None)

    def piece(self, text: str) -> dict[str, Any]:
        return self._chunk({"content": text}, text, None)

    def closing(self, result: Result) -> dict[str, Any]:
        return self._chunk({}, "", result.finish_reason)

    def usage(self, result: Result) -> dict[str, Any]:
        """The chunk that ``stream_options.include_usage`` asks for: no choices, the counts."""
        return self._body([], chunk=True) | {"usage": usage(result)}

    def _chunk(self, delta: dict[str, Any], text: str, reason: str | None) -> dict[str, Any]:
        content = {"delta": delta} if self.kind == "chat" else {"text": text}
        return self._body(
            [{"index": 0, **content, "logprobs": None, "finish_reason": reason}], chunk=True
        ) | ({"usage": None} if self.include_usage else {})

    def _body(self, choices: list[dict[str, Any]], *, chunk: bool) -> dict[str, Any]:
        if self.kind == "chat":
            prefix, name = "chatcmpl-", "chat.completion.chunk" if chunk else "chat.completion"
        else:
            prefix, name = "cmpl-", "text_completion"
        return {
            "id": prefix + self.id,
            "object": name,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


def usage(result: Result) -> dict[str, int]:
    return {
        "prompt_tokens": result.usage.prompt_tokens,
        "completion_tokens": result.usage.completion_tokens,
        "total_tokens": result.usage.total_tokens,
    }
