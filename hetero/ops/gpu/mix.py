"""Hyper-connections of one block, for a decode step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from hetero.ops.gpu import mix_kernels

_ROWS, _DEPTH = 4, 256


@dataclass(frozen=True, slots=True)
class MixWeights:
    """Of one block's hyper-connections, on the device."""

    norm: Tensor  # [count * hidden]
    down: Tensor  # [rank + count, count * hidden]: the down projection, below it the injection's
    up: Tensor  # [count * hidden, rank]
    count: int
    eps: float

    @property
    def rank(self) -> int:
        return self.up.shape[1]


def mix_streams(
    weights: MixWeights, streams: Tensor, block_out: Tensor | None, inject: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(the block's input [T, hidden], injection float32 [T, count]) of ``streams`` [T, count * hidden],
    contiguous.

    The last block's output [T, hidden] and its injection, where there was one, are added to the streams in
    place.
    """
    count, rows = weights.count, streams.shape[0]
    hidden = streams.shape[1] // count
    sizes = {"COUNT": count, "HIDDEN": hidden}
    normed = torch.empty(streams.shape, dtype=torch.float32, device=streams.device)
    has_out = block_out is not None and inject is not None
    mix_kernels.norm_streams[(count, rows)](
        streams, block_out if has_out else streams, inject if has_out else normed, weights.norm, normed,
        weights.eps, WIDTH=triton.next_power_of_2(hidden), HAS_OUT=has_out, **sizes,
    )  # fmt: skip
    low = torch.empty(rows, weights.rank, dtype=torch.float32, device=streams.device)
    inject = torch.empty(rows, count, dtype=torch.float32, device=streams.device)
    blocks = {"RANK": weights.rank, "ROWS": _ROWS, "DEPTH": _DEPTH}
    mix_kernels.project[(-(-(weights.rank + count) // _ROWS), rows)](
        normed, weights.down, low, inject, **sizes, **blocks
    )
    out = torch.empty(rows, hidden, dtype=streams.dtype, device=streams.device)
    mix_kernels.mix[(-(-hidden // _ROWS), rows)](normed, low, weights.up, out, **sizes, **blocks)
    return out, inject
