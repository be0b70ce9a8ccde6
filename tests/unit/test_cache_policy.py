"""What the simulation of cache policies must show for the policy that the GPU's cache has."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.scripts import script as load

SLOTS, LAYERS, STEPS = 130, 2, 200


@pytest.fixture(scope="module")
def policy() -> Any:
    return load("benchmarks/cache_policy.py")


def test_tables_reuse_as_they_say(policy: Any) -> None:
    for kind, low, high in (("local", 0.38, 0.5), ("uniform", 0.0, 0.04)):
        ids = policy.table(kind, 1, 100, 5)[0]
        assert all(len(set(step)) == policy.TOP for step in ids.tolist())
        again = [len(set(a) & set(b)) / policy.TOP for a, b in itertools.pairwise(ids)]
        assert low <= sum(again) / len(again) < high


def test_learned_chances_follow_the_routing(policy: Any) -> None:
    """Local routing is held as by recency and far better than by frequency; uniform routing moves nothing;
    a slot that is kept free saves moves."""
    local = policy.table("local", LAYERS, STEPS, 7)
    learned, moved, _ = policy.simulate(local, SLOTS, 2, policy.Learned(LAYERS, 0.04), reserve=0, skipped=50)
    recent, *_ = policy.simulate(local, SLOTS, 2, policy.Recency(LAYERS), reserve=0, skipped=50)
    often, *_ = policy.simulate(local, SLOTS, 2, policy.Decayed(LAYERS, 256.0, 1.5), reserve=0, skipped=50)
    assert learned > recent - 0.02
    assert learned > often + 0.2
    free, fewer, stayed = policy.simulate(
        local, SLOTS, 2, policy.Learned(LAYERS, 0.04), reserve=1, skipped=50
    )
    assert free > learned - 0.02
    assert fewer < moved - stayed / 2
    uniform = policy.table("uniform", LAYERS, STEPS, 7)
    hits, moved, _ = policy.simulate(uniform, SLOTS, 2, policy.Learned(LAYERS, 0.04), reserve=0, skipped=50)
    assert abs(hits - SLOTS / policy.EXPERTS) < 0.04
    assert moved < 0.1
    change = policy.table("change", LAYERS, STEPS, 7)
    _, moved, _ = policy.simulate(
        change, SLOTS, 2, policy.Learned(LAYERS, 0.04), reserve=0, skipped=STEPS // 2 + 60
    )
    assert moved < 0.2


def test_split_ends_both_sides_soonest(policy: Any) -> None:
    assert [policy.split(m) for m in range(5)] == [0, 0, 1, 1, 1]
