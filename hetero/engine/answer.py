"""One answer as it grows: logits in, pieces out, until something ends it. Every way of running shares it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hetero.core import InputError, Timings
from hetero.engine.logprobs import TokenLogprob, token_logprob, token_logprobs
from hetero.engine.request import FinishReason, Piece, Request, Result, Usage
from hetero.engine.sample import Sampler, Scored
from hetero.engine.stop import StopMatcher

if TYPE_CHECKING:
    from hetero.engine.gpu.runner import GpuRunner
    from hetero.model.tokenizer import Tokenizer

clock = time.perf_counter


def _no_kernels() -> dict[str, int]:
    return {}


@dataclass(slots=True)
class Runnable:
    """What the engine needs of a loaded model; it does not know where the model comes from.

    ``context``: most tokens of prompt and answer together, None when the model has no limit of its own.
    ``eos``: tokens that end an answer. ``whole_prompt``: the prompt cannot be read in pieces. ``kernels``:
    executed kernels so far, name -> calls. ``runner``: what makes the steps of a model with fused layers.
    """

    model: nn.Module
    vocabulary: int
    tokenizer: Tokenizer | None = None
    context: int | None = None
    eos: frozenset[int] = frozenset()
    whole_prompt: bool = False
    kernels: Callable[[], dict[str, int]] = field(default=_no_kernels)
    load_s: float = 0.0
    runner: GpuRunner | None = None


def check(run: Runnable, request: Request) -> int:
    """Tokens that this request may make at most. Raises InputError when it cannot run at all."""
    size = len(request.prompt)
    # By C's loops: a server asks this on its event loop, of prompts of any length.
    least, most = min(request.prompt), max(request.prompt)
    worst = least if least < 0 else most
    if not 0 <= worst < run.vocabulary:
        raise InputError(f"prompt: token id {worst} is not in the vocabulary of {run.vocabulary}")
    if request.stop and run.tokenizer is None:
        raise InputError("stop: stop strings need a tokenizer, and this model has none")
    if run.context is None:
        if request.max_tokens is None:
            raise InputError("max_tokens: must be given, since this model has no context limit of its own")
        return request.max_tokens
    if request.max_tokens == 0 and size <= run.context:
        return 0
    if size >= run.context:
        raise InputError(
            f"the prompt has {size} tokens and the context of this model holds {run.context}, "
            f"so no room is left for an answer: shorten it by at least {size - run.context + 1}"
        )
    room = run.context - size
    return room if request.max_tokens is None else min(request.max_tokens, room)


class Answer:
    """State of one request besides the model's own: sampler, text, reason of the end.

    ``reason`` is None while it goes on; whoever ends it early (cancel, deadline) sets it. ``cached``: tokens
    of the prompt that were not read anew.
    """

    def __init__(self, run: Runnable, request: Request, limit: int) -> None:
        self.request = request
        self.reason: FinishReason | None = None
        self.tokens: list[int] = []
        self.cached = 0
        self._run = run
        self._limit = limit
        self._kernels = run.kernels()
        self._sampler = Sampler(request.sampling, request.prompt, grammar=request.grammar)
        self._words = _Words(run.tokenizer, request.stop, request.visible)
        self._eos = frozenset() if request.ignore_eos else run.eos
        self._scored: list[TokenLogprob | None] = [None]
        self._submitted = self._began = self._first = self._last = clock()

    @property
    def foreseen(self) -> bool:
        """Whether the next token is the likeliest, and unless it ends the answer, so is the one after it, by
        a step whose token that is. Nobody reads the logits."""
        return self._sampler.plain and self.request.logprobs is None and len(self.tokens) + 2 <= self._limit

    def begin(self) -> None:
        """The model is about to read the prompt; what came before was waiting."""
        self._began = clock()

    @property
    def scores_prompt(self) -> bool:
        """Whether the logits of every position of the prompt are wanted, by ``score``."""
        return self.request.prompt_logprobs is not None

    def score(self, start: int, logits: Tensor) -> None:
        """Logits [n, V] at the positions from ``start``; each tells of the token after it.

        Positions that were scored before, and those after the prompt, are passed over.
        """
        top = self.request.prompt_logprobs
        assert top is not None
        first = len(self._scored) - 1
        following = list(self.request.prompt[first + 1 : start + 1 + len(logits)])
        if following:
            rows = logits[first - start : first - start + len(following)]
            self._scored += token_logprobs(rows, following, top)

    def read(self) -> None:
        """The prompt has been read. An answer of no tokens ends here."""
        if self._limit == 0:
            self._first = self._last = clock()
            self.reason = "length"

    def take(self, logits: Tensor | Scored) -> Piece:
        """Draw the next token from logits [V]; ``reason`` is set when it is the last.

        Raises HeteroError when the logits are not finite.
        """
        with torch.inference_mode():
            token = self._sampler.pick(logits)
            top = self.request.logprobs
            score = None if top is None else token_logprob(_plain(logits), token, top)
        self.tokens.append(token)
        self._last = clock()
        if len(self.tokens) == 1:
            self._first = self._last
        if token in self._eos:
            self.reason = "stop"
            return Piece(token, "", score)
        text = self._words.feed(token)
        if self._words.stop is not None or self._sampler.done:
            self.reason = "stop"
        elif len(self.tokens) >= self._limit:
            self.reason = "length"
        return Piece(token, text, score)

    def result(self) -> Result:
        """The end of the stream; once only."""
        tail = self._words.finish()
        made, size = len(self.tokens), len(self.request.prompt)
        prefill_s, decode_s = self._first - self._began, self._last - self._first
        return Result(
            token_ids=tuple(self.tokens),
            text=self._words.text,
            tail=tail,
            finish_reason=self.reason or "length",
            usage=Usage(size, made, self.cached),
            timings=Timings(
                load_s=self._run.load_s,
                ttft_s=self._first - self._submitted,
                prefill_tok_s=(size - self.cached) / prefill_s if prefill_s > 0 else 0.0,
                decode_tok_s=(made - 1) / decode_s if made > 1 else 0.0,
            ),
            kernels=_difference(self._kernels, self._run.kernels()),
            seed=self._sampler.seed,
            prompt_logprobs=tuple(self._scored) if self.scores_prompt else None,
            stop=self._words.stop,
        )


def _plain(logits: Tensor | Scored) -> Tensor:
    return logits.logits if isinstance(logits, Scored) else logits


class _Words:
    """Text of one answer: detokenizer and stop strings in a row; ``text`` stays None without a tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None, stops: tuple[str, ...], visible: frozenset[int]) -> None:
        self._detokenizer = None if tokenizer is None else tokenizer.detokenizer(visible)
        self._matcher = StopMatcher(stops)
        self._shown: list[str] = []

    @property
    def stop(self) -> str | None:
        """The stop string that was found."""
        return self._matcher.matched

    @property
    def text(self) -> str | None:
        return None if self._detokenizer is None else "".join(self._shown)

    def feed(self, token: int) -> str:
        if self._detokenizer is None:
            return ""
        return self._keep(self._matcher.feed(self._detokenizer.feed(token)))

    def finish(self) -> str:
        if self._detokenizer is None:
            return ""
        rest = "" if self.stop is not None else self._matcher.feed(self._detokenizer.finish())
        return self._keep(rest + self._matcher.finish())

    def _keep(self, text: str) -> str:
        if text:
            self._shown.append(text)
        return text


def _difference(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    return {name: calls - before.get(name, 0) for name, calls in after.items() if calls > before.get(name, 0)}
