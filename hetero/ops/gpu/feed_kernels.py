"""Triton kernel that puts the tokens of one step into the next one."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def feed(tokens, found, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """``tokens`` int64 [ROWS] in place: t < 0 becomes ``found[-1 - t]``."""
    row = tl.arange(0, WIDTH)
    token = tl.load(tokens + row, row < ROWS, 0)
    later = token < 0
    other = tl.load(found + tl.where(later, -1 - token, 0), later & (row < ROWS), 0)
    tl.store(tokens + row, tl.where(later, other, token), row < ROWS)
