"""Spans of a model whose experts are on the CPU and whose other layers are on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hetero.engine.forward import Stepper
from hetero.engine.load import load_model
from hetero.ops.experts import CpuExpertsOp
from hetero.ops.watch import dense_bytes
from hetero.trace import COPY, DENSE, EXPERTS, SHARED, recorder, whole_steps
from tests.model.parity import save_tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none"),
]


@pytest.mark.parametrize("overlap", [True, False])
def test_work_is_on_the_lane_of_its_device(overlap: bool, tmp_path: Path) -> None:
    save_tiny("qwen3_next", tmp_path)
    model = load_model(tmp_path, rules="default-gpu", overrides={"experts": "int8"}, threads=2).runnable.model
    experts = [module for module in model.modules() if isinstance(module, CpuExpertsOp)]
    for op in experts:
        op.overlap = overlap
    since = recorder.next_number() + 1
    with recorder.recording(), torch.inference_mode():
        sequence = Stepper(model).start()
        sequence.advance([1, 2, 3])
        sequence.advance([4])
    steps = whole_steps(recorder.spans(since), since)
    assert [step.span.tokens for step in steps] == [3, 1]
    assert "cuda" in dense_bytes(model)
    for step in steps:
        lanes = {(part.name, part.lane) for part in step.parts}
        assert lanes == {(EXPERTS, "cpu"), (DENSE, "gpu"), (COPY, "pcie")} | (
            {(SHARED, "gpu")} if overlap else set()
        )
        copies = [part for part in step.parts if part.name == COPY]
        assert len(copies) == 2 * len(experts)
        # There and back: at least a row of two bytes a number for each token.
        assert all(part.nbytes >= 2 * step.span.tokens * experts[0].spec.hidden for part in copies)
        assert all(step.span.start <= part.start <= part.end <= step.span.end for part in step.parts)
