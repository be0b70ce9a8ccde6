"""The body of /v1/responses, and the chat that it comes to.

Nothing is stored: ``store`` true and whatever refers to an earlier response are refused, and a client sends
the whole conversation. ``reasoning.summary`` is a hint: the thinking itself is in the answer.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from hetero.core import InputError
from hetero.server.chat_protocol import ChatBody
from hetero.server.protocol import Body, Neutral, StreamOptions, Strict
from hetero.server.replies import chat_of, thinking_variables

_TEXTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")
# Fields of items that answers have and that say nothing to a model.
_NOTES = ("id", "status", "annotations", "logprobs", "phase", "caller", "namespace")
_ENCRYPTED = "reasoning.encrypted_content"
_PREFIX = "plain:"


def sealed(thinking: str) -> str:
    """Thinking as an opaque text, for clients that send only that back. It is not secret."""
    return _PREFIX + base64.b64encode(thinking.encode()).decode()


def unsealed(text: str) -> str:
    """Raises ValueError for what ``sealed`` has not made."""
    if not text.startswith(_PREFIX):
        raise ValueError("encrypted_content: not of this server, which cannot read it; leave the item out")
    try:
        return base64.b64decode(text.removeprefix(_PREFIX), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        raise ValueError("encrypted_content: damaged") from None


def _text(content: Any, what: str) -> Any:
    """Content as one text; what is no text is refused by its type."""
    if not isinstance(content, list):
        return content
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, Mapping) else None
        if kind not in _TEXTS or not isinstance(text, str):
            raise ValueError(f"{what} of type {kind!r} is not supported by this server, only text is")
        parts.append(text)
    return "".join(parts)


class Item(Strict):
    """One item of the input; its content comes as one text."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _flatten(cls, body: Any) -> Any:
        if not isinstance(body, Mapping):
            return body
        kind = body.get("type") or "message"
        if kind not in ("message", "function_call", "function_call_output", "reasoning"):
            raise ValueError(f"an item of type {kind!r} is not supported by this server")
        kept = {k: v for k, v in body.items() if k not in _NOTES and v is not None}
        if kind == "reasoning":
            own = kept.pop("encrypted_content", None)
            summary = _text(kept.pop("summary", []), "summary")
            content = _text(kept.get("content"), "content")
            kept["content"] = content or (unsealed(own) if isinstance(own, str) else summary or "")
        for name in ("content", "output"):
            if name in kept:
                kept[name] = _text(kept[name], name)
        return kept

    @model_validator(mode="after")
    def _whole(self) -> Item:
        needed = {
            "message": ("role", "content"),
            "function_call": ("call_id", "name", "arguments"),
            "function_call_output": ("call_id", "output"),
            "reasoning": ("content",),
        }[self.type]
        for name in ("role", "content", "call_id", "name", "arguments", "output"):
            given = getattr(self, name) is not None
            if given != (name in needed) and not (name == "name" and self.type == "function_call_output"):
                raise ValueError(f"{name}: {'not in' if given else 'missing in'} an item of type {self.type}")
        return self


def messages(items: list[Item]) -> list[dict[str, Any]]:
    """Items as messages of a chat: those of one turn of the assistant are one message."""
    out: list[dict[str, Any]] = []
    turn: dict[str, Any] | None = None
    for item in items:
        if item.type == "function_call_output" or (item.type == "message" and item.role != "assistant"):
            turn = None
            role = "tool" if item.type == "function_call_output" else item.role
            message = {"role": role, "content": item.content if item.output is None else item.output}
            out.append(message | ({"tool_call_id": item.call_id} if role == "tool" else {}))
            continue
        # Thinking begins a turn, and a text after a call does as well.
        if turn is None or (item.type != "function_call" and "tool_calls" in turn):
            turn = {"role": "assistant"}
            out.append(turn)
        if item.type == "function_call":
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            turn.setdefault("tool_calls", []).append(call)
        else:
            name = "content" if item.type == "message" else "reasoning_content"
            turn[name] = turn.get(name, "") + item.content
    # Thinking that led to nothing tells a model nothing.
    return [m for m in out if m["role"] != "assistant" or m.get("content") or m.get("tool_calls")]


class FunctionTool(Strict):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _function(cls, body: Any) -> Any:
        kind = body.get("type") if isinstance(body, Mapping) else None
        if kind != "function":
            raise ValueError(f"a tool of type {kind!r} is not supported by this server, only function is")
        return body

    def chat(self) -> dict[str, Any]:
        return {"type": "function", "function": self.model_dump(exclude={"type"}, exclude_none=True)}


