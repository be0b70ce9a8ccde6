"""Laps of a tape: which spans they become. Times of a GPU: tests/gpu/test_stamps_on_gpu.py."""

from __future__ import annotations

import time

import pytest
import torch

from hetero.ops.gpu.stamps import (
    Stamps,
    at_layer,
    chosen,
    here,
    lap,
    lap_experts,
    lap_moves,
    lap_reads,
    running,
    start,
)
from hetero.trace import HEAD, HITS, IN_PLACE, MIXER, MOVE, PREFILL, STAMPED, clock, recorder, whole_steps


def one_step(counts: torch.Tensor) -> None:
    """Of an eager pass of one layer."""
    start()
    time.sleep(0.001)
    at_layer(0)
    lap(MIXER)
    counts += torch.tensor([3, 1, 2, 5])
    lap_experts(counts[:3], 100)
    lap_moves(counts[1:], 10)
    at_layer(-1)
    lap(HEAD)


def test_laps_are_parts_of_the_step_under_way() -> None:
    stamps = Stamps("cpu")
    tape = stamps.tape(capacity=5)
    counts = torch.tensor([40, 30, 20, 9])
    since = recorder.next_number() + 1
    with recorder.recording():
        for _ in range(2):
            recorder.begin_step(4)
            with tape.recording():
                assert running()
                for part in (counts[:3], counts[1:]):
                    stamps.prime(part)
                one_step(counts)
                tape.seal()
            tape.tell(4)
            recorder.end_step(STAMPED)
    assert not running()
    steps = whole_steps(recorder.spans(since), since)
    assert len(steps) == 2
    for step in steps:
        told = {part.name: part for part in step.parts}
        assert [part.name for part in step.parts if part.lane == "gpu"] == [MIXER, HITS, HEAD]
        assert told[MIXER].duration >= 1_000_000
        assert step.span.start <= told[MIXER].start
        assert told[MIXER].end == told[HITS].start
        assert told[HEAD].end <= step.span.end
        assert (told[HITS].experts, told[HITS].nbytes) == (3, 300)
        assert (told[IN_PLACE].lane, told[IN_PLACE].experts, told[IN_PLACE].nbytes) == ("pcie", 1, 100)
        assert (told[IN_PLACE].start, told[IN_PLACE].end) == (told[HITS].start, told[HITS].end)
        assert (told[MOVE].lane, told[MOVE].experts, told[MOVE].nbytes) == ("pcie", 5, 50)
        assert (told[MOVE].layer, told[MOVE].tokens) == (0, 4)


def test_reads_of_their_own_are_no_part_of_the_experts() -> None:
    """What is brought before it is computed has a span that ends when it is there."""
    tape, counts = Stamps("cpu").tape(), torch.zeros(5, dtype=torch.int64)
    with recorder.recording():
        since = recorder.next_number() + 1
        for part in (counts[:3], counts[1:4]):
            tape.stamps.prime(part)
        with tape.recording():
            start()
            counts += torch.tensor([3, 2, 1, 1, 0])
            lap_reads(counts[1:4], 100)
            lap_experts(counts[:3], 100, in_place=False)
            tape.seal()
        tape.tell(1)
        read, hits = recorder.spans(since)
    assert (read.lane, read.name, read.experts, read.nbytes) == ("pcie", IN_PLACE, 2, 200)
    assert (hits.lane, hits.name, hits.experts, hits.nbytes) == ("gpu", HITS, 3, 300)
    assert read.end == hits.start


def test_counters_are_known_before_the_first_step() -> None:
    """As of a graph: recorded once, primed by ``begin``, replayed."""
    stamps = Stamps("cpu")
    tape = stamps.tape()
    counts = torch.tensor([40, 30, 20])
    with tape.recording():
        start()
        at_layer(5)
        lap_experts(counts, 10)
    with recorder.recording():
        for _ in range(2):
            since = recorder.next_number() + 1
            tape.begin()
            counts += torch.tensor([1, 0, 9])
            tape._device[1, 1:] = counts  # what a replay does
            tape.seal()
            tape.tell(1)
            (hits,) = recorder.spans(since)
            assert (hits.name, hits.experts, hits.nbytes, hits.layer) == (HITS, 1, 10, 5)


