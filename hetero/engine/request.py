"""What goes into the engine and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hetero.core import InputError, Timings
from hetero.engine.sample import SamplingParams

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class Request:
    """One answer to make. ``max_tokens`` None: up to the end of the context.

    Raises InputError for an empty prompt, a ``max_tokens`` below 1 and an empty stop string.
    """

    prompt: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if not self.prompt:
            raise InputError("the prompt is empty: it must have at least one token")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InputError(f"max_tokens={self.max_tokens}: must be at least 1")
        if not all(self.stop):
            raise InputError("stop: a stop string must not be empty")


@dataclass(frozen=True, slots=True)
class Piece:
    """One step of a stream: the token drawn and the text that became certain with it (often empty)."""

    token: int
    text: str


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens read and made. The end-of-text token counts as made."""

    prompt_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Result:
    """The end of a stream.

    ``text`` is the whole answer, or None without a tokenizer; ``tail`` is the part of it that no piece has
    shown yet. ``kernels``: name -> calls during this request. ``seed``: the one that repeats it.
    """

    token_ids: tuple[int, ...]
    text: str | None
    tail: str
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    kernels: dict[str, int]
    seed: int
