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


def added_parts(
    main: Tensor | None, shared: Tensor | None, gate: Tensor | None, absent: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """What ``mix_kernels.block_output`` takes first; ``absent``: any tensor, in the place of what is not
    there, since it has to be a pointer."""
    parts = [absent if part is None else part for part in (main, shared, gate)]
    return parts[0], parts[1], parts[2], 0 if gate is None else gate.stride(0)


def mix_streams(
    weights: MixWeights,
    streams: Tensor,
    block_out: Tensor | None,
    inject: Tensor | None,
    *,
    shared: Tensor | None = None,
    gate: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(the block's input [T, hidden], injection float32 [T, count]) of ``streams`` [T, count * hidden],
    contiguous.

    The last block's output and its injection, where there was one, are added to the streams in place. The
    output is block_out + shared * sigmoid(gate), [T, hidden] each, contiguous; gate [T] or [T, 1], without
    which shared counts whole.
    """
    count, rows = weights.count, streams.shape[0]
    hidden = streams.shape[1] // count
    sizes = {"COUNT": count, "HIDDEN": hidden}
    normed = torch.empty(streams.shape, dtype=torch.float32, device=streams.device)
    has_out = block_out is not None and inject is not None
    mix_kernels.norm_streams[(count, rows)](
        streams, *added_parts(block_out if has_out else None, shared, gate, normed),
        inject if has_out else normed, weights.norm, normed, weights.eps,
        WIDTH=triton.next_power_of_2(hidden), HAS_OUT=has_out, HAS_SHARED=shared is not None,
        HAS_GATE=gate is not None, **sizes,
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
