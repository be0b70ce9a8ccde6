"""Penalties and bias against the documented order, computed in float64 one token at a time."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from hetero.core import InputError
from hetero.engine.sample import Sampler, SamplingParams, probabilities

SIZE = 40
PROMPT = (1, 2, 3, 3, 39)


def reference(
    logits: list[float], p: SamplingParams, prompt: tuple[int, ...], made: list[int]
) -> list[float]:
    counts = Counter(made)
    bias = dict(p.logit_bias)
    moved = []
    for token, logit in enumerate(logits):
        value = logit
        if token in counts or token in prompt:
            value = value / p.repetition_penalty if value > 0 else value * p.repetition_penalty
        value -= p.frequency_penalty * counts[token]
        value -= p.presence_penalty * (token in counts)
        moved.append(value + bias.get(token, 0.0))
    return moved


CASES = [
    SamplingParams(frequency_penalty=0.7),
    SamplingParams(frequency_penalty=-0.3),
    SamplingParams(presence_penalty=1.1),
    SamplingParams(presence_penalty=-2.0),
    SamplingParams(logit_bias=((3, 1.5), (7, -100.0), (0, 0.25))),
    SamplingParams(
        repetition_penalty=1.4, frequency_penalty=0.2, presence_penalty=0.4, logit_bias=((5, 0.8),)
    ),
]


@pytest.mark.parametrize("params", CASES, ids=str)
def test_a_greedy_run_is_the_reference_arg_max(params: SamplingParams) -> None:
    random = torch.Generator().manual_seed(3)
    # One fixed bias of the model, so that without penalties a few tokens would win every time.
    liked = torch.randn(SIZE, generator=random)
    sampler = Sampler(params, PROMPT)
    made: list[int] = []
    differs = False
    for _ in range(60):
        logits = liked + 0.3 * torch.randn(SIZE, generator=random)
        before = logits.clone()
        want = reference(logits.double().tolist(), params, PROMPT, made)
        token = sampler.pick(logits)
        assert torch.equal(logits, before), "the model's own logits are needed for log-probabilities"
        assert want[token] == pytest.approx(max(want), abs=1e-5)
        differs |= token != int(logits.argmax())
        made.append(token)
    assert differs


def test_the_distribution_is_the_penalised_one() -> None:
    params = SamplingParams(
        temperature=0.8, seed=1, frequency_penalty=0.5, presence_penalty=0.3, logit_bias=((2, 1.0),)
    )
    logits = torch.linspace(-2, 2, SIZE)
    sampler = Sampler(params, PROMPT)
    made = [sampler.pick(logits) for _ in range(50)]
    # The same uniform numbers over the reference's distribution give the same tokens.
    again = Sampler(SamplingParams(temperature=0.8, seed=1))
    for i, token in enumerate(made):
        want = torch.tensor(
            reference(logits.double().tolist(), params, PROMPT, made[:i]), dtype=torch.float64
        )
        assert again.draw(*probabilities(want, params)) == token


def test_a_bias_forces_and_forbids() -> None:
    logits = torch.linspace(0, 5, SIZE)
    assert Sampler(SamplingParams(logit_bias=((4, 100.0),))).pick(logits) == 4
    banned = tuple((token, -100.0) for token in range(10, SIZE))
    assert Sampler(SamplingParams(logit_bias=banned)).pick(logits) == 9


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("frequency_penalty", 2.1),
        ("frequency_penalty", float("nan")),
        ("presence_penalty", -2.1),
        ("logit_bias", ((3, 101.0),)),
        ("logit_bias", ((-1, 1.0),)),
        ("logit_bias", ((3, float("nan")),)),
    ],
)
def test_values_outside_the_range_are_named(field: str, value: object) -> None:
    with pytest.raises(InputError, match=field):
        SamplingParams(**{field: value})  # type: ignore[arg-type]


def test_a_bias_beyond_the_vocabulary_is_named() -> None:
    with pytest.raises(InputError, match="logit_bias: token id 40"):
        Sampler(SamplingParams(logit_bias=((40, 1.0),))).pick(torch.zeros(SIZE))
