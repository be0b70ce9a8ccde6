"""The body of /v1/chat/completions: messages, tools and what the answer must look like."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from hetero.core import InputError
from hetero.engine.logprobs import MAX_TOP
from hetero.server.protocol import Neutral, Sampling, Strict

Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class CalledFunction(Strict):
    name: str
    arguments: str

    @field_validator("arguments")
    @classmethod
    def _object(cls, arguments: str) -> str:
        try:
            good = isinstance(json.loads(arguments or "{}"), dict)
        except (ValueError, RecursionError):
            good = False
        if not good:
            raise ValueError("must be a JSON object, written as text")
        return arguments


class ToolCall(Strict):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    # Streamed calls carry their place, and clients send back what they have put together.
    index: int | None = None

    def plain(self, *, text_arguments: bool = False) -> dict[str, Any]:
        """As chat templates expect it: most write the arguments in their own way, out of an object."""
        arguments = self.function.arguments or "{}"
        called = {
            "name": self.function.name,
            "arguments": arguments if text_arguments else json.loads(arguments),
        }
        return {"id": self.id, "type": "function", "function": called}


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _flatten(cls, body: Any) -> Any:
        if not isinstance(body, Mapping):
            return body
        if body.get("role") == "function" or body.get("function_call"):
            raise ValueError("functions are not supported by this server; use tools")
        if body.get("audio"):
            raise ValueError("audio is not supported by this server, only text is")
        # A message of an earlier answer comes back with what was null in it, and with notes of ours.
        kept = {k: v for k, v in body.items() if v is not None and k not in _ANSWER_ONLY}
        if isinstance(kept.get("content"), list):
            kept["content"] = "".join(map(_part, kept["content"]))
        return kept

    @model_validator(mode="after")
    def _whole(self) -> Message:
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("tool_call_id: missing; a tool's message names the call that it answers")
        if self.role != "tool" and self.tool_call_id is not None:
            raise ValueError("tool_call_id: only in a message of role 'tool'")
        if self.role != "assistant" and (self.tool_calls or self.reasoning_content):
            raise ValueError("tool_calls and reasoning_content: only in a message of role 'assistant'")
        if self.content is None and not (self.tool_calls or self.reasoning_content or self.refusal):
            raise ValueError("content: missing")
        return self

    def plain(self, *, text_arguments: bool = False) -> dict[str, Any]:
        """As chat templates expect it."""
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.content or self.refusal or "",
        }
        if self.name:
            message["name"] = self.name
        if self.tool_call_id:
            message["tool_call_id"] = self.tool_call_id
        if self.reasoning_content:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            message["tool_calls"] = [call.plain(text_arguments=text_arguments) for call in self.tool_calls]
        return message


# Fields that answers have and that say nothing to a model.
_ANSWER_ONLY = frozenset({"annotations", "audio", "function_call"})


def _part(part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in ("text", "refusal"):
        raise ValueError(f"content of type {kind!r} is not supported by this server, only text is")
    text = part.get(kind)
    if not isinstance(text, str) or set(part) - {"type", kind}:
        raise ValueError(f"content: a part must be {{'type': '{kind}', '{kind}': '...'}}")
    return text


_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


class FunctionSpec(Strict):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: FunctionSpec

    def plain(self) -> dict[str, Any]:
        """As chat templates expect it."""
        spec = self.function
        function = {
            "name": spec.name,
            "description": spec.description or "",
            "parameters": spec.parameters or _NO_PARAMETERS,
        }
        return {"type": "function", "function": function}


class JsonSchema(Strict):
    name: Name
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    # Every schema is enforced; the API lets a server be laxer without it, not stricter with it.
    strict: bool | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _whole(self) -> ResponseFormat:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise ValueError("json_schema: must be there with type 'json_schema', and only then")
        return self


class ChatBody(Sampling):
    neutral: ClassVar[Neutral] = {
        "functions": (None, []),
        "function_call": (None, "none", "auto"),
        "modalities": (None, ["text"]),
        "audio": (None,),
        "prediction": (None,),
        "service_tier": (None, "auto", "default"),
        "store": (None, False),
        "metadata": (None, {}),
        "verbosity": (None, "medium"),
        "web_search_options": (None,),
        "prompt_cache_retention": (None, "in_memory", "in-memory"),
    }

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP)
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Two more names of the end user, and of whom to reuse a prefix for; all prefixes are reused here.
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="after")
    def _together(self) -> ChatBody:
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise InputError("max_tokens: differs from max_completion_tokens; give one of them")
        if self.top_logprobs and not self.logprobs:
            raise InputError("top_logprobs: only with logprobs=true")
        names = [tool.function.name for tool in self.tools or ()]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise InputError(f"tools: '{twice[0]}' is there twice")
        return self

    @property
    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def alternatives(self) -> int | None:
        """How many each token comes with; None when no log-probabilities are asked for."""
        return (self.top_logprobs or 0) if self.logprobs else None
