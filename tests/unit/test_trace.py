"""The recorder: what the ring keeps, which steps are whole, and what is made of them."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import numpy as np
import pytest

from hetero import trace, trace_file
from hetero.core import InputError
from hetero.trace import COPY, DENSE, EXPERTS, SHARED, Reading, Recorder, Span, summarise, whole_steps

MS = 1_000_000


def known_step(number: int, step: int, start: int) -> list[Span]:
    """Ten milliseconds: dense 1, experts 3, dense 1, copy 1, experts 2 beside 1 of shared work, dense 2."""
    at = start
    return [
        Span(number, "cpu", EXPERTS, 0, step, at + 1 * MS, at + 4 * MS, 300, 1),
        Span(number + 1, "pcie", COPY, 1, step, at + 5 * MS, at + 6 * MS, 40, 1),
        Span(number + 2, "gpu", SHARED, 1, step, at + 6 * MS, at + 7 * MS),
        Span(number + 3, "cpu", EXPERTS, 1, step, at + 6 * MS, at + 8 * MS, 200, 1),
        Span(number + 4, "step", "gpu", -1, step, at, at + 10 * MS, 0, 1),
    ]


def test_nothing_is_recorded_outside_a_step_that_is_watched() -> None:
    recorder = Recorder(8)
    assert not recorder.active
    with recorder.recording():
        assert recorder.active
        recorder.end_step("cpu")  # of a step that began before
        with recorder.recording():
            pass
        assert recorder.active
    assert not recorder.active
    assert recorder.spans() == []


def test_step_that_was_under_way_when_recording_began_is_left_out() -> None:
    recorder = Recorder(8)
    with recorder.recording():
        recorder.begin_step(1)
    with recorder.recording():
        recorder.add(("cpu", EXPERTS, 3, 10, 20, 1, 5))
        recorder.end_step("cpu")
        recorder.begin_step(2)
        recorder.end_step("cpu")
    steps = whole_steps(recorder.spans())
    assert [step.span.tokens for step in steps] == [2]
    assert [part.name for part in steps[0].parts] == [DENSE]


def test_full_ring_keeps_the_newest_in_order() -> None:
    recorder = Recorder(8)
    for count in range(21):
        recorder.add(("cpu", EXPERTS, count, count, count + 1, 1, 0))
    assert [span.layer for span in recorder.spans()] == list(range(13, 21))
    assert [span.layer for span in recorder.spans(since=18)] == [18, 19, 20]
    assert recorder.next_number() == 21


def test_larger_ring_goes_on_with_the_numbers() -> None:
    recorder = Recorder(4)
    recorder.add(("cpu", EXPERTS, 0, 0, 1, 1, 0))
    with recorder.recording(capacity=64):
        for count in range(40):
            recorder.add(("cpu", EXPERTS, count, 0, 1, 1, 0))
    assert [span.number for span in recorder.spans()] == list(range(1, 41))


def test_writers_on_many_threads_lose_nothing() -> None:
    recorder = Recorder(4096)
    seen: list[int] = []

    def write(layer: int) -> None:
        for count in range(500):
            recorder.add(("cpu", EXPERTS, layer, count, count + 1, 1, 0))

    threads = [threading.Thread(target=write, args=(layer,)) for layer in range(8)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        seen.append(len(recorder.spans()))
    for thread in threads:
        thread.join()
    spans = recorder.spans()
    assert [span.number for span in spans] == list(range(4000))
    for layer in range(8):
        assert [span.start for span in spans if span.layer == layer] == list(range(500))
    assert seen == sorted(seen)


def test_experts_are_counted_once_each_and_only_real_ones() -> None:
    recorder = Recorder(8)
    ids = np.array([[0, 3], [3, 8], [-1, 7]])
    recorder.add(("cpu", EXPERTS, 0, 0, 1, ids, Reading(experts=8, expert_bytes=10)))
    (span,) = recorder.spans()
    assert (span.nbytes, span.tokens) == (30, 3)


def test_dense_work_is_all_that_no_other_span_tells_of() -> None:
    (step,) = whole_steps(known_step(0, 0, 100))
    dense = [
        (part.layer, part.lane, part.start - 100, part.end - 100) for part in step.parts if part.name == DENSE
    ]
    assert dense == [(0, "gpu", 0, MS), (1, "gpu", 4 * MS, 5 * MS), (-1, "gpu", 8 * MS, 10 * MS)]


def test_step_whose_beginning_is_lost_is_left_out() -> None:
    first, second = known_step(0, 7, 0), known_step(5, 8, 10 * MS)
    assert [step.span.step for step in whole_steps(first + second)] == [7, 8]
    assert [step.span.step for step in whole_steps(first[1:] + second)] == [8]
    assert [step.span.step for step in whole_steps(second, since=5)] == [8]
    assert [step.span.step for step in whole_steps(second, since=4)] == []
    assert [step.span.step for step in whole_steps(first + second[:-1])] == [7]


def test_summary_of_known_spans() -> None:
    steps = whole_steps(known_step(0, 0, 0) + known_step(5, 1, 20 * MS))
    summary = summarise(steps)
    assert summary.steps == 2
    assert summary.tokens == 2
    assert summary.seconds == pytest.approx(0.020)
    assert summary.experts_s == pytest.approx(0.010)
    assert summary.dense_s == pytest.approx(2 * (0.004 + 0.001))
    assert summary.pcie_s == pytest.approx(0.002)
    assert (summary.expert_bytes, summary.pcie_bytes) == (1000, 80)
    assert summary.line().startswith("2 steps, 10.0 ms each: CPU experts 50%, dense 50%, PCIe 10%;")
    assert summarise([]).line() == "no whole step was recorded"


def test_chrome_trace_is_what_the_viewer_reads() -> None:
    body = json.loads(json.dumps(trace_file.chrome_trace(known_step(0, 0, 5 * MS))))
    events = body["traceEvents"]
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert list(lanes.values()) == list(trace.LANES)
    complete = [e for e in events if e["ph"] == "X"]
    assert len(complete) + sum(e["ph"] == "M" for e in events) == len(events)
    for event in complete:
        assert event["ts"] >= 0
        assert event["dur"] > 0
        assert lanes[event["tid"]] == event["cat"]
    (step,) = [e for e in complete if e["cat"] == "step"]
    assert (step["name"], step["ts"], step["dur"]) == ("step 0", 0, 10_000)
    first = next(e for e in complete if e["name"] == EXPERTS)
    assert (first["ts"], first["dur"]) == (1000, 3000)
    assert first["args"] == {"step": 0, "layer": 0, "tokens": 1, "bytes": 300}
    assert body["otherData"]["steps"] == 1
    assert body["otherData"]["events_overwritten"] == 0


def test_files_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    missing = tmp_path / "none" / "out.json"
    for call in (lambda: trace_file.check_writable(missing), lambda: trace_file.write(missing, [])):
        with pytest.raises(InputError, match=r"--trace .*out\.json: cannot be written: No such file"):
            call()
    good = tmp_path / "out.json"
    trace_file.check_writable(good)
    trace_file.write(good, known_step(0, 0, 0))
    assert len(json.loads(good.read_text())["traceEvents"]) > 5
