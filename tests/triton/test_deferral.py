"""Which experts a step puts off, by the kernel that hands over; and layers in a row that do so."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from hetero.core import ExpertSpec
from hetero.cpu import CpuExperts
from hetero.formats import parse_format
from hetero.ops.gpu.deferral import parted, put_off
from hetero.ops.gpu.hybrid import DirectPort, HybridExperts
from hetero.ops.gpu.hybrid_shared import HybridShared
from hetero.ops.gpu.pinned import PinnedArena
from tests.cpu.reference import fill, random_weights

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
pytestmark = [
    *([pytest.mark.gpu] if CUDA else []),
    # Rows that nobody computes are whatever memory held, and numpy, which interprets kernels, warns of it.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
SPEC = ExpertSpec(12, 32, 16, 5)
ROWS, LAYERS = 3, 3


def layers_of(
    slots: int, share: float, defer: int, generator: torch.Generator
) -> tuple[list[HybridExperts], HybridShared]:
    """Layers whose experts take turns on one port; nothing moves, so that the test knows what sits where."""
    experts = [
        fill(CpuExperts(SPEC, parse_format("int8")), random_weights(SPEC, generator)) for _ in range(LAYERS)
    ]
    shared = HybridShared(DEVICE, share=share, moves=0, defer=defer)
    port = DirectPort(experts, ROWS, DEVICE, defer=True)
    made = [
        HybridExperts(one, layer, port, shared, slots=slots, arena=PinnedArena(one, DEVICE))
        for layer, one in enumerate(experts)
    ]
    for layer in made if slots else []:
        layer.seed(torch.rand(SPEC.num_experts, generator=generator).tolist())
    return made, shared


def chosen(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(ROWS, SPEC.hidden, generator=generator).bfloat16()
    ids = torch.rand(ROWS, SPEC.num_experts, generator=generator).topk(SPEC.top_k).indices
    ids[0, 1], ids[1, 2] = -1, SPEC.num_experts
    weights = torch.randint(1, 5, ids.shape, generator=generator).float() / 8  # some are equal
    return x, ids, weights


@pytest.mark.parametrize(("slots", "defer"), [(0, 2), (5, 1), (5, SPEC.top_k)])
def test_the_kernel_puts_off_what_the_reference_does(
    slots: int, defer: int, generator: torch.Generator
) -> None:
    """The sum of all layers is that of experts on the CPU, in the layers' own order of adding."""
    made, shared = layers_of(slots, 0.0, defer, generator)
    carry = torch.zeros(ROWS, SPEC.hidden)
    for number, hybrid in enumerate(made):
        x, ids, weights = chosen(generator)
        # Of a layer whose cache the test has filled: what is not there, is the CPU's.
        here = hybrid.cache.slot_of.cpu() >= 0 if slots else torch.zeros(SPEC.num_experts, dtype=torch.bool)
        real = (ids >= 0) & (ids < SPEC.num_experts)
        cpu_ids = torch.where(real & ~here[ids.clamp(0, SPEC.num_experts - 1)], ids, -1)
        marked = put_off(cpu_ids, weights, defer, SPEC.num_experts)
        last = number + 1 == LAYERS
        now, later = parted(marked, SPEC.num_experts, last=last)
        experts = hybrid.experts
        on_gpu = torch.where(cpu_ids < 0, ids, -1)
        wanted = sum(experts.forward(x, part, weights) for part in (on_gpu, now)) + carry
        hybrid.submit(x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE))
        assert torch.equal(hybrid.port.payload(number).ids.cpu(), torch.where(cpu_ids < 0, -1, marked))
        out = hybrid.collect().cpu()
        assert float((out - wanted).norm() / wanted.norm()) < 1e-5
        carry = experts.forward(x, later, weights)
    assert (carry == 0).all()
    assert shared.defer == defer


def test_nothing_is_put_off_unless_asked_for(generator: torch.Generator) -> None:
    made, _ = layers_of(0, 0.0, 0, generator)
    for hybrid in made:
        x, ids, weights = chosen(generator)
        hybrid.submit(x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE))
        wanted = hybrid.experts.forward(x, ids, weights)
        assert torch.equal(hybrid.collect().cpu(), wanted)
