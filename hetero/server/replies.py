"""One answer as deltas, for the APIs that are put together from a chat: /v1/messages and /v1/responses."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

from pydantic import ValidationError

from hetero.core import InputError
from hetero.engine.request import Result
from hetero.server.chat import Plan
from hetero.server.chat_protocol import ChatBody
from hetero.server.dialects import Delta, Reasoning, ToolEnd, ToolStart
from hetero.server.dialects.jsontext import parsed
from hetero.server.dialects.source import joined
from hetero.server.generation import Generation


class Reply:
    """Reads one generation of a plan; ``called`` and ``result`` are there at its end.

    ``thinking_tokens``: up to the last of the thinking.
    """

    def __init__(self, plan: Plan, generation: Generation) -> None:
        self._parser = plan.dialect.parser(plan.prompt, plan.offer.offered)
        self._one_call = plan.one_call
        self._generation = generation
        self._open = False
        self._over = False
        self._calls = 0
        self._result: Result | None = None
        self._read_tokens = 0
        self.thinking_tokens = 0

    @property
    def called(self) -> bool:
        """There is a call, and none was cut off."""
        return self._calls > 0 and not self._open

    @property
    def result(self) -> Result:
        assert self._result is not None, "the reply has not ended"
        return self._result

    async def deltas(self) -> AsyncIterator[Delta]:
        """As they come; after the last, the result is there. Raises what ``Generation.events`` raises."""
        async for event in self._generation.events():
            if isinstance(event, Result):
                self._result = event
                ready = self._read(self._parser.feed(event.tail) + self._parser.finish(), at_end=True)
            else:
                self._read_tokens += 1
                ready = self._read(self._parser.feed(event.text)) if event.text else []
            for delta in ready:
                yield delta
            if self._over:
                self._generation.cancel()

    def _read(self, deltas: list[Delta], *, at_end: bool = False) -> list[Delta]:
        kept = []
        cut = at_end and self.result.finish_reason in ("length", "deadline")
        for delta in joined(deltas):
            if self._over:
                break
            kept.append(delta)
            if isinstance(delta, Reasoning):
                self.thinking_tokens = self._read_tokens
            if isinstance(delta, ToolStart):
                self._calls += 1
                self._open = True
            elif isinstance(delta, ToolEnd):
                # At the end of the text, a parser closes what was open.
                self._open = cut
                self._over = self._one_call
        return kept


def chat_of(fields: Mapping[str, Any]) -> ChatBody:
    """A chat's body. Raises InputError for what a chat refuses and the other API has no rule for."""
    try:
        return ChatBody.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise InputError(f"{place}: {first['msg'].removeprefix('Value error, ')}") from None


def thinking_variables(template: str, on: bool | None, effort: str | None) -> dict[str, Any]:
    """What tells a chat template to think, and how hard, as far as it has a setting for that."""
    variables: dict[str, Any] = {}
    if on is not None:
        variables |= {name: on for name in ("enable_thinking", "thinking") if name in template}
    if effort is not None and "reasoning_effort" in template:
        variables["reasoning_effort"] = effort
    return variables


def object_of(arguments: str) -> dict[str, Any] | None:
    """The object that a call's arguments are, None when they are none."""
    try:
        found = parsed(arguments)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
