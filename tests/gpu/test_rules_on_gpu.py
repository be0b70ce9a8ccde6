"""The shipped GPU rules on a real device: placement as planned, logits and tokens as transformers' own."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero.engine.forward import Stepper
from hetero.engine.load import Loaded, load_model
from hetero.ops.experts import CpuExpertsOp
from hetero.ops.moe import MoeBlock
from tests.model.parity import STEPS, load_reference, prompt, relative, save_tiny
from tests.model.routes import Routing, chosen_by

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none"),
]

FAMILIES = [
    "qwen3_moe",
    "qwen3_next",
    "qwen3_5_moe",
    "qwen4_exp",
    "deepseek_v3",
    "gpt_oss",
    "mixtral",
    "glm4_moe",
]


def greedy(model: Any, ids: list[int]) -> tuple[torch.Tensor, list[int]]:
    """Logits [STEPS + 1, V] on the CPU after the prompt and after each greedy token, and the tokens."""
    sequence = Stepper(model).start()
    rows, tokens = [], []
    with torch.inference_mode():
        logits = sequence.advance(ids)
        for _ in range(STEPS):
            rows.append(logits.float().cpu())
            tokens.append(int(logits.argmax()))
            logits = sequence.advance([tokens[-1]])
    return torch.stack([*rows, logits.float().cpu()]), tokens


SPLIT = """
rules:
  - name: experts of the first layers
    match: {class: MoeBlock, layers: 0-1}
    replace: {op: moe, device: "cuda:0", experts: {device: cpu, format: f32}}
  - name: other experts
    match: {class: MoeBlock}
    replace: {op: moe, device: cpu, experts: {device: cpu, format: f32}}
  - name: first layers
    match: {name: '.*', layers: 0-1}
    replace: {op: keep, device: "cuda:0"}
  - name: the rest
    match: {name: '.*'}
    replace: {op: keep, device: cpu}
"""


def on_gpu(folder: Path, experts: str) -> Loaded:
    return load_model(folder, rules="default-gpu", overrides={"experts": experts}, threads=2)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_same_as_transformers(model_type: str, tmp_path: Path) -> None:
    model_class = save_tiny(model_type, tmp_path)
    ids = prompt()[0].tolist()
    want, tokens = greedy(load_reference(model_type, model_class, tmp_path), ids)
    got, ours = greedy(on_gpu(tmp_path, "f32").runnable.model, ids)
    assert relative(got, want) < 1e-4
    assert ours == tokens


@pytest.mark.parametrize("model_type", ["deepseek_v3", "gpt_oss", "mixtral"])
def test_bfloat16_as_transformers(model_type: str, tmp_path: Path) -> None:
    """Logits over 64 tokens that the reference chose, in float32, and by its experts; ours in bfloat16,
    experts on the CPU."""
    model_class = save_tiny(model_type, tmp_path)
    reference = load_reference(model_type, model_class, tmp_path)
    tokens = prompt()[0].tolist()
    with torch.inference_mode():
        for _ in range(64):
            tokens.append(int(reference(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
        with chosen_by(reference) as chosen:
            want = reference(input_ids=torch.tensor([tokens])).logits[0, 11:].float()
    loaded = load_model(
        tmp_path, rules="default-gpu", overrides={"experts": "bf16"}, dtype="bfloat16", threads=2
    )
    blocks = [module for module in loaded.runnable.model.modules() if isinstance(module, MoeBlock)]
    routing = Routing("cuda", len(blocks), chosen[0][0].shape[1], chosen=[chosen])
    for layer, block in enumerate(blocks):
        block.routing = partial(routing, layer)
    sequence = Stepper(loaded.runnable.model).start()
    rows = []
    with torch.inference_mode():
        for start, end in [(0, 12), *((at, at + 1) for at in range(12, len(tokens)))]:
            routing.prompt(0, start, end)
            rows.append(sequence.advance(tokens[start:end]))
    assert relative(torch.stack(rows).float().cpu(), want) < 0.05


def test_modules_are_where_the_plan_says(tmp_path: Path) -> None:
    save_tiny("qwen3_next", tmp_path)
    loaded = on_gpu(tmp_path, "int8")
    for name, parameter in loaded.runnable.model.named_parameters():
        assert str(parameter.device) == loaded.placement.device_of(name.rpartition(".")[0]), name
    experts = [m for m in loaded.runnable.model.modules() if isinstance(m, CpuExpertsOp)]
    assert experts
    assert all(e.overlap and not list(e.parameters()) for e in experts)


def test_overlap_changes_nothing(tmp_path: Path) -> None:
    """The experts run on a thread of their own beside the GPU: the same bits as one after the other."""
    save_tiny("qwen3_next", tmp_path)
    model = on_gpu(tmp_path, "int4").runnable.model
    ids = prompt()[0].tolist()
    beside, _ = greedy(model, ids)
    for module in model.modules():
        if isinstance(module, CpuExpertsOp):
            module.overlap = False
    after, _ = greedy(model, ids)
    assert torch.equal(beside, after)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "qwen3_next"])
def test_layers_on_two_devices(model_type: str, tmp_path: Path) -> None:
    model_class = save_tiny(model_type, tmp_path)
    rules = tmp_path / "split.yaml"
    rules.write_text(SPLIT)
    loaded = load_model(tmp_path, rules=rules, threads=2)
    used = {parameter.device.type for parameter in loaded.runnable.model.parameters()}
    assert used == {"cpu", "cuda"}
    ids = prompt()[0].tolist()
    want, tokens = greedy(load_reference(model_type, model_class, tmp_path), ids)
    got, ours = greedy(loaded.runnable.model, ids)
    assert relative(got, want) < 1e-4
    assert ours == tokens


ON_GPU = """
rules:
  - name: experts in GPU memory
    match: {class: MoeBlock}
    replace: {op: moe, device: "cuda:0", experts: {device: "cuda:0", format: bf16}}
  - name: the rest
    match: {name: '.*'}
    replace: {op: keep, device: "cuda:0"}
"""


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_experts_in_gpu_memory(model_type: str, tmp_path: Path) -> None:
    """The same packed experts on the GPU and on the CPU, for a prompt of many rows and for single tokens."""
    save_tiny(model_type, tmp_path)
    rules = tmp_path / "gpu.yaml"
    rules.write_text(ON_GPU)
    ids = prompt()[0].tolist()
    want, _ = greedy(on_gpu(tmp_path, "bf16").runnable.model, ids)
    got, _ = greedy(load_model(tmp_path, rules=rules).runnable.model, ids)
    # Whether later tokens are the same is chance where two are close, so the first logits count.
    assert relative(got[:1], want[:1]) < 0.02
    steps = Stepper(load_model(tmp_path, rules=rules).runnable.model).start()
    with torch.inference_mode():
        one = steps.advance(ids[:1])
        want = Stepper(on_gpu(tmp_path, "bf16").runnable.model).start().advance(ids[:1])
    assert relative(one.float().cpu(), want.float().cpu()) < 1e-4
