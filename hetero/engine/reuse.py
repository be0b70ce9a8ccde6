"""What a scheduler keeps of its requests' sequences, and what later requests begin with."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

from hetero.engine.beginnings import places
from hetero.engine.forward import AnyStepper
from hetero.engine.job import Job
from hetero.kv.prefix import Entry, PrefixStore, best, common

# Sequences kept, for each slot, and the part of the memory that they may take, at least that of one slot; how
# many where they share their memory, which ends before.
KEPT_PER_SLOT, KEPT_PART, KEPT_SHARED = 4, 4, 64
# Prompts whose tokens are remembered, to see where new ones fork from them.
PROMPTS = 32


class Reuse:
    """Of sequences of ``stepper`` in ``slots``, which hold ``tokens`` together.

    ``on``: whether anything is kept. ``lock``: around ``store``, which other threads look at; reentrant.
    ``room``: the tokens that may be kept now, under the lock. ``states``: whether what is kept cannot be cut,
    as far as that is known beforehand.
    """

    def __init__(
        self,
        stepper: AnyStepper,
        slots: int,
        tokens: int,
        *,
        on: bool,
        lock: AbstractContextManager[Any],
        room: Callable[[], int],
    ) -> None:
        most, held = slots * KEPT_PER_SLOT, tokens // min(slots, KEPT_PART)
        if stepper.shares:
            most, held = max(most, KEPT_SHARED), tokens
        self.store = PrefixStore(most, held, stepper)
        self.states = on and stepper.states
        self._on, self._lock, self._room = on, lock, room
        self._prompts: deque[tuple[int, ...]] = deque(maxlen=PROMPTS)
        stepper.on_shortage(self._give_up)

    def serves(self, job: Job) -> bool:
        """Whether a request may start from what was read before: scores of a prompt need all of it read."""
        return self._on and not job.answer.scores_prompt

    def found(self, job: Job, running: Iterable[Job]) -> tuple[Entry, int] | None:
        """What a request may begin from, and how many tokens: of kept sequences and of running ones, what has
        most of its own. Under the lock."""
        if not self.serves(job):
            return None
        tokens = tuple(job.tokens(0, job.known))
        alive = [
            Entry(tuple(other.tokens(0, other.read)), other.sequence.cache, True)
            for other in running
            if other is not job and other.sequence is not None and other.read and other.sequence.cuttable
        ]
        known = (self.store.find(tokens), best(alive, tokens))
        return max((each for each in known if each is not None), key=lambda each: each[1], default=None)

    def note(self, job: Job) -> None:
        """Remember a prompt, and tell its job where it parts from earlier ones and from what may come."""
        prompt = job.request.prompt
        job.fork = max(common(prompt, other) for other in (*self._prompts, job.request.alike))
        if prompt not in self._prompts:
            self._prompts.append(prompt)

    def mark(self, job: Job, start: int, end: int) -> int:
        """Before tokens [start, end) are read: have states kept within them; where to stop reading."""
        sequence = job.sequence
        assert sequence is not None
        if not self._on or sequence.cuttable:
            return end
        if not sequence.marks:
            return job.fork if start < job.fork < end else end
        for at, spare in places(len(job.request.prompt), job.fork, job.answer.cached).items():
            with self._lock:
                wanted = start < at <= end and self.store.lacks(tuple(job.tokens(0, at)))
            if wanted:
                sequence.mark(at, spare=spare)
        return end

    def keep_marked(self, job: Job, end: int) -> None:
        """Keep the states that were told up to token ``end``."""
        sequence = job.sequence
        assert sequence is not None
        if not self._on or sequence.cuttable:
            return
        if not sequence.marks and end == job.fork:
            self.keep(job, sequence.kept)
        known = places(len(job.request.prompt), job.fork, job.answer.cached)
        for at, cache in sequence.marked():
            self._put(Entry(tuple(job.tokens(0, at)), cache, cuttable=False), first=known[at])

    def keep(self, job: Job, make: Callable[[], object]) -> None:
        """Let later requests begin with what this one's sequence holds, unless they can already; ``make``:
        makes or gives its cache."""
        sequence = job.sequence
        if not self._on or sequence is None or not sequence.keepable:
            return
        sequence.settle()
        tokens = tuple(job.tokens(0, sequence.length))
        with self._lock:
            wanted = self.store.lacks(tokens)
        cache = make() if wanted else None
        if cache is not None:
            self._put(Entry(tokens, cache, sequence.cuttable))

    def close(self) -> None:
        """Give up all."""
        with self._lock:
            self.store.clear()

    def _put(self, entry: Entry, *, first: bool = False) -> None:
        with self._lock:
            self.store.put(entry, first=first)
            self.store.shrink(self._room())

    def _give_up(self) -> bool:
        """Give up something that is kept, where the stepper is short of memory."""
        with self._lock:
            return self.store.give_up()
