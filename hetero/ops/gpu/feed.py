"""Tokens that the host does not know yet: those that the step before has found likeliest."""

from __future__ import annotations

import triton
from torch import Tensor

from hetero.ops.gpu import feed_kernels


def feed(tokens: Tensor, found: Tensor) -> None:
    """In place: of ``tokens`` int64 [R], one below 0, say t, becomes ``found[-1 - t]``; ``found`` int64 [n],
    n > -1 - t. Capturable."""
    rows = len(tokens)
    feed_kernels.feed[(1,)](tokens, found, ROWS=rows, WIDTH=triton.next_power_of_2(rows), num_warps=1)
