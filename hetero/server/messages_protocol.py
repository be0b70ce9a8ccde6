"""The bodies of /v1/messages, and the chat that each comes to.

Hints are taken without a promise, as the API defines them: ``cache_control`` (every prefix is reused anyway),
``budget_tokens`` and ``effort`` where the chat template has no such setting, ``metadata``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from hetero.core import InputError
from hetero.server.chat_protocol import ChatBody
from hetero.server.protocol import MAX_STOPS, Body, Neutral, Strict
from hetero.server.replies import chat_of, thinking_variables

# Between blocks, which are paragraphs of their own.
_BREAK = "\n\n"
_REFUSED = "is not supported by this server, only text, thinking, tool_use and tool_result are"


class CacheControl(Strict):
    type: Literal["ephemeral"]
    ttl: str | None = None


class Block(Strict):
    cache_control: CacheControl | None = None


class TextBlock(Block):
    type: Literal["text"]
    text: str
    # Answers have it, and come back.
    citations: Annotated[list[Any], Field(max_length=0)] | None = None


class ThinkingBlock(Block):
    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class ToolUseBlock(Block):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    # Who called: a tool is only ever called by the model itself here.
    caller: dict[str, Any] | None = None

    @field_validator("caller")
    @classmethod
    def _direct(cls, caller: dict[str, Any] | None) -> dict[str, Any] | None:
        if caller is not None and caller.get("type") != "direct":
            raise ValueError("only {'type': 'direct'} is supported by this server")
        return caller


class ToolResultBlock(Block):
    type: Literal["tool_result"]
    tool_use_id: str
    content: list[TextBlock] = Field(default_factory=list)
    is_error: bool = False

    @field_validator("content", mode="before")
    @classmethod
    def _blocks(cls, content: Any) -> Any:
        return _blocks(content, ("text",), "a tool_result with content")

    @property
    def text(self) -> str:
        text = _BREAK.join(block.text for block in self.content)
        # Chat templates have no place for the flag.
        return f"Error: {text}" if self.is_error else text


def _blocks(content: Any, kinds: tuple[str, ...], what: str = "content") -> Any:
    """Content as a list of blocks; what is no text is refused by its type."""
    if content is None:
        return []
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    for block in content if isinstance(content, list) else ():
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind not in kinds:
            raise ValueError(f"{what} of type {kind!r} {_REFUSED}")
    return content


_Any = Annotated[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]
_KINDS = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "tool_use"),
    "system": ("text",),
}


class Message(Strict):
    role: Literal["user", "assistant", "system"]
    content: list[_Any]

    @model_validator(mode="before")
    @classmethod
    def _normal(cls, body: Any) -> Any:
        role = body.get("role") if isinstance(body, Mapping) else None
        if not isinstance(role, str) or role not in _KINDS or body.get("content") is None:
            return body
        return {**body, "content": _blocks(body["content"], _KINDS[role], f"{role} content")}

    @model_validator(mode="after")
    def _said(self) -> Message:
        if not self.content and self.role != "assistant":
            raise ValueError("content: must not be empty")
        return self

    def plain(self) -> list[dict[str, Any]]:
        """As messages of a chat: each result of a tool is one of its own."""
        if self.role == "assistant":
            return [self._assistant()]
        messages: list[dict[str, Any]] = []
        text: list[str] = []

        def close() -> None:
            if text:
                messages.append({"role": self.role, "content": _BREAK.join(text)})
            text.clear()

        for block in self.content:
            if isinstance(block, ToolResultBlock):
                close()
                messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": block.text})
            elif isinstance(block, TextBlock):
                text.append(block.text)
        close()
        return messages

    def _assistant(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant"}
        message["content"] = _BREAK.join(b.text for b in self.content if isinstance(b, TextBlock))
        if thinking := "".join(b.thinking for b in self.content if isinstance(b, ThinkingBlock)):
            message["reasoning_content"] = thinking
        if calls := [b for b in self.content if isinstance(b, ToolUseBlock)]:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(call.input, ensure_ascii=False)},
                }
                for call in calls
            ]
        return message


class Tool(Block):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    # Arguments are always streamed as they come.
    eager_input_streaming: bool | None = None
    defer_loading: Literal[False] | None = None
    input_examples: list[dict[str, Any]] | None = None
    allowed_callers: list[Literal["direct"]] | None = None

    @model_validator(mode="before")
    @classmethod
    def _own(cls, body: Any) -> Any:
        kind = body.get("type") if isinstance(body, Mapping) else None
        if kind not in (None, "custom"):
            raise ValueError(f"type {kind!r} is not supported by this server; describe the tool by a schema")
        return body

    def plain(self) -> dict[str, Any]:
        function: dict[str, Any] = {"name": self.name, "parameters": self.input_schema}
        # Chat templates have no place for examples.
        examples = [f"Example: {json.dumps(example)}" for example in self.input_examples or ()]
        if description := _BREAK.join(filter(None, (self.description, *examples))):
            function["description"] = description
        if self.strict is not None:
            function["strict"] = self.strict
        return {"type": "function", "function": function}


class ToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _named(self) -> ToolChoice:
        if (self.name is not None) != (self.type == "tool"):
            raise ValueError("name: must be there with type 'tool', and only then")
        return self

    def plain(self) -> str | dict[str, Any]:
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class Thinking(Strict):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1024)] | None = None
    display: Literal["summarized", "omitted"] | None = None

    @model_validator(mode="after")
    def _budget(self) -> Thinking:
        if (self.budget_tokens is not None) != (self.type == "enabled"):
            raise ValueError("budget_tokens: must be there with type 'enabled', and only then")
        return self

    @property
    def shown(self) -> bool:
        return self.type != "disabled" and self.display != "omitted"


class OutputFormat(Strict):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Metadata(Strict):
    user_id: str | None = None


class CountBody(Body):
    """What the prompt is made of."""

    neutral: ClassVar[Neutral] = {
        "cache_control": (None, {"type": "ephemeral"}),
        "container": (None,),
        "context_management": (
            None,
            {"edits": []},
            {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        ),
        "diagnostics": (None,),
        "inference_geo": (None,),
        "mcp_servers": (None, []),
        "speed": (None, "standard"),
    }

    model: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)]
    system: list[TextBlock] = Field(default_factory=list)
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    @field_validator("system", mode="before")
    @classmethod
    def _system(cls, system: Any) -> Any:
        return _blocks(system, ("text",), "system")

    @model_validator(mode="after")
    def _last(self) -> CountBody:
        if self.messages[-1].role == "assistant":
            raise InputError(
                "messages: the last one must not be the assistant's; this server does not continue its text"
            )
        return self

    def chat(self, template: str) -> ChatBody:
        """The same call as a chat, for a model with this chat template."""
        messages = [m for message in self.messages for m in message.plain()]
        if self.system:
            messages.insert(
                0, {"role": "system", "content": _BREAK.join(block.text for block in self.system)}
            )
        on = None if self.thinking is None else self.thinking.type != "disabled"
        config = self.output_config or OutputConfig()
        effort = "high" if config.effort in ("xhigh", "max") else config.effort
        body: dict[str, Any] = {
            "messages": messages,
            "tools": [tool.plain() for tool in self.tools or ()],
            "chat_template_kwargs": thinking_variables(template, on, effort),
        }
        if self.tool_choice is not None:
            body["tool_choice"] = self.tool_choice.plain()
            if self.tool_choice.disable_parallel_tool_use:
                body["parallel_tool_calls"] = False
        if config.format is not None:
            schema = {"name": "output", "schema": config.format.schema_}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        return chat_of(body | self._settings())

    def _settings(self) -> dict[str, Any]:
        return {}


class MessagesBody(CountBody):
    neutral: ClassVar[Neutral] = {**CountBody.neutral, "service_tier": (None, "auto", "standard_only")}

    max_tokens: Annotated[int, Field(ge=1)]
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    stop_sequences: Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=MAX_STOPS)] = Field(
        default_factory=list
    )
    stream: bool = False
    metadata: Metadata | None = None

    @model_validator(mode="after")
    def _thinks_within(self) -> MessagesBody:
        budget = None if self.thinking is None else self.thinking.budget_tokens
        if budget is not None and budget >= self.max_tokens:
            raise InputError("thinking.budget_tokens: must be less than max_tokens")
        return self

    @property
    def user(self) -> str | None:
        return None if self.metadata is None else self.metadata.user_id

    @property
    def shows_thinking(self) -> bool:
        return self.thinking is None or self.thinking.shown

    def _settings(self) -> dict[str, Any]:
        return {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "stop": self.stop_sequences,
        }
