"""What goes into the engine and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hetero.core import HeteroError, InputError, Timings
from hetero.engine.grammar import Grammar
from hetero.engine.logprobs import TokenLogprob, check_top
from hetero.engine.sample import SamplingParams

FinishReason = Literal["stop", "length", "cancelled", "deadline"]


class QueueFull(HeteroError):  # noqa: N818
    """No place in the queue; try again after ``retry_after_s`` seconds."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class Request:
    """One answer to make. ``max_tokens`` None: up to the end of the context.

    ``logprobs``: None for none, else how many alternatives each drawn token comes with. ``prompt_logprobs``:
    the same of the prompt's tokens, in the result; with it ``max_tokens`` may be 0, for no answer at all.
    ``deadline_s``: seconds from submission after which the answer ends as it is. ``client``: whose turn in
    the queue it takes. ``grammar``: what the answer must look like; it ends when the grammar does.
    ``visible``: special tokens that show in the text, which otherwise leaves them out. ``alike``: tokens of
    another prompt that somebody may send: where this one parts from it, it is worth keeping what was read.

    Raises InputError for an empty prompt, an empty stop string, and a number outside its range.
    """

    prompt: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    deadline_s: float | None = None
    client: str = ""
    grammar: Grammar | None = None
    visible: frozenset[int] = frozenset()
    alike: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.prompt:
            raise InputError("the prompt is empty: it must have at least one token")
        least = 1 if self.prompt_logprobs is None else 0
        if self.max_tokens is not None and self.max_tokens < least:
            raise InputError(f"max_tokens={self.max_tokens}: must be at least {least}")
        check_top("logprobs", self.logprobs)
        check_top("prompt_logprobs", self.prompt_logprobs)
        if self.deadline_s is not None and not self.deadline_s > 0:
            raise InputError(f"deadline_s={self.deadline_s}: must be above 0")
        if not all(self.stop):
            raise InputError("stop: a stop string must not be empty")


@dataclass(frozen=True, slots=True)
class Piece:
    """One step of a stream: the token drawn and the text that became certain with it (often empty)."""

    token: int
    text: str
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens read and made. The end-of-text token counts as made.

    ``cached_tokens``: how many of the prompt's were known from an earlier request.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Result:
    """The end of a stream.

    ``text`` is the whole answer, or None without a tokenizer; ``tail`` is the part of it that no piece has
    shown yet. ``kernels``: name -> calls during this request. ``seed``: the one that repeats it.
    ``prompt_logprobs``: one a token of the prompt when the request asks for them; the first token, which
    nothing precedes, has None. ``stop``: the stop string that ended the answer.
    """

    token_ids: tuple[int, ...]
    text: str | None
    tail: str
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    kernels: dict[str, int]
    seed: int
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    stop: str | None = None