class TextFormat(Strict):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _whole(self) -> TextFormat:
        whole = self.type == "json_schema"
        if (self.name is not None) != whole or (self.schema_ is not None) != whole:
            raise ValueError("name and schema: must be there with type 'json_schema', and only then")
        return self

    def chat(self) -> dict[str, Any]:
        if self.type != "json_schema":
            return {"type": self.type}
        schema = self.model_dump(exclude={"type"}, exclude_none=True, by_alias=True)
        return {"type": self.type, "json_schema": schema}


class TextConfig(Strict):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningConfig(Strict):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesBody(Body):
    neutral: ClassVar[Neutral] = {
        "background": (None, False),
        "conversation": (None,),
        "context_management": (None, []),
        "max_tool_calls": (None,),
        "moderation": (None,),
        "previous_response_id": (None,),
        "prompt": (None,),
        "prompt_cache_options": (None,),
        "prompt_cache_retention": (None, "in_memory", "in-memory"),
        "service_tier": (None, "auto", "default"),
        "store": (None, False),
        "top_logprobs": (None, 0),
        "truncation": (None, "disabled"),
    }

    model: str | None = None
    input: list[Item]
    instructions: str | None = None
    tools: list[FunctionTool] = Field(default_factory=list)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: list[str] | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    # All prefixes are reused here.
    prompt_cache_key: str | None = None
    # What a client notes of itself.
    client_metadata: dict[str, Any] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @field_validator("input", mode="before")
    @classmethod
    def _items(cls, value: Any) -> Any:
        return [{"role": "user", "content": value}] if isinstance(value, str) else value

    @field_validator("include")
    @classmethod
    def _included(cls, include: list[str] | None) -> list[str] | None:
        for name in include or ():
            if name != _ENCRYPTED:
                raise ValueError(f"'{name}' is not supported by this server, only {_ENCRYPTED} is")
        return include

    @model_validator(mode="after")
    def _options_need_stream(self) -> ResponsesBody:
        if self.stream_options is not None and not self.stream:
            raise InputError("stream_options: only with stream=true")
        if self.stream_options is not None and self.stream_options.include_usage:
            raise InputError("stream_options.include_usage: the last event has the usage; leave it out")
        return self

    @model_validator(mode="after")
    def _comes_back(self) -> ResponsesBody:
        for name in ("instructions", "metadata", "user", "tools", "tool_choice", "text"):
            value = self.model_dump(include={name}, by_alias=True)
            try:
                json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
            except ValueError:
                raise InputError(
                    f"{name}: must be valid JSON and Unicode, since the answer repeats it"
                ) from None
        return self

    @property
    def seals(self) -> bool:
        return _ENCRYPTED in (self.include or ())

    @property
    def format(self) -> TextFormat:
        return (self.text and self.text.format) or TextFormat()

    def chat(self, template: str) -> ChatBody:
        """The same call as a chat, for a model with this chat template."""
        chat = messages(self.input)
        if self.instructions is not None:
            chat.insert(0, {"role": "system", "content": self.instructions})
        if not chat:
            raise InputError("input: must not be empty")
        effort = None if self.reasoning is None else self.reasoning.effort
        on = None if effort is None else effort not in ("none", "minimal")
        hard = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}.get(effort or "", effort)
        return chat_of(
            {
                "messages": chat,
                "tools": [tool.chat() for tool in self.tools],
                "tool_choice": self._choice(),
                "parallel_tool_calls": self.parallel_tool_calls,
                "response_format": self.format.chat(),
                "chat_template_kwargs": thinking_variables(template, on, hard),
                "max_tokens": self.max_output_tokens,
                "temperature": self.temperature,
                "top_p": self.top_p,
            }
        )

    def _choice(self) -> str | dict[str, Any] | None:
        choice = self.tool_choice
        if not isinstance(choice, dict):
            return choice
        kind = choice.get("type")
        if kind == "function":
            return _named(choice)
        if kind == "allowed_tools":
            tools = choice.get("tools")
            named = (
                [_named(tool) for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
            )
            return {"type": kind, "allowed_tools": {"mode": choice.get("mode"), "tools": named}}
        raise InputError(f"tool_choice: type {kind!r} is not supported by this server")


def _named(choice: dict[str, Any]) -> dict[str, Any]:
    return {"type": choice.get("type"), "function": {"name": choice.get("name")}}
