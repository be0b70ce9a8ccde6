"""What a runner's steps leave in the trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hetero.core import HeteroError, MachineError
from hetero.decode.inputs import StepInputs
from hetero.engine.gpu.graphs import CaptureError
from hetero.engine.gpu.runner import GpuRunner
from hetero.ops.gpu.stamps import at_layer, lap
from hetero.trace import HEAD, MIXER, STAMPED, recorder, whole_steps
from tests.engine.paged import PagedDecoder, greedy
from tests.engine.twins import TwinMeans


class Telling(PagedDecoder):
    """Says what it did."""

    def step(self, inputs: StepInputs) -> Tensor:
        out = super().step(inputs)
        at_layer(0)
        lap(MIXER)
        return out

    def prefill(self, *args: Any, **options: Any) -> Tensor:
        out = super().prefill(*args, **options)
        at_layer(0)
        lap(MIXER)
        return out


def runner_of(**options: Any) -> GpuRunner:
    return GpuRunner(Telling(2, 64), [], handoff=None, slots=2, context=64, **options)


def played(stamps: bool) -> list[Any]:
    """A prompt of 10 tokens in chunks of 4, then two steps."""
    runner = runner_of(chunk=4)
    runner.capture()
    since = recorder.next_number() + 1
    with recorder.recording(stamps=stamps):
        slot = runner.claim()
        token = int(runner.prefill(slot, list(range(10))).argmax())
        for _ in range(2):
            (token,) = runner.step([(slot, token)]).ids
    return whole_steps(recorder.spans(since), since)


def test_stamped_steps_tell_what_the_device_did() -> None:
    steps = played(stamps=True)
    assert [step.span.tokens for step in steps] == [4, 4, 2, 1, 1]
    for step in steps:
        assert step.span.name == STAMPED
        assert [(part.name, part.layer, part.tokens) for part in step.parts] == [
            (MIXER, 0, step.span.tokens),
            (HEAD, -1, step.span.tokens),
        ]
        assert all(step.span.start <= part.start <= part.end <= step.span.end for part in step.parts)


def test_without_stamps_a_step_is_dense_work() -> None:
    steps = played(stamps=False)
    assert [step.span.tokens for step in steps] == [4, 4, 2, 1, 1]
    assert all(step.span.name == "cpu" and [part.name for part in step.parts] == ["dense"] for step in steps)


@pytest.mark.parametrize("error", [MachineError("no memory"), CaptureError("lap in layer.py:9: no")])
def test_a_trace_for_which_no_graph_can_be_made(
    error: HeteroError, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Steps go on by the graphs that there are."""
    means = TwinMeans()
    runner = runner_of(rows=(1, 2), means=means)
    runner.capture()

    def fails(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(means, "graph", fails)
    slot, made = runner.claim(), [3]
    runner.prefill(slot, [1, 2])
    before = means.replays
    with recorder.recording(stamps=True):
        for _ in range(3):
            made += runner.step([(slot, made[-1])]).ids
    assert made[1:] == greedy([1, 2, 3], 3)
    assert means.replays == before + 3
    assert [message for message in caplog.messages if "trace" in message] == [
        f"the trace has no times of the GPU: {error}"
    ]


def test_tokens_do_not_depend_on_the_trace() -> None:
    runner = runner_of()
    slot = runner.claim()
    logits = runner.prefill(slot, [1, 2, 3])
    plain = runner.step([(slot, 5)]).logits
    with recorder.recording(stamps=True):
        other = runner.claim()
        assert torch.equal(runner.prefill(other, [1, 2, 3]), logits)
        traced = runner.step([(other, 5)]).logits
    assert plain is not None
    assert traced is not None
    assert torch.equal(plain, traced)
