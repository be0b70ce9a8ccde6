"""The expert operator against float64, on every instruction set that runs here."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hetero import _cpu, cpu, cpu_weights
from hetero.core import Activation, ActKind, ExpertSpec, InputError, MachineError
from hetero.cpu import CpuExperts
from hetero.formats import expert_bytes, parse_format
from hetero.hw import memory
from hetero.quant.pack import dequantise, quantise, quantise_codes
from tests.cpu.kernel_runner import KEPT
from tests.cpu.reference import (
    activate,
    decoded,
    fill,
    operator,
    random_kept,
    random_routing,
    random_weights,
    relative,
)

ISAS = cpu.isas(include_twin=True)
FORMATS = [
    "f32",
    "bf16",
    "int8 g32",
    "int8 g128",
    "int4 g32",
    "int4 g64",
    "int4 g128",
    "int4a g32",
    "int4a g64",
    "fp8",
    "mxfp4",
    "nvfp4",
]
SHAPES = [(64, 64), (192, 200), (200, 192), (20, 36)]
TOKENS = [0, 1, 2, 3, 5, 16, 17, 40, 100]
GPT_OSS = Activation(alpha=1.702, gate_max=7.0, up_limit=7.0, up_offset=1.0)


def limit(fmt: str, tokens: int) -> float:
    """Relative norm allowed against a reference that rounds activations to int8 as the operator does.

    Where a sum in float32 and one in float64 fall on two sides of a rounding, one code of h differs by one:
    up to 4e-3 with so few values. A lost group or a wrong zero point is above 5e-2. Bulk kernels may
    multiply in bf16.
    """
    if tokens > 16:
        return 5e-6 if fmt == "f32" else 1e-2
    return 5e-6 if fmt in ("f32", "bf16", "fp8", "fp8_row") else 8e-3


def check(
    experts: CpuExperts,
    y: Tensor,
    step: tuple[Tensor, Tensor, Tensor],
    weights: dict[tuple[int, str], Tensor] | None = None,
    within: float | None = None,
) -> None:
    """y against float64 with the operator's int8 activations. Bulk kernels may round them to bf16 instead:
    then against float64 of the values themselves, no worse than the int8 ones by more than 1e-3."""
    spec, fmt, (x, ids, w) = experts.spec, experts.format, step
    weights = weights or decoded(experts)
    formats = fmt, experts.down_format
    rounds, down_rounds = (one.rounds_activations for one in formats)
    want = operator(spec, weights, x, ids, w, quantised=rounds, down_quantised=down_rounds)
    error = relative(y, want)
    if error > (within or max(limit(str(one), x.shape[0]) for one in formats)):
        assert rounds or down_rounds, error
        assert x.shape[0] > 16, error
        plain = operator(spec, weights, x, ids, w, quantised=False)
        assert relative(y, plain) <= (within or relative(want, plain) + 1e-3), error


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("hidden", "intermediate"), SHAPES)
def test_equals_float64_of_decoded_weights(
    fmt: str, isa: str, hidden: int, intermediate: int, generator: torch.Generator
) -> None:
    spec = ExpertSpec(num_experts=6, hidden=hidden, intermediate=intermediate, top_k=3)
    experts = fill(CpuExperts(spec, parse_format(fmt), isa=isa), random_weights(spec, generator))
    weights = decoded(experts)
    for tokens in TOKENS:
        x, ids, w = random_routing(spec, tokens, generator)
        y = experts.forward(x, ids, w)
        assert y.shape == (tokens, hidden)
        assert y.dtype == torch.float32
        if tokens:
            check(experts, y, (x, ids, w), weights)


@pytest.mark.parametrize("fmt", FORMATS)
def test_bits_equal_on_every_isa_and_thread_count(fmt: str, generator: torch.Generator) -> None:
    spec = ExpertSpec(num_experts=5, hidden=200, intermediate=96, top_k=4, has_bias=True, activation=GPT_OSS)
    weights = random_weights(spec, generator)
    steps = [random_routing(spec, tokens, generator) for tokens in (1, 2, 3, 5, 9, 16)]
    first: list[Tensor] | None = None
    for isa in ISAS:
        experts = fill(CpuExperts(spec, parse_format(fmt), isa=isa), weights)
        for threads in (1, 2, 3):
            cpu.set_threads(threads)
            results = [experts.forward(*step) for step in steps]
            first = first or results
            for got, want in zip(results, first, strict=True):
                assert torch.equal(got.view(torch.int32), want.view(torch.int32)), (isa, threads)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("tokens", [1, 7, 16])
def test_experts_are_summed_in_slot_order_by_fma(isa: str, tokens: int, generator: torch.Generator) -> None:
    spec = ExpertSpec(7, 96, 64, 5)
    experts = fill(CpuExperts(spec, parse_format("int8"), isa=isa), random_weights(spec, generator))
    x, ids, w = random_routing(spec, tokens, generator)
    want = torch.zeros(tokens, 96)
    for slot in range(5):
        one = experts.forward(x, ids[:, slot : slot + 1], torch.ones(tokens, 1))
        # A product of two float32 is exact in float64, so this rounds once, as fma does.
        want = (w[:, slot, None].double() * one.double() + want.double()).float()
    assert torch.equal(experts.forward(x, ids, w), want)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("fmt", ["f32", "bf16", "int8 g64", "int4 g32"])
def test_many_tokens_do_not_depend_on_threads(fmt: str, isa: str, generator: torch.Generator) -> None:
    spec = ExpertSpec(num_experts=4, hidden=192, intermediate=200, top_k=2)
    experts = fill(CpuExperts(spec, parse_format(fmt), isa=isa), random_weights(spec, generator))
    step = random_routing(spec, 90, generator)
    results = []
    for threads in (1, 2, 3):
        cpu.set_threads(threads)
        results.append(experts.forward(*step))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("tokens", [4, 33])
def test_repeated_and_skipped_experts(isa: str, tokens: int, generator: torch.Generator) -> None:
    spec = ExpertSpec(num_experts=3, hidden=64, intermediate=48, top_k=4)
    experts = fill(CpuExperts(spec, parse_format("int8"), isa=isa), random_weights(spec, generator))
    x, _, _ = random_routing(replace(spec, top_k=1), tokens, generator)
    ids = torch.randint(-2, spec.num_experts + 2, (tokens, 4), generator=generator)
    ids[0] = torch.tensor([1, 1, 1, -1])
    ids[1] = torch.tensor([-1, spec.num_experts, 2**40, -(2**40)])
    w = torch.rand(tokens, 4, generator=generator)
    w[1] = math.nan  # a skipped slot contributes zero whatever its weight
    y = experts.forward(x, ids, w)
    assert torch.equal(y[1], torch.zeros(spec.hidden))
    check(experts, y, (x, ids, w))
    narrow = experts.forward(x, ids.clamp(-5, 50).int(), w)
    assert torch.equal(narrow, y)


@pytest.mark.parametrize("fmt", ["f32", "int8 g32", "int4 g64"])
def test_staged_bits_equal_on_every_isa(fmt: str, generator: torch.Generator) -> None:
    spec = ExpertSpec(4, 72, 136, 3, has_bias=True)
    experts = fill(CpuExperts(spec, parse_format(fmt)), random_weights(spec, generator))
    x, ids, _ = random_routing(spec, 16, generator)
    h = torch.randn(16, 3, 136, generator=generator)
    experts.use("scalar")
    first, second = experts.gate_up(x, ids), experts.down(h, ids)
    for isa in ISAS:
        experts.use(isa)
        for threads in (1, 3):
            cpu.set_threads(threads)
            assert torch.equal(experts.gate_up(x, ids), first)
            assert torch.equal(experts.down(h, ids), second)


def test_no_slots() -> None:
    spec = ExpertSpec(1, 32, 32, 1)
    experts = CpuExperts(spec, parse_format("int8"))
    for part, shape in (("gate", (32, 32)), ("up", (32, 32)), ("down", (32, 32))):
        experts.put(0, part, torch.ones(shape))
    for tokens in (3, 20):
        ids = torch.zeros(tokens, 0, dtype=torch.long)
        y = experts.forward(torch.ones(tokens, 32), ids, torch.ones(tokens, 0))
        assert torch.equal(y, torch.zeros(tokens, 32))


def test_sums_go_where_they_are_wanted(generator: torch.Generator) -> None:
    spec = ExpertSpec(4, 64, 32, 2)
    experts = fill(CpuExperts(spec, parse_format("int8")), random_weights(spec, generator))
    x, ids, weights = random_routing(spec, 5, generator)
    out = torch.full((7, 64), 7.0)
    result = experts.forward(x, ids, weights, out[1:6])
    assert result.data_ptr() == out[1:6].data_ptr()
    assert torch.equal(out[1:6], experts.forward(x, ids, weights))
    assert (out[[0, 6]] == 7.0).all()
    for wrong in (out[:4], out[:5].double(), torch.empty(64, 5).T):
        with pytest.raises(ValueError, match="output "):
            experts.forward(x, ids, weights, wrong)


def test_every_token_skipped(generator: torch.Generator) -> None:
    spec = ExpertSpec(num_experts=2, hidden=32, intermediate=32, top_k=2)
    experts = fill(CpuExperts(spec, parse_format("int4")), random_weights(spec, generator))
    for tokens in (1, 20):
        ids = torch.full((tokens, 2), -1)
        y = experts.forward(torch.randn(tokens, 32), ids, torch.ones(tokens, 2))
        assert torch.equal(y, torch.zeros(tokens, 32))
        assert torch.equal(experts.gate_up(torch.randn(tokens, 32), ids), torch.zeros(tokens, 2, 64))
        assert torch.equal(experts.down(torch.randn(tokens, 2, 32), ids), torch.zeros(tokens, 2, 32))
        none = torch.empty(tokens, 0, dtype=torch.long)
        assert experts.gate_up(torch.randn(tokens, 32), none).shape == (tokens, 0, 64)
        assert experts.down(torch.randn(tokens, 0, 32), none).shape == (tokens, 0, 32)
        y = experts.forward(torch.randn(tokens, 32), none, torch.ones(tokens, 0))
        assert torch.equal(y, torch.zeros(tokens, 32))


def test_no_result_of_an_earlier_step_survives(generator: torch.Generator) -> None:
    spec = ExpertSpec(num_experts=4, hidden=200, intermediate=20, top_k=2)
    for fmt in FORMATS:
        experts = fill(CpuExperts(spec, parse_format(fmt)), random_weights(spec, generator))
        for tokens in (16, 50):
            x, ids, w = random_routing(spec, tokens, generator)
            clean = experts.forward(x, ids, w)
            assert experts.forward(torch.full_like(x, math.nan), ids, w).isnan().all()
            assert torch.equal(experts.forward(x, ids, w), clean)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("fmt", ["f32", "int8", "int4"])
@pytest.mark.parametrize("kind", list(ActKind))
@pytest.mark.parametrize("gate", [True, False])
def test_activations(fmt: str, isa: str, kind: ActKind, gate: bool, generator: torch.Generator) -> None:
    act = Activation(kind=kind, gate_max=2.0, up_limit=1.5, act_max=1.2, up_offset=0.5)
    if not gate:
        act = Activation(kind=kind)
    spec = ExpertSpec(3, 64, 40, 2, activation=act, has_gate=gate, has_bias=True)
    experts = fill(CpuExperts(spec, parse_format(fmt), isa=isa), random_weights(spec, generator))
    for tokens in (3, 24):
        x, ids, w = random_routing(spec, tokens, generator)
        want = operator(spec, decoded(experts), x, ids, w, quantised=experts.format.rounds_activations)
        assert relative(experts.forward(x, ids, w), want) <= limit(fmt, tokens)


@pytest.mark.parametrize("isa", ISAS)
def test_gpt_oss_formula(isa: str, generator: torch.Generator) -> None:
    """alpha 1.702, clamps at 7, up + 1 and biases, written as gpt_oss computes them."""
    spec = ExpertSpec(2, 96, 64, 1, activation=GPT_OSS, has_bias=True)
    weights = random_weights(spec, generator, scale=4.0)  # so that the clamps at 7 act
    experts = fill(CpuExperts(spec, parse_format("f32"), isa=isa), weights)
    x = torch.randn(7, 96, generator=generator)
    ids = torch.randint(0, 2, (7, 1), generator=generator)
    want = torch.empty(7, 96, dtype=torch.float64)
    clamped = 0
    for t in range(7):
        e = int(ids[t, 0])
        part = {name: tensor.double() for (owner, name), tensor in weights.items() if owner == e}
        gate = part["gate"] @ x[t].double() + part["gate_bias"]
        up = part["up"] @ x[t].double() + part["up_bias"]
        clamped += int((gate > 7).sum() + (up.abs() > 7).sum())
        gate, up = gate.clamp(min=None, max=7), up.clamp(min=-7, max=7)
        h = (up + 1) * (gate * torch.sigmoid(gate * 1.702))
        want[t] = part["down"] @ h + part["down_bias"]
    assert clamped > 0
    assert relative(experts.forward(x, ids, torch.ones(7, 1)), want) < 5e-6


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_staged_equals_whole(fmt: str, isa: str, generator: torch.Generator) -> None:
    spec = ExpertSpec(4, 96, 72, 3, has_bias=True)
    experts = fill(CpuExperts(spec, parse_format(fmt), isa=isa), random_weights(spec, generator))
    for tokens in (2, 16, 21):
        x, ids, w = random_routing(spec, tokens, generator)
        ids[0, 1] = -1
        both = experts.gate_up(x, ids)
        assert both.shape == (tokens, 3, 144)
        assert torch.equal(both[0, 1], torch.zeros(144))
        gate, up = both.double().chunk(2, dim=-1)
        h = (gate * torch.sigmoid(gate) * up).float()
        y = experts.down(h, ids)
        assert y.shape == (tokens, 3, 96)
        assert torch.equal(y[0, 1], torch.zeros(96))
        staged = (y.double() * w[..., None]).sum(1)
        assert relative(experts.forward(x, ids, w), staged) <= (5e-6 if fmt == "f32" else 3e-3)


def test_staged_without_gate(generator: torch.Generator) -> None:
    spec = ExpertSpec(3, 40, 72, 2, has_gate=False, activation=Activation(kind=ActKind.RELU2))
    experts = fill(CpuExperts(spec, parse_format("f32")), random_weights(spec, generator))
    x, ids, w = random_routing(spec, 5, generator)
    up = experts.gate_up(x, ids)
    assert up.shape == (5, 2, 72)
    staged = (experts.down(up.relu() ** 2, ids) * w[..., None]).sum(1)
    assert relative(experts.forward(x, ids, w), staged) < 5e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_input_types_and_strides(dtype: torch.dtype, generator: torch.Generator) -> None:
    """Weights and inputs of any of the three types, transposed weights, strided inputs."""
    spec = ExpertSpec(2, 40, 24, 1)
    weights = {key: t.to(dtype) for key, t in random_weights(spec, generator).items()}
    strided = {key: t.T.contiguous().T for key, t in weights.items()}
    for fmt in ("f32", "int8"):
        plain = fill(CpuExperts(spec, parse_format(fmt)), weights)
        turned = fill(CpuExperts(spec, parse_format(fmt)), strided)
        x, ids, w = random_routing(spec, 6, generator)
        x = x.to(dtype)
        y = plain.forward(x, ids, w)
        assert torch.equal(y, turned.forward(x.T.contiguous().T, ids, w))
        assert torch.equal(y, plain.forward(x.float(), ids, w))


@pytest.mark.parametrize("count", [1, 512])
def test_number_of_experts(count: int, generator: torch.Generator) -> None:
    spec = ExpertSpec(count, 32, 16, min(count, 10))
    experts = fill(CpuExperts(spec, parse_format("f32")), random_weights(spec, generator))
    for tokens in (1, 300):
        x, ids, w = random_routing(spec, tokens, generator)
        want = operator(spec, decoded(experts), x, ids, w, quantised=False)
        assert relative(experts.forward(x, ids, w), want) < 5e-6


@pytest.mark.parametrize("fmt", ["f32", "int8", "int4"])
def test_waves_and_passes_change_nothing(fmt: str, generator: torch.Generator) -> None:
    """A workspace too small for the results of one expert, and for the inputs of all tokens."""
    spec = ExpertSpec(5, 96, 64, 3)
    experts = fill(CpuExperts(spec, parse_format(fmt)), random_weights(spec, generator))
    for tokens in (3, 40, 700):
        x, ids, w = random_routing(spec, tokens, generator)
        ids[:, 1] = 2
        ids[0] = -1
        x = x.bfloat16()
        for wave_bytes, store_bytes in ((64 << 20, 160 << 20), (40_000, 160 << 20), (40_000, 9_000), (1, 1)):
            before = _cpu.set_tuning(wave_bytes, store_bytes, 0)
            try:
                y = experts.forward(x, ids, w)
            finally:
                _cpu.set_tuning(*before)
            check(experts, y, (x, ids, w))


def test_8192_tokens(generator: torch.Generator) -> None:
    spec = ExpertSpec(3, 512, 32, 2)
    experts = fill(CpuExperts(spec, parse_format("int8")), random_weights(spec, generator))
    x, ids, w = random_routing(spec, 8192, generator)
    check(experts, experts.forward(x, ids, w), (x, ids, w))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_extreme_blocks_stay_finite(fmt: str, isa: str, generator: torch.Generator) -> None:
    """Weights of +6e4 (sums beyond fp16), all-zero groups, extreme codes of both signs."""
    spec = ExpertSpec(2, 128, 128, 2, activation=Activation(kind=ActKind.IDENTITY, up_limit=1.0))
    weights = random_weights(spec, generator)
    weights[0, "gate"][:16] = 6e4
    weights[0, "down"][:, :64] = 6e4
    weights[0, "down"][:, 64:] = -6e4
    weights[1, "up"][:, 32:64] = 0
    weights[1, "down"][:] = 0
    experts = fill(CpuExperts(spec, parse_format(fmt), isa=isa), weights)
    for tokens in (1, 6, 40):
        x = torch.randn(tokens, 128, generator=generator).sign() * 0.01
        x[:, :65] = 0.01  # a majority, so that the large gates are large and not the rounding of a zero
        x[0] = 1.0
        ids = torch.tensor([[0, 1]]).expand(tokens, 2)
        w = torch.ones(tokens, 2)
        y = experts.forward(x, ids, w)
        assert y.isfinite().all()
        rounds = [experts.format.rounds_activations]
        if tokens > 16:  # bulk kernels may take the hidden values as bf16 instead of int8
            rounds.append(False)
        references = [operator(spec, decoded(experts), x, ids, w, quantised=r) for r in rounds]
        # Down's halves cancel, by how much depends on the seed; what rounding can do is a share of the sum
        # of the magnitudes (bulk rounds activations to bf16, 2^-9 each, and the hidden values again).
        gate, up = experts.gate_up(x, ids)[:, 0].double().chunk(2, dim=-1)
        magnitudes = 6e4 * (gate * up.clamp(-1, 1)).abs().sum(-1, keepdim=True)
        assert any(((y - want).abs() <= 2**-7 * magnitudes + 1e-2 * want.abs()).all() for want in references)
        only_zero = experts.forward(x, torch.ones(tokens, 1, dtype=torch.long), w[:, :1])
        assert torch.equal(only_zero, torch.zeros(tokens, 128))
        assert torch.equal(experts.forward(x * 0, ids, w), torch.zeros(tokens, 128))


@pytest.mark.parametrize("fmt", ["f32", "int8", "int4"])
def test_nan_reaches_only_its_token(fmt: str, generator: torch.Generator) -> None:
    spec = ExpertSpec(2, 64, 64, 2)
    experts = fill(CpuExperts(spec, parse_format(fmt)), random_weights(spec, generator))
    for tokens in (4, 30):
        x, ids, w = random_routing(spec, tokens, generator)
        x[1, 5] = math.nan
        x[2, 60] = math.inf
        bad = experts.forward(x, ids, w).isnan().any(-1)
        assert bad[1]
        assert bad[2]
        assert int(bad.sum()) == 2


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("fmt", "against_original"), [("int4 g32", 0.155), ("int8 g128", 0.02)])
def test_accuracy_of_gaussian_experts(
    fmt: str,
    isa: str,
    against_original: float,
    generator: torch.Generator,
    record_property: Callable[[str, object], None],
) -> None:
    """2560 x 640: what remains against the decoded weights is the int8 activations."""
    spec = ExpertSpec(2, 2560, 640, 2)
    weights = random_weights(spec, generator)
    experts = fill(CpuExperts(spec, parse_format(fmt), isa=isa), weights)
    # Four steps of the most tokens that are exact: one step alone scatters by 3% between seeds.
    steps = [random_routing(spec, 16, generator) for _ in range(4)]
    y = torch.cat([experts.forward(*step) for step in steps])
    x, ids, w = (torch.cat(parts) for parts in zip(*steps, strict=True))
    decoded_error = relative(y, operator(spec, decoded(experts), x, ids, w, quantised=False))
    original_error = relative(y, operator(spec, weights, x, ids, w, quantised=False))
    record_property("decoded_error", decoded_error)
    record_property("original_error", original_error)
    print(f"{fmt} {isa}: {decoded_error:.5f} decoded, {original_error:.5f} original")  # noqa: T201
    assert decoded_error <= 0.015
    assert original_error <= against_original


def test_each_part_exactly_once(generator: torch.Generator) -> None:
    spec = ExpertSpec(2, 32, 48, 1, has_bias=True)
    weights = random_weights(spec, generator)
    experts = CpuExperts(spec, parse_format("int8"))
    assert len(experts.missing()) == 12
    for at, ((e, part), tensor) in enumerate(weights.items()):
        assert (e, part) in experts.missing()
        with pytest.raises(RuntimeError, match="have not been put"):
            experts.forward(torch.zeros(1, 32), torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1))
        experts.put(e, part, tensor)  # type: ignore[arg-type]
        assert len(experts.missing()) == 11 - at
        with pytest.raises(InputError, match=f"expert {e} {part}: given twice"):
            experts.put(e, part, tensor)  # type: ignore[arg-type]
    assert experts.missing() == []


def test_bad_parts_are_refused() -> None:
    spec = ExpertSpec(2, 32, 48, 1)
    experts = CpuExperts(spec, parse_format("int8"))
    with pytest.raises(InputError, match=r"expert 2 up: there are 2 experts"):
        experts.put(2, "up", torch.zeros(48, 32))
    with pytest.raises(InputError, match=r"expert 0 up_bias: these experts have only gate, up, down"):
        experts.put(0, "up_bias", torch.zeros(48))
    with pytest.raises(InputError, match=r"expert 0 up: shape \[32, 48\], must be \[48, 32\]"):
        experts.put(0, "up", torch.zeros(32, 48))
    with pytest.raises(InputError, match=r"must be float32, bfloat16 or float16"):
        experts.put(0, "up", torch.zeros(48, 32, dtype=torch.float64))
    with pytest.raises(InputError, match=r"expert 1 down in int8 g32: .*NaN"):
        experts.put(1, "down", torch.full((32, 48), math.nan))
    with pytest.raises(InputError, match=r"expert 1 down in int8 g32: .*too large"):
        experts.put(1, "down", torch.full((32, 48), 1e30))
    assert (1, "down") in experts.missing()
    assert (0, "gate") in CpuExperts(replace(spec, has_gate=True), parse_format("f32")).missing()
    assert (0, "gate") not in CpuExperts(replace(spec, has_gate=False), parse_format("f32")).missing()


def test_shapes_of_a_step_are_checked(generator: torch.Generator) -> None:
    spec = ExpertSpec(2, 32, 48, 2)
    experts = fill(CpuExperts(spec, parse_format("int8")), random_weights(spec, generator))
    ids, w = torch.zeros(3, 2, dtype=torch.long), torch.ones(3, 2)
    with pytest.raises(ValueError, match="expected"):
        experts.forward(torch.zeros(3, 31), ids, w)
    with pytest.raises(ValueError, match="expected"):
        experts.forward(torch.zeros(2, 32), ids, w)
    with pytest.raises(ValueError, match="weights"):
        experts.forward(torch.zeros(3, 32), ids, w[:, :1])
    with pytest.raises(ValueError, match="expected"):
        experts.down(torch.zeros(3, 1, 48), ids)


def test_kernel_counts_are_calls_per_expert_and_projection(generator: torch.Generator) -> None:
    spec = ExpertSpec(6, 64, 160, 2)
    experts = fill(CpuExperts(spec, parse_format("int4"), isa="scalar"), random_weights(spec, generator))
    ids = torch.tensor([[0, 1], [0, 2], [0, 3], [0, 4], [0, -1]])  # expert 0: 5 rows, others 1
    for threads in (1, 2):
        cpu.set_threads(threads)
        cpu.reset_kernel_counts()
        experts.forward(torch.randn(5, 64), ids, torch.ones(5, 2))
        assert cpu.kernel_counts() == {"int4.scalar.gemv": 8, "int4.scalar.gemm": 2}
    cpu.reset_kernel_counts()
    assert cpu.kernel_counts() == {}


def test_one_arena_serves_every_isa(generator: torch.Generator) -> None:
    spec = ExpertSpec(3, 64, 48, 2)
    experts = fill(CpuExperts(spec, parse_format("int4"), isa="scalar"), random_weights(spec, generator))
    step = random_routing(spec, 4, generator)
    want = experts.forward(*step)
    for isa in ISAS:
        experts.use(isa)
        assert experts.isa == isa
        cpu.reset_kernel_counts()
        assert torch.equal(experts.forward(*step), want)
        ran = {name.split(".")[1].split("_")[0] for name in cpu.kernel_counts()}
        # Few rows run on the instruction set below: tiles gain nothing there.
        assert ran <= {"amx": {"amx", "avx512"}, "amx_twin": {"amx", "scalar"}}.get(isa, {isa})
    assert experts.plain_read() == experts.nbytes


def test_copied_expert_computes_the_same(generator: torch.Generator) -> None:
    spec = ExpertSpec(3, 64, 48, 1, has_bias=True)
    experts = CpuExperts(spec, parse_format("int8"))
    for (e, part), tensor in random_weights(spec, generator).items():
        if e == 0:
            experts.put(e, part, tensor)  # type: ignore[arg-type]
    experts.copy_expert(0, 1)
    with pytest.raises(InputError, match="expert 1: given twice"):
        experts.copy_expert(0, 1)
    with pytest.raises(InputError, match="cannot copy expert 2 to 0: missing gate"):
        experts.copy_expert(2, 0)
    with pytest.raises(InputError, match="cannot copy expert 0 to 3: missing target"):
        experts.copy_expert(0, 3)
    experts.copy_expert(1, 2)
    assert experts.missing() == []
    x = torch.randn(1, 64, generator=generator)
    a, b, c = (experts.forward(x, torch.tensor([[e]]), torch.ones(1, 1)) for e in range(3))
    assert torch.equal(a, b)
    assert torch.equal(a, c)


def test_isa_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETERO_ISA", "scalar")
    assert cpu.pick_isa("auto") == "scalar"
    assert cpu.pick_isa(cpu.isas()[-1]) == cpu.isas()[-1]
    monkeypatch.delenv("HETERO_ISA")
    assert cpu.pick_isa("auto") == cpu.isas()[-1]
    with pytest.raises(InputError, match="no instruction set 'sse9'"):
        cpu.pick_isa("sse9")
    for isa in ("avx2", "avx512", "amx"):
        if isa not in cpu.isas():
            with pytest.raises(MachineError, match=f"'{isa}': this machine lacks .+; it has scalar"):
                cpu.pick_isa(isa)


def test_isa_that_the_machine_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks(name: str) -> None:
        raise RuntimeError("amx_tile, amx_int8")

    monkeypatch.setattr("hetero._cpu.check_isa", lacks)
    with pytest.raises(MachineError, match=r"'amx': this machine lacks amx_tile, amx_int8; it has scalar"):
        cpu.pick_isa("amx")


def test_too_little_memory() -> None:
    spec = ExpertSpec(100_000, 8192, 8192, 1)
    with pytest.raises(MachineError, match=r"100000 experts of 8192 x 8192 in int4 g32 needs .* available"):
        CpuExperts(spec, parse_format("int4"))


def test_memory_promised_to_other_experts_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three layers that fit one by one, not together; pages are taken only when experts arrive."""
    spec, fmt = ExpertSpec(4, 64, 64, 1), parse_format("int8")
    size = cpu.packed_nbytes(spec, fmt)
    others = sum(e.promised_bytes for e in cpu_weights._live)
    monkeypatch.setattr(memory, "available", lambda *a: memory.Available(others + 2 * size, "test"))
    kept = [CpuExperts(spec, fmt) for _ in range(2)]
    with pytest.raises(MachineError, match=r"of other experts and 4 experts of 64 x 64 in int8 g32 needs"):
        CpuExperts(spec, fmt)
    assert kept[0].promised_bytes == size
    kept[0].put(0, "up", torch.ones(64, 64))
    assert kept[0].promised_bytes == size * 11 // 12


