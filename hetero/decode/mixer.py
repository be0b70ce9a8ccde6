"""Token mixers: what brings tokens of a sequence together."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from hetero.decode.inputs import Chunk, StepInputs
from hetero.decode.matrix import Projection
from hetero.formats import Format
from hetero.ops.gpu.fused import Normed


class Mixer(Protocol):
    """Attention or a recurrence, from its projections to its output projection, with its state in slots."""

    @property
    def format(self) -> Format:
        """Of the rows that ``step`` takes."""
        ...

    @property
    def nbytes(self) -> int:
        """Of the state of all slots."""
        ...

    @property
    def first_weights(self) -> list[Tensor]:
        """What ``step`` reads first."""
        ...

    def step(self, x: Normed, inputs: StepInputs) -> Tensor:
        """One token of every row, R <= 16: [R, H] of x.rows and x.x, finite in idle
        rows. Capturable: no sync, and nothing on the host depends on data."""
        ...

    def prefill(self, x: Tensor, chunk: Chunk) -> Tensor:
        """[T, H] -> [T, H], any T; the state is carried on."""
        ...

    def clear(self, slot: int) -> None:
        """Begin a new sequence in a slot."""
        ...

    def states(self, slot: int) -> list[Tensor]:
        """Views of all that a slot holds outside of pages: what a sequence needs to go on elsewhere."""
        ...

    @property
    def paged(self) -> list[Tensor]:
        """What lies in pages, each [pages, ...]."""
        ...

    @property
    def grain(self) -> int:
        """Tokens of a block, of which something is written in the page of its first token once the last one
        is there; 1: every token's part is written with it."""
        ...


class Projected:
    """What mixers have in common that begin with one projection, ``_in``, of their input."""

    _in: Projection
    grain = 1

    @property
    def format(self) -> Format:
        return self._in.format

    @property
    def first_weights(self) -> list[Tensor]:
        return [matrix.packed for matrix in self._in.matrices]
