"""Hybrid experts inside captured graphs: hand-off, cache, reads over PCIe and moves on a stream beside."""

from __future__ import annotations

import pytest
import torch

from hetero.core import ExpertSpec, HeteroError
from hetero.cpu import CpuExperts
from hetero.engine.gpu.port import LanePort
from hetero.engine.gpu.share import measure
from hetero.engine.handoff import Handoff
from hetero.engine.handoff_choice import GPU_BACKENDS, make_backend
from hetero.formats import parse_format
from hetero.ops.gpu.hybrid import HybridExperts
from hetero.ops.gpu.hybrid_shared import SIZES, HybridShared
from hetero.ops.gpu.pinned import pin_all
from tests.cpu.reference import fill, random_weights
from tests.triton.flips import EXACT, beyond, decoded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none"),
]

SPEC = ExpertSpec(32, 256, 128, 4)
ROWS, LAYERS = 4, 3


class Captured:
    """A graph of layers that each have inputs of their own."""

    def __init__(
        self, backend: str, slots: int, share: float, generator: torch.Generator, *, early: bool = True
    ) -> None:
        fmt = parse_format("int4")
        self.experts = [fill(CpuExperts(SPEC, fmt), random_weights(SPEC, generator)) for _ in range(LAYERS)]
        self.parts = [decoded(one) for one in self.experts]
        self.arenas = pin_all(self.experts, "cuda")
        self.handoff = Handoff(self.experts, rows=ROWS, slots=SPEC.top_k, device="cuda", backend=backend)
        self.shared = HybridShared("cuda", share=share, early=early, soon=early)
        port = LanePort(self.handoff)
        self.layers = [
            HybridExperts(one, number, port, self.shared, slots=slots, arena=arena)
            for number, (one, arena) in enumerate(zip(self.experts, self.arenas, strict=True))
        ]
        shape = LAYERS, ROWS, SPEC.top_k
        self.x = torch.zeros(LAYERS, ROWS, SPEC.hidden, dtype=torch.bfloat16, device="cuda")
        self.ids = torch.zeros(shape, dtype=torch.int64, device="cuda")
        self.weights = torch.zeros(shape, device="cuda")
        self.fresh(generator)
        # Kernels are compiled by a step without a graph.
        with self.handoff.step({0: ROWS}):
            self.sums = self.record()
            torch.cuda.synchronize()
        self.check()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.sums = self.record()

    def record(self) -> list[torch.Tensor]:
        sums = []
        for number, layer in enumerate(self.layers):
            layer.submit(self.x[number], self.ids[number], self.weights[number])
            sums.append(layer.collect())
        self.shared.join()
        return sums

    def fresh(self, generator: torch.Generator) -> None:
        """Routing that prefers the experts of the step before."""
        scores = torch.rand(*self.ids.shape[:2], SPEC.num_experts, generator=generator)
        scores.scatter_add_(2, self.ids.cpu() * (self.ids.cpu() >= 0), torch.full(self.ids.shape, 0.4))
        self.ids.copy_(scores.topk(SPEC.top_k).indices)
        self.ids[:, 0, 0] = -1
        self.x.copy_(torch.randn(self.x.shape, generator=generator))
        self.weights.copy_(torch.rand(self.weights.shape, generator=generator))
        torch.cuda.synchronize()

    def replay(self) -> None:
        with self.handoff.step({0: ROWS}):
            self.graph.replay()
            torch.cuda.synchronize()

    def check(self) -> None:
        for number, experts in enumerate(self.experts):
            given = [part[number].cpu() for part in (self.x, self.ids, self.weights)]
            x, ids, weights = given
            wanted = experts.forward(x, ids, weights)
            off = beyond(experts, self.parts[number], self.sums[number], wanted, (x, ids, weights))
            assert off < EXACT, number

    def close(self) -> None:
        self.handoff.close()
        for arena in self.arenas:
            arena.close()


