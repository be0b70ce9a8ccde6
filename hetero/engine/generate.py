"""The life of one request alone: read the prompt in chunks, then one token a step until something ends it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from hetero.engine.answer import Answer, Runnable, check
from hetero.engine.beginnings import LEAST, near
from hetero.engine.forward import AnySequence
from hetero.engine.request import Piece, Request, Result
from hetero.engine.sample import Scored
from hetero.engine.stepping import chunk_of, stepper_for
from hetero.kv.prefix import Entry, PrefixStore

__all__ = ["Engine", "Runnable"]


# Sequences that are kept: slots share memory, other caches are as large as they are.
_SHARED, _OWNED = 8, 1


class Engine:
    """Runs requests one at a time on one model. Not for two threads at once. ``reuse``: a request begins with
    what an earlier one has left, where their tokens are the same; ``close`` gives that up."""

    def __init__(self, runnable: Runnable, prefill_chunk: int | None = None, *, reuse: bool = False) -> None:
        self.runnable = runnable
        self._stepper = stepper_for(runnable)
        self._chunk = prefill_chunk or chunk_of(runnable)
        most = _SHARED if self._stepper.shares else _OWNED
        self._store: PrefixStore | None = None
        if reuse and not runnable.whole_prompt:
            self._store = PrefixStore(most, sys.maxsize, self._stepper)
            self._stepper.on_shortage(self._store.give_up)

    def close(self) -> None:
        """Give up what is kept."""
        if self._store is not None:
            self._store.clear()
            self._stepper.on_shortage(lambda: False)

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
                        logits = sequence.advance([answer.tokens[-1]], answer.foreseen)
            self._keep(sequence, answer)
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
        if self._store is not None and not answer.scores_prompt:
            self._begin(self._store, sequence, answer)
        for start in range(sequence.length, len(prompt), chunk):
            if cancelled():
                return None
            end = min(start + chunk, len(prompt))
            if self._store is not None:
                self._mark(self._store, sequence, answer, end)
            logits = read_chunk(sequence, answer, start, list(prompt[start:end]))
            for at, cache in sequence.marked():
                assert self._store is not None
                self._store.put(Entry(prompt[:at], cache, cuttable=False))
        return logits

    @staticmethod
    def _begin(store: PrefixStore, sequence: AnySequence, answer: Answer) -> None:
        """With what an earlier request has left."""
        found = store.find(answer.request.prompt)
        if found is None:
            return
        entry, used = found
        if not sequence.marks:  # a cache of its own: the sequence takes it over
            store.drop(entry)
        sequence.begin(entry.cache, len(entry.tokens), used, own=not sequence.marks)
        answer.cached = used

    @staticmethod
    def _mark(store: PrefixStore, sequence: AnySequence, answer: Answer, end: int) -> None:
        """Have a state kept shortly before the end of the prompt."""
        prompt = answer.request.prompt
        at = near(len(prompt), 0)
        wanted = sequence.marks and not sequence.cuttable and sequence.length < at <= end
        if wanted and at - answer.cached >= LEAST and store.lacks(prompt[:at]):
            sequence.mark(at)

    def _keep(self, sequence: AnySequence, answer: Answer) -> None:
        """For the next request, which most likely goes on from here."""
        sequence.settle()
        tokens = (*answer.request.prompt, *answer.tokens)[: sequence.length]
        if self._store is None or not sequence.keepable or not self._store.lacks(tokens):
            return
        cache = sequence.given()
        if cache is not None:
            self._store.put(Entry(tokens, cache, sequence.cuttable))


def read_chunk(sequence: AnySequence, answer: Answer, start: int, tokens: list[int]) -> Tensor | Scored:
    """Logits [V] after ``tokens``, which follow the ``start`` tokens that ``sequence`` holds."""
    with torch.inference_mode():
        if not answer.scores_prompt:
            return sequence.advance(tokens)
        return sequence.advance_each(tokens, lambda index, rows: answer.score(start + index, rows))
