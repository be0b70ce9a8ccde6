"""One request on its way through the scheduler, and what is told of all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hetero.core import HeteroError
from hetero.engine.answer import Answer, clock
from hetero.engine.forward import AnySequence
from hetero.engine.request import FinishReason, Piece, Request, Result
from hetero.kv.prefix import blocks

Sink = Callable[[Piece | Result | HeteroError], None]


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """Of this moment. Tokens of keys and values in whole blocks; counters since the start.

    ``kv_tokens_used``: held by running requests; ``kv_tokens_cached``: kept for reuse, given up when needed.
    ``prompt_tokens``: read by the model, again after a return to the queue; ``prefix_hit_tokens``: not read,
    since they were known. ``batch``: answers that the last step made a token of; ``last_step_s``: how long it
    took.
    """

    slots: int
    running: int
    waiting: int
    kv_tokens_used: int
    kv_tokens_cached: int
    kv_tokens_total: int
    prefix_hit_tokens: int
    prompt_tokens: int
    completion_tokens: int
    steps: int
    last_step_s: float
    batch: int
    preemptions: int


class Handle:
    """A request that was submitted."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self.cancelled = False

    def cancel(self) -> None:
        """End it within one step, as "cancelled". From any thread; after the end it does nothing."""
        self.cancelled = True
        self._wake()


class Job:
    """One request on its way through the scheduler."""

    def __init__(self, request: Request, answer: Answer, sink: Sink, handle: Handle) -> None:
        self.request, self.answer, self.sink, self.handle = request, answer, sink, handle
        self.until = None if request.deadline_s is None else clock() + request.deadline_s
        self.sequence: AnySequence | None = None
        self.begun = False  # the reading of its prompt, since it was admitted
        self.fork = 0  # where the prompt parts from an earlier one; 0 when that is of no use
        self.began = clock()

    def drop(self) -> None:
        """Give up its sequence, if it has one, and what that holds."""
        if self.sequence is not None:
            self.sequence.close()
        self.sequence = None

    @property
    def read(self) -> int:
        """Tokens that the sequence holds."""
        sequence = self.sequence  # another thread may ask while it is dropped
        return 0 if sequence is None else sequence.length

    @property
    def known(self) -> int:
        """Tokens of prompt and answer so far."""
        return len(self.request.prompt) + len(self.answer.tokens)

    @property
    def reading(self) -> bool:
        """Whether more than the last token is still to be read."""
        return self.read == 0 or self.known - self.read > 1 or not self.answer.tokens

    @property
    def needs(self) -> int:
        """Tokens of the blocks that it must have to go on."""
        return blocks(self.known)

    def tokens(self, start: int, end: int) -> list[int]:
        """Those of prompt and answer in a row."""
        prompt = self.request.prompt
        return [
            *prompt[start:end],
            *self.answer.tokens[max(start - len(prompt), 0) : max(end - len(prompt), 0)],
        ]

    def overdue(self) -> FinishReason | None:
        """Why it must end now, if it must."""
        if self.handle.cancelled:
            return "cancelled"
        return "deadline" if self.until is not None and clock() >= self.until else None


def next_reader(running: Iterable[Job], step: int) -> Job | None:
    """Whose prompt is read next: the oldest's and the one with least to read take turns.

    So a short prompt does not wait for a long one, and short ones cannot keep a long one out for ever.
    ``running``: in the order of their admission.
    """
    readers = [job for job in running if job.reading]
    if not readers or step % 2:
        return min(readers, key=lambda job: job.known - job.read, default=None)
    return readers[0]
