"""One answer as deltas, for the APIs that are put together from a chat: /v1/messages and /v1/responses."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol

from pydantic import ValidationError

from hetero.core import InputError
from hetero.engine.request import Result
from hetero.server.chat import Plan, plan_of
from hetero.server.chat_protocol import ChatBody
from hetero.server.dialects import Delta
from hetero.server.dialects.jsontext import parsed
from hetero.server.dialects.source import joined
from hetero.server.generation import Generation
from hetero.server.state import AppState


class Reply:
    """Reads one generation of a plan; ``called``, ``thinking_tokens`` and ``result`` are there at its end."""

    def __init__(self, plan: Plan, generation: Generation) -> None:
        self._reader = plan.reader()
        self._generation = generation
        self._result: Result | None = None

    @property
    def called(self) -> bool:
        """There is a call, and none was cut off."""
        return self._reader.called

    @property
    def thinking_tokens(self) -> int:
        """Up to the last of the thinking."""
        return self._reader.thinking_tokens

    @property
    def result(self) -> Result:
        assert self._result is not None, "the reply has not ended"
        return self._result

    async def deltas(self) -> AsyncIterator[Delta]:
        """As they come; after the last, the result is there. Raises what ``Generation.events`` raises."""
        async for event in self._generation.events():
            if isinstance(event, Result):
                self._result = event
                cut = event.finish_reason in ("length", "deadline")
                ready = self._reader.finish(event.tail, cut=cut)
            else:
                ready = self._reader.feed(event.text)
            for delta in joined(ready):
                yield delta
            if self._reader.over:
                self._generation.cancel()


class _Body(Protocol):
    def chat(self, template: str) -> ChatBody: ...


def plan_for(state: AppState, body: _Body, client: str) -> Plan:
    """The plan of the chat that a body of another API comes to."""
    template = "" if state.tokenizer is None else state.tokenizer.template
    return plan_of(state, body.chat(template), client)


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