SIZES_AND_SHARES = [(0, 1.0), (12, 0.0), (12, 0.4), (12, 1.0), (32, 0.5)]
# What the GPU does is the same by another backend.
CASES = [(*case, "memop") for case in SIZES_AND_SHARES] + [(12, 0.4, name) for name in GPU_BACKENDS[1:]]


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize(("slots", "share", "backend"), CASES)
def test_replays(slots: int, share: float, backend: str, early: bool, generator: torch.Generator) -> None:
    try:
        make_backend(backend, "cuda")
    except HeteroError as error:
        pytest.skip(f"{backend}: {error}")
    captured = Captured(backend, slots, share, generator, early=early)
    for _ in range(40):
        captured.fresh(generator)
        captured.replay()
        captured.check()
    counts = captured.layers[0].counts()
    assert counts.gpu + counts.pcie + counts.cpu > 40
    if slots == 12:
        assert counts.moved > 0
        assert (counts.stayed > 0) == (share > 0)
    captured.close()


@pytest.mark.parametrize("first", [0.0, 0.5])
def test_shares_change_between_replays(first: float, generator: torch.Generator) -> None:
    """Without another capture, whether or not PCIe had a share then; and a prompt between two steps sees the
    slots that moves have left."""
    captured = Captured("auto", 12, first, generator)
    before = captured.layers[1].counts()
    for share in (1.0, 0.5, 0.0, 1.0):
        captured.shared.set_share(share)
        for _ in range(10):
            captured.fresh(generator)
            captured.replay()
            captured.check()
        x = torch.randn(300, SPEC.hidden, generator=generator).bfloat16()
        ids = torch.rand(300, SPEC.num_experts, generator=generator).topk(SPEC.top_k).indices
        weights = torch.rand(300, SPEC.top_k, generator=generator)
        wanted = captured.experts[1].forward(x, ids, weights)
        got = captured.layers[1].prefill(x.cuda(), ids.cuda(), weights.cuda()).cpu()
        assert float((got - wanted).norm() / wanted.norm()) < 2e-2
    after = captured.layers[1].counts()
    assert after.pcie > before.pcie
    assert after.cpu > before.cpu
    captured.close()


@pytest.mark.parametrize("ahead", [True, False])
def test_prompts_whose_sums_streams_wait_for(ahead: bool, generator: torch.Generator) -> None:
    """All layers in a row, with an error of the CPU's in between, which the next layer raises."""
    captured = Captured("auto", 0, 0.0, generator)
    prefiller = captured.shared.prefiller
    prefiller.strategy, prefiller.ahead = "split", ahead
    ids = torch.rand(200, SPEC.num_experts, generator=generator).topk(SPEC.top_k).indices
    weights = torch.rand(200, SPEC.top_k, generator=generator)

    def check() -> None:
        x = torch.randn(200, SPEC.hidden, generator=generator).bfloat16()
        for layer, experts in zip(captured.layers, captured.experts, strict=True):
            wanted = experts.forward(x, ids, weights)
            got = layer.prefill(x.cuda(), ids.cuda(), weights.cuda()).cpu()
            assert float((got - wanted).norm() / wanted.norm()) < 2e-2

    def fails(*_: object) -> None:
        raise OSError("lost")

    check()
    captured.experts[0].forward = fails  # type: ignore[method-assign]
    given = torch.zeros(200, SPEC.hidden, dtype=torch.bfloat16, device="cuda"), ids.cuda(), weights.cuda()

    def all_layers() -> None:
        for layer in captured.layers:
            layer.prefill(*given)

    with pytest.raises(OSError, match="lost"):
        all_layers()
    del captured.experts[0].forward
    check()
    captured.replay()
    captured.check()
    captured.close()


def test_rates_are_measured_beside_each_other(generator: torch.Generator) -> None:
    fmt = parse_format("int4")
    experts = [fill(CpuExperts(SPEC, fmt), random_weights(SPEC, generator)) for _ in range(LAYERS)]
    arenas = pin_all(experts, "cuda")
    found = measure(experts, arenas, torch.device("cuda"), rows=4)
    assert len(found.sides) == len(SIZES)
    assert found.sides[3] == found.sides[4]  # eight and more rows as four would have
    for one in found.sides:
        assert 0.0 < one.cpu < 1e-3
        assert 0.0 < one.pcie < 1e-3
        assert 0.0 < one.own < 1e-3
    HybridShared("cuda").balance(found.sides)
    for arena in arenas:
        arena.close()
