"""Experts in every packed format on a real device: a captured step over all tiers, and prompts, against the
CPU's on the same bytes; checkpoints whose values experts keep there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hetero.core import ExpertSpec
from hetero.cpu import CpuExperts
from hetero.engine.load import load_model
from hetero.formats import GPU_FORMATS, parse_format
from hetero.ops.gpu import launch
from hetero.ops.gpu.hybrid import DirectPort, HybridExperts
from hetero.ops.gpu.hybrid_shared import HybridShared
from hetero.ops.gpu.launch import ExpertLaunch
from hetero.ops.gpu.op import GpuExpertsOp
from hetero.ops.gpu.pinned import PinnedArena
from tests.cpu.reference import fill, random_weights
from tests.model.parity import relative
from tests.model.quantised import SCHEMES, write_gpt_oss, write_quantised
from tests.model.test_keep import ON_GPU
from tests.triton.flips import EXACT, beyond, decoded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none"),
]

SPEC = ExpertSpec(16, 544, 200, 3)
# Each format once, of gate and up or of down: kernels take longer to compile than to test.
MIXED = [*zip(GPU_FORMATS[::2], (*GPU_FORMATS[1::2], "mxfp4"), strict=False), ("q4_k", "q6_k")]


def inputs(rows: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(rows, SPEC.hidden, generator=generator).bfloat16()
    ids = torch.rand(rows, SPEC.num_experts, generator=generator).topk(SPEC.top_k).indices
    return x, ids, torch.rand(rows, SPEC.top_k, generator=generator)


@pytest.mark.parametrize(("up", "down"), MIXED)
def test_all_tiers(up: str, down: str, generator: torch.Generator) -> None:
    """Experts come and stay between steps; then a prompt, of which each tier has a part."""
    experts = CpuExperts(SPEC, parse_format(up), parse_format(down))
    fill(experts, random_weights(SPEC, generator))
    parts, arena = decoded(experts), PinnedArena(experts, "cuda")
    port, shared = DirectPort([experts], 4, "cuda"), HybridShared("cuda", share=0.8)
    hybrid = HybridExperts(experts, 0, port, shared, slots=9, arena=arena)
    for rows in (1, 3, 1, 3):
        given = inputs(rows, generator)
        hybrid.submit(*(part.cuda() for part in given))
        got = hybrid.collect()
        shared.join()
        assert beyond(experts, parts, got, experts.forward(*given), given) < EXACT, rows
    assert hybrid.counts().pcie > 0
    shared.prefiller.strategy = "split"
    given = inputs(150, generator)
    got = hybrid.prefill(*(part.cuda() for part in given)).cpu()
    assert float((got - experts.forward(*given)).norm() / got.norm()) < 2e-2
    torch.cuda.synchronize()
    arena.close()


@pytest.mark.parametrize("fmt", ["mxfp4", "q5_k", "fp8", "int4"])
def test_a_captured_step(fmt: str, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of int4 also as other formats are read."""
    experts = fill(CpuExperts(SPEC, parse_format(fmt)), random_weights(SPEC, generator))
    parts, arena = decoded(experts), PinnedArena(experts, "cuda")
    given = inputs(2, generator)
    wanted = experts.forward(*given)
    memory = arena.view.cuda()
    for by_units in (False, True) if fmt == "int4" else (False,):
        monkeypatch.setattr(launch, "INTEGERS_BY_UNITS", by_units)
        made = ExpertLaunch(SPEC, experts.format, torch.device("cuda"))
        x, ids, weights = (part.cuda() for part in given)
        at = memory.data_ptr() + ids * arena.view.shape[1]
        made.few(memory, made.rows(x), at, weights)  # compiled outside of the graph
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = made.few(memory, made.rows(x), at, weights)
        out.fill_(float("nan"))
        graph.replay()
        assert beyond(experts, parts, out, wanted, given) < EXACT
    arena.close()


@pytest.mark.parametrize("scheme", ["fp8", "awq", "modelopt-nvfp4", "mxfp4 of gpt-oss"])
def test_checkpoints_keep_their_values_there(scheme: str, tmp_path: Path) -> None:
    wanted = "mxfp4"
    if scheme == "mxfp4 of gpt-oss":
        written = write_gpt_oss(tmp_path)
    else:
        written, wanted = write_quantised(tmp_path, "qwen3_moe", SCHEMES[scheme]), SCHEMES[scheme].format
    rules = tmp_path / "rules.yaml"
    rules.write_text(ON_GPU.replace("device: cpu}", 'device: "cuda:0"}'))
    model = load_model(tmp_path, rules=rules).runnable.model
    backends = [module.backend for module in model.modules() if isinstance(module, GpuExpertsOp)]
    assert {str(one.format) for one in backends} == {wanted}
    ids = torch.randint(3, 90, (1, 6))
    with torch.no_grad():
        got = model(input_ids=ids.cuda()).logits.float().cpu()
        expected = written.model(input_ids=ids).logits
    assert relative(got, expected) < 0.1
