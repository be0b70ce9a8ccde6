"""Triton kernel of embeddings, whose table may lie in pinned memory of the host."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gather(tokens, table, out, HIDDEN: tl.constexpr, WIDTH: tl.constexpr):
    """``out`` [T, HIDDEN]: rows of ``table`` [V, HIDDEN] by ``tokens`` int64 [T]; program (WIDTH values,
    row)."""
    row = tl.program_id(1)
    at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    token = tl.load(tokens + row)
    value = tl.load(table + token * HIDDEN + at, at < HIDDEN, 0.0)
    tl.store(out + row.to(tl.int64) * HIDDEN + at, value, at < HIDDEN)
