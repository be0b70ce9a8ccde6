"""Triton kernel that reads memory and does nothing else: what zero-copy and GPU memory give at most."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def read(address, words, out, WORDS: tl.constexpr, TURNS: tl.constexpr):
    """``out`` int64 [programs]: sums over TURNS * WORDS of the ``words`` int64 at ``address`` each."""
    start = tl.program_id(0).to(tl.int64) * WORDS * TURNS
    lanes = tl.arange(0, WORDS)
    memory = address.to(tl.pointer_type(tl.int64))
    total = tl.zeros([WORDS], tl.int64)
    for turn in range(TURNS):
        at = start + turn * WORDS + lanes
        total += tl.load(memory + at, at < words, 0)
    tl.store(out + tl.program_id(0), tl.sum(total, 0))
