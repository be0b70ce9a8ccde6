"""The assistant's turn as a chat's choice shows it: content, thinking and tool calls, whole or in parts."""

from __future__ import annotations

from typing import Any

from fastapi import Request as HttpRequest

from hetero.engine.request import Result
from hetero.server.dialects import Content, Delta, Parser, Reasoning, ToolArgs, ToolEnd, ToolStart
from hetero.server.safety import caller


def client_of(http: HttpRequest, user: str | None) -> str:
    """Who takes turns with others in the queue."""
    who = caller(http.headers, http.client.host if http.client else "")
    return f"{who}/{user}" if user else who


def finish_reason(result: Result, *, called: bool = False) -> str:
    """In the words of the API, which has none for running out of time. ``called``: there is a call."""
    if result.finish_reason in ("length", "deadline"):
        return "length"
    return "tool_calls" if called else "stop"


class Turn:
    """One choice as its text comes in."""

    def __init__(self, parser: Parser, *, one_call: bool = False) -> None:
        """``one_call``: the turn is over after its first call."""
        self._parser = parser
        self._one_call = one_call
        self._content: list[str] = []
        self._thinking: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._open = False
        self._tokens = 0
        self.over = False
        self.thinking_tokens = 0  # up to the last of the thinking

    @property
    def called(self) -> bool:
        """There is a call, and it is whole."""
        return bool(self._calls) and not self._open

    def feed(self, text: str, tokens: int = 1) -> list[dict[str, Any]]:
        """The parts of the message that this piece of text, of so many tokens, makes certain."""
        self._tokens += tokens
        return self._parts(self._parser.feed(text)) if text else []

    def finish(self) -> list[dict[str, Any]]:
        """What was held back, at the end of the text."""
        return self._parts(self._parser.finish())

    def message(self) -> dict[str, Any]:
        """All parts together."""
        content = "".join(self._content)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self._thinking:
            message["reasoning_content"] = "".join(self._thinking)
        if self._calls:
            message["content"] = content or None
            message["tool_calls"] = [
                {
                    "id": call["id"],
                    "type": "function",
                    "function": {"name": call["name"], "arguments": "".join(call["arguments"])},
                }
                for call in self._calls
            ]
        return message

    def _parts(self, deltas: list[Delta]) -> list[dict[str, Any]]:
        return [part for delta in deltas if not self.over and (part := self._part(delta))]

    def _part(self, delta: Delta) -> dict[str, Any]:
        if isinstance(delta, Content):
            self._content.append(delta.text)
            return {"content": delta.text}
        if isinstance(delta, Reasoning):
            self._thinking.append(delta.text)
            self.thinking_tokens = self._tokens
            return {"reasoning_content": delta.text}
        if isinstance(delta, ToolStart):
            self._open = True
            self._calls.append({"id": delta.id, "name": delta.name, "arguments": []})
            function = {"name": delta.name, "arguments": ""}
            head = {"index": delta.index, "id": delta.id, "type": "function", "function": function}
            return {"tool_calls": [head]}
        if isinstance(delta, ToolArgs):
            self._calls[delta.index]["arguments"].append(delta.fragment)
            return {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.fragment}}]}
        assert isinstance(delta, ToolEnd)
        self._open = False
        self.over = self._one_call
        return {}
