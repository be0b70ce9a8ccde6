"""Parts of decoders by themselves, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("triton", reason="triton is not installed")

from hetero.decode.embedding import Embedding
from hetero.decode.inputs import Chunk
from hetero.decode.matrix import Part, Projection
from hetero.decode.prefill_attention import attend
from hetero.decode.prefill_delta import convolved, delta_rule
from hetero.formats import parse_format
from hetero.ops.gpu.attention import AttentionShape, AttentionWeights, PagedKeys
from hetero.ops.gpu.delta import DeltaShape, DeltaState, DeltaWeights
from hetero.ops.gpu.fused import Normed, plain_rows
from hetero.ops.gpu.linear import PackedLinear
from hetero.quant.pack import dequantise, quantise
from tests.decode.tiny import DEVICE, error

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []


def linear(n: int, k: int, fmt: str, generator: torch.Generator) -> tuple[nn.Module, torch.Tensor]:
    """(a layer with its own bias in a format, or one of torch; its weight and, as a last column, its bias,
    float64)."""
    made: nn.Module = nn.Linear(k, n)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator).bfloat16())
    weight, bias = (parameter.detach().double() for parameter in made.parameters())
    if fmt == "f32":
        return made.to(DEVICE), torch.cat([weight, bias[:, None]], 1)
    if fmt == "bf16":
        return made.bfloat16().to(DEVICE), torch.cat([weight, bias[:, None]], 1)
    packed = PackedLinear(made, parse_format(fmt), DEVICE)  # type: ignore[arg-type]
    weight = dequantise(packed.format, quantise(packed.format, weight.float()), n, k).double()
    packed.after_load()
    return packed, torch.cat([weight, bias[:, None]], 1)


@pytest.mark.parametrize(
    "formats", ["f32 f32", "bf16 bf16", "int8 int8", "int4 g64 int4 g64", "int8 f32", "fp8 fp8", "fp8 int8"]
)
def test_layers_of_one_input(formats: str, generator: torch.Generator) -> None:
    """Two layers, the rows of one in another order, neither of whole blocks."""
    half = len(formats) // 2
    first, second = formats[:half].strip(), formats[half:].strip()
    one, weight_one = linear(20, 96, first, generator)
    two, weight_two = linear(24, 96, second, generator)
    order = torch.randperm(24, generator=generator)
    both = Projection(Part(one, (12, 8)), Part(two, (5, 19), order))
    whole = torch.cat([weight_one, weight_two[order]])
    x = torch.randn(3, 96, generator=generator).to(DEVICE)
    wanted = torch.cat([x.double().cpu(), torch.ones(3, 1)], 1) @ whole.T
    few = both.few(Normed(plain_rows(both.format, x), x, x), torch.float32)
    many = both.many(x)
    assert [part.shape for part in few] == [part.shape for part in many] == [(3, n) for n in (12, 8, 5, 19)]
    assert error(torch.cat(few, 1).double().cpu(), wanted) < (0.02 if "int" in formats else 1e-5)
    # The interpreter cuts off decoded weights where a GPU rounds them to bf16.
    assert error(torch.cat(many, 1).double().cpu(), wanted) < (6e-3 if "int" in formats else 1e-5)


def test_weights_are_in_memory_once(generator: torch.Generator) -> None:
    """What is joined is part of the whole, what is put into another order is gone."""
    one, weight = linear(16, 64, "bf16", generator)
    packed, _ = linear(32, 64, "int8", generator)
    turned, _ = linear(32, 64, "int8", generator)
    bare = nn.Parameter(torch.randn(8, 64, generator=generator).bfloat16().to(DEVICE), requires_grad=False)
    before = bare.clone()
    floats, codes = Projection(Part(one, (16,)), Part(bare, (8,))), Projection(Part(packed, (32,)))
    (whole,) = floats.matrices
    assert torch.equal(bare, before)
    assert torch.equal(one.weight.double().cpu(), weight[:, :-1])
    assert {t.untyped_storage().data_ptr() for t in (one.weight, bare)} == {
        whole.packed.untyped_storage().data_ptr()
    }
    assert codes.matrices[0].packed.data_ptr() == packed.packed.data_ptr()
    Projection(Part(turned, (32,), torch.arange(31, -1, -1)))
    assert turned.packed.untyped_storage().nbytes() == 0


@pytest.mark.parametrize(("window", "sinks"), [(0, False), (5, False), (0, True), (20, True)])
def test_attention_of_pieces(window: int, sinks: bool, generator: torch.Generator) -> None:
    shape = AttentionShape(4, 2, 16, 8, window=window)
    cache = PagedKeys(shape, 9, 4, torch.float32, DEVICE)
    cache.keys.fill_(float("nan"))
    cache.values.fill_(float("nan"))
    sink = torch.randn(4, generator=generator).to(DEVICE) if sinks else None
    weights = AttentionWeights(torch.zeros(4, device=DEVICE), sinks=sink)
    pages = torch.randperm(9, generator=generator).int().view(1, 9).to(DEVICE)
    q, k, v = (torch.randn(31, heads, 16, generator=generator).to(DEVICE) for heads in (4, 2, 2))
    got = torch.cat(
        [
            attend(shape, weights, cache, (q[a:b], k[a:b], v[a:b]), Chunk(pages, 0, a, pages))
            for a, b in ((0, 7), (7, 8), (8, 31))
        ]
    )
    keys, values = (part.double().repeat_interleave(2, 1) for part in (k, v))
    scores = torch.einsum("thd,lhd->htl", q.double(), keys) / 4
    ago = torch.arange(31, device=DEVICE)[:, None] - torch.arange(31, device=DEVICE)
    scores = scores.masked_fill((ago < 0) | (ago >= (window or 31)), float("-inf"))
    if sink is not None:
        scores = torch.cat([scores, sink.double().view(4, 1, 1).expand(4, 31, 1)], 2)
    wanted = torch.einsum("htl,lhd->thd", torch.softmax(scores, 2)[..., :31], values)
    assert error(got.double(), wanted) < 1e-5


# On a GPU the sizes of the models that there are too, for which it takes other instructions.
DIMS = [(16, 24), (128, 128)] if DEVICE == "cuda" else [(16, 24)]


@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("hard", [False, True])
def test_recurrence_of_pieces(hard: bool, dims: tuple[int, int], generator: torch.Generator) -> None:
    """``hard``: keys all alike, and nothing fades: the powers of a chunk's system are then huge."""
    keys, values = dims
    shape = DeltaShape(2, 4, keys, values, 4)
    a, b = (torch.randn(72, 4, generator=generator) for _ in range(2))
    qkv = torch.randn(72, shape.channels, generator=generator)
    conv = torch.randn(shape.channels, 4, generator=generator)
    if hard:
        alike = slice(2 * keys, 4 * keys)
        a, b, qkv[:, alike], conv = a - 30, b + 6, qkv[:1, alike], conv.abs()
    weights = DeltaWeights(
        *(part.to(DEVICE) for part in (conv, torch.rand(4), torch.rand(4), torch.ones(values))), 1e-6
    )
    state = DeltaState(shape, 2, DEVICE)
    got = []
    for begin, end in ((0, 3), (3, 69), (69, 72)):
        piece = [part[begin:end].to(DEVICE) for part in (qkv, a, b)]
        acted = convolved(state, weights, piece[0], 1, begin)
        got.append(delta_rule(state, weights, (acted, piece[1], piece[2]), 1))

    padded = nn.functional.pad(qkv.double(), (0, 0, 3, 0))
    acted = nn.functional.silu(sum(padded[tap : tap + 72] * conv[:, tap].double() for tap in range(4)))  # type: ignore[arg-type]
    parts = acted.split([2 * keys, 2 * keys, 4 * values], 1)
    q, k, v = (part.view(72, -1, dim) for part, dim in zip(parts, (keys, keys, values), strict=True))
    q, k = (
        (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + 1e-6)).repeat_interleave(2, 1)
        for part in (q, k)
    )
    fade = torch.exp(
        -weights.a_log.double().cpu().exp()
        * nn.functional.softplus(a.double() + weights.dt_bias.double().cpu())
    )
    memory, wanted = torch.zeros(4, keys, values, dtype=torch.float64), []
    for time in range(72):
        memory = memory * fade[time][:, None, None]
        change = (v[time] - (memory * k[time][:, :, None]).sum(1)) * torch.sigmoid(b[time].double())[:, None]
        memory = memory + k[time][:, :, None] * change[:, None]
        wanted.append((memory * q[time][:, :, None]).sum(1) * keys**-0.5)
    assert error(torch.cat(got).double().cpu(), torch.stack(wanted)) < 1e-4
    assert error(state.states[1].double().cpu(), memory) < 1e-4
    assert not state.states[0].any()
    last = torch.stack([state.rings[1, :, time % 4] for time in range(68, 72)])
    assert torch.equal(last.cpu(), qkv[68:])


def test_embeddings(generator: torch.Generator) -> None:
    """Of a table on the device, and of one in the memory of the host."""
    for where in {"cpu", DEVICE}:
        table = torch.randn(19, 700, generator=generator).bfloat16().to(where)
        embedding = Embedding(table, torch.device(DEVICE))
        tokens = torch.randint(19, (5,), generator=generator)
        got = embedding(tokens.to(DEVICE))
        assert got.device.type == DEVICE
        assert torch.equal(got.cpu(), table.cpu()[tokens])
