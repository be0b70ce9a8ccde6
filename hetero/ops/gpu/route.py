"""Choices on the device: routers, and the likeliest token."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from hetero.ops.gpu import route_kernels
from hetero.ops.gpu.overlap import overlap

_CHUNK = 2048


def route(
    logits: Tensor,
    top_k: int,
    *,
    sigmoid: bool = False,
    bias: Tensor | None = None,
    norm: bool = True,
    scale: float = 1.0,
    slots: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(ids int64, weights float32) [T, top_k], best first, of ``logits`` [T, experts] of any float dtype,
    rows any distance apart; see ``route_kernels``. ``slots`` int64 [T]: the ids of a row whose slot is
    negative are -1, its weights 0."""
    rows, experts = logits.shape
    ids = torch.empty(rows, top_k, dtype=torch.int64, device=logits.device)
    weights = torch.empty(rows, top_k, dtype=torch.float32, device=logits.device)
    width = triton.next_power_of_2(experts)
    route_kernels.top_k[(rows,)](
        logits, logits if bias is None else bias, ids if slots is None else slots, ids, weights, scale,
        logits.stride(0),
        EXPERTS=experts, WIDTH=width, TOP=top_k, PLACES=triton.next_power_of_2(top_k), SIGMOID=sigmoid,
        HAS_BIAS=bias is not None, HAS_SLOTS=slots is not None, NORM=norm,
        # Within one warp a choice needs no barrier.
        num_warps=1 if width <= 512 else 4, **overlap(logits.device),
    )  # fmt: skip
    return ids, weights


def argmax(values: Tensor, out: Tensor | None = None) -> Tensor:
    """int64 [R] (``out``, if given): where the largest of each row of ``values`` [R, n] is, the first of
    equals; rows any distance apart."""
    rows, count = values.shape
    parts = -(-count // _CHUNK)
    keys, places = torch.empty(2, rows, parts, dtype=torch.int32, device=values.device)
    out = torch.empty(rows, dtype=torch.int64, device=values.device) if out is None else out
    route_kernels.largest[(parts, rows)](
        values,
        keys,
        places,
        values.stride(0),
        COUNT=count,
        PARTS=parts,
        CHUNK=_CHUNK,
        **overlap(values.device),
    )
    route_kernels.largest_of_parts[(rows,)](
        keys,
        places,
        out,
        PARTS=parts,
        WIDTH=triton.next_power_of_2(parts),
        num_warps=1,
        **overlap(values.device),
    )
    return out
