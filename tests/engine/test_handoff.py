"""The hand-off between a stream and the CPU experts, a thread in the stream's place: same bits, any order."""

from __future__ import annotations

import multiprocessing
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hetero import _cpu, cpu
from hetero.core import InputError
from hetero.cpu import CpuExperts
from hetero.engine.handoff import Handoff, HandoffError
from hetero.trace import EXPERTS, recorder
from tests.engine.handoffs import PATIENT_S, SPEC, Played, make_experts


@pytest.fixture(autouse=True)
def small_pool() -> Iterator[None]:
    threads = cpu.threads()
    cpu.set_threads(2)
    yield
    cpu.set_threads(threads)


@pytest.fixture
def experts(generator: torch.Generator) -> list[CpuExperts]:
    return make_experts(3, generator)


def test_ten_thousand_replays(experts: list[CpuExperts], generator: torch.Generator) -> None:
    """Two lanes on one stream; most replays have fewer rows than the graph."""
    played = Played(experts[:2], generator, limit_s=PATIENT_S)
    for _ in range(10_000):
        played.step({lane: random.randint(1, played.handoff.rows) for lane in range(2)})
    assert played.handoff.workers == 1
    played.close()


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("late", [False, True])
def test_any_timing(streams: bool, late: bool, experts: list[CpuExperts], generator: torch.Generator) -> None:
    """Random delays everywhere; lanes on one stream or two; results collected at once or a layer later."""
    played = Played(experts, generator, streams=streams, late=late, limit_s=PATIENT_S)
    for delay in (0.0, 20e-6, 200e-6):
        played.jitter(delay)
        for _ in range(60):
            played.step()
    played.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_types_and_formats(dtype: torch.dtype, generator: torch.Generator) -> None:
    for fmt in ("f32", "int4"):
        played = Played(
            make_experts(2, generator, fmt), generator, dtype=dtype, ids_dtype=torch.int32, depth=1
        )
        for _ in range(20):
            played.step()
        played.close()


def test_a_lane_alone(experts: list[CpuExperts], generator: torch.Generator) -> None:
    """A step of one lane needs nothing of the other, and lanes may begin one after the other."""
    played = Played(experts, generator, streams=True)
    for lane in (1, 0, 1):
        played.fresh()
        with played.handoff.step({lane: 2}):
            played.backend.twins[lane].launch()
            assert played.backend.twins[lane].synchronize(30.0)
        played.check({lane: 2}, {lane})
    played.close()


def test_rows_that_do_not_count_are_left_alone(experts: list[CpuExperts], generator: torch.Generator) -> None:
    played = Played(experts, generator, lanes=1)
    played.step()
    before = played.handoff.payload(0, 2).result.clone()
    played.step({0: 1})
    assert torch.equal(played.handoff.payload(0, 2).result[1:], before[1:])
    played.close()


def test_kernels_may_fill_the_payload(experts: list[CpuExperts], generator: torch.Generator) -> None:
    """Without tensors nothing is copied: what stands in the slot is computed, and the result stays there."""
    handoff = Handoff(experts[:1], rows=2, slots=SPEC.top_k, dtype=torch.float32)
    handoff.record_submit(0, 0)
    result = handoff.record_collect(0, 0)
    x, ids, weights, _ = handoff.payload(0, 0)
    x.normal_(generator=generator)
    ids.random_(0, SPEC.num_experts, generator=generator)
    weights.uniform_(generator=generator)
    backend: Any = handoff.backend
    with handoff.step({0: 2}):
        backend.launch()
        backend.synchronize()
    assert torch.equal(result, experts[0].forward(x, ids, weights))
    handoff.close()


def test_stop_and_restart(experts: list[CpuExperts], generator: torch.Generator) -> None:
    for _ in range(5):
        played = Played(experts, generator)
        played.step()
        played.close()
        played.close()
        with pytest.raises(HandoffError, match="closed"):
            played.replay()


def test_two_channels_share_the_pool(experts: list[CpuExperts], generator: torch.Generator) -> None:
    both = [Played(experts, torch.Generator().manual_seed(i), limit_s=PATIENT_S) for i in range(2)]

    def many(played: Played) -> None:
        for _ in range(100):
            played.step()

    threads = [threading.Thread(target=many, args=(played,)) for played in both]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for played in both:
        played.step()
        played.close()


def test_pool_of_another_size_between_steps(experts: list[CpuExperts], generator: torch.Generator) -> None:
    played = Played(experts, generator)
    for threads in (1, 3, 2):
        cpu.set_threads(threads)
        for _ in range(20):
            played.step()
    played.close()


def test_idle_uses_no_cpu(experts: list[CpuExperts], generator: torch.Generator) -> None:
    played = Played(experts, generator)
    for _ in range(5):
        played.step()
    time.sleep(0.05)
    start = time.process_time()
    time.sleep(0.3)
    # One thread that spins would use 0.3 s.
    assert time.process_time() - start < 0.1
    played.close()


