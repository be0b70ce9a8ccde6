"""The expert cache against the same policy in plain Python."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from hetero.core import ExpertSpec
from hetero.cpu import CpuExperts
from hetero.formats import parse_format
from hetero.ops.gpu.cache import GAIN, HALF_LIFE, MEMORY, PRIOR, ExpertCache
from hetero.ops.gpu.hybrid import DirectPort, HybridExperts
from hetero.ops.gpu.hybrid_shared import HybridShared
from hetero.ops.gpu.pinned import PinnedArena
from tests.cpu.reference import fill, random_weights

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
pytestmark = [
    *([pytest.mark.gpu] if CUDA else []),
    # Rows that nobody computes are whatever memory held, and numpy, which interprets kernels, warns of it.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
EXPERTS = 12
SPEC = ExpertSpec(EXPERTS, 32, 16, 2)


def make(slots: int, generator: torch.Generator, moves: int = 2, early: bool = False) -> HybridExperts:
    experts = fill(CpuExperts(SPEC, parse_format("int8")), random_weights(SPEC, generator))
    port = DirectPort([experts], 4, DEVICE)
    shared = HybridShared(DEVICE, moves=moves, early=early, soon=early)
    return HybridExperts(experts, 0, port, shared, slots=slots, arena=PinnedArena(experts, DEVICE))


def step(hybrid: HybridExperts, ids: torch.Tensor, generator: torch.Generator) -> tuple[list[int], list[int]]:
    """Addresses of the pairs of one step, and their sources, or where they are brought."""
    x = torch.randn(len(ids), SPEC.hidden, generator=generator).bfloat16().to(DEVICE)
    hybrid.submit(x, ids.to(DEVICE), torch.ones(ids.shape, device=DEVICE))
    one = hybrid._pending[-1]
    none = torch.zeros_like(one.addresses)
    second = one.sources if one.later is None else one.later.addresses
    found = one.addresses.flatten().tolist(), (none if second is None else second).flatten().tolist()
    hybrid.collect()
    hybrid.shared.join()
    return found


WHOLE = CpuExperts(SPEC, parse_format("int8")).whole_bytes  # without the padding to a page


def check_slots(cache: ExpertCache) -> dict[int, int]:
    """Every slot has one expert, whose bytes it holds, or is free; the experts here and their slots."""
    slot_of = cache.slot_of.tolist()
    here = {expert: slot for expert, slot in enumerate(slot_of) if slot >= 0}
    free = [slot for slot in cache.free.tolist() if slot >= 0]
    assert sorted([*here.values(), *free]) == list(range(cache.slots))
    assert len(free) == cache.reserve
    for expert, slot in here.items():
        assert torch.equal(cache.memory[slot, :WHOLE].cpu(), cache.host[expert, :WHOLE])
    return here


class Policy:
    """What ``choose`` is told to keep in mind, one expert at a time."""

    def __init__(self) -> None:
        self.age, self.often = [1 << 20] * EXPERTS, [0.0] * EXPERTS
        self.seen = [16.0] * 64
        self.used = [16.0 * 2.0 ** (cell % 8 - 8) for cell in range(64)]

    def cell(self, expert: int) -> int:
        rate = self.often[expert] * (1 - 2 ** (-1 / HALF_LIFE))
        old = min(7, int(math.log2(self.age[expert])))
        return 8 * old + (max(0, min(7, math.floor(math.log2(rate)) + 8)) if rate else 0)

    def step(self, used: set[int]) -> list[float]:
        """What each expert is worth after it."""
        cells = [self.cell(expert) for expert in range(EXPERTS)]
        fade, decay = 2 ** (-1 / MEMORY), 2 ** (-1 / HALF_LIFE)
        for cell in range(64):
            self.seen[cell] = self.seen[cell] * fade + cells.count(cell)
            self.used[cell] = self.used[cell] * fade + sum(cells[expert] == cell for expert in used)
        for expert in range(EXPERTS):
            self.age[expert] = 1 if expert in used else min(self.age[expert] + 1, 1 << 20)
            self.often[expert] = self.often[expert] * decay + (expert in used)
        cells = [self.cell(expert) for expert in range(EXPERTS)]
        usual = sum(self.used) / sum(self.seen) * PRIOR
        return [(self.used[cell] + usual) / (self.seen[cell] + PRIOR) for cell in cells]


@pytest.mark.parametrize(("slots", "early"), [(3, False), (9, False), (3, True), (9, True), (EXPERTS, True)])
def test_follows_the_policy(slots: int, early: bool, generator: torch.Generator) -> None:
    """Early: what is used does not go, and experts of several rows are read first."""
    hybrid = make(slots, generator, early=early)
    cache, policy = hybrid.cache, Policy()
    gpu = pcie = cpu = stayed = moved = 0
    chosen = [0] * EXPERTS
    for number in range(6):
        ids = torch.randint(-1, EXPERTS + 1, (1 + number % 3, 2), generator=generator)
        share = (0.0, 0.5, 1.0)[number % 3]
        hybrid.shared.set_share(share)
        before = check_slots(cache)
        free = cache.free.tolist()
        flat = ids.flatten().tolist()
        chosen = [count + flat.count(expert) for expert, count in enumerate(chosen)]
        used = sorted({expert for expert in flat if 0 <= expert < EXPERTS})
        missing = sorted(
            (e for e in used if e not in before), key=lambda e: ((flat.count(e) > 1) != early, e)
        )
        taken = missing[: math.floor(len(missing) * share + 0.5)]
        stays = taken[: cache.reserve]
        addresses, sources = step(hybrid, ids, generator)
        for expert, address, source in zip(flat, addresses, sources, strict=True):
            where = cache.host_at + expert * cache.stride
            if early and share:
                if expert in before:
                    assert (address, source) == (cache.cache_at + before[expert] * cache.stride, 0)
                elif expert in stays:
                    room = cache.cache_at + free[stays.index(expert)] * cache.stride
                    assert (address, source) == (0, room)
                else:
                    assert address == 0
                    assert (source != 0) == (expert in taken)
                continue
            slot = free[stays.index(expert)] if expert in stays else before.get(expert, 0)
            in_slot = cache.cache_at + slot * cache.stride
            if expert in stays:
                assert (address, source) == (in_slot, where)
            else:
                assert source == 0
                assert address == (in_slot if expert in before else where if expert in taken else 0)
        gpu, pcie = gpu + len(used) - len(missing), pcie + len(taken)
        cpu, stayed = cpu + len(missing) - len(taken), stayed + len(stays)

        worth = policy.step(set(used))
        held = set(before) | set(stays)
        came = set()
        for _ in range(min(2 if not share or (early and len(ids) > 2) else 1, slots)):
            absent = [expert for expert in range(EXPERTS) if expert not in held]
            may_go = [expert for expert in held if not (early and expert in used)]
            best = max(absent, key=lambda e: (worth[e], -e), default=None)
            worst = min(may_go, key=lambda e: worth[e], default=None)
            if best is None or worst is None or worth[best] <= worth[worst] + GAIN:
                break
            held = (held - {worst}) | {best}
            came.add(best)
        for _ in stays:
            held.remove(min(held, key=lambda e: worth[e]))
        after = check_slots(cache)
        assert cache._age.tolist() == policy.age
        assert cache._often.tolist() == pytest.approx(policy.often, rel=1e-5)
        assert cache._seen.tolist() == pytest.approx(policy.seen, rel=1e-5)
        assert cache._used.tolist() == pytest.approx(policy.used, rel=1e-5)
        # Of experts of one class any may go.
        assert sorted(worth[e] for e in after) == pytest.approx(sorted(worth[e] for e in held), rel=1e-5)
        moved += len(came)
        counts = hybrid.counts()
        assert (counts.gpu, counts.pcie, counts.cpu, counts.stayed) == (gpu, pcie, cpu, stayed)
        assert counts.moved == moved
        assert hybrid.uses() == chosen


def test_seeded_by_counts(generator: torch.Generator) -> None:
    hybrid = make(3, generator)
    hybrid.seed([0.0, 5, 1, 0, 9, 2, 0, 0, 7, 0, 0, 0])
    assert sorted(check_slots(hybrid.cache)) == [1, 4, 8]
    with pytest.raises(ValueError, match=r"\[3\] counts for 12 experts"):
        hybrid.seed([1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match="13 slots for 12 experts"):
        ExpertCache(hybrid.cache.host, 13, DEVICE)


def test_the_most_used_stay_and_the_budget_holds(generator: torch.Generator) -> None:
    """Two experts that every step uses come in; with no budget nothing moves."""
    hybrid = make(3, generator, moves=1)
    hybrid.shared.set_most(0)
    ids = torch.tensor([[10, 11]])
    for _ in range(3):
        step(hybrid, ids, generator)
    assert sorted(check_slots(hybrid.cache)) == [0, 1, 2]
    hybrid.shared.set_most(1)
    for number in range(2):
        step(hybrid, ids, generator)
        assert hybrid.counts().moved == number + 1
    assert {10, 11} < set(check_slots(hybrid.cache))
    with pytest.raises(ValueError, match="2 moves a step, at most 1"):
        hybrid.shared.set_most(2)


def test_a_prompt_counts_as_steps(generator: torch.Generator) -> None:
    hybrid = make(3, generator)  # whose experts are the memory that the cache is over
    cache = hybrid.cache
    uses = torch.zeros(EXPERTS, dtype=torch.int64, device=DEVICE)
    uses[5] = 1000
    cache.observe(uses, 1000)
    decay = 2 ** (-1 / HALF_LIFE)
    assert cache._often.tolist()[5] == pytest.approx((1 - decay**128) / (1 - decay), rel=1e-5)
    assert cache._often.tolist()[4] == 0
    assert cache.chosen.tolist() == uses.tolist()
    cache.choose(torch.tensor([[5, 6]], device=DEVICE))
    fresh = make(3, generator).cache
    cache.unlearn()
    for name in ("chosen", "_often", "_age", "_seen", "_used"):
        assert torch.equal(getattr(cache, name), getattr(fresh, name)), name