def test_nothing_happens_without_a_tape() -> None:
    start()
    at_layer(0)
    lap(MIXER)
    tape = Stamps("cpu").tape()
    since = recorder.next_number() + 1
    tape.tell(1)
    with recorder.recording():
        tape.tell(1)
        with tape.recording():
            at_layer(0)
            lap(MIXER)  # without a start there is nothing to be behind
        tape.tell(1)
    assert recorder.spans(since) == []


def test_a_full_tape_keeps_what_it_has(caplog: pytest.LogCaptureFixture) -> None:
    tape = Stamps("cpu").tape(capacity=2)
    with tape.recording():
        start()
        for _ in range(3):
            lap(MIXER)
        chosen(here(), "cpu", 5, 0.0)
        tape.seal()
    assert [message for message in caplog.messages if "more than 2 stamps" in message] == caplog.messages
    assert len(caplog.messages) == 1
    with recorder.recording():
        since = recorder.next_number() + 1
        tape.tell(1)
        assert [span.name for span in recorder.spans(since)] == [MIXER]


def test_what_no_stream_has_come_to_is_left_out() -> None:
    """Of a side stream that nobody has waited for, the stamps are missing when a step is told."""
    tape = Stamps("cpu").tape()
    with tape.recording():
        start()
        lap(MIXER)
        lap(HEAD)
        tape._device[2] = 0
        tape.seal()
    with recorder.recording():
        since = recorder.next_number() + 1
        tape.tell(1)
        assert [span.name for span in recorder.spans(since)] == [MIXER]


def test_tapes_within_each_other() -> None:
    """The inner one takes what is said within it, and the outer one goes on."""
    stamps = Stamps("cpu")
    outer, inner = stamps.tape(), stamps.tape()
    begun = clock()
    with outer.recording():
        start()
        with inner.recording():
            start()
            at_layer(-1)
            lap(HEAD)
            inner.seal()
        at_layer(1)
        lap(MIXER)
        outer.seal()
    with recorder.recording():
        since = recorder.next_number() + 1
        inner.tell(1)
        outer.tell(1)
        spans = recorder.spans(since)
    assert [span.name for span in spans] == [HEAD, MIXER]
    assert begun <= spans[1].start <= spans[0].start <= spans[0].end <= spans[1].end <= clock()


def test_the_end_of_a_recording_is_told_to_those_who_live() -> None:
    class Listener:
        heard = 0

        def hear(self) -> None:
            self.heard += 1

    listener, other = Listener(), Listener()
    recorder.at_end(listener.hear)
    recorder.at_end(other.hear)
    del other
    with recorder.recording():
        with recorder.recording():
            pass
        assert listener.heard == 0
    assert listener.heard == 1


def test_choices_are_from_the_last_lap_until_now() -> None:
    stamps = Stamps("cpu")
    tape = stamps.tape()
    with tape.recording():
        assert running()
        start()
        at_layer(2)
        lap(MIXER)
        since = here()
        lap(HEAD)
        chosen(since, "stream", 77, 5e-6)
        at_layer(-1)
        lap(HEAD)
        tape.seal()
    assert here() == -1
    chosen(-1, "stream", 77, 5e-6)
    with recorder.recording(stamps=True):
        assert recorder.stamping
        since = recorder.next_number() + 1
        tape.tell(100)
        mixer, head, choice, rest = recorder.spans(since)
    assert not recorder.stamping
    assert (choice.lane, choice.name, choice.layer, choice.tokens) == ("choice", PREFILL, 2, 77)
    assert dict(choice.details) == {"strategy": "stream", "expected_us": 5.0}
    assert mixer.end == choice.start == head.start
    assert head.end <= choice.end == rest.start
    assert mixer.tokens == 100
