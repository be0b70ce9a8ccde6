"""Triton kernel of routers: scores of all experts to the chosen ones and their weights."""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(float("-inf"))


@triton.jit
def top_k(
    logits, bias, ids, weights, scale,
    EXPERTS: tl.constexpr, WIDTH: tl.constexpr, TOP: tl.constexpr, SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """``ids`` int64 and ``weights`` float32 [T, TOP], best first, of ``logits`` [T, EXPERTS]; program (row).

    Scores are the softmax over all experts, or sigmoids. ``bias`` float32 [EXPERTS] is added for the choice
    alone. NORM: weights are divided by their sum; then they are multiplied by ``scale``.
    """
    row = tl.program_id(0)
    expert = tl.arange(0, WIDTH)
    known = expert < EXPERTS
    logit = tl.load(logits + row * EXPERTS + expert, known, LOWEST).to(tl.float32)
    if SIGMOID:
        score = tl.sigmoid(logit)
    else:
        score = tl.exp(logit - tl.max(logit))
        score = score / tl.sum(score)
    rank = score
    if HAS_BIAS:
        rank = score + tl.load(bias + expert, known, 0.0)
    rank = tl.where(known, rank, LOWEST)
    total = 0.0
    for slot in tl.static_range(TOP):
        best = tl.argmax(rank, 0)
        weight = tl.sum(tl.where(expert == best, score, 0.0))
        total += weight
        tl.store(ids + row * TOP + slot, best.to(tl.int64))
        tl.store(weights + row * TOP + slot, weight * scale)
        rank = tl.where(expert == best, LOWEST, rank)
    if NORM:
        tl.debug_barrier()
        for slot in tl.static_range(TOP):
            at = weights + row * TOP + slot
            tl.store(at, tl.load(at) / total)
