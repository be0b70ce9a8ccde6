"""The expert cache against the same policy in plain Python."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from hetero.ops.gpu.cache import HALF_LIFE, MARGIN, ExpertCache

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
pytestmark = [pytest.mark.gpu] if CUDA else []
EXPERTS, STRIDE = 11, 256


def host_memory(generator: torch.Generator) -> torch.Tensor:
    bytes_ = torch.randint(256, (EXPERTS, STRIDE), generator=generator, dtype=torch.uint8)
    return bytes_.pin_memory() if CUDA else bytes_


def check_slots(cache: ExpertCache) -> list[int]:
    """What ``slot_of`` and ``expert_in`` say agrees, and slots hold their experts' bytes; the experts
    here."""
    slot_of, expert_in = cache._slot_of.tolist(), cache._expert_in.tolist()
    here = [expert for expert, slot in enumerate(slot_of) if slot >= 0]
    assert sorted(here) == sorted(expert for expert in expert_in if expert >= 0)
    for expert in here:
        assert expert_in[slot_of[expert]] == expert
        assert torch.equal(cache.memory[slot_of[expert]].cpu(), cache.host[expert])
    return here


@pytest.mark.parametrize("slots", [1, 3, EXPERTS])
def test_follows_the_policy(slots: int, generator: torch.Generator) -> None:
    cache = ExpertCache(host_memory(generator), slots, DEVICE)
    scores = [0.0] * EXPERTS
    hits = host_reads = cpu = 0
    for step in range(12):
        ids = torch.randint(-1, EXPERTS + 1, (1 + step % 3, 2), generator=generator)
        share = (0.0, 0.5, 1.0)[step % 3]
        before = check_slots(cache)
        addresses, cpu_ids = (part.flatten().tolist() for part in cache.look_up(ids.to(DEVICE), share))
        used = sorted({expert for expert in ids.flatten().tolist() if 0 <= expert < EXPERTS})
        missing = [expert for expert in used if expert not in before]
        taken = missing[: math.floor(len(missing) * share + 0.5)]
        for expert, address, cpu_id in zip(ids.flatten().tolist(), addresses, cpu_ids, strict=True):
            if expert in before:
                slot = cache._slot_of.tolist()[expert]
                assert (address, cpu_id) == (cache.memory.data_ptr() + slot * STRIDE, -1)
            elif expert in taken:
                assert (address, cpu_id) == (cache.host.data_ptr() + expert * STRIDE, -1)
            else:
                assert (address, cpu_id) == (0, expert if expert in used else -1)
        hits, host_reads = hits + len(used) - len(missing), host_reads + len(taken)
        cpu += len(missing) - len(taken)
        assert cache.counts() == (hits, host_reads, cpu)
        scores = [s * 2 ** (-1 / HALF_LIFE) + (e in used) for e, s in enumerate(scores)]
        assert cache._scores.tolist() == pytest.approx(scores, rel=1e-5)

        cache.move()
        after = check_slots(cache)
        absent = [e for e in range(EXPERTS) if e not in before]
        best = max(absent, key=lambda e: scores[e], default=None)
        if best is None or scores[best] == 0:
            assert after == before
        elif len(before) < slots:
            assert sorted(after) == sorted([*before, best])
        else:
            worst = min(scores[e] for e in before)
            came = set(after) - set(before)
            assert came == ({best} if scores[best] > worst * MARGIN else set()) or _close(
                scores, absent, best
            )


def _close(scores: list[float], absent: list[int], best: int) -> bool:
    """Whether float32 may see another best one."""
    return any(e != best and abs(scores[e] - scores[best]) < 1e-5 for e in absent)


def test_seeded_by_counts(generator: torch.Generator) -> None:
    cache = ExpertCache(host_memory(generator), 3, DEVICE)
    counts = [0.0, 5, 1, 0, 9, 2, 0, 0, 7, 0, 0]
    cache.seed(counts)
    assert check_slots(cache) == [1, 4, 8]
    cache.move()
    assert check_slots(cache) == [1, 4, 8]
    with pytest.raises(ValueError, match=r"\[3\] counts for 11 experts"):
        cache.seed([1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match="12 slots for 11 experts"):
        ExpertCache(host_memory(generator), 12, DEVICE)
