"""Routers on the device."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from hetero.ops.gpu import route_kernels


def route(
    logits: Tensor,
    top_k: int,
    *,
    sigmoid: bool = False,
    bias: Tensor | None = None,
    norm: bool = True,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """(ids int64, weights float32) [T, top_k], best first, of ``logits`` [T, experts]; see
    ``route_kernels``."""
    rows, experts = logits.shape
    logits = logits.contiguous()
    ids = torch.empty(rows, top_k, dtype=torch.int64, device=logits.device)
    weights = torch.empty(rows, top_k, dtype=torch.float32, device=logits.device)
    route_kernels.top_k[(rows,)](
        logits, logits if bias is None else bias, ids, weights, scale,
        EXPERTS=experts, WIDTH=triton.next_power_of_2(experts), TOP=top_k, SIGMOID=sigmoid,
        HAS_BIAS=bias is not None, NORM=norm,
    )  # fmt: skip
    return ids, weights
