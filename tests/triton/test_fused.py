"""Prologues and projections against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton", reason="triton is not installed")

from hetero.core import InputError
from hetero.formats import Format, parse_format
from hetero.ops.gpu.fused import (
    PackedMatrix,
    Rows,
    gated_norm_rows,
    norm_rows,
    plain_rows,
    project,
    sigmoid_gated_rows,
    swiglu_rows,
)
from hetero.ops.gpu.linear import PackedLinear
from hetero.quant.pack import dequantise

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
F32, INT8 = Format("f32"), parse_format("int8")


def random(*size: int, generator: torch.Generator) -> Tensor:
    return torch.randn(size, generator=generator).to(DEVICE)


def values(rows: Rows, k: int) -> Tensor:
    """float64 [T, k] of what rows stand for."""
    if rows.q.dtype != torch.int8:
        return rows.q.double()
    assert (rows.q[:, k:] == 0).all()
    return (rows.q.double() * rows.scales.double().repeat_interleave(32, 1))[:, :k]


def near(got: Tensor, wanted: Tensor, limit: float) -> None:
    assert got.shape == wanted.shape
    assert float((got.double() - wanted).norm() / wanted.norm()) < limit


def stands_for(rows: Rows, fmt: Format, wanted: Tensor) -> None:
    """That rows are those of ``wanted`` float64 [T, k], up to what the format loses."""
    near(values(rows, wanted.shape[1]), wanted, 0.02 if fmt.quantised else 1e-6)


@pytest.mark.parametrize("fmt", [F32, INT8, parse_format("int4 g128")], ids=str)
def test_prologues(fmt: Format, generator: torch.Generator) -> None:
    """Of slices; k is no multiple of a group of any kind."""
    x, add, shared = random(3, 3 * 72, generator=generator).split(72, 1)
    weight, gate = random(72, generator=generator), random(3, 2, generator=generator)[:, :1]
    stands_for(plain_rows(fmt, x), fmt, x.double())
    for parts, wanted in (
        ({}, x),
        ({"add": add}, x + add),
        ({"shared": shared}, x + shared),
        ({"add": add, "shared": shared, "gate": gate}, x + add + shared * gate.sigmoid()),
    ):
        got = norm_rows(fmt, x, weight, 1e-5, 1.0, **parts)
        near(got.residual, wanted.double(), 1e-6)
        normed = wanted.double() * (wanted.double().pow(2).mean(1, keepdim=True) + 1e-5).rsqrt()
        near(got.x, normed * (1 + weight.double()), 1e-6)
        for ours, plain in zip(got.rows, plain_rows(fmt, got.x), strict=True):
            assert torch.equal(ours, plain)
    both = random(3, 80 + 2 * 72, generator=generator)[:, 80:]
    one, two = both.double().chunk(2, 1)
    stands_for(swiglu_rows(fmt, both), fmt, nn.functional.silu(one) * two)


@pytest.mark.parametrize(("heads", "dim"), [(3, 32), (2, 24), (1, 96)])
@pytest.mark.parametrize("fmt", [F32, parse_format("int4 g128")], ids=str)
def test_gated_prologues(fmt: Format, heads: int, dim: int, generator: torch.Generator) -> None:
    y, z = random(2, heads, dim, generator=generator), random(2, heads * dim, generator=generator)
    weight = random(dim, generator=generator)
    normed = y.double() * (y.double().pow(2).mean(2, keepdim=True) + 1e-6).rsqrt() * weight.double()
    for silu in (True, False):
        gate = nn.functional.silu(z.double()) if silu else z.double().sigmoid()
        rows = gated_norm_rows(fmt, y, z, weight, 1e-6, silu=silu)
        stands_for(rows, fmt, normed.flatten(1) * gate)
    both = random(2, heads, 2 * dim, generator=generator)
    got = sigmoid_gated_rows(fmt, both[..., :dim].contiguous(), both[..., dim:])
    stands_for(got, fmt, (both[..., :dim].double() * both[..., dim:].double().sigmoid()).flatten(1))


@pytest.mark.parametrize(
    ("fmt", "bias"),
    [("f32", 1), ("bf16", 0), ("int8", 1), ("int8 g128", 0), ("int4", 0), ("int4 g64", 1)],
)
def test_projections(fmt: str, bias: int, generator: torch.Generator) -> None:
    """Of two parts as one, whose modules then use its memory; each row is the same alone."""
    format_ = parse_format(fmt)
    linears = []
    for n in (32, 40):
        linear = nn.Linear(200, n, bias=bool(bias)).to(DEVICE)
        with torch.no_grad():
            for parameter in linear.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        linears.append(linear.bfloat16() if fmt == "bf16" else linear)
    parts = [PackedMatrix.from_linear(linear, format_) for linear in linears]
    whole = PackedMatrix.concat(parts)
    if format_.quantised:
        wanted = torch.cat([dequantise(format_, p.packed.cpu(), p.n, 200) for p in parts]).double().to(DEVICE)
    else:
        wanted = torch.cat([linear.weight for linear in linears]).detach().double()
        assert linears[1].weight.data_ptr() == whole.packed[32:].data_ptr()
    add = torch.cat([linear.bias for linear in linears]).detach().double() if bias else 0.0
    assert (whole.n, whole.k) == (72, 200)
    x = random(6, 200, generator=generator)
    for count in (1, 3, 6):
        rows = plain_rows(format_, x[:count])
        got = project(rows, whole, torch.float32)
        near(got, values(rows, 200) @ wanted.T + add, 1e-5)
        alone = plain_rows(format_, x[count - 1 : count])
        near(project(alone, whole, torch.float32), got[-1:].double(), 1e-6)
    if fmt == "bf16":  # tensor cores take values of the same kind alone
        rows = plain_rows(format_, x.bfloat16())
        near(project(rows, whole, torch.float32), rows.q.double() @ wanted.T + add, 1e-5)


@pytest.mark.parametrize("fmt", ["bf16", "int8"])
def test_modules_share_the_memory_of_the_whole(fmt: str, generator: torch.Generator) -> None:
    modules = []
    for _ in range(3):
        linear = nn.Linear(64, 16, bias=False)
        nn.init.normal_(linear.weight, generator=generator)
        module = PackedLinear.from_module(
            linear, name="x", config=None, device=DEVICE, options={"format": fmt}
        )
        module.after_load()
        modules.append(module)
    x = random(2, 64, generator=generator)
    before = torch.cat([module(x) for module in modules], 1)
    whole = PackedMatrix.concat([PackedMatrix.from_linear(module) for module in modules])
    whole = PackedMatrix.concat([whole, PackedMatrix.from_linear(modules[0])])
    assert torch.equal(torch.cat([module(x) for module in modules], 1), before)
    end = whole.packed.data_ptr() + whole.packed.nbytes
    assert all(whole.packed.data_ptr() <= module.packed.data_ptr() < end for module in modules)


def test_refusals(generator: torch.Generator) -> None:
    linear = nn.Linear(64, 24)
    with pytest.raises(InputError, match="LayerNorm is no linear layer"):
        PackedMatrix.from_linear(nn.LayerNorm(4))
    with pytest.raises(
        InputError, match="format mxfp4 is not read on a GPU; valid: f32, bf16, int8, int4, fp8"
    ):
        PackedMatrix.from_linear(linear, parse_format("mxfp4"))
    part = PackedMatrix.from_linear(linear.to(DEVICE), INT8)
    with pytest.raises(ValueError, match=r"parts of \[24, 24\] outputs"):
        PackedMatrix.concat([part, part])
    with pytest.raises(ValueError, match="cannot be one"):
        PackedMatrix.concat([part, PackedMatrix.from_linear(linear)])
    with pytest.raises(ValueError, match="for a matrix of 64 inputs in int8 g32"):
        project(plain_rows(F32, random(1, 64, generator=generator)), part)
