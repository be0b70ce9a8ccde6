"""Halves of a step that take turns, each by a lane of its own: a thread in the GPU's place for flags alone,
and the kernels' interpreter for the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from hetero.core import HeteroError, MachineError
from hetero.decode.decoder import Decoder
from hetero.decode.experts import DirectExperts
from hetero.decode.inputs import StepInputs
from hetero.decode.layer import PlainStream
from hetero.decode.turns import halves, joined, step
from hetero.engine.gpu.fuse import find_sites
from hetero.engine.gpu.graphs import CaptureError
from hetero.engine.gpu.port import LanePort
from hetero.engine.gpu.runner import GpuRunner
from hetero.engine.handoff import Handoff
from hetero.engine.synthetic import load_synthetic
from hetero.ops.gpu.hybrid import HybridExperts
from hetero.ops.gpu.hybrid_shared import HybridShared
from tests.engine.handoffs import POINTS, SPEC, STALL, THROW, make_experts
from tests.engine.paged import PagedDecoder
from tests.engine.test_step_with_handoff import SHAPE
from tests.engine.twins import PlayedFlags, TwinMeans
from tests.model.parity import relative

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has these on the device")


def runner_of(turns: bool, **options: Any) -> tuple[GpuRunner, PlayedFlags]:
    """Of three rows, everybody's experts given; the same weights every time."""
    torch.manual_seed(5)
    loaded = load_synthetic(SHAPE, dtype="bfloat16", overrides={"experts": "int8"}, threads=1)
    experts = [site.experts for site in find_sites(loaded.runnable.model, loaded.placement)]
    given = [DirectExperts(one) for one in experts]
    decoder = Decoder(loaded.runnable.model, given, slots=3, context=32, device="cpu")

    def routing(layer: int, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        chosen = torch.arange(4).expand_as(ids) + layer
        return torch.where(ids < 0, -1, chosen), torch.full_like(weights, 0.25)

    decoder.routing = routing
    handoff = Handoff(experts, rows=4, slots=4, lanes=2, numbers=decoder.moe_numbers, **options)
    played: Any = PlayedFlags(handoff)
    port = LanePort(played, (0, 1), 2)
    shared = HybridShared("cpu", moves=0)
    hybrid = [HybridExperts(one, layer, port, shared) for layer, one in enumerate(experts)]
    decoder.experts[:] = hybrid
    runner = GpuRunner(
        decoder,
        hybrid,
        handoff=handoff,
        slots=3,
        context=32,
        rows=(4,),
        shared=shared,
        port=port,
        halves=True,
    )
    if turns:
        runner._steps.turns.add(4)
    return runner, played


def test_halves_are_the_whole() -> None:
    """Two halves, of which the second has an idle row, say what one step does, but for the order of sums."""
    plain, one = runner_of(False)
    turns, two = runner_of(True)
    slots = [plain.claim() for _ in range(3)]
    assert slots == [turns.claim() for _ in range(3)]
    rows = [(slot, 3 + 5 * slot) for slot in slots]
    wanted, got = plain.step(rows), turns.step(rows)
    assert wanted.logits is not None
    assert got.logits is not None
    assert relative(got.logits, wanted.logits) < 1e-2
    assert one.log[:4] == [("submit", 0, 0), ("collect", 0, 0), ("submit", 0, 1), ("collect", 0, 1)]
    # One half's experts are away while the other half goes on.
    assert two.log[:8] == [
        ("submit", 0, 0), ("submit", 1, 0), ("collect", 0, 0), ("collect", 1, 0),
        ("submit", 0, 1), ("submit", 1, 1), ("collect", 0, 1), ("collect", 1, 1),
    ]  # fmt: skip
    assert turns.totals is not None
    assert turns.totals.layers == 4
    plain.close()
    turns.close()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter's numpy, for results that are NaN
def test_a_failure_at_one_half_is_the_steps() -> None:
    """An exception of the worker, then a worker that is stuck; the next step works."""
    runner, _ = runner_of(True, limit_s=0.3)
    rows = [(runner.claim(), 3 + index) for index in range(3)]
    assert runner.handoff is not None
    for kind, error in ((THROW, "layer 1: a fault"), (STALL, "no sign of life")):
        runner.handoff._channel.inject(POINTS["work"], kind, 1, 1, int(1.5e9))
        with pytest.raises(HeteroError, match=error):
            runner.step(rows)
    assert len(runner.step(rows).ids) == 3
    runner.close()


def test_a_port_of_two_lanes(generator: torch.Generator) -> None:
    handoff = Handoff(make_experts(2, generator), rows=2, slots=SPEC.top_k, lanes=4)
    port = LanePort(handoff, (0, 1), 2)

    def at(layer: int) -> int:
        found = port.payload(layer).x.data_ptr()
        return next(lane for lane in range(4) if handoff.payload(lane, layer).x.data_ptr() == found)

    for first in (0, 2):
        port.use(first // 2)
        assert at(0) == first
        port.record_submit(0)
        assert (at(0), at(1)) == (first + 1, first)
        port.record_submit(0)
        with pytest.raises(ValueError, match="layer 0: 2 submits are to be collected, and each needs a lane"):
            port.record_submit(0)
        port.record_collect(0)
        assert at(0) == first
        port.record_collect(0)
        with pytest.raises(ValueError, match="collect of layer 0, which was not submitted"):
            port.record_collect(0)
    one = LanePort(handoff)
    one.record_submit(1)
    with pytest.raises(ValueError, match="layer 1: 1 submits are to be collected"):
        one.payload(1)
    one.forget()
    assert one.payload(1) is not None
    handoff.close()


def test_rows_in_two_parts() -> None:
    for rows, sizes in ((1, [1]), (2, [1, 1]), (5, [3, 2]), (16, [8, 8])):
        numbers = torch.arange(3 * rows).view(3, rows)
        inputs = StepInputs(*numbers, torch.zeros(1, 1), torch.arange(rows * 2).view(rows, 2))
        parts = halves(inputs)
        assert [len(part.tokens) for part in parts] == sizes
        for name in ("tokens", "slots", "positions", "ple"):
            assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(inputs, name))


class Told:
    """A layer that says what it does."""

    def __init__(self, number: int, log: list[str]) -> None:
        self.number, self.log = number, log

    def begin_step(self, stream: Any, inputs: Any) -> Any:
        self.log.append(f"{inputs}{self.number} begins")

        def end() -> Any:
            self.log.append(f"{inputs}{self.number} ends")
            return stream

        return end


def test_the_order_of_two_halves() -> None:
    log: list[str] = []
    layers: list[Any] = [Told(number, log) for number in range(2)]
    parts: list[Any] = ["a", "b"]
    done = step(layers, [PlainStream(torch.ones(1, 2)), PlainStream(torch.zeros(2, 2))], parts)
    assert log == [
        "a0 begins", "b0 begins", "a0 ends", "a1 begins", "b0 ends", "b1 begins", "a1 ends", "b1 ends",
    ]  # fmt: skip
    whole, nothing = joined(done)
    assert nothing is None
    assert whole.tolist() == [[1.0, 1.0], [0.0, 0.0], [0.0, 0.0]]


class Halving(PagedDecoder):
    """Tells by how many lanes it was asked to go."""

    asked: tuple[int, ...] = ()

    def step(self, inputs: StepInputs, *, lanes: int = 1) -> Tensor:
        self.asked = (*self.asked, lanes)
        return super().step(inputs)


@pytest.mark.parametrize(("faster", "lanes"), [(True, 2), (False, 1)])
def test_what_is_faster_is_kept(faster: bool, lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = Halving(4, 32)
    runner = GpuRunner(
        decoder, [], handoff=None, slots=4, context=32, rows=(1, 4, 8), means=TwinMeans(), halves=True
    )
    runner.capture()
    times = iter([2.0, 1.0 if faster else 3.0])
    monkeypatch.setattr(runner, "_seconds", lambda size: next(times))
    assert set(runner.take_turns()) == {4}  # eight rows have no sequences to be tried with
    decoder.asked = ()
    runner.step([(runner.claim(), token) for token in (3, 4, 5)])
    assert decoder.asked == (lanes,)
    monkeypatch.undo()
    for slot in range(3):
        runner.release(slot)
    assert runner._seconds(4) > 0.0
    assert runner.take_turns(True) == {}
    decoder.asked = ()
    slots = [runner.claim() for _ in range(3)]
    runner.step([(slots[0], 1)])
    runner.step([(slot, 3) for slot in slots])
    assert decoder.asked == (1, 2)
    runner.close()


class TightMeans(TwinMeans):
    """Cannot capture the steps whose decoder goes by two lanes, for ``error``."""

    def __init__(self, decoder: Halving, error: Exception) -> None:
        super().__init__()
        self.decoder, self.error = decoder, error

    def graph(self, record: Callable[[], Tensor], pool: Any) -> Any:
        record()
        if self.decoder.asked[-1] == 2:
            raise self.error
        return super().graph(record, pool)


@pytest.mark.parametrize("error", [MachineError("no memory"), CaptureError("no such operator")])
@pytest.mark.parametrize("turns", [True, None])
def test_halves_that_cannot_be_captured(
    error: Exception, turns: bool | None, caplog: pytest.LogCaptureFixture
) -> None:
    decoder = Halving(4, 32)
    means = TightMeans(decoder, error)
    runner = GpuRunner(decoder, [], handoff=None, slots=4, context=32, rows=(1, 4), means=means, halves=True)
    runner.capture()
    assert runner.take_turns(turns) == {}
    assert [line for line in caplog.messages if "take turns" in line] == [
        f"halves of steps of 4 rows do not take turns: {error}"
    ]
    decoder.asked = ()
    replays = means.replays
    runner.step([(runner.claim(), token) for token in (3, 4, 5)])
    assert set(decoder.asked) == {1}
    assert means.replays == replays + 1  # still by a graph
    runner.close()
