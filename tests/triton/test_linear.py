"""Packed linear layers against float64 of the decoded weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("triton", reason="triton is not installed")

from hetero.core import InputError
from hetero.decode.rows import gathered
from hetero.formats import parse_format
from hetero.ops.gpu.fused import PackedMatrix, plain_rows, project
from hetero.ops.gpu.linear import PackedLinear
from hetero.quant.pack import Codes, dequantise, quantise

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("fmt", ["bf16", "int8", "int4 g64", "fp8"])
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
    # Few rows round activations to 8 bits in groups of 32, but for bf16 and fp8; many round them to bf16.
    for rows, limit in ((1, 0.02 if format_.rounds_activations else 1e-6), (20, 6e-3)):
        x = torch.randn(2, rows, 72, generator=generator)
        with torch.no_grad():
            got = ours(x.to(DEVICE)).double().cpu()
        wanted = x.double() @ weight.T + add
        assert got.shape == wanted.shape
        assert float((got - wanted).norm() / wanted.norm()) < limit, rows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_of_fp8_weights_are_values(dtype: torch.dtype, generator: torch.Generator) -> None:
    """More inputs than two scales have, and rows that are slices; several of bf16 by tensor cores."""
    n, k, fmt = 40, 296, parse_format("fp8")
    packed = quantise(fmt, torch.randn(n, k, generator=generator))
    bias = torch.randn(n, generator=generator)
    matrix = PackedMatrix(packed.to(DEVICE), fmt, n, k, bias.to(DEVICE))
    for rows in (1, 10) if dtype == torch.bfloat16 else (1, 3):
        x = torch.randn(rows, k + 3, generator=generator).to(dtype)[:, 3:]
        wanted = x.double() @ dequantise(fmt, packed, n, k).double().T + bias.double()
        got = project(plain_rows(fmt, x.to(DEVICE)), matrix, torch.float32).cpu().double()
        assert float((got - wanted).norm() / wanted.norm()) < 1e-6, rows
    with pytest.raises(ValueError, match=r"rows .* for a matrix of 296 inputs in fp8"):
        project(plain_rows(parse_format("int8"), x.to(DEVICE)), matrix)


def test_blocks_of_fp8_stay_whole_or_become_floats(generator: torch.Generator) -> None:
    fmt, k = parse_format("fp8"), 136
    weights = [torch.randn(n, k, generator=generator) * scale for n, scale in ((160, 1.0), (32, 9.0))]
    packed = [quantise(fmt, weight) for weight in weights]
    matrices = [PackedMatrix(p.to(DEVICE), fmt, len(w), k) for p, w in zip(packed, weights, strict=True)]
    known = [dequantise(fmt, p, len(w), k) for p, w in zip(packed, weights, strict=True)]
    whole = torch.cat([torch.arange(128, 160), torch.arange(16, 48)])
    for order, name in ((whole, "fp8"), (whole + 8 * (whole < 100), "f32")):
        made = gathered(matrices, [order, None])
        assert (made.format.name, made.n) == (name, 96)
        raw = made.packed.cpu()
        values = raw if name == "f32" else dequantise(fmt, raw, made.n, k)
        assert torch.equal(values, torch.cat([known[0][order], known[1]]))


@pytest.mark.parametrize("fmt", ["fp8", "fp8_row"])
def test_codes_of_a_checkpoint(fmt: str, generator: torch.Generator) -> None:
    """Their values to the bit, whatever the scales; products of them; rows of several in another order."""
    n, k, format_ = 144 if fmt == "fp8" else 64, 136, parse_format(fmt)
    shape = (n, 1) if fmt == "fp8_row" else (2, 2)
    values = torch.randn(2, n, k, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(2, *shape, generator=generator) + 0.1
    tiles = scales if fmt == "fp8_row" else scales.repeat_interleave(128, 1).repeat_interleave(128, 2)
    known = values.float() * tiles[:, :n, : 1 if fmt == "fp8_row" else k]
    layers = []
    for codes, scale, bias in zip(values, scales, (True, False), strict=True):
        linear = PackedLinear(nn.Linear(k, n, bias=bias), parse_format("fp8"), DEVICE)
        assert linear.keeps(format_)
        assert not linear.keeps(parse_format("int8"))
        linear.take_codes(format_, Codes(codes.view(torch.uint8), scale, None))()
        linear.after_load()
        assert linear.format == format_
        assert not list(linear.parameters())
        layers.append(linear)
    for linear, weight in zip(layers, known, strict=True):
        assert torch.equal(dequantise(format_, linear.packed.cpu(), n, k), weight)
    bias = layers[0].bias
    assert bias is not None
    for rows, limit in ((2, 1e-6), (20, 6e-3)):
        x = torch.randn(rows, k, generator=generator)
        wanted = x.double() @ known[0].double().T + bias.cpu().double()
        with torch.no_grad():
            got = layers[0](x.to(DEVICE)).double().cpu()
        assert float((got - wanted).norm() / wanted.norm()) < limit, rows
    matrices = [PackedMatrix.from_linear(linear) for linear in layers]
    whole = PackedMatrix.concat(matrices)
    assert torch.equal(dequantise(format_, whole.packed.cpu(), 2 * n, k), known.flatten(0, 1))
    for order, name in ((torch.arange(16, 48), fmt), (torch.arange(20, 52), "f32")):
        made = gathered(matrices, [order, None])
        raw = made.packed.cpu()
        found = raw if name == "f32" else dequantise(format_, raw, made.n, k)
        assert made.format.name == name
        assert torch.equal(found, torch.cat([known[0][order], known[1]]))
    no_numbers = Codes(torch.full((16, 128), 127, dtype=torch.uint8), torch.ones(1, 1), None)
    with pytest.raises(InputError, match="16 x 128 in fp8: a code is NaN"):
        layers[0].take_codes(parse_format("fp8"), no_numbers)


def test_refuses_what_is_no_linear_layer() -> None:
    with pytest.raises(
        InputError, match=r"op 'linear' was given norm \(LayerNorm\), which is no torch Linear"
    ):
        PackedLinear.from_module(nn.LayerNorm(4), name="norm", config=None, device=DEVICE, options={})
