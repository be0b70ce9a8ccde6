"""Triton kernels of the expert cache: which experts sit in GPU memory, looked up and changed without the
host.

State of a layer, all on the device:

- ``slot_of`` int32 [EXPERTS]: the slot of each expert, -1 where it is not here;
- ``free`` int32 [RESERVE]: slots kept free for experts that the GPU reads over PCIe for a step anyway, -1
  where one was taken; ``incoming`` int32 [RESERVE]: the expert that this step reads into each, or -1;
- ``age`` int32 [EXPERTS]: steps since an expert was used; ``often`` float32 [EXPERTS]: its uses, fading;
- ``seen``, ``used`` float32 [CELLS]: of experts of a class of age and a class of frequency, how many there
  were and how many of these the next step used, fading. Their quotient is what holding an expert is worth:
  the chance that the next step uses it, whatever the routing is like; ``prior`` experts of the usual chance
  are added to each class, so that one of which little was seen is not taken for likely.
  benchmarks/cache_policy.py compares this with other policies.

A layer's step: ``find`` before its experts; ``bring``, where what is read over PCIe shall lie in GPU memory
before it is computed; ``choose``, as a kernel or by a program of ``bring``, and then ``fetch``, beside the
experts (SOON) or after them, which may run beside everything else but the layer's next ``find``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hetero.ops.gpu.expert_kernels import _at

NOTHING = tl.constexpr(-1)
AGES = tl.constexpr(8)
OFTEN = tl.constexpr(8)
CELLS = tl.constexpr(64)


@triton.jit
def find(
    ids, slot_of, split, free, incoming, place, addresses, sources, cpu_ids, counts, cache_at, host_at,
    stride, pairs, weights, chosen, coming, staging_at, EXPERTS: tl.constexpr, WIDTH: tl.constexpr,
    PAIRS: tl.constexpr, RESERVE: tl.constexpr, STAY: tl.constexpr, LONGEST: tl.constexpr,
    DEFER: tl.constexpr, STAGED: tl.constexpr,
):  # fmt: skip
    """Who computes each of ``ids`` int64 [pairs]; called by one program.

    ``addresses`` int64 [pairs]: of the expert in GPU memory (``cache_at`` + slot * ``stride``) or, for
    ``split`` [misses] of those that are not there, in host memory (``host_at`` + expert * ``stride``); 0 for
    the others, whose ids stand in ``cpu_ids``, -1 elsewhere. Of experts read from host memory, as many as
    there are free slots shall stay: ``sources`` int64 [pairs] is then where the bytes come from and
    ``addresses`` the slot that they go to; ``sources`` is 0 elsewhere. STAY: whether any shall.

    ``split`` int32 [LONGEST + 1]; ``place`` int64 [2, EXPERTS]: scratch. Added to ``counts`` int64: experts
    found in GPU memory, read from host memory, left to the CPU, each once. WIDTH and PAIRS: EXPERTS and
    pairs as powers of two.

    STAGED > 0: experts read from host memory are brought before they are computed, each once, by ``bring``:
    those that stay to their slots, up to STAGED others to places of ``stride`` bytes from ``staging_at`` on;
    the rest is read in place. ``coming`` int64 [1 + 2 * (RESERVE + STAGED)]: how many, then where each comes
    from and goes to. ``addresses`` int64 [3, pairs] are then those of experts found in GPU memory, those of
    experts that the GPU reads, and both; ``sources`` is left as it is.

    DEFER: so many of the CPU's experts of each token, ``chosen`` pairs long, those of the lowest ``weights``
    float32 [pairs], are put off: their ids stand in ``cpu_ids`` + EXPERTS (``deferral.put_off``).
    """
    expert = tl.arange(0, WIDTH)
    known = expert < EXPERTS
    slot = tl.load(slot_of + expert, known, NOTHING).to(tl.int64)
    uses = tl.zeros((WIDTH,), tl.int32)
    for pair in range(pairs):
        uses += (expert == tl.load(ids + pair)).to(tl.int32)
    here = known & (uses > 0) & (slot >= 0)
    missing = known & (uses > 0) & (slot < 0)
    misses = tl.sum(missing.to(tl.int32))
    taken = tl.minimum(tl.load(split + tl.minimum(misses, LONGEST)), misses)
    single = (missing & (uses == 1)).to(tl.int32)
    several = (missing & (uses > 1)).to(tl.int32)
    if STAGED > 0:
        # Rows cost a GPU nothing, the CPU a little.
        rank = tl.where(several > 0, tl.cumsum(several, 0), tl.sum(several) + tl.cumsum(single, 0))
    else:
        # Read in place, an expert crosses once for each of its pairs: those of one pair first.
        rank = tl.where(single > 0, tl.cumsum(single, 0), tl.sum(single) + tl.cumsum(several, 0))
    from_host = missing & (rank <= taken)
    at_host = tl.where(from_host, host_at + expert * stride, 0)
    address = tl.where(here, cache_at + slot * stride, at_host)
    source = tl.zeros((WIDTH,), tl.int64)
    kept = expert < 0
    if STAY and RESERVE > 0:
        first = from_host & (rank <= RESERVE)
        room = tl.load(free + tl.maximum(rank - 1, 0), first, NOTHING).to(tl.int64)
        kept = first & (room >= 0)
        source = tl.where(kept, at_host, source)
        address = tl.where(kept, cache_at + room * stride, address)
        # ``choose`` has cleared it.
        tl.store(incoming + rank - 1, expert, kept)
    if STAGED > 0:
        number = tl.cumsum((from_host & (kept == 0)).to(tl.int32), 0)
        spare = from_host & (kept == 0) & (number <= STAGED)
        address = tl.where(spare, staging_at + (number - 1).to(tl.int64) * stride, address)
        brought = kept | spare
        entry = coming + 2 * tl.cumsum(brought.to(tl.int32), 0)
        tl.store(entry - 1, at_host, brought)
        tl.store(entry, address, brought)
        tl.store(coming, tl.sum(brought.to(tl.int64)))
        source = tl.where(from_host, address, 0)
    tl.store(place + expert, address, known)
    tl.store(place + EXPERTS + expert, source, known)
    tl.store(counts, tl.load(counts) + tl.sum(here.to(tl.int64)))
    tl.store(counts + 1, tl.load(counts + 1) + taken)
    tl.store(counts + 2, tl.load(counts + 2) + misses - taken)
    # The addresses that other threads of the program have stored.
    tl.debug_barrier()
    at = tl.arange(0, PAIRS)
    live = at < pairs
    mine = tl.load(ids + at, live, 0)
    valid = live & (mine >= 0) & (mine < EXPERTS)
    found = tl.load(place + mine, valid, 0)
    second = tl.load(place + EXPERTS + mine, valid, 0)
    if STAGED > 0:
        tl.store(addresses + at, tl.where(second == 0, found, 0), live)
        tl.store(addresses + pairs + at, second, live)
        tl.store(addresses + 2 * pairs + at, found, live)
    else:
        tl.store(addresses + at, found, live)
        tl.store(sources + at, second, live)
    left = valid & (found == 0)
    if DEFER > 0:
        weight = tl.load(weights + at, live, 0.0)
        lower = tl.zeros((PAIRS,), tl.int32)
        for place_in_row in range(chosen):
            beside = at // chosen * chosen + place_in_row
            other = tl.load(ids + beside, live, NOTHING)
            meant = live & (other >= 0) & (other < EXPERTS)
            away = meant & (tl.load(place + other, meant, 1) == 0)
            theirs = tl.load(weights + beside, live, 0.0)
            lower += (away & ((theirs < weight) | ((theirs == weight) & (beside > at)))).to(tl.int32)
        mine = tl.where(lower < DEFER, mine + EXPERTS, mine)
    tl.store(cpu_ids + at, tl.where(left, mine, NOTHING), live)


@triton.jit
def _cell(age, often, rate):
    """The class of an expert: AGES by doublings of its age, OFTEN by doublings of its uses a step."""
    old = tl.zeros(age.shape, tl.int32)
    much = tl.zeros(age.shape, tl.int32)
    for step in tl.static_range(1, 8):
        old += (age >= (1 << step)).to(tl.int32)
        much += (often * rate >= 2.0 ** (step - 8)).to(tl.int32)
    return old * OFTEN + much


@triton.jit
def choose(
    ids, slot_of, free, incoming, age, often, seen, used, chosen, moves, most, counts, pairs, decay, fade,
    prior, gain,
    EXPERTS: tl.constexpr, WIDTH: tl.constexpr, RESERVE: tl.constexpr, MOVES: tl.constexpr,
    SOON: tl.constexpr,
):  # fmt: skip
    """In a step that uses ``ids`` int64 [pairs]: learn from it, take in what it reads into free slots, and
    tell ``fetch`` what else should come; one program.

    ``moves`` int32 [MOVES, 2]: an expert and the slot for it, or -1; at most ``most`` int32 [1] of them. An
    expert comes where it is worth ``gain`` more than the least worthy one that is here, so that experts which
    are used alike do not take turns. SOON: they come while the step still computes, so none goes that it
    uses. Added to ``counts`` + 3 and + 4 int64: experts that stayed, and that were moved; to ``chosen`` int64
    [EXPERTS]: the pairs of each expert.
    """
    expert = tl.arange(0, WIDTH)
    known = expert < EXPERTS
    old = tl.load(age + expert, known, 0)
    uses = tl.load(often + expert, known, 0.0)
    times = tl.zeros((WIDTH,), tl.int32)
    for pair in range(pairs):
        times += (expert == tl.load(ids + pair)).to(tl.int32)
    now = known & (times > 0)
    tl.store(chosen + expert, tl.load(chosen + expert, known, 0) + times, known)
    cell = tl.arange(0, CELLS)
    was = (_cell(old, uses, 1.0 - decay)[:, None] == cell[None, :]) & known[:, None]
    all_seen = tl.load(seen + cell) * fade + tl.sum(was.to(tl.float32), 0)
    hit = was & now[:, None]
    all_used = tl.load(used + cell) * fade + tl.sum(hit.to(tl.float32), 0)
    tl.store(seen + cell, all_seen)
    tl.store(used + cell, all_used)
    usual = tl.sum(all_used, 0) / tl.sum(all_seen, 0) * prior
    old = tl.where(now, 1, tl.minimum(old + 1, 1 << 20))
    uses = uses * decay + now.to(tl.float32)
    tl.store(age + expert, old, known)
    tl.store(often + expert, uses, known)
    # The sums that other threads of the program have stored.
    tl.debug_barrier()
    mine = _cell(old, uses, 1.0 - decay)
    worth = (tl.load(used + mine) + usual) / (tl.load(seen + mine) + prior)

    slot = tl.load(slot_of + expert, known, NOTHING)
    stayed = 0
    for one in tl.static_range(RESERVE):
        came = tl.load(incoming + one)
        room = tl.load(free + one)
        slot = tl.where((came >= 0) & (expert == came), room, slot)
        stayed += (came >= 0).to(tl.int32)
    limit = tl.load(most)
    moved = 0
    for one in tl.static_range(MOVES):
        absent = tl.where(known & (slot < 0), worth, -1.0)
        may_go = known & (slot >= 0)
        if SOON:
            may_go = may_go & (now == 0)
        held = tl.where(may_go, worth, float("inf"))
        best, worst = tl.argmax(absent, 0), tl.argmin(held, 0)
        goes = (one < limit) & (tl.max(absent, 0) > tl.min(held, 0) + gain)
        room = tl.max(tl.where(expert == worst, slot, NOTHING), 0)
        slot = tl.where(goes & (expert == worst), NOTHING, tl.where(goes & (expert == best), room, slot))
        tl.store(moves + 2 * one, tl.where(goes, best, NOTHING))
        tl.store(moves + 2 * one + 1, room)
        moved += goes.to(tl.int32)
    # What was just brought is worth more than what goes now, so its slot is not given away at once.
    for one in tl.static_range(RESERVE):
        came = tl.load(incoming + one)
        held = tl.where(known & (slot >= 0), worth, float("inf"))
        worst = tl.argmin(held, 0)
        room = tl.max(tl.where(expert == worst, slot, NOTHING), 0)
        if came >= 0:
            tl.store(free + one, room)
            tl.store(incoming + one, NOTHING)
        slot = tl.where((came >= 0) & (expert == worst), NOTHING, slot)
    tl.store(slot_of + expert, slot, known)
    tl.store(counts + 3, tl.load(counts + 3) + stayed)
    tl.store(counts + 4, tl.load(counts + 4) + moved)


@triton.jit
def bring(
    coming, base, stride, ids, slot_of, free, incoming, age, often, seen, used, chosen, moves, most, counts,
    pairs, decay, fade, prior, gain,
    EXPERTS: tl.constexpr, WIDTH: tl.constexpr, RESERVE: tl.constexpr, MOVES: tl.constexpr,
    LEARN: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Copy what ``find`` has put into ``coming``, one expert after the other; any number of programs, which
    have WORDS words on their way each. ``base``: any pointer to bytes; ``stride`` in bytes. LEARN: program 0
    does what ``choose`` does, in time for the step (SOON), in their place."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    if LEARN:
        if program == 0:
            choose(
                ids, slot_of, free, incoming, age, often, seen, used, chosen, moves, most, counts, pairs,
                decay, fade, prior, gain, EXPERTS, WIDTH, RESERVE, MOVES, True,
            )  # fmt: skip
        program -= 1
        programs -= 1
    if program >= 0:
        words = stride // 4
        each = tl.cdiv(words, WORDS)
        for chunk in range(program, tl.load(coming).to(tl.int32) * each, programs):
            entry = coming + 1 + 2 * (chunk // each)
            source = _at(base, tl.load(entry)).to(tl.pointer_type(tl.int32))
            target = _at(base, tl.load(entry + 1)).to(tl.pointer_type(tl.int32))
            at = chunk % each * WORDS + tl.arange(0, WORDS)
            here = at < words
            tl.store(target + at, tl.load(source + at, here, 0), here)


@triton.jit
def fetch(moves, base, cache_at, host_at, stride, MOVES: tl.constexpr, WORDS: tl.constexpr):
    """Bring the experts of ``moves`` into their slots, one after the other; any number of programs, of few
    bytes in flight each: what else crosses PCIe meanwhile should not wait behind a long queue. ``base``: any
    pointer to bytes; ``stride`` in bytes."""
    words = stride // 4
    for one in range(MOVES):
        expert = tl.load(moves + 2 * one).to(tl.int64)
        if expert >= 0:
            slot = tl.load(moves + 2 * one + 1).to(tl.int64)
            source = _at(base, host_at + expert * stride).to(tl.pointer_type(tl.int32))
            target = _at(base, cache_at + slot * stride).to(tl.pointer_type(tl.int32))
            for first in range(tl.program_id(0) * WORDS, words, tl.num_programs(0) * WORDS):
                at = first + tl.arange(0, WORDS)
                here = at < words
                tl.store(target + at, tl.load(source + at, here, 0), here)
