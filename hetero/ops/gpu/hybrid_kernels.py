"""Triton kernels of a decode step over all tiers: what tells the CPU and the GPU their shares, what reads
experts over PCIe and keeps them, what adds both sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hetero.ops.gpu import cache_kernels, expert_kernels
from hetero.ops.gpu.expert_kernels import ACT_GROUP, _at, coded


@triton.jit
def submit(
    x, ids, weights, slot_of, split, free, incoming, place, addresses, sources, counts, to_x, to_ids,
    to_weights, q, scales, cache_at, host_at, stride, pairs, chosen, coming, staging_at,
    HIDDEN: tl.constexpr, K: tl.constexpr, QUANTISED: tl.constexpr, GROUPS: tl.constexpr, CHUNKS:
    tl.constexpr,
    EXPERTS: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr, RESERVE: tl.constexpr, STAY:
    tl.constexpr, LONGEST: tl.constexpr, DEFER: tl.constexpr, STAGED: tl.constexpr,
):  # fmt: skip
    """The CPU's payload (``to_x``, ``to_ids``, ``to_weights``, in mapped host memory) and the GPU's: program
    0 finds who computes what (``cache_kernels.find``), the others each copy and quantise GROUPS groups of a
    row.

    ``x`` [T, HIDDEN]; ``q`` [T, K] and ``scales`` [T, K / 32] as ``expert_kernels.gate_up`` reads them; the
    grid is 1 + T * CHUNKS. ``chosen``: experts a token; DEFER: how many of them the CPU may put off.
    """
    program = tl.program_id(0)
    if program == 0:
        cache_kernels.find(
            ids, slot_of, split, free, incoming, place, addresses, sources, to_ids, counts, cache_at, host_at,
            stride, pairs, weights, chosen, coming, staging_at, EXPERTS, WIDTH, PAIRS, RESERVE, STAY, LONGEST,
            DEFER, STAGED,
        )  # fmt: skip
        pair = tl.arange(0, PAIRS)
        tl.store(to_weights + pair, tl.load(weights + pair, pair < pairs, 0.0), pair < pairs)
    else:
        row = (program - 1) // CHUNKS
        group = (program - 1) % CHUNKS * GROUPS + tl.arange(0, GROUPS)
        at = group[:, None] * ACT_GROUP + tl.arange(0, ACT_GROUP)[None, :]
        value = tl.load(x + row * HIDDEN + at, at < HIDDEN, 0.0)
        tl.store(to_x + row * HIDDEN + at, value, at < HIDDEN)
        if QUANTISED:
            code, scale = coded(value.to(tl.float32))
            tl.store(q + row * K + at, code, at < K)
            tl.store(scales + row * (K // ACT_GROUP) + group, scale, group < K // ACT_GROUP)
        else:
            tl.store(q + row * K + at, value.to(tl.float32), at < K)


@triton.jit
def _bring(base, source, target, nbytes, WORDS: tl.constexpr):
    """Copy bytes from one address to another; threads of the program may then read the copy."""
    from_ = _at(base, source).to(tl.pointer_type(tl.int32))
    to = _at(base, target).to(tl.pointer_type(tl.int32))
    for first in range(0, nbytes // 4, WORDS):
        at = first + tl.arange(0, WORDS)
        here = at < nbytes // 4
        tl.store(to + at, tl.load(from_ + at, here, 0), here)
    tl.debug_barrier()


@triton.jit
def gate_up(
    base, q, qs, addresses, sources, h, slots, alpha, gate_max, up_limit, act_max, up_offset,
    K: tl.constexpr, N: tl.constexpr, BLOCK_BYTES: tl.constexpr, GROUP: tl.constexpr, SCALES_AT: tl.constexpr,
    BIAS_AT: tl.constexpr, FORMAT: tl.constexpr, KIND: tl.constexpr, HAS_GATE: tl.constexpr,
    HAS_BIAS: tl.constexpr, STEPS: tl.constexpr, TILES: tl.constexpr, ASM: tl.constexpr,
    BEGIN: tl.constexpr, REST: tl.constexpr, WORDS: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    """``expert_kernels.gate_up``, whose program (16 outputs, pair) first brings its bytes of an expert from
    ``sources`` int64 [pairs], where that is not 0, and a part of the REST bytes from BEGIN on, those of down:
    every second program before its own, so that PCIe has work while the others compute. Pairs of one expert
    bring the same bytes to the same place."""
    block, pair = tl.program_id(0).to(tl.int64), tl.program_id(1)
    mats: tl.constexpr = 2 if HAS_GATE else 1
    blocks: tl.constexpr = (N + 15) // 16
    part: tl.constexpr = (REST // 64 + blocks - 1) // blocks * 64
    source, target = tl.load(sources + pair), tl.load(addresses + pair)
    rest = BEGIN + block * part
    count = tl.minimum(REST - block * part, part)
    if (source != 0) & (block % 2 == 1):
        _bring(base, source + rest, target + rest, count, WORDS)
    if source != 0:
        offset = block * (mats * BLOCK_BYTES)
        _bring(base, source + offset, target + offset, mats * BLOCK_BYTES, WORDS)
    expert_kernels.gate_up(
        base, q, qs, addresses, h, slots, alpha, gate_max, up_limit, act_max, up_offset,
        K, N, BLOCK_BYTES, GROUP, SCALES_AT, BIAS_AT, FORMAT, KIND, HAS_GATE, HAS_BIAS, STEPS, TILES, ASM,
        NEAR,
    )  # fmt: skip
    if (source != 0) & (block % 2 == 0):
        _bring(base, source + rest, target + rest, count, WORDS)


@triton.jit
def add(own, result, extra, out, count, HAS_OWN: tl.constexpr, HAS_EXTRA: tl.constexpr, WIDTH: tl.constexpr):
    """out = own + result + extra, float32 [count]; programs of WIDTH. ``result`` is the CPU's, in mapped host
    memory; ``extra`` of any type."""
    at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    here = at < count
    # What the CPU wrote may not come from a cache.
    total = tl.load(result + at, here, 0.0, cache_modifier=".cv")
    if HAS_OWN:
        total = tl.load(own + at, here, 0.0) + total
    if HAS_EXTRA:
        total += tl.load(extra + at, here, 0.0).to(tl.float32)
    tl.store(out + at, total, here)


@triton.jit(do_not_specialize=("count",))
def pull(host, out, count, WIDTH: tl.constexpr):
    """Copy numbers of pinned host memory; programs of WIDTH."""
    at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    tl.store(out + at, tl.load(host + at, at < count, 0, cache_modifier=".cv"), at < count)
