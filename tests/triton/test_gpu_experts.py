"""Experts on the GPU against the CPU's on the same bytes, and against float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from hetero.core import Activation, ActKind, ExpertSpec, InputError
from hetero.cpu import CpuExperts
from hetero.formats import parse_format
from hetero.ops.gpu.experts import GpuExperts, _tiles
from hetero.ops.gpu.launch import sorted_places
from hetero.quant.pack import dequantise, quantise

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [
    *([pytest.mark.gpu] if DEVICE == "cuda" else []),
    # The interpreter computes by numpy, which warns where a GPU overflows to infinity and goes on.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
OAI = Activation(ActKind.SILU, alpha=1.702, gate_max=7.0, up_limit=7.0, up_offset=1.0)


def parts(spec: ExpertSpec, generator: torch.Generator) -> Iterator[tuple[int, str, torch.Tensor]]:
    """Random weights of every part of every expert."""
    wide, narrow = (spec.intermediate, spec.hidden), (spec.hidden, spec.intermediate)
    shapes = {"gate": wide, "up": wide, "down": narrow}
    for part, shape in shapes.items() if spec.has_gate else list(shapes.items())[1:]:
        for expert in range(spec.num_experts):
            yield expert, part, torch.randn(shape, generator=generator) / shape[1] ** 0.5
            if spec.has_bias:
                yield expert, f"{part}_bias", torch.randn(shape[0], generator=generator)


def both(spec: ExpertSpec, fmt: str, generator: torch.Generator) -> tuple[CpuExperts, GpuExperts]:
    """The same random experts on the CPU and on the device."""
    format_ = parse_format(fmt)
    ours, theirs = CpuExperts(spec, format_), GpuExperts(spec, format_, DEVICE)
    for expert, part, weight in parts(spec, generator):
        ours.put(expert, part, weight)  # type: ignore[arg-type]
        theirs.put(expert, part, weight)
    assert theirs.missing() == []
    return ours, theirs


def routing(tokens: int, spec: ExpertSpec, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    scores = torch.rand(tokens, spec.num_experts, generator=generator)
    return scores.topk(spec.top_k).indices, torch.rand(tokens, spec.top_k, generator=generator)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double().cpu() - b.double()).norm() / b.double().norm())


SPECS = {
    "gate": ExpertSpec(4, 128, 32, 2),
    "odd": ExpertSpec(3, 72, 40, 2),
    "bias": ExpertSpec(3, 64, 32, 2, OAI, has_bias=True),
    "plain": ExpertSpec(3, 64, 48, 2, Activation(ActKind.RELU2), has_gate=False),
    "gelu": ExpertSpec(2, 32, 32, 1, Activation(ActKind.GELU)),
    "tanh": ExpertSpec(2, 32, 32, 1, Activation(ActKind.GELU_TANH)),
}


FEW = [
    *(("gate", fmt) for fmt in ("bf16", "int8", "int4", "int4 g64", "int8 g128")),
    *(("odd", fmt) for fmt in ("bf16", "int8", "int4")),
    *((name, "int4") for name in ("bias", "plain", "gelu", "tanh")),
]


@pytest.mark.parametrize(("name", "fmt"), FEW)
def test_few_rows_equal_the_cpu(fmt: str, name: str, generator: torch.Generator) -> None:
    spec = SPECS[name]
    ours, theirs = both(spec, fmt, generator)
    for tokens in (1, 4):
        x = torch.randn(tokens, spec.hidden, generator=generator)
        x[:, 3] *= 30
        ids, weights = routing(tokens, spec, generator)
        if tokens > 1:
            ids[1, 0], ids[2] = -1, spec.num_experts
        wanted = ours.forward(x, ids, weights)
        got = theirs.forward(x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE))
        assert relative(got, wanted) < 1e-5, tokens


@pytest.mark.parametrize(
    ("name", "fmt"), [("gate", "int4 g64"), ("odd", "int8"), ("bias", "bf16"), ("plain", "int4")]
)
def test_many_rows_err_as_bf16(fmt: str, name: str, generator: torch.Generator) -> None:
    """Against the CPU in f32 on the decoded weights."""
    spec, format_ = SPECS[name], parse_format(fmt)
    exact, theirs = CpuExperts(spec, parse_format("f32")), GpuExperts(spec, format_, DEVICE)
    for expert, part, weight in parts(spec, generator):
        theirs.put(expert, part, weight)
        seen = dequantise(format_, quantise(format_, weight), *weight.shape) if weight.dim() == 2 else weight
        exact.put(expert, part, seen)  # type: ignore[arg-type]
    tokens = 70 if DEVICE == "cuda" else 20
    x = torch.randn(tokens, spec.hidden, generator=generator)
    ids, weights = routing(tokens, spec, generator)
    ids[1, 0], ids[2] = -1, spec.num_experts
    wanted = exact.forward(x, ids, weights)
    got = theirs.forward(x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE))
    assert relative(got, wanted) < 6e-3
    assert (got[2] == 0).all()


def test_a_number_that_is_none_reaches_the_output(generator: torch.Generator) -> None:
    spec = SPECS["gelu"]
    _, theirs = both(spec, "int4", generator)
    x = torch.randn(3, spec.hidden, generator=generator)
    x[1, 5] = float("inf")
    ids, weights = routing(3, spec, generator)
    got = theirs.forward(x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE)).cpu()
    assert got[1].isnan().all()
    assert got[[0, 2]].isfinite().all()


def test_tiles_hold_every_pair_once(generator: torch.Generator) -> None:
    for tokens, experts, rows in ((1, 3, 16), (40, 4, 16), (200, 7, 64)):
        ids = torch.randint(-1, experts + 1, (tokens, 3), generator=generator).flatten()
        keys = torch.where((ids >= 0) & (ids < experts), ids, experts)
        order, places = sorted_places(keys)
        assert torch.equal(order[places.long()], torch.arange(len(ids), dtype=torch.int32))
        seen = []
        for (first, last), expert in zip(
            *(part.tolist() for part in _tiles(keys, experts, rows)), strict=True
        ):
            pairs = order[first:last].tolist()
            assert len(pairs) <= rows
            assert all(int(ids[pair]) == expert for pair in pairs)
            seen += pairs
        assert sorted(seen) == (keys < experts).nonzero().flatten().tolist()


def test_refusals() -> None:
    spec = SPECS["gate"]
    with pytest.raises(InputError, match="format f32 is not read there; valid: bf16, int8, int4"):
        GpuExperts(spec, parse_format("f32"), DEVICE)
    with pytest.raises(InputError, match="format q2_k blocks is not read there"):
        GpuExperts(spec, parse_format("int4"), DEVICE, parse_format("q2_k blocks"))
    experts = GpuExperts(spec, parse_format("int8"), DEVICE)
    assert len(experts.missing()) == 3 * spec.num_experts
    experts.put(0, "up", torch.zeros(32, 128))
    assert (0, "up") not in experts.missing()
    with pytest.raises(InputError, match="up: given twice"):
        experts.put(0, "up", torch.zeros(32, 128))
    with pytest.raises(InputError, match="there are 4 experts"):
        experts.put(4, "up", torch.zeros(32, 128))
