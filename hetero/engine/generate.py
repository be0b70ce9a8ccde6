"""The life of one request: read the prompt in chunks, then one token a step until something ends it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hetero.config import settings
from hetero.core import InputError, Timings
from hetero.engine.forward import Sequence, Stepper
from hetero.engine.request import FinishReason, Piece, Request, Result, Usage
from hetero.engine.sample import Sampler
from hetero.engine.stop import StopMatcher

if TYPE_CHECKING:
    from hetero.model.tokenizer import Tokenizer


def _no_kernels() -> dict[str, int]:
    return {}


@dataclass(slots=True)
class Runnable:
    """What the engine needs of a loaded model; it does not know where the model comes from.

    ``context``: most tokens of prompt and answer together, None when the model has no limit of its own.
    ``eos``: tokens that end an answer. ``whole_prompt``: the prompt cannot be read in pieces. ``kernels``:
    executed kernels so far, name -> calls.
    """

    model: nn.Module
    vocabulary: int
    tokenizer: Tokenizer | None = None
    context: int | None = None
    eos: frozenset[int] = frozenset()
    whole_prompt: bool = False
    kernels: Callable[[], dict[str, int]] = field(default=_no_kernels)
    load_s: float = 0.0


class Engine:
    """Runs requests one at a time on one model. Not for two threads at once."""

    def __init__(self, runnable: Runnable, prefill_chunk: int | None = None) -> None:
        self.runnable = runnable
        self._stepper = Stepper(runnable.model)
        self._chunk = prefill_chunk or settings().prefill_chunk

    def check(self, request: Request) -> int:
        """Tokens that this request may make at most. Raises InputError when it cannot run at all."""
        run = self.runnable
        size = len(request.prompt)
        worst = max(request.prompt, key=lambda token: token if token >= 0 else run.vocabulary - token)
        if not 0 <= worst < run.vocabulary:
            raise InputError(f"prompt: token id {worst} is not in the vocabulary of {run.vocabulary}")
        if request.stop and run.tokenizer is None:
            raise InputError("stop: stop strings need a tokenizer, and this model has none")
        if run.context is None:
            if request.max_tokens is None:
                raise InputError(
                    "max_tokens: must be given, since this model has no context limit of its own"
                )
            return request.max_tokens
        if size >= run.context:
            raise InputError(
                f"the prompt has {size} tokens and the context of this model holds {run.context}, "
                f"so no room is left for an answer: shorten it by at least {size - run.context + 1}"
            )
        room = run.context - size
        return room if request.max_tokens is None else min(request.max_tokens, room)

    def complete(self, request: Request) -> Result:
        """Run to the end."""
        for event in self.stream(request):
            if isinstance(event, Result):
                return event
        raise AssertionError("a stream ends with its result")

    def stream(
        self, request: Request, cancelled: Callable[[], bool] = lambda: False
    ) -> Iterator[Piece | Result]:
        """Pieces as they are made, then the result. ``cancelled`` is asked before every forward pass.

        Everything that the request holds is freed when the iterator ends or is closed.
        """
        limit = self.check(request)
        return self._run(request, limit, cancelled)

    def _run(self, request: Request, limit: int, cancelled: Callable[[], bool]) -> Iterator[Piece | Result]:
        run = self.runnable
        clock = time.perf_counter
        began = clock()
        before = run.kernels()
        sampler = Sampler(request.sampling, request.prompt)
        words = _Words(run.tokenizer, request.stop, request.visible)
        eos = frozenset() if request.ignore_eos else run.eos
        sequence = self._stepper.start()
        tokens: list[int] = []
        reason: FinishReason | None = None
        first = last = began

        logits = self._prefill(sequence, request.prompt, cancelled)
        if logits is None:
            reason = "cancelled"
        while reason is None and logits is not None:
            with torch.inference_mode():
                token = sampler.pick(logits)
            tokens.append(token)
            last = clock()
            first = last if len(tokens) == 1 else first
            if token in eos:
                reason = "stop"
                yield Piece(token, "")
                break
            text = words.feed(token)
            if words.stopped:
                reason = "stop"
            elif len(tokens) >= limit:
                reason = "length"
            yield Piece(token, text)
            if reason is None and cancelled():
                reason = "cancelled"
            if reason is None:
                with torch.inference_mode():
                    logits = sequence.advance([token])

        tail = words.finish()
        prefill_s, decode_s = first - began, last - first
        yield Result(
            token_ids=tuple(tokens),
            text=words.text,
            tail=tail,
            finish_reason=reason or "length",
            usage=Usage(len(request.prompt), len(tokens)),
            timings=Timings(
                load_s=run.load_s,
                ttft_s=prefill_s,
                prefill_tok_s=len(request.prompt) / prefill_s if tokens else 0.0,
                decode_tok_s=(len(tokens) - 1) / decode_s if len(tokens) > 1 else 0.0,
            ),
            kernels=_difference(before, run.kernels()),
            seed=sampler.seed,
        )

    def _prefill(
        self, sequence: Sequence, prompt: tuple[int, ...], cancelled: Callable[[], bool]
    ) -> Tensor | None:
        """Logits [V] after the whole prompt, or None when cancelled between chunks."""
        logits: Tensor | None = None
        chunk = len(prompt) if self.runnable.whole_prompt else self._chunk
        for start in range(0, len(prompt), chunk):
            if cancelled():
                return None
            with torch.inference_mode():
                logits = sequence.advance(list(prompt[start : start + chunk]))
        return logits


class _Words:
    """Text of one answer: detokenizer and stop strings in a row; ``text`` stays None without a tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None, stops: tuple[str, ...], visible: frozenset[int]) -> None:
        self._detokenizer = None if tokenizer is None else tokenizer.detokenizer(visible)
        self._matcher = StopMatcher(stops)
        self._shown: list[str] = []

    @property
    def stopped(self) -> bool:
        return self._matcher.matched is not None

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
        rest = "" if self.stopped else self._matcher.feed(self._detokenizer.finish())
        return self._keep(rest + self._matcher.finish())

    def _keep(self, text: str) -> str:
        if text:
            self._shown.append(text)
        return text


def _difference(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    return {name: calls - before.get(name, 0) for name, calls in after.items() if calls > before.get(name, 0)}
