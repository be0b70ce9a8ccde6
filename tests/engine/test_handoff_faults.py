"""A hand-off whose worker fails: the stream goes on, the step gets an error, the next one works."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hetero import _cpu, cpu
from hetero.cpu import CpuExperts
from hetero.engine.handoff import Handoff, HandoffError
from tests.engine.handoffs import DIE, POINTS, SPEC, STALL, THROW, Played, make_experts

LAYERS = 3
# Beyond what a worker that is well may have to wait for a core.
LIMIT_S = 0.4
STALL_S = 1.2


@pytest.fixture(autouse=True)
def small_pool() -> Iterator[None]:
    threads = cpu.threads()
    cpu.set_threads(2)
    yield
    cpu.set_threads(threads)


@pytest.fixture
def experts(generator: torch.Generator) -> list[CpuExperts]:
    return make_experts(LAYERS, generator)


@pytest.mark.parametrize("point", ["work", "computed"])
def test_exception(point: str, experts: list[CpuExperts], generator: torch.Generator) -> None:
    """It is the error of that lane's step alone, and costs no worker."""
    played = Played(experts, generator)
    for layer in range(LAYERS):
        for lane in range(2):
            played.inject(point, THROW, lane=lane, layer=layer)
            played.fresh()
            with pytest.raises(HandoffError, match=f"lane {lane}, layer {layer}: a fault that a test asked"):
                played.replay()
            assert played.out[lane, LAYERS - 1].isnan().all()
            played.check(lanes={1 - lane})
            played.step()
    assert played.handoff.workers == 1
    played.close()


def test_exception_at_two_lanes(experts: list[CpuExperts], generator: torch.Generator) -> None:
    played = Played(experts, generator, streams=True)
    for _ in range(20):
        played.inject("work", THROW, lane=0)
        played.inject("work", THROW, lane=1)
        with pytest.raises(HandoffError, match="lane 0"):
            played.replay()
        played.step()
    played.close()


@pytest.mark.parametrize("layer", [0, LAYERS - 1])
@pytest.mark.parametrize("point", ["seen", "work", "computed", "publish"])
def test_thread_ends(point: str, layer: int, experts: list[CpuExperts], generator: torch.Generator) -> None:
    """The worker's thread is gone in the middle of a layer, also of a publication."""
    played = Played(experts, generator)
    played.step()
    played.inject(point, DIE, lane=1, layer=layer)
    with pytest.raises(HandoffError, match="the worker's thread ended"):
        played.replay()
    for _ in range(20):
        played.step()
    assert played.handoff.workers == 2
    played.close()


def workers_alive() -> int:
    count = 0
    for path in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            count += path.read_text() == "hetero-handoff\n"
    return count


def test_thread_ends_behind_its_work(experts: list[CpuExperts], generator: torch.Generator) -> None:
    """Nothing is lost when it had published the step's last result: the next step starts another worker."""
    played = Played(experts, generator, lanes=1)
    for workers in (1, 2, 3):
        played.inject("published", DIE, layer=LAYERS - 1)
        played.step()
        assert played.handoff.workers == workers
        while workers_alive():
            time.sleep(0.01)
    played.close()


@pytest.mark.parametrize("point", ["seen", "work", "computed"])
def test_stuck_worker_comes_back(point: str, experts: list[CpuExperts], generator: torch.Generator) -> None:
    """Later steps are served while it is stuck, and nothing that it does afterwards reaches them."""
    played = Played(experts, generator, limit_s=LIMIT_S)
    played.inject(point, STALL, lane=0, layer=1, seconds=STALL_S)
    start = time.monotonic()
    with pytest.raises(HandoffError, match="gave no sign of life for 400 ms"):
        played.replay()
    served = 0
    while time.monotonic() < start + STALL_S + 0.1:
        played.step()
        served += time.monotonic() < start + STALL_S
    assert served > 0
    assert played.handoff.workers == 2
    played.close()


def test_stuck_while_it_publishes(experts: list[CpuExperts], generator: torch.Generator) -> None:
    """The stream is freed; steps are refused until the old worker cannot write any more."""
    played = Played(experts, generator, limit_s=LIMIT_S)
    played.inject("publish", STALL, lane=1, layer=1, seconds=4 * STALL_S)
    with pytest.raises(HandoffError, match="no sign of life"):
        played.replay()
    with pytest.raises(HandoffError, match="stuck while it publishes"):
        played.replay()
    for _ in range(50):
        try:
            played.replay()
            break
        except HandoffError:
            time.sleep(0.05)
    for _ in range(20):
        played.step()
    played.close()


