"""Every packed format on the GPU: one matrix for few rows, decoded weights, experts of several formats."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from hetero.core import Activation, ActKind, ExpertSpec
from hetero.cpu import CpuExperts
from hetero.formats import GPU_FORMATS, Format, parse_format
from hetero.ops.gpu import expert_kernels, launch, linear_kernels
from hetero.ops.gpu.codings import CODINGS
from hetero.ops.gpu.experts import GpuExperts
from hetero.ops.gpu.hybrid import DirectPort, HybridExperts
from hetero.ops.gpu.hybrid_shared import HybridShared
from hetero.ops.gpu.launch import ExpertLaunch, _cut, _reading
from hetero.ops.gpu.op import GpuExpertsOp
from hetero.ops.gpu.packed import capability, matrix_sizes
from hetero.ops.gpu.pinned import PinnedArena
from hetero.ops.gpu.tuning import cut_up
from hetero.quant.pack import dequantise, pack_codes
from tests.cpu.kernel_runner import GEMV, Matrix, random_scales, valid_codes
from tests.cpu.reference import fill, random_kept, random_routing, random_weights
from tests.triton.flips import EXACT, beyond, decoded

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [
    *([pytest.mark.gpu] if DEVICE == "cuda" else []),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of the interpreter's numpy
]
OAI = Activation(ActKind.SILU, alpha=1.702, gate_max=7.0, up_limit=7.0, up_offset=1.0)
N, K = 20, 280  # a block that is not whole, and a scale of 256 inputs that is not


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double().cpu() - b.double()).norm() / b.double().norm())


def one_matrix(fmt: Format, packed: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """float32 [1, N] of a row [1, K], by the kernel of experts."""
    made = ExpertLaunch(ExpertSpec(1, K, N, 1), fmt, torch.device(DEVICE))
    memory, rows = packed.to(DEVICE), made.rows(x.to(DEVICE))
    out = torch.full((1, N), float("nan"), device=DEVICE)
    code, unit = _reading(fmt)
    expert_kernels.gate_up[(-(-N // 16), 1)](
        memory, *rows, torch.tensor([memory.data_ptr()], device=DEVICE), out, 1,
        *(1.0, *4 * [float("inf")]), **matrix_sizes(fmt, N, K) | code,
        BIAS_AT=0, KIND=5, HAS_GATE=False, HAS_BIAS=False, ASM=capability(memory.device), NEAR=False,
        **_cut(cut_up(made.up["K"], fmt.code_bits, unit), unit),
    )  # fmt: skip
    return out.cpu()


@pytest.mark.parametrize("name", GPU_FORMATS)
def test_one_matrix_equals_the_cpu(name: str, generator: torch.Generator) -> None:
    """Against the extension's kernel, which other tests compare with float64, and with float64 as well."""
    fmt = parse_format(name)
    matrix = Matrix.gaussian(fmt, N, K, generator)
    x = torch.randn(1, K, generator=generator)
    x[:, 40:80] *= 30
    got = one_matrix(fmt, torch.from_numpy(matrix.packed), x)
    wanted = torch.from_numpy(matrix.run("scalar", GEMV, x.numpy())[:, :N])
    assert relative(got, wanted) < EXACT
    assert relative(got, torch.from_numpy(matrix.evaluate(x.numpy()))) < EXACT


@pytest.mark.parametrize("name", ["int8a", "mxfp4", "q2_k", "q6_k", "iq4_xs"])
def test_extreme_codes(name: str, generator: torch.Generator) -> None:
    """Rows of the highest and of the lowest codes alone, by the largest activations of either sign."""
    fmt = parse_format(name)
    codes = torch.tensor(sorted(valid_codes(fmt)), dtype=torch.uint8)
    rows = codes[torch.randint(0, 2, (N, 1), generator=generator) * (len(codes) - 1)].expand(N, K)
    scales, extra = random_scales(fmt, N, K, generator)
    matrix = Matrix(fmt, pack_codes(fmt, rows.contiguous(), scales, extra), N, K)
    x = torch.full((1, K), 3.0)
    x[:, 150:] = -3.0
    got = one_matrix(fmt, torch.from_numpy(matrix.packed), x)
    assert relative(got, torch.from_numpy(matrix.run("scalar", GEMV, x.numpy())[:, :N])) < EXACT


