"""What is summed up of stamped steps, from spans whose overlaps are known."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import Any

import pytest

from hetero import trace_file
from hetero.overlap import HandOff, choices, hand_offs, overlap
from hetero.trace import (
    DEFERRED,
    EXPERTS,
    HEAD,
    HITS,
    IN_PLACE,
    MIXER,
    MOVE,
    PLAN,
    PREFILL,
    SHARED,
    STAMPED,
    SUBMIT,
    WAIT,
    Span,
    Step,
    summarise,
    whole_steps,
)  # fmt: skip
from hetero.trace_file import TRACKS, chrome_trace, summary_lines

US = 1000


def layer(step: int, number: int, at: int) -> list[Span]:
    """100 us from ``at`` (in us): mixer 30, submit 5, shared 10, own experts 15, a third of them read in
    place, wait 40; the CPU works from 38 to 93, so that both hand-offs cost 3 + 7."""

    def span(lane: Any, name: str, times: tuple[int, int], nbytes: int = 0, experts: int = 0) -> Span:
        start, end = ((at + time) * US for time in times)
        return Span(0, lane, name, number, step, start, end, nbytes, 1, experts)

    return [
        span("gpu", MIXER, (0, 30)),
        span("gpu", SUBMIT, (30, 35)),
        span("gpu", SHARED, (35, 45)),
        span("gpu", HITS, (45, 60), 20, 2),
        span("pcie", IN_PLACE, (45, 60), 10, 1),
        span("gpu", WAIT, (60, 100)),
        span("cpu", EXPERTS, (38, 93), 70, 7),
    ]


def step(number: int, at: int, layers: int = 2, rest: int = 0) -> list[Span]:
    """Layers, a head of 20 us, and 30 us of the host alone before them and 10 behind."""
    spans = [span for i in range(layers) for span in layer(number, i, at + 30 + 100 * i)]
    end = at + 30 + 100 * layers
    spans.append(Span(0, "gpu", HEAD, -1, number, end * US, (end + 20) * US, 0, 1))
    spans.append(Span(0, "step", STAMPED, -1, number, at * US, (end + 30 + rest) * US, 0, 1))
    return [span._replace(number=number * 100 + i) for i, span in enumerate(spans)]


def test_shares_of_known_steps() -> None:
    spans = step(0, 0) + step(1, 500)
    random.shuffle(spans[:-1])
    told = overlap(whole_steps(spans))
    assert (told.steps, told.tokens, told.layers) == (2, 2, 2)
    assert told.seconds == pytest.approx(2 * 260e-6)
    assert told.cpu_s == pytest.approx(4 * 55e-6)
    assert told.gpu_s == pytest.approx(2 * (2 * 60 + 20) * 1e-6)
    assert told.pcie_s == pytest.approx(4 * 15e-6)
    # Of a layer: 38 to 60 both; after 93 nobody but the GPU, waiting.
    assert told.cpu_hidden == pytest.approx(22 / 55)
    assert told.gpu_hidden == pytest.approx(2 * 22 / 140)
    assert told.pcie_hidden == pytest.approx(1.0)
    assert told.host_s == pytest.approx(2 * (40 + 2 * 7) * 1e-6)
    assert told.handoff_us == pytest.approx(3 + 7)
    assert told.submit_us == pytest.approx(5)
    assert told.wait_us == pytest.approx(40)
    assert (told.hits, told.in_place, told.cpu_experts) == (8, 4, 28)
    assert told.hit_rate == pytest.approx(8 / 40)
    assert (told.gpu_bytes, told.in_place_bytes, told.cpu_bytes) == (80, 40, 280)
    assert json.loads(json.dumps(told.as_dict()))["hit_rate"] == pytest.approx(0.2)
    assert "hand-off 10.0 us a layer" in "\n".join(told.lines())


def test_dense_work_is_not_invented_where_stamps_tell_all() -> None:
    (one,) = whole_steps(step(0, 0, layers=1))
    assert {part.name for part in one.parts} == {MIXER, SUBMIT, SHARED, HITS, IN_PLACE, WAIT, EXPERTS, HEAD}
    assert summarise([one]).dense_s == pytest.approx((30 + 5 + 10 + 15 + 20) * 1e-6)


def test_the_wait_is_no_hand_off_where_the_gpu_was_busy_longer() -> None:
    """The CPU ends at 93; the GPU's own experts take until 95, its look at the flag until 97."""
    parts = [
        one._replace(end=95 * US) if one.name == HITS else one for one in layer(0, 3, 0) if one.name != WAIT
    ]
    parts.append(Span(0, "gpu", WAIT, 3, 0, 95 * US, 97 * US, 0, 1))
    whole = Step(Span(9, "step", STAMPED, -1, 0, 0, 100 * US, 0, 1), tuple(parts))
    assert hand_offs(whole) == [HandOff(3, pytest.approx(5e-6), pytest.approx(5e-6), pytest.approx(2e-6))]


