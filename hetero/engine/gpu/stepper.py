"""Sequences as slots of a runner, for everything that runs requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from typing import Any

import torch
from torch import Tensor

from hetero.decode.inputs import PAGE
from hetero.engine.gpu.pages import settled
from hetero.engine.gpu.runner import GpuRunner
from hetero.engine.gpu.snapshots import Kept, Marked
from hetero.engine.sample import Scored
from hetero.kv.prefix import Entry

_UNREAD = torch.empty(0)


class SlotSequence:
    """State of one sequence in a slot, which ``close`` gives back."""

    host_bytes = 0
    marks = True

    def __init__(self, runner: GpuRunner) -> None:
        self._runner = runner
        self.slot = runner.claim()
        self._open = True
        self._marks: list[Marked] = []  # of the tokens that are read next
        self._marked: list[tuple[int, Kept]] = []

    @property
    def length(self) -> int:
        return self._runner.length(self.slot) if self._open else 0

    @property
    def keepable(self) -> bool:
        return self._runner.keeping.able

    @property
    def cuttable(self) -> bool:
        return self._runner.keeping.cuttable

    # -- beginnings

    @property
    def cache(self) -> SlotSequence:
        """What others may begin from, for as long as this sequence lives: itself, where it can be cut."""
        return self

    @property
    def pages(self) -> Many[int]:
        return self._runner.pages.held(self.slot)

    @property
    def state(self) -> Tensor | None:
        """None: what has a state is not shared while it lives."""
        return None

    @property
    def last(self) -> list[int]:
        return self._runner.recent(self.slot)

    def begin(self, cache: Any, held: int, used: int, *, own: bool = False) -> None:
        """Go on from ``used`` of the ``held`` tokens of another sequence or of what one has left. (What can
        be cut has no n-grams, for which the last tokens would count.)"""
        self._runner.resume(self.slot, cache, used)

    def settle(self) -> None:
        """Afterwards ``length`` is of all that it holds: a step that was launched ahead may have added the
        last token."""
        self._runner.settle()

    def kept(self) -> Kept | None:
        """What this sequence is now; None where there is no memory for its state."""
        return self._runner.keep(self.slot)

    def given(self) -> Kept | None:
        return self.kept()

    def mark(self, at: int, *, spare: bool = False) -> None:
        marked = self._runner.keeping.mark(self.slot, at, spare)
        if marked is not None:
            self._marks.append(marked)

    def marked(self) -> list[tuple[int, Kept]]:
        found, self._marked = self._marked, []
        return found

    # -- tokens

    def advance(self, tokens: list[int], foreseen: bool = False) -> Tensor | Scored:
        """Logits [V] after appending ``tokens`` [n >= 1]; they hold until the next step. ``foreseen``: as in
        ``SlotStepper.advance``."""
        if len(tokens) > 1 or self.length == 0 or self._marks:
            return self._read(tokens, None)
        return step(self._runner, [self], tokens, foreseen)[0]

    def advance_each(self, tokens: list[int], take: Callable[[int, Tensor], None]) -> Tensor:
        return self._read(tokens, take)

    def _read(self, tokens: list[int], take: Callable[[int, Tensor], None] | None) -> Tensor:
        marks, self._marks = sorted(self._marks, key=lambda marked: marked.at), []
        start, before = self.length, self.last
        try:
            logits = self._runner.prefill(
                self.slot, tokens, marks=[marked.mark for marked in marks], each=take
            )
        except BaseException:
            for marked in marks:
                self._runner.keeping.give(marked.state)
            raise
        for marked in marks:
            last = (before + tokens[: marked.at - start])[-self._runner.window :]
            self._marked.append((marked.at, self._runner.keeping.marked(marked, self.slot, last)))
        return logits

    def close(self) -> None:
        """Give up the slot, and what was marked and nobody has asked for."""
        if self._open:
            self._open = False
            for _, kept in self.marked():
                kept.close()
            for marked in self._marks:
                self._runner.keeping.give(marked.state)
            self._runner.release(self.slot)

    def __del__(self) -> None:
        if getattr(self, "_open", False):
            self.close()


class SlotStepper:
    """Runs sequences through a runner, up to its largest graph in one replay."""

    together = True
    shares = True

    def __init__(self, runner: GpuRunner) -> None:
        self._runner = runner

    @property
    def states(self) -> bool:
        keeping = self._runner.keeping
        return keeping.able and not keeping.cuttable

    def start(self) -> SlotSequence:
        """A new, empty sequence. Raises HeteroError where all slots are taken."""
        return SlotSequence(self._runner)

    def advance(
        self, sequences: Many[SlotSequence], tokens: Many[int], foreseen: bool = False
    ) -> list[Scored]:
        """Logits of each after one token; they hold until the next step. ``foreseen``: nobody reads more of
        them than the largest, whose token each sequence takes that goes on; by one more step then."""
        return step(self._runner, sequences, tokens, foreseen)

    def shared(self, cache: Kept, used: int) -> int:
        runner = self._runner
        return PAGE * runner.pages.used_by_slots(cache.pages[: settled(used, runner.decoder.grain)])

    def needs(self, wanted: Iterable[tuple[SlotSequence | None, int]]) -> int:
        pages = self._runner.pages
        more = (
            max(0, tokens - (0 if sequence is None else PAGE * len(sequence.pages)))
            for sequence, tokens in wanted
        )
        return PAGE * pages.in_slots + sum(more)

    def on_shortage(self, give_up: Callable[[], bool]) -> None:
        self._runner.pages.reclaim = give_up

    # What is kept holds pages that others hold too.

    def weigh(self, entries: Many[Entry]) -> int:
        return PAGE * self._runner.pages.only_kept

    def frees(self, cache: Kept) -> bool:
        return self._runner.pages.frees(cache.pages)

    def free(self, cache: Kept) -> None:
        cache.close()

    def close(self) -> None:
        """The runner stays: whoever loaded the model closes it."""
        self.on_shortage(lambda: False)


def step(runner: GpuRunner, sequences: Many[SlotSequence], tokens: Many[int], foreseen: bool) -> list[Scored]:
    rows = [(one.slot, token) for one, token in zip(sequences, tokens, strict=True)]
    out = runner.step(rows, logits=not foreseen, ahead=foreseen)
    logits = [_UNREAD] * len(rows) if out.logits is None else out.logits
    return [Scored(*row) for row in zip(logits, out.ids, out.best, strict=True)]