@pytest.mark.parametrize("name", ["int4", "int8"])
def test_integers_by_units(name: str, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    fmt = parse_format(name)
    matrix = Matrix.gaussian(fmt, N, K, generator)
    x = torch.randn(1, K, generator=generator)
    monkeypatch.setattr(launch, "INTEGERS_BY_UNITS", True)
    got = one_matrix(fmt, torch.from_numpy(matrix.packed), x)
    assert relative(got, torch.from_numpy(matrix.run("scalar", GEMV, x.numpy())[:, :N])) < EXACT


@pytest.mark.parametrize("name", [name for name in GPU_FORMATS if name != "bf16"])
def test_decoded_weights(name: str, generator: torch.Generator) -> None:
    """To the bit where nothing contracts products and sums, else to a bf16 of another rounding."""
    fmt = parse_format(name)
    packed = torch.from_numpy(Matrix.gaussian(fmt, N, K, generator).packed)
    out = torch.full((N, K), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    linear_kernels.unpacked[(1, -(-K // 64))](
        packed.to(DEVICE), 0, N, out, K,
        BLOCKS=2, DEPTH=64, TWIN=DEVICE == "cpu", **matrix_sizes(fmt, N, K),
    )  # fmt: skip
    wanted = dequantise(fmt, packed, N, K).bfloat16()
    if DEVICE == "cpu":
        assert torch.equal(out, wanted)
    assert ((out.cpu().float() - wanted.float()).abs() <= 2.0**-7 * wanted.float().abs()).all()


def test_numbers_of_tables_are_found_as_sums_of_two() -> None:
    """As the GPU's instruction gives bytes: where a pick's highest bit is set, the sign of the byte alone."""
    for name, coding in CODINGS.items():
        if not coding.table:
            continue
        halves = torch.tensor(coding.picks).view(torch.int8).view(-1, 8)
        for code in valid_codes(parse_format(name)) if len(coding.table) == 16 else range(8):
            first = int(halves[0, code & 7])
            number = first if code < 8 else first >> 7
            if len(halves) == 2:
                second = int(halves[1, code & 7])
                number += second if code >= 8 else second >> 7
            assert number + coding.lessened == coding.table[code], (name, code)


def both(spec: ExpertSpec, up: str, down: str, generator: torch.Generator) -> tuple[CpuExperts, GpuExperts]:
    """The same experts on the CPU and on the device."""
    formats = parse_format(up), parse_format(down)
    theirs = GpuExperts(spec, formats[0], DEVICE, formats[1])
    ours, weights = CpuExperts(spec, *formats), random_weights(spec, generator)
    for number, ((expert, part), weight) in enumerate(weights.items()):
        if theirs.format_of(part).kept_only:  # as ``fill`` makes them
            made = torch.Generator().manual_seed(number)
            theirs.put_codes(expert, part, *random_kept(theirs.format_of(part), *weight.shape, made))
        else:
            theirs.put(expert, part, weight)
    assert theirs.missing() == []
    return fill(ours, weights), theirs


def test_blocks_of_a_file_become_the_same_bytes(generator: torch.Generator) -> None:
    pytest.importorskip("gguf")
    from tests.cpu.ggml_blocks import random_blocks

    spec, formats = ExpertSpec(1, 256, 256, 1), (parse_format("q4_k"), parse_format("q6_k"))
    op, ours = GpuExpertsOp(spec, formats[0], DEVICE, formats[1]), CpuExperts(spec, *formats)
    rng = np.random.default_rng(int(torch.randint(2**31, (), generator=generator)))
    for part, kind in (("gate", "Q4_K"), ("up", "Q4_K"), ("down", "Q6_K")):
        blocks = random_blocks(kind, 256, 256, rng)
        assert op.format_of(part) == ours.format_of(part)  # type: ignore[arg-type]
        op.put_ggml(0, part, kind, torch.from_numpy(blocks))
        ours.put_ggml(0, part, kind, blocks)  # type: ignore[arg-type]
    wanted = torch.empty(ours.whole_bytes, dtype=torch.uint8)
    ours.save(0, wanted.numpy().data)
    assert op.missing() == []
    assert torch.equal(op.backend._memory[0].cpu(), wanted)


def test_experts_with_an_order_of_their_own(generator: torch.Generator) -> None:
    """Those of act-order checkpoints, with biases before the order; some in slots, some in host memory.

    A code on a border may be another one, which is far less than inputs in another order or in other groups.
    """
    spec = ExpertSpec(9, 72, 40, 2, OAI, has_bias=True)
    formats = parse_format("int4 g64 ordered"), parse_format("int8z g32 ordered")
    ours, theirs = CpuExperts(spec, *formats), GpuExperts(spec, formats[0], DEVICE, formats[1])
    for (expert, part), weight in random_weights(spec, generator).items():
        given = (weight,)
        put = "put"
        if not part.endswith("_bias"):
            packed = formats[part == "down"].packed
            given, put = random_kept(packed, *weight.shape, generator), "put_codes"  # type: ignore[assignment]
        for experts in (ours, theirs):
            getattr(experts, put)(expert, part, *given)
    assert theirs.missing() == [(expert, "order") for expert in range(spec.num_experts)]
    for expert in range(spec.num_experts):
        order = torch.randperm(spec.hidden, generator=generator).int()
        for experts in (ours, theirs):
            experts.put(expert, "order", order)
    assert theirs.missing() == []
    x, ids, weights = random_routing(spec, 2, generator)
    ids[1, 0] = -1
    wanted = ours.forward(x, ids, weights)
    got = theirs.forward(x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE))
    assert relative(got, wanted) < 1e-3
    many = random_routing(spec, 20, generator)
    got = theirs.forward(*(part.to(DEVICE) for part in many)).cpu()
    assert relative(got, ours.forward(*many)) < 2e-2
    port, shared = DirectPort([ours], 4, DEVICE), HybridShared(DEVICE, share=0.6)
    hybrid = HybridExperts(ours, 0, port, shared, slots=8, arena=PinnedArena(ours, DEVICE))
    wanted = ours.forward(x.bfloat16(), ids, weights)
    hybrid.submit(x.bfloat16().to(DEVICE), ids.to(DEVICE), weights.to(DEVICE))
    assert relative(hybrid.collect(), wanted) < 1e-3


MIXED = [
    ("q4_k", "q6_k", ExpertSpec(2, 40, 200, 1)),
    ("mxfp4", "mxfp4", ExpertSpec(2, 96, 48, 1, OAI, has_bias=True)),
    ("fp8", "int4", ExpertSpec(2, 40, 192, 1)),
    ("int4z g64", "fp8_row", ExpertSpec(2, 72, 40, 2, has_gate=False)),
]


@pytest.mark.parametrize(("up", "down", "spec"), MIXED)
def test_mixed_formats(up: str, down: str, spec: ExpertSpec, generator: torch.Generator) -> None:
    ours, theirs = both(spec, up, down, generator)
    x, ids, weights = random_routing(spec, 1, generator)
    got = theirs.forward(x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE))
    wanted = ours.forward(x, ids, weights)
    assert beyond(ours, decoded(ours), got, wanted, (x, ids, weights)) < EXACT
    # Many rows round activations and weights to bf16.
    x, ids, weights = random_routing(spec, 20, generator)
    ids[1, 0], ids[2] = -1, spec.num_experts
    got = theirs.forward(x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE)).cpu()
    wanted = ours.forward(x, ids, weights)
    assert relative(got, wanted) < 2e-2
    assert (got[2] == 0).all()