def test_workspace_refused_by_the_system(monkeypatch: pytest.MonkeyPatch, generator: torch.Generator) -> None:
    spec = ExpertSpec(2, 32, 32, 1)
    experts = fill(CpuExperts(spec, parse_format("int8")), random_weights(spec, generator))

    def refused(*arguments: int) -> None:
        raise MemoryError

    monkeypatch.setattr(experts, "_experts", type("Raw", (), {"forward": staticmethod(refused)}))
    with pytest.raises(MachineError, match=r"workspace of a step needs up to 256\.0 MiB"):
        experts.forward(torch.zeros(1, 32), torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1))


def test_mapping_refused_by_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetero.hw.memory.require", lambda *args: None)
    with pytest.raises(MachineError, match=r"the system refused .* available"):
        CpuExperts(ExpertSpec(10_000_000, 8192, 8192, 1), parse_format("int4"))


@pytest.mark.parametrize("fmt", ["int8 g64", "int4 g32", "int4a g32", "fp8", "mxfp4", "nvfp4"])
def test_codes_keep_their_values(fmt: str, generator: torch.Generator) -> None:
    """Experts put as codes give the bits of experts packed from floats, whole or split over nodes."""
    spec, form = ExpertSpec(2, 192, 200, 2), parse_format(fmt)
    weights = random_weights(spec, generator)
    whole, split = CpuExperts(spec, form), CpuExperts(spec, form, numa="split")
    for (expert, part), w in weights.items():
        codes = quantise_codes(form, w)
        whole.put_codes(expert, part, *codes)  # type: ignore[arg-type]
        split.put_codes(expert, part, *codes)  # type: ignore[arg-type]
    assert whole.missing() == []
    for key, values in decoded(whole).items():
        n, k = weights[key].shape
        wanted = dequantise(form, quantise(form, weights[key]), n, k)
        assert torch.allclose(values.float(), wanted, rtol=3e-7, atol=0), key
    packed = fill(CpuExperts(spec, form), weights)
    x, ids, w = random_routing(spec, 3, generator)
    for other in (whole, split):
        assert torch.equal(other.forward(x, ids, w), packed.forward(x, ids, w))


