"""The hand-off inside captured CUDA graphs, by every backend that the driver allows."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from hetero.core import ExpertSpec, HeteroError
from hetero.cpu import CpuExperts
from hetero.engine.gpu.gate import FlagGate
from hetero.engine.handoff import Handoff, HandoffError
from hetero.engine.handoff_backends import GpuBackend, SpinBackend
from hetero.engine.handoff_choice import GPU_BACKENDS, make_backend
from hetero.formats import parse_format
from tests.cpu.reference import fill, random_weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none"),
]

SPEC = ExpertSpec(16, 256, 128, 4)
ROWS, LAYERS = 4, 3
POINT_WORK, THROW, STALL, DIE = 1, 0, 1, 2


class Captured:
    """A graph a lane: each layer adds the CPU's sum to the hidden state, which the next layer is given."""

    def __init__(self, backend: str, experts: list[CpuExperts], *, lanes: int = 1, in_place: bool = False):
        self.handoff = Handoff(
            experts, rows=ROWS, slots=SPEC.top_k, lanes=lanes, device="cuda", backend=backend
        )
        self.lanes = range(lanes)
        places = [(lane, layer) for lane in self.lanes for layer in range(LAYERS)]
        device = torch.device("cuda")
        self.x = [torch.zeros(ROWS, SPEC.hidden, dtype=torch.bfloat16, device=device) for _ in self.lanes]
        self.ids = {p: torch.zeros(ROWS, SPEC.top_k, dtype=torch.int64, device=device) for p in places}
        self.weights = {p: torch.zeros(ROWS, SPEC.top_k, device=device) for p in places}
        self.h = [torch.zeros(ROWS, SPEC.hidden, device=device) for _ in self.lanes]
        self.sums = {p: torch.zeros(ROWS, SPEC.hidden, device=device) for p in places}
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for lane in self.lanes:
                self.h[lane].copy_(self.x[lane])
            for layer in range(LAYERS):
                for lane in self.lanes:
                    self.submit(lane, layer, in_place)
                for lane in self.lanes:
                    self.collect(lane, layer, in_place)

    def submit(self, lane: int, layer: int, in_place: bool) -> None:
        ids, weights = self.ids[lane, layer], self.weights[lane, layer]
        if not in_place:
            self.handoff.record_submit(lane, layer, self.h[lane].bfloat16(), ids, weights)
            return
        to = self.handoff.payload(lane, layer)
        # Kernels, since torch copies by the copy engine where types agree.
        torch.add(self.h[lane].bfloat16(), 0, out=to.x)
        torch.add(ids, 0, out=to.ids)
        torch.mul(weights, 1, out=to.weights)
        self.handoff.record_submit(lane, layer)

    def collect(self, lane: int, layer: int, in_place: bool) -> None:
        out = self.sums[lane, layer]
        if in_place:
            torch.mul(self.handoff.record_collect(lane, layer), 1, out=out)
        else:
            self.handoff.record_collect(lane, layer, out)
        self.h[lane].add_(out)

    def fresh(self) -> None:
        for lane in self.lanes:
            self.x[lane].normal_()
        for ids in self.ids.values():
            ids.random_(-1, SPEC.num_experts + 1)
        for weights in self.weights.values():
            weights.uniform_()
        torch.cuda.synchronize()

    def replay(self, rows: int = ROWS) -> None:
        with self.handoff.step(dict.fromkeys(self.lanes, rows)):
            self.graph.replay()
            torch.cuda.synchronize()

    def check(self, rows: int = ROWS) -> None:
        """Every layer's sum, from the hidden state that the GPU has had there, to the bit."""
        for lane in self.lanes:
            h = self.x[lane][:rows].float()
            for layer in range(LAYERS):
                want = self.handoff.experts[layer].forward(
                    h.bfloat16().cpu(),
                    self.ids[lane, layer][:rows].cpu(),
                    self.weights[lane, layer][:rows].cpu(),
                )
                assert torch.equal(self.sums[lane, layer][:rows].cpu(), want), (lane, layer)
                h = h + self.sums[lane, layer][:rows]


