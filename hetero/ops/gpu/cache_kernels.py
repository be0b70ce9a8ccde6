"""Triton kernels of the expert cache: which experts sit in GPU memory, looked up and changed without the
host.

Per layer: ``slot_of`` int32 [EXPERTS] (-1: not here), ``expert_in`` int32 [SLOTS] (-1: free), ``scores``
float32 [EXPERTS], which fade by ``decay`` a step, as in ``hetero.store.policy``. A slot's expert changes by
``choose``, ``fetch`` and ``publish``, in this order on one stream, which may be another one than that of
``look_up``: ``choose`` takes the old expert out of ``slot_of`` before its bytes go, and the new one is in it
only when its bytes are there. ``choose`` must come after the layer's experts of the same step, and the next
``look_up`` after ``choose``; ``fetch`` and ``publish`` may run beside everything.
"""

from __future__ import annotations

import triton
import triton.language as tl

NOTHING = tl.constexpr(-1)


@triton.jit
def look_up(
    ids, slot_of, scores, place, addresses, cpu_ids, counts, cache_at, host_at, stride, pairs, decay, share,
    EXPERTS: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Who computes each pair; one program.

    ``ids`` int64 [pairs]; ``addresses`` int64 [pairs]: of the expert in GPU memory (``cache_at`` + slot *
    ``stride``) or, for a share of those that are not there, in pinned host memory (``host_at`` + expert *
    ``stride``); 0 for the others, whose ids stand in ``cpu_ids`` int64 [pairs], -1 elsewhere. ``place`` int64
    [EXPERTS]: scratch. Added to ``counts`` int64 [3]: experts found in GPU memory, read from host memory,
    left to the CPU, each once a step. WIDTH and PAIRS: EXPERTS and pairs as powers of two.
    """
    expert = tl.arange(0, WIDTH)
    known = expert < EXPERTS
    used = expert < 0
    for pair in range(pairs):
        used = used | (expert == tl.load(ids + pair))
    used = used & known
    score = tl.load(scores + expert, known, 0.0) * decay + tl.where(used, 1.0, 0.0)
    tl.store(scores + expert, score, known)

    slot = tl.load(slot_of + expert, known, NOTHING).to(tl.int64)
    here = used & (slot >= 0)
    missing = used & (slot < 0)
    misses = tl.sum(missing.to(tl.int32))
    taken = (misses.to(tl.float32) * share + 0.5).to(tl.int32)
    rank = tl.cumsum(missing.to(tl.int32), 0)
    from_host = missing & (rank <= taken)
    address = tl.where(here, cache_at + slot * stride, tl.where(from_host, host_at + expert * stride, 0))
    tl.store(place + expert, address, known)
    tl.store(counts, tl.load(counts) + tl.sum(here.to(tl.int64)))
    tl.store(counts + 1, tl.load(counts + 1) + taken)
    tl.store(counts + 2, tl.load(counts + 2) + misses - taken)
    # The addresses that other threads of the program have stored.
    tl.debug_barrier()
    at = tl.arange(0, PAIRS)
    live = at < pairs
    one = tl.load(ids + at, live, 0)
    valid = live & (one >= 0) & (one < EXPERTS)
    found = tl.load(place + one, valid, 0)
    tl.store(addresses + at, found, live)
    tl.store(cpu_ids + at, tl.where(valid & (found == 0), one, NOTHING), live)


@triton.jit
def choose(
    slot_of, expert_in, scores, move, margin,
    EXPERTS: tl.constexpr, SLOTS: tl.constexpr, WIDTH: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """``move`` int32 [2]: an expert that should come and the slot for it, or -1; one program.

    The best expert that is not here takes a free slot, or that of the worst one if its score is ``margin``
    times as high, so that two experts that are used as often do not take turns. ROOM: SLOTS as a power of
    two.
    """
    expert = tl.arange(0, WIDTH)
    known = expert < EXPERTS
    score = tl.load(scores + expert, known, 0.0)
    absent = known & (tl.load(slot_of + expert, known, 0) < 0)
    best = tl.argmax(tl.where(absent, score, -1.0), 0)
    gain = tl.max(tl.where(absent, score, -1.0), 0)
    slot = tl.arange(0, ROOM)
    inside = slot < SLOTS
    holder = tl.load(expert_in + slot, inside, 0)
    held = tl.load(scores + tl.maximum(holder, 0), inside & (holder >= 0), 0.0)
    # A free slot is worse than any expert.
    held = tl.where(inside, tl.where(holder < 0, -1.0, held), float("inf"))
    worst = tl.argmin(held, 0)
    loss = tl.min(held, 0)
    goes = (gain > 0.0) & (gain > loss * margin)
    old = tl.load(expert_in + worst)
    if goes:
        if old >= 0:
            tl.store(slot_of + old, NOTHING)
        tl.store(expert_in + worst, best)
    tl.store(move, tl.where(goes, best, NOTHING))
    tl.store(move + 1, worst)


@triton.jit
def fetch(move, host, cache, stride, WORDS: tl.constexpr):
    """Bring the expert of ``move`` into its slot; programs of WORDS int32 each. ``stride`` in words."""
    expert = tl.load(move).to(tl.int64)
    if expert >= 0:
        slot = tl.load(move + 1).to(tl.int64)
        at = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
        here = at < stride
        tl.store(cache + slot * stride + at, tl.load(host + expert * stride + at, here, 0), here)


@triton.jit
def publish(move, slot_of):
    """Let ``look_up`` find the expert that ``fetch`` has brought; one program."""
    expert = tl.load(move)
    if expert >= 0:
        tl.store(slot_of + expert, tl.load(move + 1))
