"""A Triton kernel that asks for memory to be brought into the L2 cache of the GPU."""

from __future__ import annotations

import triton
import triton.language as tl

ASKS = tl.constexpr(90)
"""Ten times the compute capability from which on a GPU has the instruction of ``ask``."""


@triton.jit
def fetch(
    first, second, third, fourth, first_bytes, second_bytes, third_bytes, fourth_bytes, CHUNK: tl.constexpr
):  # fmt: skip
    """Program (CHUNK bytes of the four pieces, whose sizes are multiples of 16, one after the other in whole
    chunks). Nothing waits for what is asked for."""
    chunk = tl.program_id(0)
    of_first, of_second = tl.cdiv(first_bytes, CHUNK), tl.cdiv(second_bytes, CHUNK)
    of_third = tl.cdiv(third_bytes, CHUNK)
    if chunk < of_first:
        _fetch_chunk(first, chunk, first_bytes, CHUNK)
    elif chunk < of_first + of_second:
        _fetch_chunk(second, chunk - of_first, second_bytes, CHUNK)
    elif chunk < of_first + of_second + of_third:
        _fetch_chunk(third, chunk - of_first - of_second, third_bytes, CHUNK)
    else:
        _fetch_chunk(fourth, chunk - of_first - of_second - of_third, fourth_bytes, CHUNK)


@triton.jit
def _fetch_chunk(piece, chunk, size, CHUNK: tl.constexpr):
    at = piece.to(tl.int64) + chunk.to(tl.int64) * CHUNK
    ask(at, tl.minimum(size - chunk * CHUNK, CHUNK))


@triton.jit
def ask(at, size):
    """Ask for ``size`` bytes from the address ``at`` on, multiples of 16, by one thread of a program."""
    tl.inline_asm_elementwise(
        """{
        .reg .pred one;
        .reg .u32 thread;
        mov.u32 thread, %tid.x;
        setp.eq.u32 one, thread, 0;
        @one cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.u32 $0, 0;
        }""",
        "=r,l,r", [at, size], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def ask_each(at, size):
    """``ask`` of 16 addresses and sizes, as vectors, by as many threads; of nothing where a size is 0."""
    tl.inline_asm_elementwise(
        """{
        .reg .pred mine;
        .reg .u32 thread;
        mov.u32 thread, %tid.x;
        setp.lt.u32 mine, thread, 16;
        setp.ne.and.u32 mine, $2, 0, mine;
        @mine cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.u32 $0, 0;
        }""",
        "=r,l,r", [at, size], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
