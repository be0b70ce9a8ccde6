"""Bodies of the API. A field is honoured, or refused by its name: none is silently dropped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from hetero.core import InputError
from hetero.engine.sample import MAX_SEED, SamplingParams

MAX_STOPS = 16

# Fields of the public API that this server does not serve, each with the values that ask for nothing. Clients
# send those by themselves, so they pass.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "logit_bias": (None, {}),
    "top_logprobs": (None, 0),
    "logprobs": (None, False),
    "echo": (None, False),
    "suffix": (None, ""),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "parallel_tool_calls": (None, True, False),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "reasoning_effort": (None,),
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
    "metadata": (None, {}),
    "web_search_options": (None,),
}


class Strict(BaseModel):
    """Unknown names and wrong types are errors."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Strict):
    include_usage: bool = False


class Sampling(Strict):
    """Fields that both completion calls share."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Names the end user to the operator of a service; it has no influence on an answer anywhere.
    user: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, body: Any) -> Any:
        if not isinstance(body, Mapping):
            return body
        kept = {}
        for name, value in body.items():
            if name in _NEUTRAL and name not in cls.model_fields:
                # True == 1 in Python, so types are compared as well, but 0 and 0.0 are both no penalty.
                if not any(_same(value, neutral) for neutral in _NEUTRAL[name]):
                    raise InputError(f"{name}: not supported by this server; leave it out")
            else:
                kept[name] = value
        return kept

    @field_validator("stop")
    @classmethod
    def _stops(cls, stop: str | list[str] | None) -> str | list[str] | None:
        stops = [stop] if isinstance(stop, str) else stop or []
        if len(stops) > MAX_STOPS:
            raise InputError(f"stop: at most {MAX_STOPS} strings, got {len(stops)}")
        if not all(stops):
            raise InputError("stop: a stop string must not be empty")
        return stop

    @model_validator(mode="after")
    def _options_need_stream(self) -> Sampling:
        if self.stream_options is not None and not self.stream:
            raise InputError("stream_options: only with stream=true")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self) -> SamplingParams:
        """The API's default temperature is 1. A negative seed is folded into the range."""
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=self.top_k or 0,
            top_p=1.0 if self.top_p is None else self.top_p,
            min_p=self.min_p or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            seed=None if self.seed is None else self.seed & MAX_SEED,
        )


def _same(value: object, neutral: object) -> bool:
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


class TextPart(Strict):
    type: Literal["text"]
    text: str


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, body: Any) -> Any:
        if not isinstance(body, Mapping):
            return body
        if body.get("role") in ("tool", "function") or body.get("tool_calls") or body.get("function_call"):
            raise InputError("messages: tool calls are not supported by this server")
        content = body.get("content")
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind != "text":
                raise InputError(f"messages: content of type {kind!r} is not supported, only text is")
        return {k: v for k, v in body.items() if k not in ("tool_calls", "function_call", "refusal") or v}

    def plain(self) -> dict[str, str]:
        """As chat templates expect it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": text} | ({"name": self.name} if self.name else {})


class ChatBody(Sampling):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: int | None = None

    @model_validator(mode="after")
    def _one_limit(self) -> ChatBody:
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise InputError("max_tokens: differs from max_completion_tokens; give one of them")
        return self

    @property
    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionBody(Sampling):
    prompt: str | list[str] | list[int] | list[list[int]]

    @field_validator("prompt", mode="before")
    @classmethod
    def _kind(cls, prompt: Any) -> Any:
        if isinstance(prompt, str):
            return prompt
        if isinstance(prompt, list) and prompt:
            if all(isinstance(part, int) and not isinstance(part, bool) for part in prompt):
                return prompt
            if isinstance(prompt[0], (str, list)):
                if len(prompt) > 1:
                    raise InputError(f"prompt: one prompt a request, got {len(prompt)}; send them one by one")
                inner = prompt[0]
                if isinstance(inner, str) or all(type(part) is int for part in inner):
                    return prompt
        raise InputError("prompt: must be a text or a list of token ids, and not empty")

    @property
    def limit(self) -> int:
        """The API's default is 16."""
        return 16 if self.max_tokens is None else self.max_tokens

    def text_or_ids(self) -> str | list[int]:
        prompt = self.prompt
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
            return prompt[0]
        return cast("str | list[int]", prompt)