def test_error_with_the_default_limit(experts: list[CpuExperts], generator: torch.Generator) -> None:
    """It comes while the worker is still stuck, and the next step works at once."""
    played = Played(experts, generator)
    played.inject("work", STALL, seconds=3.0)
    with pytest.raises(HandoffError, match="no sign of life for 1000 ms"):
        played.replay()
    played.step()
    played.close()


def test_pool_that_is_stuck(experts: list[CpuExperts], generator: torch.Generator) -> None:
    """Another step holds the pool and its lock and does not get on: the process gets a new pool."""
    played = Played(experts, generator, limit_s=LIMIT_S)
    played.step()
    stuck = threading.Thread(target=_cpu.pool_exercise, args=(1, 1_000_000, -1))  # two phases
    stuck.start()
    time.sleep(0.05)
    with pytest.raises(HandoffError, match="no sign of life"):
        played.replay()
    played.step()
    assert stuck.is_alive()
    assert cpu.threads() == 2
    stuck.join()
    played.step()
    played.close()


def test_long_work_is_no_failure(experts: list[CpuExperts], generator: torch.Generator) -> None:
    """A worker that waits for another's long step, which gets on, is alive."""
    played = Played(experts, generator, limit_s=LIMIT_S)
    busy = threading.Thread(target=_cpu.pool_exercise, args=(40, 20_000, -1))  # two phases of 0.4 s
    busy.start()
    time.sleep(0.05)
    played.step()
    busy.join()
    assert played.handoff.workers == 1
    played.close()


def launch_and_fail(played: Played) -> None:
    with played.handoff.step({0: 1, 1: 1}):
        played.backend.launch()
        raise ZeroDivisionError


def test_stream_that_never_ran(experts: list[CpuExperts], generator: torch.Generator) -> None:
    """What stands within a step keeps its own error, and the lanes are free again."""
    played = Played(experts, generator)
    for _ in range(5):
        with pytest.raises(ZeroDivisionError), played.handoff.step({0: 1, 1: 1}):
            raise ZeroDivisionError
        with pytest.raises(ZeroDivisionError):
            launch_and_fail(played)
        played.step()
    assert played.handoff.workers == 1
    played.close()


def test_graph_that_lacks_a_layer(experts: list[CpuExperts], generator: torch.Generator) -> None:
    handoff = Handoff(experts, rows=1, slots=SPEC.top_k, dtype=torch.float32, limit_s=0.05)
    handoff.record_submit(0, 0)
    handoff.record_collect(0, 0)
    handoff.record_submit(0, 1)
    twin = handoff.backend.twin  # type: ignore[attr-defined]

    def replay() -> None:
        with handoff.step({0: 1}):
            twin.launch()
            assert twin.synchronize(30.0)

    with pytest.raises(HandoffError, match="layer 2: was not submitted"):
        replay()
    handoff.record_collect(0, 1)
    handoff.record_submit(0, 2)
    with pytest.raises(HandoffError, match="layer 2: submitted and not collected"):
        replay()
    handoff.record_collect(0, 2)
    for _ in range(3):
        replay()
    handoff.close()


def test_close_with_a_stuck_worker(experts: list[CpuExperts], generator: torch.Generator) -> None:
    """It does not wait for it beyond the limit; memory that the worker may still read stays."""
    played = Played(experts, generator, limit_s=LIMIT_S)
    played.inject("work", STALL, seconds=1.0)
    with pytest.raises(HandoffError):
        played.replay()
    played.close()
    time.sleep(1.0)


def test_faults_at_random(experts: list[CpuExperts], generator: torch.Generator) -> None:
    """Delays everywhere, and at random a fault: every step has the right bits or an error."""
    played = Played(experts, generator, streams=True, limit_s=0.05)
    played.jitter(20e-6)
    points = list(POINTS)
    failed = 0
    for _ in range(80):
        draw = torch.randint(0, 1000, (3,), generator=generator).tolist()
        if draw[0] % 4 == 0:
            kind = draw[1] % 3
            point = points[1 + draw[2] % 2] if kind == THROW else points[draw[2] % 5]
            played.inject(point, kind, seconds=0.1)
        played.fresh()
        try:
            played.replay()
        except HandoffError:
            failed += 1
            continue
        played.check()
    played.jitter(0)
    for _ in range(50):
        try:
            played.step()
            break
        except HandoffError:
            time.sleep(0.01)
    else:
        pytest.fail("no step came through after the last fault")
    assert failed > 0
    played.close()
