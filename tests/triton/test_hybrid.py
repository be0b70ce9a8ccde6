"""Hybrid experts against the CPU's own."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from hetero.core import ExpertSpec
from hetero.cpu import CpuExperts
from hetero.formats import parse_format
from hetero.ops.gpu.hybrid import DirectPort, HybridExperts
from hetero.ops.gpu.hybrid_shared import HybridShared
from hetero.ops.gpu.pinned import PinnedArena
from tests.cpu.reference import fill, random_weights

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
SPEC = ExpertSpec(8, 64, 32, 3)


def test_steps_equal_the_cpu(generator: torch.Generator) -> None:
    experts = fill(CpuExperts(SPEC, parse_format("int4")), random_weights(SPEC, generator))
    port = DirectPort([experts], 4, DEVICE)
    hybrid = HybridExperts(experts, 0, port, HybridShared(DEVICE), arena=PinnedArena(experts, DEVICE))
    for rows in (1, 4):
        x = torch.randn(rows, SPEC.hidden, generator=generator).bfloat16()
        ids = torch.rand(rows, SPEC.num_experts, generator=generator).topk(SPEC.top_k).indices
        weights = torch.rand(rows, SPEC.top_k, generator=generator)
        wanted = experts.forward(x, ids, weights)
        hybrid.submit(x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE))
        got = hybrid.collect().cpu()
        assert float((got - wanted).norm() / wanted.norm()) < 1e-5
