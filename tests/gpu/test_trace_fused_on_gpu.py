"""Traces of fused models on a real device, deferred experts, and halves of a chunk that take turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from hetero.engine.effect import forced
from hetero.overlap import choices, hand_offs, overlap
from hetero.trace import EXPERTS, HEAD, HITS, MIXER, ROUTER, STAMPED, SUBMIT, WAIT, recorder, whole_steps
from tests.engine.test_deferred_model import PROMPT, TOKENS, reference
from tests.gpu.test_runner_on_gpu import errors, fused, options_of, random_tokens, runner_of, told
from tests.model.parity import save_tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none"),
]

SLACK = 20_000
"""Nanoseconds by which a cause may seem to come after its effect, besides the clocks' known error."""


@pytest.mark.parametrize("family", ["qwen3_next", "qwen4_exp"])
def test_a_traced_run(family: str, tmp_path: Path) -> None:
    """The same logits as untraced; spans of all lanes on one clock, in the order of causes and effects."""
    save_tiny(family, tmp_path)
    tokens = random_tokens(30)
    with fused(tmp_path, cache="50%", share="0.5") as loaded:
        runner = runner_of(loaded)
        assert not runner.eager, runner.why_eager
        plain = told(runner, tokens, 5)
        launches = runner.launches
        since = recorder.next_number() + 1
        with recorder.recording(stamps=True):
            traced = told(runner, tokens, 5)
        # What sits in the cache differs, and with it the order of sums.
        assert float(errors(traced, plain).median()) < 0.01
        assert runner.launches == launches
        stamps = runner._steps.tracing._stamps
        assert stamps is not None
        error = stamps.alignment.error + SLACK
        moe: Any = runner.decoder.moe_numbers  # type: ignore[attr-defined]
    steps = [one for one in whole_steps(recorder.spans(since), since) if one.span.tokens == 1]
    assert len(steps) == 25
    for step in steps:
        assert step.span.name == STAMPED
        assert {MIXER, ROUTER, SUBMIT, HITS, WAIT, HEAD, EXPERTS} <= {part.name for part in step.parts}
        assert [part.layer for part in step.parts if part.name == EXPERTS] == moe
        named = {(part.name, part.layer): part for part in step.parts}
        for layer in moe:
            submit, work, wait = (named[name, layer] for name in (SUBMIT, EXPERTS, WAIT))
            assert submit.start <= work.start + error
            assert work.end <= wait.end + error
        assert all(
            step.span.start - error <= part.start <= part.end <= step.span.end + error for part in step.parts
        )
        assert len(hand_offs(step)) == len(moe)
    summary = overlap(steps)
    assert summary.hits > 0
    assert summary.cpu_experts + summary.in_place > 0
    assert 0 < summary.handoff_us < 1000
    assert 0.0 <= summary.cpu_hidden <= 1.0


def test_deferred_experts(tmp_path: Path) -> None:
    """In bfloat16 the error is less than half of what deferral itself does."""
    save_tiny("qwen3_moe", tmp_path, num_hidden_layers=2, mlp_only_layers=[])
    plain, wanted = reference(tmp_path, False), reference(tmp_path, True)
    with fused(tmp_path, experts="bf16", defer="2") as loaded:
        found = forced(runner_of(loaded), PROMPT, TOKENS)
    assert float((found - wanted).norm()) < 0.5 * float((found - plain).norm())


def test_halves_take_turns(tmp_path: Path) -> None:
    save_tiny("qwen3_next", tmp_path)
    tokens = random_tokens(100)
    with fused(tmp_path, options_of(2)) as loaded:
        runner: Any = runner_of(loaded)
        runner.experts[0].shared.prefiller.strategy = "cpu"
        slot = runner.claim()
        runner.prefill(slot, tokens[:64])
        wanted = runner.prefill(slot, tokens[64:]).cpu()
        runner.decoder.turns = True
        since = recorder.next_number() + 1
        with recorder.recording(stamps=True):
            other = runner.claim()
            found = runner.prefill(other, tokens).cpu()
        assert float(errors(found[None], wanted[None])) < 1e-3
        layers = len(runner.experts)
    steps = whole_steps(recorder.spans(since), since)
    assert [one["strategy"] for one in choices(steps)] == ["cpu"] * 2 * layers
    (step,) = steps
    assert len([part for part in step.parts if part.name == EXPERTS]) == 2 * layers
