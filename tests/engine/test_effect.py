"""Measures of how two logits differ."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hetero.decode.inputs import StepInputs
from hetero.engine.effect import deferral_effect, effect, forced
from hetero.engine.gpu.runner import GpuRunner
from tests.engine.paged import PagedDecoder, logits_of


def test_known_distributions() -> None:
    """Of two successors each: 1/2 and 1/2 against 1/4 and 3/4; and the same twice."""
    plain = torch.log(torch.tensor([[0.5, 0.5], [0.9, 0.1]]))
    changed = torch.log(torch.tensor([[0.25, 0.75], [0.9, 0.1]])) + torch.tensor([[3.0], [-2.0]])
    found = effect(plain, changed)
    kl = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert found.tokens == 2
    assert found.kl_most == pytest.approx(kl)
    assert found.kl == pytest.approx(kl / 2)
    assert found.same_top == 0.5  # of equal ones the first counts
    half = math.log(0.75 / 0.25) / 2
    assert found.relative == pytest.approx(half / (math.log(0.9 / 0.1) / 2))
    assert "50.0%" in found.line()


def test_nothing_differs_from_itself(generator: torch.Generator) -> None:
    logits = torch.randn(5, 40, generator=generator)
    found = effect(logits, logits + 7.0)
    assert found.relative < 1e-6
    assert found.kl < 1e-9
    assert found.same_top == 1.0
    for bad in (logits[:4], logits[0]):
        with pytest.raises(ValueError, match="logits"):
            effect(logits, bad)


class Changed(PagedDecoder):
    """Whose steps, but not its prompts, are off by ``by``."""

    by = 0

    def step(self, inputs: StepInputs) -> Tensor:
        out = super().step(inputs)
        out[:, 0] += self.by
        return out


def test_tokens_are_forced_on_both() -> None:
    decoder = Changed(2, 64)
    runner = GpuRunner(decoder, [], handoff=None, slots=2, context=64)
    got = forced(runner, [1, 2, 3], [4, 5])
    assert torch.equal(got, torch.stack([logits_of([1, 2, 3, 4]), logits_of([1, 2, 3, 4, 5])]))

    def set_by(value: int) -> None:
        decoder.by = value

    found = deferral_effect(runner, set_by, 3, prompt=[1, 2], tokens=[7] * 10)
    changed = got.clone()
    changed[:, 0] += 3
    assert found.tokens == 10
    assert found.kl > 0
    assert decoder.by == 3
    assert len(runner._free) == 2
    assert effect(got, changed).kl > 0
