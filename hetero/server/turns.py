"""One answer as its text comes in: its deltas, and the assistant's turn that a chat's choice shows."""

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


class Reader:
    """The deltas of one answer. Under ``one_call`` it is ``over`` at the end of its first call.

    ``thinking_tokens``: up to the last of the thinking.
    """

    def __init__(self, parser: Parser, *, one_call: bool = False) -> None:
        self._parser = parser
        self._one_call = one_call
        self._calls = 0
        self._open = False
        self._tokens = 0
        self.over = False
        self.thinking_tokens = 0

    @property
    def called(self) -> bool:
        """There is a call, and none was cut off."""
        return self._calls > 0 and not self._open

    def feed(self, text: str) -> list[Delta]:
        """What the text of one more token makes certain."""
        self._tokens += 1
        return self._kept(self._parser.feed(text)) if text else []

    def finish(self, tail: str, *, cut: bool = False) -> list[Delta]:
        """The rest, at the end of the text. ``cut``: the end was not the model's own."""
        rest = self._parser.feed(tail) if tail else []
        # A parser closes what was open, also a call that has not come to its end.
        return self._kept(rest + self._parser.finish(), still_open=cut)

    def _kept(self, deltas: list[Delta], *, still_open: bool = False) -> list[Delta]:
        kept = []
        for delta in deltas:
            if self.over:
                break
            kept.append(delta)
            if isinstance(delta, Reasoning):
                self.thinking_tokens = self._tokens
            elif isinstance(delta, ToolStart):
                self._calls += 1
                self._open = True
            elif isinstance(delta, ToolEnd):
                self._open = still_open
                self.over = self._one_call
        return kept


class Turn:
    """One choice as its text comes in."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self._content: list[str] = []
        self._thinking: list[str] = []
        self._calls: list[dict[str, Any]] = []

    def feed(self, text: str) -> list[dict[str, Any]]:
        """The parts of the message that the text of one more token makes certain."""
        return self._parts(self.reader.feed(text))

    def finish(self, tail: str) -> list[dict[str, Any]]:
        """The rest, at the end of the text."""
        return self._parts(self.reader.finish(tail))

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
        return [part for delta in deltas if (part := self._part(delta))]

    def _part(self, delta: Delta) -> dict[str, Any]:
        if isinstance(delta, Content):
            self._content.append(delta.text)
            return {"content": delta.text}
        if isinstance(delta, Reasoning):
            self._thinking.append(delta.text)
            return {"reasoning_content": delta.text}
        if isinstance(delta, ToolStart):
            self._calls.append({"id": delta.id, "name": delta.name, "arguments": []})
            function = {"name": delta.name, "arguments": ""}
            head = {"index": delta.index, "id": delta.id, "type": "function", "function": function}
            return {"tool_calls": [head]}
        if isinstance(delta, ToolArgs):
            self._calls[delta.index]["arguments"].append(delta.fragment)
            return {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.fragment}}]}
        return {}
