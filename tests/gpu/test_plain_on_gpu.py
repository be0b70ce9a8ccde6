"""Steps of models without fused layers as captured graphs on a device, with the CPU's experts in them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hetero.engine.forward import Stepper
from hetero.engine.load import load_model
from tests.model.parity import load_reference, prompt, relative, save_tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none"),
]

STEPS = 24


@pytest.mark.parametrize("model_type", ["mixtral", "deepseek_v3", "gpt_oss", "glm4_moe"])
def test_greedy_tokens(model_type: str, tmp_path: Path) -> None:
    """Two sequences whose steps take turns at the graph, beside transformers' own forward of all tokens."""
    model_class = save_tiny(model_type, tmp_path)
    reference = load_reference(model_type, model_class, tmp_path)
    loaded = load_model(tmp_path, rules="default-gpu", overrides={"experts": "f32"}, threads=2)
    stepper = Stepper(loaded.runnable.model)
    assert stepper.graphs is not None
    texts = [prompt()[0].tolist(), prompt(2)[0, :7].tolist()]
    sequences, rows = [stepper.start() for _ in texts], [[], []]  # type: ignore[var-annotated]
    with torch.inference_mode():
        for sequence, text, seen in zip(sequences, texts, rows, strict=True):
            seen.append(sequence.advance(text).float().cpu())
        for step in range(2 * STEPS):
            turn = step // 3 % 2
            texts[turn].append(int(rows[turn][-1].argmax()))
            rows[turn].append(sequences[turn].advance(texts[turn][-1:]).float().cpu())
        assert stepper.graphs.why_eager == ""
        assert stepper.graphs._graph is not None
        for text, seen in zip(texts, rows, strict=True):
            want = reference(input_ids=torch.tensor([text])).logits[0, -len(seen) :].float()
            assert relative(torch.stack(seen), want) < 1e-4
    stepper.close()


def test_a_model_that_cannot_be_captured(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_tiny("qwen3_next", tmp_path)
    loaded = load_model(tmp_path, rules="default-gpu", overrides={"experts": "f32"}, threads=2)
    stepper = Stepper(loaded.runnable.model)
    sequence = stepper.start()
    with torch.inference_mode(), caplog.at_level("WARNING", "hetero.engine"):
        sequence.advance(prompt()[0].tolist())
        sequence.advance([3])
    assert [record.message for record in caplog.records if "runs eagerly" in record.message]
    stepper.close()