@pytest.mark.parametrize(
    "fmt", ["int8a g64", "int4z g32", "int8z g128", *(f.name for f in KEPT if f.code > 10)]
)
def test_kept_values_on_every_isa(fmt: str, generator: torch.Generator) -> None:
    """Formats that only keep values: against float64, in small steps to the bit alike."""
    spec = ExpertSpec(num_experts=5, hidden=200, intermediate=296, top_k=3, has_bias=True)
    experts = fill(CpuExperts(spec, parse_format(fmt)), random_weights(spec, generator))
    weights = decoded(experts)
    for tokens in (1, 5, 16, 40):
        step = random_routing(spec, tokens, generator)
        first: Tensor | None = None
        for isa in ISAS:
            experts.use(isa)
            y = experts.forward(*step)
            check(experts, y, step, weights)
            first = y if first is None else first
            assert tokens > 16 or torch.equal(y.view(torch.int32), first.view(torch.int32)), isa


@pytest.mark.parametrize(("fmt", "down"), [("int4 g64", "int8z g32"), ("int8 g32", "int8 g32")])
def test_inputs_in_an_order_of_each_expert(fmt: str, down: str, generator: torch.Generator) -> None:
    """The bits of experts without an order that are given each its own permuted inputs."""
    spec = ExpertSpec(num_experts=5, hidden=200, intermediate=296, top_k=3, has_bias=True)
    formats = [parse_format(fmt), parse_format(down)]
    ordered = [parse_format(f"{fmt} ordered"), parse_format(f"{down} ordered")]
    weights = random_weights(spec, generator)
    plain, mine = CpuExperts(spec, *formats), CpuExperts(spec, *ordered)
    split = CpuExperts(spec, *ordered, numa="split")
    orders = [torch.randperm(spec.hidden, generator=generator).int() for _ in range(spec.num_experts)]
    for (expert, part), tensor in weights.items():
        if part.endswith("_bias"):
            plain.put(expert, part, tensor)  # type: ignore[arg-type]
            mine.put(expert, part, tensor)  # type: ignore[arg-type]
            continue
        codes = random_kept(formats[part == "down"], *tensor.shape, generator)
        plain.put_codes(expert, part, *codes)  # type: ignore[arg-type]
        mine.put_codes(expert, part, *codes)  # type: ignore[arg-type]
    assert mine.missing() == [(expert, "order") for expert in range(spec.num_experts)]
    for expert, order in enumerate(orders):
        mine.put(expert, "order", order)
        buffer = bytearray(mine.whole_bytes)
        mine.save(expert, memoryview(buffer))
        split.restore(expert, memoryview(buffer))
    split.filled(range(spec.num_experts))
    one = expert_bytes(ordered[0], 200, 296, has_gate=True, has_bias=True, down_format=ordered[1])
    assert mine.nbytes == 5 * one == cpu.packed_nbytes(spec, *ordered)

    for tokens, dtype in ((1, torch.float32), (3, torch.bfloat16), (16, torch.float16), (40, torch.float32)):
        x, ids, w = random_routing(spec, tokens, generator)
        x, ids = x.to(dtype), torch.where(torch.rand(ids.shape, generator=generator) < 0.1, -1, ids)
        turned = [x[:, order.long()].contiguous() for order in orders]
        for isa in ISAS:
            for one_of in (plain, mine, split):
                one_of.use(isa)
            results = torch.full((*ids.shape, spec.hidden), float("nan"))
            halves = torch.zeros(*ids.shape, 2 * spec.intermediate)
            for expert, inputs in enumerate(turned):
                alone = torch.where(ids == expert, ids, -1)
                plain.pairs(inputs, alone, results)
                halves += plain.gate_up(inputs, alone)
            want = plain.weighted_sum(results, ids, w, spec.num_experts)
            for experts in (mine, split):
                assert torch.equal(experts.forward(x, ids, w), want), (isa, tokens)
                assert torch.equal(experts.gate_up(x, ids), halves), (isa, tokens)
                pairs = torch.full_like(results, float("nan"))
                experts.pairs(x, ids, pairs)
                assert torch.equal(pairs.nan_to_num(), results.nan_to_num()), (isa, tokens)


