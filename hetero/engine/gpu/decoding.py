"""Decode steps of a runner's sequences: in one replay for all of them, and ahead where that can be.

Where the tokens that follow are sure to be the likeliest, the next step is launched before the host has
waited for this one: its tokens come from the device. What the caller then asks for is there already, or is
dropped with its sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from hetero.core import HeteroError
from hetero.engine.gpu.graphs import Flight, Means
from hetero.engine.gpu.pages import Pages
from hetero.engine.gpu.parts import Decoder
from hetero.engine.gpu.staging import LATER
from hetero.engine.gpu.steps import TRACKS, Steps
from hetero.engine.handoff import HandoffError
from hetero.trace import recorder


class StepOut(NamedTuple):
    """Of each row: the most likely token, its logit, and all logits float32 [n, V] on the device, which hold
    until the next step; None where they were not asked for."""

    ids: list[int]
    best: list[float]
    logits: Tensor | None


class _Told(NamedTuple):
    """Of a step that has ended and that nobody has asked for yet."""

    token: int  # that it was given
    id: int
    best: float


class _Way(NamedTuple):
    """A step on its way. ``tokens``: that its slots are given, once they are known."""

    flight: Flight
    slots: list[int]
    tokens: list[int]


@dataclass(slots=True)
class Slots:
    """What the host knows of sequences: which slots are free, how many tokens each holds, and the last
    ``window`` of them."""

    pages: Pages
    window: int
    free: list[int]
    length: list[int]
    last: list[list[int]]

    def grown(self, slot: int, *tokens: int) -> None:
        """A slot holds these as well."""
        self.length[slot] += len(tokens)
        self.last[slot] = [*self.last[slot], *tokens][-self.window :]


class Decoding:
    """``told``: of slots whose step was launched ahead and has ended, what it said, or its error."""

    def __init__(
        self, slots: Slots, steps: Steps, means: Means, decoder: Decoder, rows: Sequence[int]
    ) -> None:
        self.slots, self.rows = slots, rows
        self._steps, self._means, self._decoder = steps, means, decoder
        self._ahead: _Way | None = None
        self.told: dict[int, _Told | HandoffError] = {}

    def settle(self) -> None:
        """Wait for a step that was launched ahead. Its outcome, or its error, is kept for who asks for it;
        its slots hold a token more. Nothing is on its way afterwards."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return
        with torch.inference_mode(), self._means.stream():
            try:
                ids, best = self._steps.end(ahead.flight)
            except HandoffError as error:
                self.told.update({slot: error for slot in ahead.slots if slot not in self.slots.free})
                return
        for slot, *one in zip(ahead.slots, ahead.tokens, ids, best, strict=True):
            if slot not in self.slots.free:
                self.told[slot] = told = _Told._make(one)
                self.slots.grown(slot, told.token)

    def step(self, rows: Sequence[tuple[int, int]], logits: bool = True, ahead: bool = False) -> StepOut:
        """One token for each of (slot, token), all of different slots. ``ahead``: the caller needs no logits,
        and if it goes on with a slot, then with the token that this step says and by one more step, which may
        be launched already. Raises HandoffError where the CPU side failed: the slots of this step are then
        worth nothing, and the next step works."""
        count = len(rows)
        if len({slot for slot, _ in rows}) != count or not 1 <= count <= self.rows[-1]:
            raise ValueError(f"{count} rows, must be 1 to {self.rows[-1]} of different slots")
        asked = {slot for slot, _ in rows}
        if self._ahead is not None and (recorder.active or not asked <= set(self._ahead.slots)):
            self.settle()
        with torch.inference_mode(), self._means.stream():
            told = {slot: self._recall(slot, token) for slot, token in rows if slot in self.told}
            left = [row for row in rows if row[0] not in told]
            made: Tensor | None = None
            if left:
                way = self._taken(left) or self._launched(left)
                found = self._finished(way, asked, ahead and not told)
                told.update({slot: one for slot, (_, one) in found.items()})
                if logits and not ahead:
                    places = [found[slot][0] if slot in found else -1 for slot, _ in rows]
                    made = _rows_of(way.flight.logits, places)
        ends = [told[slot] for slot, _ in rows]
        return StepOut([one.id for one in ends], [one.best for one in ends], made)

    def _recall(self, slot: int, token: int) -> _Told:
        """What a step has told that was launched ahead."""
        told = self.told.pop(slot)
        if isinstance(told, HandoffError):
            raise told
        if told.token != token:
            raise ValueError(f"slot {slot} went on with token {told.token}, not {token}")
        return told

    def _taken(self, rows: Sequence[tuple[int, int]]) -> _Way | None:
        """The step that was launched ahead, if any."""
        way = self._ahead
        if way is not None:
            given = dict(zip(way.slots, way.tokens, strict=True))
            for slot, token in rows:
                if given[slot] != token:
                    raise ValueError(f"slot {slot} went on with token {given[slot]}, not {token}")
            self._ahead = None
        return way

    def _launched(self, rows: Sequence[tuple[int, int]]) -> _Way:
        for slot, _ in rows:
            self.slots.pages.grow(slot, self.slots.length[slot] + 1)
        slots, tokens = [slot for slot, _ in rows], [token for _, token in rows]
        given = [(token, slot, self.slots.length[slot]) for slot, token in rows]
        gather = partial(self._gather, [[*self.slots.last[slot], token] for slot, token in rows])
        return _Way(self._steps.begin(given, self._size(len(rows)), gather=gather), slots, tokens)

    def _launched_ahead(self, way: _Way, wanted: set[int]) -> _Way | None:
        """The step that follows one which may still be running, of those of its slots that are wanted; its
        tokens are not known yet. None where it has to wait."""
        places = [place for place, slot in enumerate(way.slots) if slot in wanted]
        size = self._size(len(places))
        if not self._steps.fits_ahead(size):
            return None
        slots = [way.slots[place] for place in places]
        try:
            for slot in slots:
                self.slots.pages.grow(slot, self.slots.length[slot] + 2)
            given = [(LATER - at, way.slots[at], self.slots.length[way.slots[at]] + 1) for at in places]
            flight = self._steps.begin(given, size, TRACKS - 1 - way.flight.track, ahead=True)
            return _Way(flight, slots, [])
        except HeteroError:  # of who asks for it, if it is one then
            return None

    def _finished(self, way: _Way, wanted: set[int], ahead: bool) -> dict[int, tuple[int, _Told]]:
        """Wait for a step: of each wanted slot its row and what was told. With ``ahead`` the next one is on
        its way before."""
        following = self._launched_ahead(way, wanted) if ahead else None
        found: dict[int, tuple[int, _Told]] = {}
        # Before all else: its first layers are running.
        feed = None if following is None else partial(self._feed, way, following)
        try:
            try:
                ids, best = self._steps.end(way.flight, feed)
            except HandoffError as error:
                self.told.update(
                    {slot: error for slot in way.slots if slot not in {*wanted, *self.slots.free}}
                )
                raise
            for place, (slot, *one) in enumerate(zip(way.slots, way.tokens, ids, best, strict=True)):
                if slot in self.slots.free:
                    continue
                told = _Told._make(one)
                self.slots.grown(slot, told.token)
                if slot in wanted:
                    found[slot] = place, told
                else:
                    self.told[slot] = told
            self._ahead = following
        except BaseException:
            if following is not None:
                self._steps.drop(following.flight)
            raise
        return found

    def _feed(self, way: _Way, following: _Way, ids: Sequence[int]) -> None:
        """``ids``: what the rows of a step have said, for the one that follows it."""
        said = {slot: one for slot, *one in zip(way.slots, way.tokens, ids, strict=True)}
        following.tokens.extend(said[slot][1] for slot in following.slots)
        if self._decoder.window:
            windows = [[*self.slots.last[slot], *said[slot]] for slot in following.slots]
            self._steps.feed(following.flight, partial(self._gather, windows))

    def _gather(self, windows: Sequence[list[int]], out: Tensor) -> None:
        self._decoder.gather([window[-self.slots.window :] for window in windows], out)

    def _size(self, count: int) -> int:
        return next(n for n in self.rows if n >= count)


def _rows_of(logits: Tensor, places: Sequence[int]) -> Tensor:
    """The rows of ``places``; for a place below 0 numbers that are none."""
    if list(places) == list(range(len(places))):
        return logits[: len(places)]
    made = logits.new_full((len(places), logits.shape[1]), float("nan"))
    for row, place in enumerate(places):
        if place >= 0:
            made[row] = logits[place]
    return made
