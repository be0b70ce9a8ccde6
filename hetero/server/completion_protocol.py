"""The body of /v1/completions."""

from __future__ import annotations

from typing import Any, ClassVar, cast

from pydantic import Field, model_validator

from hetero.core import InputError
from hetero.engine.logprobs import MAX_TOP
from hetero.server.protocol import MAX_CHOICES, Neutral, Sampling

Prompt = str | list[int]


class CompletionBody(Sampling):
    neutral: ClassVar[Neutral] = {"suffix": (None, "")}

    prompt: str | list[str] | list[int] | list[list[int]]
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP)

    @model_validator(mode="before")
    @classmethod
    def _kind(cls, body: Any) -> Any:
        """One message for what a union of four types would answer by four."""
        prompt = body.get("prompt") if isinstance(body, dict) else None
        if prompt is not None and not _is_prompt(prompt) and not _is_prompts(prompt):
            raise InputError("prompt: must be a text, a list of token ids, or a list of either; none empty")
        return body

    @model_validator(mode="after")
    def _together(self) -> CompletionBody:
        if self.best_of is not None and self.best_of != self.choices:
            raise InputError("best_of: not supported by this server unless it equals n; leave it out")
        if len(self.prompts) * self.choices > MAX_CHOICES:
            raise InputError(
                f"prompt: {len(self.prompts)} prompts of {self.choices} choices are more than the "
                f"{MAX_CHOICES} answers that one call may ask for"
            )
        if self.max_tokens == 0 and not self.echo:
            raise InputError("max_tokens=0: must be at least 1, unless echo asks for the prompt")
        if self.echo and self.stream and self.logprobs is not None:
            raise InputError("echo: not together with both stream and logprobs on this server")
        return self

    @property
    def limit(self) -> int:
        """The API's default is 16."""
        return 16 if self.max_tokens is None else self.max_tokens

    @property
    def prompts(self) -> list[Prompt]:
        if _is_prompt(self.prompt):
            return [cast("Prompt", self.prompt)]
        return list(cast("list[Prompt]", self.prompt))


def _is_prompt(value: Any) -> bool:
    if isinstance(value, str):
        return bool(value)
    return isinstance(value, list) and bool(value) and all(type(part) is int for part in value)


def _is_prompts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_prompt, value)) and not _is_prompt(value)
