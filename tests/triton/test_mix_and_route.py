"""Hyper-connections and routers against transformers' modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("triton", reason="triton is not installed")

from transformers.models.qwen4_exp import modeling_qwen4_exp as qwen4_exp

from hetero.formats import Format, parse_format
from hetero.ops.gpu.feed import feed
from hetero.ops.gpu.fused import plain_rows
from hetero.ops.gpu.mix import MixWeights, mix_rows
from hetero.ops.gpu.route import argmax, route

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [
    *([pytest.mark.gpu] if DEVICE == "cuda" else []),
    # The interpreter computes by numpy, which warns where a GPU overflows to infinity and goes on.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


def test_streams_of_two_blocks(generator: torch.Generator) -> None:
    torch.manual_seed(int(torch.randint(2**31, (1,), generator=generator)))
    config: Any = qwen4_exp.Qwen4ExpTextConfig(
        hidden_size=40, hc_count=3, hc_lowrank=10, num_hidden_layers=1, layer_types=["linear_attention"]
    )
    blocks, fmt = [], parse_format("int8")
    for _ in range(2):
        module: Any = qwen4_exp.Qwen4ExpTextGatedResidual(config)
        with torch.no_grad():
            for parameter in module.parameters():
                nn.init.normal_(parameter, std=0.3)
        blocks.append(module.float().to(DEVICE))
    hyper = torch.randn(5, 120, generator=generator).to(DEVICE)
    main, shared = torch.randn(2, 5, 40, generator=generator).to(DEVICE)
    gate = torch.randn(5, 5, generator=generator).to(DEVICE)[:, 3:4]  # a column among others
    out = main + shared * gate.sigmoid()
    streams = hyper.clone()
    with torch.no_grad():
        first, _, inject = blocks[0](hyper)
        second, after, last = blocks[1](hyper + (out.unsqueeze(-2) * inject.unsqueeze(-1)).flatten(-2))
        made: list[torch.Tensor] = []
        previous: tuple[Any, ...] = (None, None)
        added: dict[str, torch.Tensor] = {}
        for module in blocks:
            weights = MixWeights(
                module.hc_norm.weight,
                torch.cat([module.input_mix_weight_down.weight, module.block_inject_weight.weight]),
                module.input_mix_weight_up.weight,
                3,
                config.rms_norm_eps,
            )
            again = streams.clone()
            _, mixed, ours = mix_rows(Format("bf16"), weights, streams, *previous, **added)
            rows, x, _ = mix_rows(fmt, weights, again, *previous, **added)
            assert torch.equal(x, mixed)
            assert torch.equal(again, streams)
            assert all(map(torch.equal, rows, plain_rows(fmt, x)))
            previous, added = (main, ours), {"shared": shared, "gate": gate}
            made += [mixed, ours]
    for got, wanted in zip([*made, streams], [first, inject, second, last, after], strict=True):
        assert float((got - wanted).norm() / wanted.norm()) < 1e-5


def test_streams_in_bf16_on_tensor_cores(generator: torch.Generator) -> None:
    """Against float64 of the same numbers; more rows than one program takes."""
    count, hidden, rank, rows, fmt = 3, 72, 20, 9, parse_format("int8")

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).bfloat16().to(DEVICE)

    down, up, norm = (
        random(rank + count, count * hidden) / 8,
        random(count * hidden, rank),
        random(count * hidden),
    )
    streams, out, inject = random(rows, count * hidden), random(rows, hidden), random(rows, count).float()
    weights = MixWeights(norm, down, up, count, 1e-6)
    after = (
        streams.double().unflatten(1, (count, hidden)) + out.double()[:, None] * inject.double()[..., None]
    )
    rounded = after.bfloat16().double()
    normed = rounded * (rounded.pow(2).mean(2, keepdim=True) + 1e-6).rsqrt()
    normed *= 1 + norm.double().view(count, hidden)
    low, amount = (normed.flatten(1) @ down.double().T / count).split([rank, count], 1)
    gates = (nn.functional.silu(low) @ up.double().T).sigmoid().view(rows, count, hidden)
    rows_, x, given = mix_rows(fmt, weights, streams, out, inject)
    for got, wanted, limit in (
        (x, (gates * normed).mean(1), 1e-2),
        (given, 2 * amount.sigmoid(), 3e-3),
        (streams, after.flatten(1), 8e-3),
    ):
        assert float((got.double() - wanted).norm() / wanted.norm()) < limit
    assert all(map(torch.equal, rows_, plain_rows(fmt, x)))


@pytest.mark.parametrize("kind", ["softmax", "softmax without norm", "sigmoid with bias"])
def test_routes(kind: str, generator: torch.Generator) -> None:
    logits = torch.randn(5, 30, generator=generator).to(DEVICE)[:, 3:24]
    bias = torch.randn(21, generator=generator).to(DEVICE) if "bias" in kind else None
    norm = "without" not in kind
    scores = logits.sigmoid() if bias is not None else logits.softmax(-1)
    wanted_ids = (scores if bias is None else scores + bias).topk(4).indices
    wanted = scores.gather(1, wanted_ids)
    wanted = 2.5 * (wanted / wanted.sum(-1, keepdim=True) if norm else wanted)
    ids, weights = route(logits, 4, sigmoid=bias is not None, bias=bias, norm=norm, scale=2.5)
    assert torch.equal(ids, wanted_ids)
    assert torch.allclose(weights, wanted, rtol=1e-5)


def test_routes_nothing_of_idle_rows(generator: torch.Generator) -> None:
    logits = torch.randn(3, 9, generator=generator).to(DEVICE)
    ids, weights = route(logits, 2, slots=torch.tensor([4, -1, 0], device=DEVICE))
    wanted = route(logits, 2)
    assert torch.equal(ids[[0, 2]], wanted[0][[0, 2]])
    assert torch.equal(weights[[0, 2]], wanted[1][[0, 2]])
    assert ids[1].tolist() == [-1, -1]
    assert weights[1].tolist() == [0.0, 0.0]


def test_of_equals_the_first_is_the_largest(generator: torch.Generator) -> None:
    values = torch.randint(-9, 9, (3, 5000), generator=generator).float().to(DEVICE)
    values[1] = -1e30
    values[1, [77, 4900]] = -3.0
    values[2] = float("-inf")
    assert argmax(values[:, :4990]).tolist() == [int((values[0] == values[0].max()).nonzero()[0]), 77, 0]
    out = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    assert argmax(values[:1, 4000:].bfloat16(), out) is out
    assert int(out) == int((values[0, 4000:] == values[0, 4000:].max()).nonzero()[0])


@pytest.mark.parametrize("rows", [1, 3, 16])
def test_tokens_of_the_step_before(rows: int) -> None:
    """Those below 0 name a row of what was found, in any order; the others stay."""
    found = torch.randint(0, 2**40, (16,), device=DEVICE)
    order = torch.randperm(16, device=DEVICE)[:rows]
    known = torch.randint(0, 2**40, (rows,), device=DEVICE)
    later = torch.rand(rows, device=DEVICE) < 0.6
    tokens = torch.where(later, -1 - order, known)
    feed(tokens, found)
    assert torch.equal(tokens, torch.where(later, found[order], known))
