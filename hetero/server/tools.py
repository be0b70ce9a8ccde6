"""What a chat's ``tools``, ``tool_choice`` and ``response_format`` ask for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hetero.core import InputError
from hetero.server.chat_protocol import ChatBody, Tool
from hetero.server.dialects import Tool as Offered

Mode = Literal["none", "auto", "required"]


@dataclass(frozen=True, slots=True)
class Offer:
    """Tools that the model is told of, and whether it may, must or must not call one."""

    mode: Mode
    tools: tuple[Tool, ...]

    @property
    def offered(self) -> list[Offered]:
        """As a parser knows them."""
        return [Offered(tool.function.name, tool.plain()["function"]["parameters"]) for tool in self.tools]

    @property
    def strict(self) -> bool:
        """Whether the arguments of each are to be held to their schema."""
        return bool(self.tools) and all(tool.function.strict for tool in self.tools)


def offer(body: ChatBody) -> Offer:
    """Raises InputError for a tool_choice that is none or names no tool of the request."""
    tools = tuple(body.tools or ())
    choice = body.tool_choice if body.tool_choice is not None else "auto" if tools else "none"
    if isinstance(choice, str):
        if choice not in ("none", "auto", "required"):
            raise InputError(
                f"tool_choice: '{choice}' is not one of none, auto, required, or an object naming a function"
            )
        if choice == "required" and not tools:
            raise InputError("tool_choice: 'required' needs tools")
        # Without tools there is nothing to choose; "none" hides them from the model.
        if choice == "none" or not tools:
            return Offer("none", ())
        return Offer("required" if choice == "required" else "auto", tools)
    kind = choice.get("type")
    if kind == "function":
        return Offer("required", (_named(tools, choice),))
    if kind == "allowed_tools" and isinstance(choice.get("allowed_tools"), Mapping):
        return _allowed(tools, choice["allowed_tools"])
    raise InputError(f"tool_choice: type {kind!r} is not supported by this server")


def _named(tools: tuple[Tool, ...], choice: Mapping[str, Any]) -> Tool:
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    for tool in tools:
        if tool.function.name == name:
            return tool
    raise InputError(f"tool_choice: there is no function {name!r} among the tools")


def _allowed(tools: tuple[Tool, ...], allowed: Mapping[str, Any]) -> Offer:
    mode, named = allowed.get("mode"), allowed.get("tools")
    if mode not in ("auto", "required") or not isinstance(named, list) or not named:
        raise InputError("tool_choice: allowed_tools has a mode, 'auto' or 'required', and a list of tools")
    if not all(isinstance(choice, Mapping) for choice in named):
        raise InputError("tool_choice: allowed_tools lists objects that name a function each")
    return Offer(mode, tuple(_named(tools, choice) for choice in named))


def schema_of(body: ChatBody) -> tuple[dict[str, Any] | None, str]:
    """The schema that the content must fit, None for any text; and the field that says so."""
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return None, "response_format"
    if wanted.json_schema is None:
        return {"type": "object"}, "response_format"
    return wanted.json_schema.schema_, "response_format.json_schema.schema"
