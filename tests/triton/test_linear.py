"""Packed linear layers against float64 of the decoded weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("triton", reason="triton is not installed")

from hetero.core import InputError
from hetero.formats import parse_format
from hetero.ops.gpu.linear import PackedLinear
from hetero.quant.pack import dequantise, quantise

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("fmt", ["bf16", "int8", "int4 g64"])
def test_against_float64(fmt: str, bias: bool, generator: torch.Generator) -> None:
    linear = nn.Linear(72, 40, bias=bias)
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    format_ = parse_format(fmt)
    weight = dequantise(format_, quantise(format_, linear.weight), 40, 72).double()
    add = linear.bias.detach().double() if bias else 0.0
    ours = PackedLinear.from_module(linear, name="head", config=None, device=DEVICE, options={"format": fmt})
    ours.after_load()  # type: ignore[operator]
    assert not list(ours.parameters())
    # Few rows round activations to 8 bits in groups of 32, but in bf16; many round them to bf16.
    for rows, limit in ((1, 0.02 if format_.quantised else 1e-6), (20, 6e-3)):
        x = torch.randn(2, rows, 72, generator=generator)
        with torch.no_grad():
            got = ours(x.to(DEVICE)).double().cpu()
        wanted = x.double() @ weight.T + add
        assert got.shape == wanted.shape
        assert float((got - wanted).norm() / wanted.norm()) < limit, rows


def test_refuses_what_is_no_linear_layer() -> None:
    with pytest.raises(
        InputError, match=r"op 'linear' was given norm \(LayerNorm\), which is no torch Linear"
    ):
        PackedLinear.from_module(nn.LayerNorm(4), name="norm", config=None, device=DEVICE, options={})
