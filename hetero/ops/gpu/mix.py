"""Hyper-connections of one block, for a decode step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from hetero.formats import Format
from hetero.ops.gpu import mix_kernels
from hetero.ops.gpu.fused import Rows, empty_rows
from hetero.ops.gpu.overlap import overlap

# Of the first kernel: outputs of a program, inputs of a step; of the second: outputs, a whole number of
# groups, and inputs. Of both: rows.
_LINES, _DEPTH, _WARPS = 4, 512, 2
_COLUMNS, _RANK_DEPTH, _MIX_WARPS = 32, 64, 4
_MOST_ROWS = 2
_PRODUCT_WARPS = 8  # of both, on tensor cores


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


class Mixed(NamedTuple):
    """What ``mix_rows`` gives."""

    rows: Rows
    x: Tensor
    """The block's input [T, hidden] in the dtype of the streams, of which ``rows`` are made."""
    inject: Tensor
    """float32 [T, count]: how much of the block's output goes to each stream."""


def mix_rows(
    fmt: Format,
    weights: MixWeights,
    streams: Tensor,
    block_out: Tensor | None,
    inject: Tensor | None,
    *,
    shared: Tensor | None = None,
    gate: Tensor | None = None,
) -> Mixed:
    """A block's input of ``streams`` [T, count * hidden], contiguous, in two kernels.

    The last block's output and its injection, where there was one, are added to the streams in place. The
    output is block_out + shared * sigmoid(gate), [T, hidden] each, contiguous; gate [T] or [T, 1], without
    which shared counts whole.
    """
    count, rows, device = weights.count, streams.shape[0], streams.device
    hidden, outputs = streams.shape[1] // count, weights.down.shape[0]
    sizes: dict[str, Any] = {"COUNT": count, "HIDDEN": hidden, "OUTPUTS": outputs}
    sizes |= overlap(device)
    products = rows > 1 and streams.dtype == weights.down.dtype == weights.up.dtype == torch.bfloat16
    few = 8 if products else min(triton.next_power_of_2(rows), _MOST_ROWS)
    sizes |= {"ROWS": few, "PRODUCTS": products, "TWIN": device.type == "cpu"}
    norms, given = torch.empty(2, rows, count, dtype=torch.float32, device=device)
    parts = torch.empty(count, rows, outputs, dtype=torch.float32, device=device)
    has_out = block_out is not None and inject is not None
    new = torch.empty_like(streams) if has_out else streams
    # More rows leave registers for half of the weights.
    lines, rank_depth = (_LINES, _RANK_DEPTH) if few == 1 else (_LINES // 2, _RANK_DEPTH // 2)
    warps, mix_warps = (_PRODUCT_WARPS,) * 2 if products else (_WARPS, _MIX_WARPS)
    if products:
        lines, rank_depth = 16, _RANK_DEPTH
    elif device.type == "cpu":
        lines = 64  # the interpreter takes long for each program
    mix_kernels.project[(-(-outputs // lines), count, -(-rows // few))](
        streams, *added_parts(block_out if has_out else None, shared, gate, parts),
        inject if has_out else parts, weights.norm, weights.down, new, norms, parts, rows, weights.eps,
        HAS_OUT=has_out, HAS_SHARED=shared is not None, HAS_GATE=gate is not None, LINES=lines,
        DEPTH=min(max(triton.next_power_of_2(hidden), 64), _DEPTH), STAGES=3, num_warps=warps, **sizes,
    )  # fmt: skip
    out = torch.empty(rows, hidden, dtype=streams.dtype, device=device)
    made, k_pad = Rows(out, out), 0
    if fmt.rounds_activations:
        made, k_pad = empty_rows(fmt, rows, hidden, streams.dtype, device)
    mix_kernels.mix[(-(-max(hidden, k_pad) // _COLUMNS), -(-rows // few))](
        new, norms, weights.norm, parts, weights.up, streams, out, given, *made, rows,
        STREAMS=triton.next_power_of_2(count), RANK=weights.rank, K_PAD=k_pad, HAS_OUT=has_out,
        QUANTISED=fmt.rounds_activations, COLUMNS=_COLUMNS,
        DEPTH=min(max(triton.next_power_of_2(weights.rank), 16), rank_depth), num_warps=mix_warps, **sizes,
    )  # fmt: skip
    return Mixed(made, out, given)