def test_wrong_orders_are_errors(generator: torch.Generator) -> None:
    spec = ExpertSpec(2, 64, 32, 1)
    experts = CpuExperts(spec, parse_format("int4 g32 ordered"))
    order = torch.arange(64, dtype=torch.int32)
    with pytest.raises(InputError, match="each input must be named once"):
        experts.put(0, "order", order // 2)
    with pytest.raises(InputError, match="each input must be named once"):
        experts.put(0, "order", order + 1)
    with pytest.raises(InputError, match="must be int32"):
        experts.put(0, "order", order.long())
    with pytest.raises(InputError, match=r"shape \[32\], must be \[64\]"):
        experts.put(0, "order", order[:32])
    experts.put(0, "order", order)
    with pytest.raises(InputError, match="given twice"):
        experts.put(0, "order", order)
    with pytest.raises(InputError, match="an order of their own, or neither"):
        CpuExperts(spec, parse_format("int4 g32 ordered"), parse_format("int4 g32"))
    with pytest.raises(InputError, match="these experts have only gate, up, down"):
        CpuExperts(spec, parse_format("int4 g32")).put(0, "order", order)


BY_PART = [
    ("q4_k", "q6_k"),
    ("q2_k", "q3_k"),
    ("bf16", "int8 g64"),
    ("int4 g128", "f32"),
    ("fp8", "mxfp4"),
    ("int4z g128", "fp8_row"),
    ("iq2_xxs", "iq4_nl"),
]


@pytest.mark.parametrize(("fmt", "down"), BY_PART)
def test_formats_by_part(fmt: str, down: str, generator: torch.Generator) -> None:
    spec = ExpertSpec(num_experts=5, hidden=200, intermediate=136, top_k=3, has_bias=fmt == "q4_k")
    up_format, down_format = parse_format(fmt), parse_format(down)
    experts = fill(CpuExperts(spec, up_format, down_format), random_weights(spec, generator))
    assert [experts.format_of(p) for p in ("gate", "up", "down")] == [up_format, up_format, down_format]
    assert experts.format_of("down_bias") == parse_format("f32")
    assert experts.nbytes == cpu.packed_nbytes(spec, up_format, down_format)
    one = expert_bytes(up_format, 200, 136, has_gate=True, has_bias=spec.has_bias, down_format=down_format)
    assert experts.nbytes == 5 * one
    split = CpuExperts(spec, up_format, down_format, numa="split")
    fill(split, random_weights(spec, torch.Generator().manual_seed(1)))
    for expert in range(5):
        buffer = bytearray(experts.whole_bytes)
        experts.save(expert, memoryview(buffer))
        split.restore(expert, memoryview(buffer))
    weights = decoded(experts)
    for tokens in (1, 2, 16, 17, 90):
        x, ids, w = step = random_routing(spec, tokens, generator)
        first: Tensor | None = None
        for isa in ISAS:
            experts.use(isa)
            split.use(isa)
            cpu.reset_kernel_counts()
            y = experts.forward(*step)
            names = {name.split(".")[0] for name in cpu.kernel_counts()}
            assert names == {up_format.name, down_format.name}
            check(experts, y, step, weights)
            first = y if first is None else first
            assert tokens > 16 or torch.equal(y.view(torch.int32), first.view(torch.int32)), isa
            assert torch.equal(split.forward(*step), y), isa
            both = experts.gate_up(x, ids)
            h = activate(spec.activation, both[..., :136], both[..., 136:], True)
            staged = (experts.down(h, ids) * w[..., None]).sum(1)
            assert relative(staged, y) < 2e-2, isa


def test_codes_that_do_not_fit_are_refused() -> None:
    experts = CpuExperts(ExpertSpec(1, 64, 64, 1), parse_format("mxfp4"))
    codes, scales = torch.zeros(64, 64, dtype=torch.uint8), torch.full((64, 2), 127, dtype=torch.uint8)
    with pytest.raises(InputError, match=r"expert 0 up: a code is above 15"):
        experts.put_codes(0, "up", codes + 16, scales)
    with pytest.raises(InputError, match=r"expert 0 up: .*must have the shape \[64, 2\]"):
        experts.put_codes(0, "up", codes, scales[:, :1])
    with pytest.raises(InputError, match=r"expert 0 up: shape"):
        experts.put_codes(0, "up", codes[:32], scales)
    experts.put_codes(0, "up", codes, scales.view(torch.float8_e8m0fnu))
    with pytest.raises(InputError, match="given twice"):
        experts.put_codes(0, "up", codes, scales)
    with pytest.raises(InputError, match="no codes"):
        CpuExperts(ExpertSpec(1, 64, 64, 1), parse_format("f32")).put_codes(0, "up", codes, scales)


def test_replicated_experts_are_made_of_their_sources(generator: torch.Generator) -> None:
    """Of several pieces, so that experts mix; each piece is one of the sources' at its place."""
    spec = ExpertSpec(9, 768, 704, 1, has_bias=True)
    experts = CpuExperts(spec, parse_format("int8"))
    weights = random_weights(spec, generator)
    for expert in range(3):
        for part in experts._parts:
            experts.put(expert, part, weights[expert, part])
    with pytest.raises(InputError, match="the first 4: they are not complete"):
        experts.replicate(4)
    experts.replicate(3)
    assert experts.missing() == []
    with pytest.raises(InputError, match="experts from 3 on: given twice"):
        experts.replicate(3)
    stride, size, piece = experts._experts.stride, experts.whole_bytes, 256 * 1024
    raw = torch.frombuffer(experts.view(0, 9), dtype=torch.uint8).view(9, stride)[:, :size]
    assert size > 2 * piece
    used = set()
    for expert in range(3, 9):
        for at in range(0, size, piece):
            mine = raw[expert, at : at + piece]
            same = [s for s in range(3) if torch.equal(mine, raw[s, at : at + piece])]
            assert len(same) == 1
            used.add((expert, same[0]))
    assert len(used) > 6  # some expert has pieces of two
    out = experts.forward(
        torch.randn(2, 768, generator=generator), torch.tensor([[3], [8]]), torch.ones(2, 1)
    )
    assert out.isfinite().all()
    assert not torch.equal(out[0], out[1])


def test_a_view_keeps_the_experts() -> None:
    """Whatever is made of it."""
    experts = CpuExperts(ExpertSpec(4, 32, 16, 1), parse_format("int8"))
    owner = weakref.ref(experts)
    seen = torch.frombuffer(experts.view(1, 2), dtype=torch.uint8)[5:]
    del experts
    assert owner() is not None
    del seen
    assert owner() is None