def test_what_the_cpu_was_still_at_is_no_hand_off() -> None:
    """Deferred experts of the layer before, until 37: the CPU begins 1 later."""
    late = Span(0, "cpu", DEFERRED, 2, 0, 20 * US, 37 * US, 0, 1, 1)
    whole = Step(Span(9, "step", STAMPED, -1, 0, 0, 100 * US, 0, 1), (late, *layer(0, 3, 0)))
    (found,) = hand_offs(whole)
    assert found.cost == pytest.approx(8e-6)


def test_steps_without_stamps_are_left_out() -> None:
    plain = Step(Span(0, "step", "gpu", -1, 0, 0, 10 * US, 0, 1), ())
    assert overlap([plain]).steps == 0
    assert overlap([plain]).lines() == []


def test_waiting_for_the_host_is_no_work() -> None:
    parts = (
        Span(0, "gpu", PLAN, 0, 0, 0, 10 * US, 0, 1),
        Span(0, "gpu", MIXER, 0, 0, 10 * US, 30 * US, 0, 1),
    )
    steps = [Step(Span(1, "step", STAMPED, -1, 0, 0, 40 * US, 0, 1), parts)]
    assert overlap(steps).gpu_s == pytest.approx(20e-6)
    assert overlap(steps).host_s == pytest.approx(20e-6)
    assert summarise(steps).dense_s == pytest.approx(20e-6)


def test_deferred_and_moved_experts_count() -> None:
    parts = (
        Span(0, "cpu", DEFERRED, 0, 0, 0, 10 * US, 30, 1, 3),
        Span(0, "pcie", MOVE, 0, 0, 5 * US, 20 * US, 50, 1),
    )
    told = overlap([Step(Span(1, "step", STAMPED, -1, 0, 0, 40 * US, 0, 1), parts)])
    assert (told.cpu_experts, told.cpu_bytes, told.moved_bytes) == (3, 30, 50)
    assert told.pcie_hidden == pytest.approx(5 / 15)
    assert told.host_s == pytest.approx(20e-6)


def chunk(strategy: str, layer: int, times: tuple[int, int], expected_us: float) -> Span:
    details = (("strategy", strategy), ("expected_us", expected_us))
    return Span(layer, "choice", PREFILL, layer, 0, *times, tokens=512, details=details)


def test_choices_of_prefills_are_told() -> None:
    spans = [
        chunk("stream", 3, (1000, 5000), 3.0),
        chunk("cpu", 4, (5000, 7000), 4.0),
        Span(9, "step", STAMPED, -1, 0, 500, 9000, 0, 512),
    ]
    steps = whole_steps(spans, 3)
    assert choices(steps) == [
        {"step": 0, "layer": 3, "tokens": 512, "actual_us": 4.0, "strategy": "stream", "expected_us": 3.0},
        {"step": 0, "layer": 4, "tokens": 512, "actual_us": 2.0, "strategy": "cpu", "expected_us": 4.0},
    ]
    halves = [spans[0], chunk("cpu", 3, (4000, 6000), 4.0), spans[2]]
    events = chrome_trace(halves, 3)["traceEvents"]
    names = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert "prefill, the other half" in names
    lines = "\n".join(summary_lines(steps))
    assert "prefill by 'stream': 1 times, 512 rows" in lines
    body = chrome_trace(spans, 3)
    assert body["otherData"]["choices"] == choices(steps)
    assert body["otherData"]["prefill"]["steps"] == 1
    assert "decode" not in body["otherData"]
    assert [e["args"]["strategy"] for e in body["traceEvents"] if e.get("cat") == "choice"] == [
        "stream",
        "cpu",
    ]


def test_a_file_shows_the_last_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_file, "MOST", 2 * 16 + 5)  # two steps of 16 spans, and not a third
    body = chrome_trace([span for i in range(4) for span in step(i, 500 * i)])
    shown = [event["name"] for event in body["traceEvents"] if event.get("cat") == "step"]
    assert shown == ["step 2", "step 3"]
    assert (body["otherData"]["steps_not_shown"], body["otherData"]["decode"]["steps"]) == (2, 4)


def test_rows_of_the_viewer_do_not_overlap() -> None:
    """Spans of one row follow each other or lie within each other; what does neither has rows of its own."""
    body = chrome_trace(step(0, 0) + step(1, 500))
    names = {e["tid"]: e["args"]["name"] for e in body["traceEvents"] if e["name"] == "thread_name"}
    assert list(names.values()) == [track for track in TRACKS if not track.startswith("prefill")]
    rows: dict[int, list[tuple[float, float]]] = {}
    for event in body["traceEvents"]:
        if event["ph"] == "X":
            assert event["tid"] in names
            rows.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in rows.values():
        spans.sort()
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
    assert body["otherData"]["decode"]["steps"] == 2
