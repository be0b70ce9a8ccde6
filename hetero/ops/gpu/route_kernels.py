"""Triton kernels that choose: a router's experts with their weights, and the largest of many numbers.

Numbers are compared as integers of the same order, for whose largest the GPU has an instruction.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hetero.ops.gpu.overlap_kernels import await_last, let_next

LOWEST = tl.constexpr(float("-inf"))
NEVER = tl.constexpr(-(2**31))  # below every number's key


@triton.jit
def _key(value):
    """int32 in the order of float32 values; its own inverse on the bits."""
    bits = value.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def top_k(
    logits, bias, slots, ids, weights, scale, stride,
    EXPERTS: tl.constexpr, WIDTH: tl.constexpr, TOP: tl.constexpr, PLACES: tl.constexpr,
    SIGMOID: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SLOTS: tl.constexpr, NORM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """``ids`` int64 and ``weights`` float32 [T, TOP], best first, of equals the lower number, of ``logits``
    [T, EXPERTS], rows ``stride`` apart; program (row). WIDTH, PLACES: EXPERTS and TOP as powers of two.

    Scores are the softmax over all experts, or sigmoids. ``bias`` float32 [EXPERTS] is added for the choice
    alone. NORM: weights are divided by their sum; then they are multiplied by ``scale``. ``slots`` int64 [T]:
    where one is negative nobody is chosen.
    """
    let_next(PDL)
    await_last(PDL)
    row = tl.program_id(0)
    expert = tl.arange(0, WIDTH)
    known = expert < EXPERTS
    logit = tl.load(logits + row * stride + expert, known, LOWEST).to(tl.float32)
    if SIGMOID:
        score = tl.sigmoid(logit)
    else:
        score = tl.exp(logit - tl.max(logit))
        score = score / tl.sum(score)
    rank = score
    if HAS_BIAS:
        rank = score + tl.load(bias + expert, known, 0.0)
    key = tl.where(known, _key(rank), NEVER)
    place = tl.arange(0, PLACES)
    chosen = tl.zeros((PLACES,), tl.int32)
    weight = tl.zeros((PLACES,), tl.float32)
    for slot in tl.static_range(TOP):
        best = tl.max(key, 0)
        at = tl.min(tl.where(key == best, expert, WIDTH), 0)
        if HAS_BIAS:
            own = tl.sum(tl.where(expert == at, score, 0.0), 0)
        else:
            own = (best ^ ((best >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        chosen = tl.where(place == slot, at, chosen)
        weight = tl.where(place == slot, own, weight)
        key = tl.where(expert == at, NEVER, key)
    if NORM:
        weight = weight / tl.sum(weight, 0)
    if HAS_SLOTS:
        live = tl.load(slots + row) >= 0
        chosen = tl.where(live, chosen, -1)
        weight = tl.where(live, weight, 0.0)
    tl.store(ids + row * TOP + place, chosen.to(tl.int64), place < TOP)
    tl.store(weights + row * TOP + place, weight * scale, place < TOP)


@triton.jit
def largest(
    values, keys, places, stride,
    COUNT: tl.constexpr, PARTS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (part, row) of ``values`` [R, COUNT], rows ``stride`` apart: into ``keys`` and ``places`` int32
    [R, PARTS] the largest of CHUNK and where it is, the first of equals. What is no number is the largest."""
    let_next(PDL)
    await_last(PDL)
    part, row = tl.program_id(0), tl.program_id(1)
    at = part * CHUNK + tl.arange(0, CHUNK)
    value = tl.load(values + row.to(tl.int64) * stride + at, at < COUNT, LOWEST).to(tl.float32)
    key = tl.where(at < COUNT, _key(value), NEVER)
    best = tl.max(key, 0)
    tl.store(keys + row * PARTS + part, best)
    tl.store(places + row * PARTS + part, tl.min(tl.where(key == best, at, COUNT - 1), 0))


@triton.jit
def largest_of_parts(keys, places, out, PARTS: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr):
    """Program (row): ``out`` int64 [R], what ``largest`` left. WIDTH: PARTS as a power of two."""
    let_next(PDL)
    await_last(PDL)
    row = tl.program_id(0)
    part = tl.arange(0, WIDTH)
    key = tl.load(keys + row * PARTS + part, part < PARTS, NEVER)
    place = tl.load(places + row * PARTS + part, part < PARTS, 2147483647)
    at = tl.min(tl.where(key == tl.max(key, 0), place, 2147483647), 0)
    tl.store(out + row, at.to(tl.int64))