@pytest.fixture(scope="module")
def experts() -> list[CpuExperts]:
    generator = torch.Generator().manual_seed(torch.seed() % 2**31)
    return [
        fill(CpuExperts(SPEC, parse_format("int8")), random_weights(SPEC, generator)) for _ in range(LAYERS)
    ]


@pytest.fixture(params=GPU_BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    try:
        make_backend(name, "cuda")
    except HeteroError as error:
        pytest.skip(f"{name}: {error}")
    return name


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("lanes", [1, 2])
def test_replays(backend: str, lanes: int, in_place: bool, experts: list[CpuExperts]) -> None:
    captured = Captured(backend, experts, lanes=lanes, in_place=in_place)
    for step in range(100):
        rows = step % ROWS + 1
        captured.fresh()
        captured.replay(rows)
        captured.check(rows)
    assert captured.handoff.workers == 1
    captured.handoff.close()


@pytest.mark.parametrize("kind", [THROW, STALL, DIE])
def test_failing_worker(backend: str, kind: int, experts: list[CpuExperts]) -> None:
    """The graph comes through, the step has an error within two seconds, and the next one works."""
    captured = Captured(backend, experts, lanes=2)
    captured.fresh()
    captured.replay()
    captured.handoff._channel.inject(POINT_WORK, kind, 1, 1, int(3e9))
    start = time.monotonic()
    # Only an exception is of one lane; a worker that is gone leaves both, and the first one tells.
    with pytest.raises(HandoffError, match="lane 1" if kind == THROW else "lane [01]"):
        captured.replay()
    assert time.monotonic() - start < 2.0
    for _ in range(10):
        captured.fresh()
        captured.replay()
        captured.check()
    captured.handoff.close()


def test_a_waiting_kernel_gives_up(experts: list[CpuExperts], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without anyone on the CPU side the GPU is free again after its own limit."""
    monkeypatch.setattr(SpinBackend, "limit_s", 0.2)
    captured = Captured("spin", experts)
    captured.fresh()
    start = time.monotonic()
    captured.graph.replay()  # no step was begun
    torch.cuda.synchronize()
    assert time.monotonic() - start < 2.0
    handoff = captured.handoff
    at = handoff._layout.fault(0)
    assert handoff._memory[at : at + 4].view(torch.int32).item() == 1
    handoff.close()


def test_a_gate_gives_up(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By whatever backend: what nobody opens in time ends, and says so; the next replay waits anew."""
    monkeypatch.setattr(GpuBackend, "limit_s", 0.2)
    made: Any = make_backend(backend, "cuda")
    gate = FlagGate(made, 1)
    host, there = torch.zeros(4, pin_memory=True), torch.full((4,), float("nan"), device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gate.record(0)
        there.copy_(host, non_blocking=True)
    for brought, opens in ((1.0, True), (2.0, False), (3.0, True)):
        gate.shut(0)
        start = time.monotonic()
        graph.replay()
        host.fill_(brought)
        if opens:
            gate.open(0)
        torch.cuda.synchronize()
        assert time.monotonic() - start < 2.0
        assert gate.failed(0) != opens
        if opens:
            assert there.tolist() == [brought] * 4


def test_auto_takes_the_faster_one_that_works() -> None:
    chosen = make_backend("auto", "cuda")
    works = []
    for name in GPU_BACKENDS:
        try:
            make_backend(name, "cuda")
        except HeteroError:
            continue
        works.append(name)
    assert chosen.name in (works if works == ["hostfunc"] else works[: -1 if "hostfunc" in works else None])
    for name in works:
        assert name == "hostfunc" or f"{name} " in chosen.why, chosen.why
    assert "us a layer" in chosen.why


def test_auto_is_tried_with_the_experts(experts: list[CpuExperts]) -> None:
    """Of the model at hand; the hand-off that was chosen works."""
    captured = Captured("auto", experts)
    backend = captured.handoff.backend
    assert backend.name == "hostfunc" or "with its experts" in backend.why
    captured.fresh()
    captured.replay()
    captured.check()
    captured.handoff.close()


def test_driver_attributes() -> None:
    from hetero.hw.cuda_driver import driver

    assert driver().version() >= 12000
