"""Sampling against distributions computed another way, and against the frequencies of many draws."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from hetero.core import HeteroError, InputError
from hetero.engine.penalties import penalise
from hetero.engine.sample import Sampler, SamplingParams, probabilities


def reference(logits: list[float], p: SamplingParams) -> dict[int, float]:
    """The documented order, in plain Python, one token at a time."""
    weights = [math.exp(x / p.temperature) for x in logits]
    order = sorted(range(len(logits)), key=lambda i: (-weights[i], i))
    if p.top_k:
        order = order[: p.top_k]
    total = sum(weights[i] for i in order)
    probs = {i: weights[i] / total for i in order}
    kept: list[int] = []
    mass = 0.0
    for i in order:
        if p.top_p < 1.0 and kept and mass >= p.top_p:
            break
        kept.append(i)
        mass += probs[i]
    kept = [i for i in kept if probs[i] >= p.min_p * probs[kept[0]]]
    total = sum(probs[i] for i in kept)
    return {i: probs[i] / total for i in kept}


CASES = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=2.5, top_k=7),
    SamplingParams(temperature=1.0, top_k=1),
    SamplingParams(temperature=1.0, top_p=0.6),
    SamplingParams(temperature=1.5, top_p=0.01),
    SamplingParams(temperature=1.0, min_p=0.2),
    SamplingParams(temperature=0.7, top_k=12, top_p=0.8, min_p=0.05),
    SamplingParams(temperature=1.0, top_k=1000),
]


@pytest.mark.parametrize("params", CASES, ids=str)
@pytest.mark.parametrize("size", [20, 700])
def test_distribution_is_the_documented_one(params: SamplingParams, size: int) -> None:
    for _ in range(5):
        logits = torch.randn(size, dtype=torch.float64) * 2
        probs, ids = probabilities(logits, params)
        want = reference(logits.tolist(), params)
        got = dict(zip(ids.tolist(), probs.tolist(), strict=True))
        assert set(got) == set(want)
        for token, probability in want.items():
            assert got[token] == pytest.approx(probability, rel=1e-9)


@pytest.mark.parametrize("size", [5000, 20000])
def test_flat_distribution_needs_more_than_the_first_guess(size: int) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.97)
    logits = torch.randn(size, dtype=torch.float64) * 0.01
    probs, ids = probabilities(logits, params)
    assert set(ids.tolist()) == set(reference(logits.tolist(), params))
    assert len(ids) > 4096
    assert float(probs.sum()) == pytest.approx(1.0)


def test_ties_at_the_edge_of_top_k_go_to_the_lower_id() -> None:
    logits = torch.tensor([0.0, 1.0, 1.0, 1.0, 0.0])
    _, ids = probabilities(logits, SamplingParams(temperature=1.0, top_k=2))
    assert sorted(ids.tolist()) == [1, 2]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.8, seed=1234),
        SamplingParams(temperature=1.2, top_k=6, top_p=0.9, min_p=0.05, seed=99),
    ],
)
def test_draws_follow_the_distribution(params: SamplingParams) -> None:
    """Chi-square over a small vocabulary: the bound is the 1 - 1e-6 quantile, and the seed is fixed."""
    logits = torch.tensor([1.0, 0.5, 0.0, -0.5, 2.0, 1.5, -1.0, 0.2, 0.7, -3.0])
    want = reference(logits.tolist(), params)
    sampler = Sampler(params)
    draws = 6000
    seen = Counter(sampler.pick(logits) for _ in range(draws))
    assert set(seen) <= set(want)
    chi2 = sum((seen[t] - draws * p) ** 2 / (draws * p) for t, p in want.items())
    freedom = len(want) - 1
    # Wilson-Hilferty quantile at z = 4.75 (one in a million).
    bound = freedom * (1 - 2 / (9 * freedom) + 4.75 * math.sqrt(2 / (9 * freedom))) ** 3
    assert chi2 < bound
    # The same draws against a wrong distribution must fail, or the test proves nothing.
    wrong = {t: 1 / len(want) for t in want}
    assert sum((seen[t] - draws * p) ** 2 / (draws * p) for t, p in wrong.items()) > bound


def test_a_seed_repeats_and_another_differs() -> None:
    logits = torch.zeros(50)

    def run(seed: int) -> list[int]:
        sampler = Sampler(SamplingParams(temperature=1.0, seed=seed))
        return [sampler.pick(logits) for _ in range(30)]

    assert run(5) == run(5)
    assert run(5) != run(6)
    fresh = Sampler(SamplingParams(temperature=1.0))
    again = Sampler(SamplingParams(temperature=1.0, seed=fresh.seed))
    assert [fresh.pick(logits) for _ in range(30)] == [again.pick(logits) for _ in range(30)]


def test_greedy_ignores_filters_and_takes_the_first_of_equals() -> None:
    logits = torch.tensor([0.0, 3.0, 3.0, -1.0])
    assert Sampler(SamplingParams(top_k=1, top_p=0.1, min_p=0.9)).pick(logits) == 1


def test_repetition_penalty_pushes_both_signs_down_and_counts_prompt_and_output() -> None:
    logits = torch.tensor([2.0, -2.0, 1.9, 1.5])
    seen = torch.tensor([True, True, False, False])
    assert penalise(logits, seen, 2.0).tolist() == pytest.approx([1.0, -4.0, 1.9, 1.5])
    sampler = Sampler(SamplingParams(repetition_penalty=2.0), prompt=[0, 1])
    assert [sampler.pick(logits) for _ in range(3)] == [2, 3, 0]


def test_not_a_number_is_an_error_not_a_token() -> None:
    for params in (SamplingParams(), SamplingParams(temperature=1.0)):
        with pytest.raises(HeteroError, match="not finite"):
            Sampler(params).pick(torch.tensor([0.0, math.nan, 1.0]))
        with pytest.raises(HeteroError, match="not finite"):
            Sampler(params).pick(torch.full((3,), -math.inf))


def test_forbidden_tokens_are_never_drawn() -> None:
    logits = torch.tensor([-math.inf, 0.0, -math.inf, 0.0])
    sampler = Sampler(SamplingParams(temperature=1.0, seed=0))
    assert {sampler.pick(logits) for _ in range(200)} == {1, 3}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("seed", -1),
        ("seed", 2**63),
    ],
)
def test_values_outside_the_range_are_named(field: str, value: float) -> None:
    with pytest.raises(InputError, match=field):
        SamplingParams(**{field: value})  # type: ignore[arg-type]
