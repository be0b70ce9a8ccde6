"""What a step and a piece of a prompt are given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

PAGE = 16
"""Tokens of a page of keys and values."""


def half_of(rows: int) -> int:
    """Of the rows of a step whose halves take turns: those of the first."""
    return -(-rows // 2)


@dataclass(slots=True)
class StepInputs:
    """Static tensors on the device, one set per captured number of rows R."""

    tokens: Tensor  # int64 [R]
    slots: Tensor  # int64 [R], sequence slots; negative: an idle row. No two rows share a slot.
    positions: Tensor  # int64 [R] of the tokens in their sequences
    pages: Tensor  # int32 [slots, most pages]: where a sequence's tokens lie, PAGE each
    ple: Tensor | None = None  # [R, ple_embed_dim] in the model's dtype: n-gram embeddings from the host
    await_ple: Callable[[], None] | None = None  # to be called before ``ple`` is read: they may come late


@dataclass(frozen=True, slots=True)
class Mark:
    """A place within a prompt at which every layer's state in the slot is told, on its way. ``at``: tokens of
    the sequence up to there; ``save``: is called by every layer that has such a state, with views as
    ``states`` gives them, whose contents change afterwards."""

    at: int
    save: Callable[[Sequence[Tensor]], None]


@dataclass(slots=True)
class Chunk:
    """Consecutive tokens of one sequence, whose state holds all before them."""

    tokens: Tensor  # int64 [T] on the device
    slot: int
    start: int  # position of the first
    pages: Tensor  # as in StepInputs
    marks: tuple[Mark, ...] = ()  # behind its first token, up to its end, in order

    def part(self, first: int, end: int) -> Chunk:
        """Its tokens [first, end), with the marks that lie there."""
        marks = tuple(mark for mark in self.marks if first < mark.at - self.start <= end)
        return Chunk(self.tokens[first:end], self.slot, self.start + first, self.pages, marks)