def test_functions_of_the_backend_hostfunc(experts: list[CpuExperts], generator: torch.Generator) -> None:
    """The driver would call them between the stream's operations; here this thread does."""
    handoff = Handoff(experts[:1], rows=1, slots=SPEC.top_k, dtype=torch.float32)
    x, ids, weights, result = handoff.payload(0, 0)
    base, layout = handoff._base, handoff._layout
    for _ in range(50):
        x.normal_(generator=generator)
        ids.random_(0, SPEC.num_experts, generator=generator)
        weights.uniform_(generator=generator)
        with handoff.step({0: 1}):
            _cpu.host_call(cpu.HOST_SUBMIT, base + layout.submit(0, 0))
            _cpu.host_call(cpu.HOST_COLLECT, base + layout.done(0, 0))
        assert torch.equal(result, experts[0].forward(x, ids, weights))
    handoff.close()


def in_child(handoff: Handoff, queue: Any) -> None:
    try:
        handoff.begin(0, 1)
    except HandoffError as error:
        queue.put(str(error))
    handoff.close()
    cpu.set_threads(2)
    queue.put(int(_cpu.pool_exercise(4, 0, -1)))


def test_the_child_of_a_fork_has_no_worker(experts: list[CpuExperts], generator: torch.Generator) -> None:
    played = Played(experts, generator)
    played.step()
    fork = multiprocessing.get_context("fork")
    queue = fork.SimpleQueue()
    child = fork.Process(target=in_child, args=(played.handoff, queue))
    child.start()
    assert "belongs to the process" in queue.get()
    assert queue.get() == 8
    child.join(30)
    assert child.exitcode == 0
    played.step()
    played.close()


def test_times_and_trace(experts: list[CpuExperts], generator: torch.Generator) -> None:
    played = Played(experts, generator, lanes=1)
    played.fresh()
    since = recorder.next_number() + 1
    start = time.perf_counter_ns()
    with recorder.recording():
        played.replay()
    times = played.handoff.times(0)
    assert len(times) == len(experts)
    last = start
    for layer, one in enumerate(times):
        assert last <= one.looked <= one.seen <= one.began <= one.ended <= one.published
        last = one.published
        ids = played.ids[0, layer]
        assert one.experts == len({i for i in ids.flatten().tolist() if 0 <= i < SPEC.num_experts})
    assert last <= time.perf_counter_ns()
    totals = played.handoff.totals(0)
    assert totals.layers == len(experts)
    whole = (times[-1].published - times[0].looked) / 1e9
    assert totals.wait_s + totals.work_s + totals.handoff_s == pytest.approx(whole)
    spans = [span for span in recorder.spans(since) if span.name == EXPERTS]
    assert [(span.lane, span.layer, span.tokens) for span in spans] == [("cpu", i, 3) for i in range(3)]
    one_expert = experts[0].nbytes // SPEC.num_experts
    assert [span.nbytes for span in spans] == [one.experts * one_expert for one in times]
    played.close()


def test_wrong_use(experts: list[CpuExperts], generator: torch.Generator) -> None:
    handoff = Handoff(experts, rows=2, slots=SPEC.top_k, dtype=torch.float32)
    x, ids, weights = torch.zeros(2, SPEC.hidden), torch.zeros(2, 4, dtype=torch.int64), torch.zeros(2, 4)
    for bad in (
        (x.double(), ids, weights),
        (x, ids.int(), weights),
        (x, ids, weights[:1]),
        (x.T, ids, weights),
    ):
        with pytest.raises(ValueError, match="must be contiguous"):
            handoff.record_submit(0, 0, *bad)
    with pytest.raises(ValueError, match="room for 2"):
        handoff.record_submit(0, 0, x.repeat(2, 1), ids.repeat(2, 1), weights.repeat(2, 1))
    with pytest.raises(ValueError, match="not submitted"):
        handoff.record_collect(0, 0)
    handoff.record_submit(0, 0, x, ids, weights)
    handoff.record_submit(0, 1, x, ids, weights)
    with pytest.raises(ValueError, match="layer 2 before the collect of layer 0"):
        handoff.record_submit(0, 2, x, ids, weights)
    with pytest.raises(ValueError, match="lane 1"):
        handoff.record_submit(1, 0)
    with pytest.raises(ValueError, match="3 rows"):
        handoff.begin(0, 3)
    handoff.begin(0, 1)
    with pytest.raises(HandoffError, match="has not ended"):
        handoff.begin(0, 1)
    handoff.end(0, abort=True)
    handoff.close()
    for options, message in (
        ({"dtype": torch.float64}, "float64"),
        ({"slots": 0}, "at least one"),
        ({"backend": "memop"}, "needs a CUDA device"),
        ({"backend": "wire"}, "no hand-off 'wire'"),
    ):
        with pytest.raises(InputError, match=message):
            Handoff(experts, **{"rows": 1, "slots": 4, **options})
