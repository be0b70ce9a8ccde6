"""What changes when things happen changes no result: kernels that begin early, weights that come early."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton", reason="triton is not installed")

from hetero.formats import parse_format
from hetero.ops.gpu import ahead, overlap
from hetero.ops.gpu.fused import PackedMatrix, norm_rows, project, swiglu_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("fmt", ["int8", "bf16"])
def test_a_captured_chain_gives_the_same(
    fmt: str, rows: int, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many short kernels, each of which reads what the last one wrote, replayed several times."""
    format_ = parse_format(fmt)
    linears = [nn.Linear(256, 512, bias=False), nn.Linear(256, 256, bias=False)]
    with torch.no_grad():
        for linear in linears:
            linear.weight.copy_(torch.randn(linear.weight.shape, generator=generator) / 16)
    up, down = (PackedMatrix.from_linear(linear.to("cuda").bfloat16(), format_) for linear in linears)
    first = torch.randn(rows, 256, generator=generator).to("cuda").bfloat16()
    norm = torch.ones(256, device="cuda")
    x = first.clone()

    def chain() -> Tensor:
        add, residual = None, x
        for _ in range(40):
            normed = norm_rows(format_, residual, norm, 1e-6, add=add)
            ahead.fetch_ahead([up.packed, down.packed])
            add = project(swiglu_rows(format_, project(normed.rows, up)), down)
            residual = normed.residual
        return residual + add

    outputs = []
    for early in (False, True):
        monkeypatch.setattr(overlap, "ENABLED", early)
        monkeypatch.setattr(ahead, "ENABLED", early)
        chain()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = chain()
        for _ in range(5):
            out.zero_()
            graph.replay()
            outputs.append(out.clone())
    assert all(torch.equal(one, outputs[0]) for one in outputs)
    assert outputs[0].isfinite().all()
