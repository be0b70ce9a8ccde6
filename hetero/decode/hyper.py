"""Hyper-connections: several residual streams, which every block reads as a mix and writes back to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor, nn

from hetero.decode.build import Build
from hetero.decode.inputs import Chunk, StepInputs
from hetero.decode.layer import Parts
from hetero.decode.marks import pieces, prefilled
from hetero.decode.matrix import Part, Projection, decoded
from hetero.decode.ple import Ngrams
from hetero.decode.stream import Sum
from hetero.formats import Format
from hetero.ops.gpu import hyper_kernels
from hetero.ops.gpu.fused import Normed, PackedMatrix
from hetero.ops.gpu.mix import MixWeights, mix_rows
from hetero.ops.gpu.stamps import lap
from hetero.trace import MIXER

# Rows of a prefill that are mixed at once: what lies between the two products is as wide as all streams.
_ROWS = 2048


class HyperStream(NamedTuple):
    """Streams [R, count * H], and the last block's output with its injection float32 [R, count], which
    whatever reads the streams next adds to them in place."""

    streams: Tensor
    added: Sum | None = None
    inject: Tensor | None = None

    def rows(self, which: slice) -> HyperStream:
        """Of some rows; streams stay the same memory."""
        return HyperStream(
            self.streams[which],
            None if self.added is None else self.added.rows(which),
            None if self.inject is None else self.inject[which],
        )


def _part(layer: Any) -> Part:
    """A linear layer, decoded where it is quantised: a step's kernels take values, and gain no time by fewer
    bytes."""
    matrix = PackedMatrix.from_linear(layer)
    if not matrix.format.quantised:
        return Part(layer, (layer.out_features,))
    weight = decoded(matrix, 0, matrix.n)
    layer.packed = layer.packed[:0]
    return Part(weight, (matrix.n,))


class Connection:
    """Of a ``Qwen4ExpTextGatedResidual``; without ``block_inject_weight`` the mix in front of the head."""

    def __init__(self, module: Any, build: Build) -> None:
        inject = module.block_inject_weight
        self._down = Projection(
            _part(module.input_mix_weight_down), *([] if inject is None else [_part(inject)])
        )
        self._up = Projection(_part(module.input_mix_weight_up))
        self._count, self._eps = module.hc_count, module.hc_norm.eps
        self._norm = build.tensor(module.hc_norm.weight)
        down, up = (part.matrices[0].packed for part in (self._down, self._up))
        self._step = MixWeights(self._norm, down, up, self._count, self._eps)

    @property
    def weights(self) -> list[Tensor]:
        return [self._step.down, self._step.up]

    def step(self, fmt: Format, stream: HyperStream) -> tuple[Normed, Tensor]:
        """(the block's input as rows for ``fmt``, its injection), R <= 16."""
        added = Sum(None, None, None) if stream.added is None else stream.added  # type: ignore[arg-type]
        rows, x, inject = mix_rows(
            fmt, self._step, stream.streams, added.main, stream.inject, shared=added.shared, gate=added.gate
        )
        return Normed(rows, x, x), inject

    def prefill(self, stream: HyperStream) -> tuple[Tensor, Tensor]:
        """(the block's input [T, H], its injection float32 [T, count])."""
        count, width = stream.streams.shape
        out = stream.streams.new_empty(count, width // self._count)
        inject = stream.streams.new_empty(count, self._count, dtype=torch.float32)
        for first in range(0, count, _ROWS):
            self._rows(stream, slice(first, first + _ROWS), out, inject)
        return out, inject

    def _rows(self, stream: HyperStream, rows: slice, out: Tensor, inject: Tensor) -> None:
        streams, hidden = stream.streams[rows], out.shape[1]
        normed = torch.empty_like(streams)
        block = normed if stream.added is None else stream.added.main[rows]
        before = inject if stream.inject is None else stream.inject[rows]
        sizes = {"COUNT": self._count, "HIDDEN": hidden, "WIDTH": triton.next_power_of_2(hidden)}
        hyper_kernels.add_and_norm[(len(streams), self._count)](
            streams, block, before, self._norm, normed, self._eps, HAS_OUT=stream.added is not None, **sizes
        )
        low, *written = self._down.many(normed)
        if written:
            inject[rows] = 2 * torch.sigmoid(written[0].float() / self._count)
        low = nn.functional.silu(low.float() / self._count).to(normed.dtype)
        hyper_kernels.weigh[(len(streams),)](normed, self._up.many(low)[0], out[rows], **sizes)


@dataclass(slots=True)
class HyperLayer(Parts):
    """N-gram embeddings where a layer has them, then mixer and block, each on a mix of the streams."""

    around_mixer: Connection
    around_block: Connection
    ngrams: Ngrams | None

    @property
    def nbytes(self) -> int:
        return self.mixer.nbytes + (0 if self.ngrams is None else self.ngrams.nbytes)

    @property
    def first_weights(self) -> list[Tensor]:
        return [*self.around_mixer.weights, *self.mixer.first_weights]

    def begin_step(self, stream: HyperStream, inputs: StepInputs) -> Callable[[], HyperStream]:
        streams = stream.streams
        if self.ngrams is not None:
            if inputs.await_ple is not None:
                inputs.await_ple()
            self.ngrams.step(*stream, inputs)
            stream = HyperStream(streams)
        x, inject = self.around_mixer.step(self.mixer.format, stream)
        mixed = HyperStream(streams, Sum(self.mixer.step(x, inputs)), inject)
        lap(MIXER)
        x, inject = self.around_block.step(self.block.format, mixed)
        end = self.block.begin_step(x, inputs)
        return lambda: HyperStream(streams, end(), inject)

    def begin_prefill(self, stream: HyperStream, chunk: Chunk) -> Callable[[], HyperStream]:
        streams = stream.streams
        if self.ngrams is not None:
            self._add_ngrams(self.ngrams, stream, chunk)
            stream = HyperStream(streams)
        x, inject = self.around_mixer.prefill(stream)
        mixed = HyperStream(streams, Sum(prefilled(self.mixer, x, chunk)), inject)
        lap(MIXER)
        x, inject = self.around_block.prefill(mixed)
        end = self.block.begin_prefill(x)
        return lambda: HyperStream(streams, Sum(end()), inject)

    @staticmethod
    def _add_ngrams(ngrams: Ngrams, stream: HyperStream, chunk: Chunk) -> None:
        for rows, piece, marks in pieces(chunk):
            ngrams.prefill(*stream.rows(rows), piece)
            for mark in marks:
                mark.save(ngrams.states(chunk.slot))

    def states(self, slot: int) -> list[Tensor]:
        return [*([] if self.ngrams is None else self.ngrams.states(slot)), *self.mixer.states(slot)]
