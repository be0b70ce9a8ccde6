"""Layers, and the residual stream that passes through them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from hetero.decode.inputs import Chunk, StepInputs
from hetero.decode.marks import prefilled
from hetero.decode.matrix import VALUES
from hetero.decode.mixer import Mixer
from hetero.decode.norm import Norm
from hetero.decode.stream import Sum
from hetero.formats import Format
from hetero.ops.gpu.fused import Normed
from hetero.ops.gpu.stamps import lap
from hetero.trace import MIXER


class Block(Protocol):
    """What follows the mixer in a layer: routed experts with a shared one, or a dense MLP."""

    @property
    def format(self) -> Format:
        """Of the rows that ``begin_step`` takes."""
        ...

    def begin_step(self, x: Normed, inputs: StepInputs) -> Callable[[], Sum]:
        """One token of every row, up to where experts on the CPU know what to do; the call does the rest."""
        ...

    def begin_parts(self, x: Tensor) -> Callable[[], Sum]:
        """x [T, H], any T, up to where experts on the CPU know what to do; the call does the rest."""
        ...

    def begin_prefill(self, x: Tensor) -> Callable[[], Tensor]:
        """``begin_parts``, whose parts the call adds up: [T, H] in the dtype of x."""
        ...


class Layer(Protocol):
    """One decoder layer. ``stream`` is the family's own: what its ``begin`` made."""

    @property
    def nbytes(self) -> int:
        """Of the state of all slots."""
        ...

    @property
    def first_weights(self) -> list[Tensor]:
        """What ``begin_step`` reads first."""
        ...

    def begin_step(self, stream: Any, inputs: StepInputs) -> Callable[[], Any]:
        """One token of every row, up to where experts on the CPU know what to do; the call does the rest. In
        between other rows may begin. Capturable."""
        ...

    def begin_prefill(self, stream: Any, chunk: Chunk) -> Callable[[], Any]:
        """Many tokens of one sequence, up to where experts on the CPU know what to do; the call does the
        rest. In between another chunk may begin, which follows this one."""
        ...

    def clear(self, slot: int) -> None: ...

    def states(self, slot: int) -> list[Tensor]:
        """As of a mixer, of all parts that have any."""
        ...

    @property
    def paged(self) -> list[Tensor]:
        """As of a mixer."""
        ...

    @property
    def grain(self) -> int:
        """As of a mixer."""
        ...


class PlainStream(NamedTuple):
    """A residual [R, H] and what is still to be added to it, which the next norm does."""

    residual: Tensor
    added: Sum | None = None


@dataclass(slots=True)
class Parts:
    """The two parts of a layer; what lies in pages is the mixer's."""

    mixer: Mixer
    block: Block

    def clear(self, slot: int) -> None:
        self.mixer.clear(slot)

    @property
    def paged(self) -> list[Tensor]:
        return self.mixer.paged

    @property
    def grain(self) -> int:
        return self.mixer.grain


@dataclass(slots=True)
class PlainLayer(Parts):
    """Pre-norm residual layers: x + mixer(norm(x)), then x + block(norm(x))."""

    mixer_norm: Norm
    block_norm: Norm

    @property
    def nbytes(self) -> int:
        return self.mixer.nbytes

    @property
    def first_weights(self) -> list[Tensor]:
        return self.mixer.first_weights

    def begin_step(self, stream: PlainStream, inputs: StepInputs) -> Callable[[], PlainStream]:
        x = self.mixer_norm.step(self.mixer.format, stream.residual, stream.added)
        mixed = self.mixer.step(x, inputs)
        lap(MIXER)
        x = self.block_norm.step(self.block.format, x.residual, Sum(mixed))
        end = self.block.begin_step(x, inputs)
        return lambda: PlainStream(x.residual, end())

    def begin_prefill(self, stream: PlainStream, chunk: Chunk) -> Callable[[], PlainStream]:
        x = self.mixer_norm.step(VALUES, stream.residual, stream.added)
        mixed = prefilled(self.mixer, x.x, chunk)
        lap(MIXER)
        x = self.block_norm.step(VALUES, x.residual, Sum(mixed))
        end = self.block.begin_parts(x.x)
        return lambda: PlainStream(x.residual, end())

    def states(self, slot: int) -> list[Tensor]:
        return self.mixer.states(slot)
