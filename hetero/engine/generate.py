"""The life of one request alone: read the prompt in chunks, then one token a step until something ends it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from hetero.engine.answer import Answer, Runnable, check
from hetero.engine.forward import AnySequence
from hetero.engine.request import Piece, Request, Result
from hetero.engine.sample import Scored
from hetero.engine.stepping import chunk_of, stepper_for

__all__ = ["Engine", "Runnable"]


class Engine:
    """Runs requests one at a time on one model. Not for two threads at once."""

    def __init__(self, runnable: Runnable, prefill_chunk: int | None = None) -> None:
        self.runnable = runnable
        self._stepper = stepper_for(runnable)
        self._chunk = prefill_chunk or chunk_of(runnable)

    def check(self, request: Request) -> int:
        """Tokens that this request may make at most. Raises InputError when it cannot run at all."""
        return check(self.runnable, request)

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
        answer = Answer(self.runnable, request, limit)
        sequence = self._stepper.start()
        try:
            logits = self._prefill(sequence, answer, cancelled)
            if logits is None:
                answer.reason = "cancelled"
            else:
                answer.read()
            while answer.reason is None and logits is not None:
                yield answer.take(logits)
                if answer.reason is None and cancelled():
                    answer.reason = "cancelled"
                if answer.reason is None:
                    with torch.inference_mode():
                        logits = sequence.advance([answer.tokens[-1]])
        finally:
            sequence.close()
        yield answer.result()

    def _prefill(
        self, sequence: AnySequence, answer: Answer, cancelled: Callable[[], bool]
    ) -> Tensor | Scored | None:
        """Logits [V] after the whole prompt, or None when cancelled between chunks."""
        prompt = answer.request.prompt
        logits: Tensor | Scored | None = None
        chunk = len(prompt) if self.runnable.whole_prompt else self._chunk
        for start in range(0, len(prompt), chunk):
            if cancelled():
                return None
            logits = read_chunk(sequence, answer, start, list(prompt[start : start + chunk]))
        return logits


def read_chunk(sequence: AnySequence, answer: Answer, start: int, tokens: list[int]) -> Tensor | Scored:
    """Logits [V] after ``tokens``, which follow the ``start`` tokens that ``sequence`` holds."""
    with torch.inference_mode():
        if not answer.scores_prompt:
            return sequence.advance(tokens)
        logits = sequence.advance_all(tokens)
        answer.score(start, logits)
        return logits[-1]
