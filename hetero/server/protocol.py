"""What the bodies of the calls share. A field is honoured, or refused by its name: none is
silently dropped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from hetero.core import InputError
from hetero.engine.sample import MAX_SEED, SamplingParams

MAX_STOPS = 16
# Answers that one call may ask for: more would not fit the queue, however empty it is.
MAX_CHOICES = 64
_ID_DIGITS = 18

Neutral = Mapping[str, tuple[Any, ...]]


class Strict(BaseModel):
    """Unknown names and wrong types are errors."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Body(Strict):
    """The whole body of a call."""

    # Fields of the public API that are not served, each with the values that ask for nothing. Clients send
    # those by themselves, so they pass.
    neutral: ClassVar[Neutral] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, body: Any) -> Any:
        if not isinstance(body, Mapping):
            return body
        kept = {}
        for name, value in body.items():
            if name not in cls.neutral:
                kept[name] = value
            elif not any(_same(value, neutral) for neutral in cls.neutral[name]):
                raise InputError(f"{name}: not supported by this server; leave it out")
        return kept


class StreamOptions(Strict):
    include_usage: bool = False
    # Padding against who measures the length of encrypted chunks.
    include_obfuscation: bool = False

    @field_validator("include_obfuscation")
    @classmethod
    def _refuse(cls, value: bool) -> bool:
        if value:
            raise ValueError("not supported by this server; leave it out")
        return value


class Sampling(Body):
    """Fields that both completion calls share; those beyond OpenAI's are named as elsewhere in the field."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Names the end user to the operator of a service; here it takes turns with others in the queue.
    user: str | None = None

    @field_validator("stop")
    @classmethod
    def _stops(cls, stop: str | list[str] | None) -> str | list[str] | None:
        stops = [stop] if isinstance(stop, str) else stop or []
        if len(stops) > MAX_STOPS:
            raise ValueError(f"at most {MAX_STOPS} strings, got {len(stops)}")
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        return stop

    @field_validator("logit_bias")
    @classmethod
    def _bias(cls, bias: dict[str, float] | None) -> dict[str, float] | None:
        for token in bias or ():
            # Longer numbers are no token's, and Python refuses to read very long ones.
            if not (token.isascii() and token.isdigit() and len(token) <= _ID_DIGITS):
                raise ValueError(f"'{token[:40]}' is not a token id")
        return bias

    @model_validator(mode="after")
    def _options_need_stream(self) -> Sampling:
        if self.stream_options is not None and not self.stream:
            raise InputError("stream_options: only with stream=true")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, vocabulary: int, choice: int = 0) -> SamplingParams:
        """How to draw the answer number ``choice``; each has the next seed.

        The API's default temperature is 1. A negative seed is folded into the range. Raises InputError for a
        number outside its range and for a bias on a token beyond ``vocabulary``.
        """
        bias = tuple((int(token), value) for token, value in (self.logit_bias or {}).items())
        if bias and max(bias)[0] >= vocabulary:
            raise InputError(f"logit_bias: token id {max(bias)[0]} is not in the vocabulary of {vocabulary}")
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=self.top_k or 0,
            top_p=1.0 if self.top_p is None else self.top_p,
            min_p=self.min_p or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            frequency_penalty=self.frequency_penalty or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            logit_bias=bias,
            seed=None if self.seed is None else (self.seed + choice) & MAX_SEED,
        )


def _same(value: object, neutral: object) -> bool:
    # True == 1 in Python, so types are compared as well, but 0 and 0.0 both ask for nothing.
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
