"""A trace as a file for chrome://tracing and Perfetto, and the lines that are told beside it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hetero.overlap import choice_lines, choices, overlap
from hetero.trace import (
    HITS,
    IN_PLACE,
    LANES,
    LONG_CAPACITY,
    Span,
    Step,
    recorder,
    summarise,
    whole_steps,
)
from hetero.wholefile import unwritable

OTHER_HALF = "prefill, the other half"

TRACKS = ("step", "prefill", OTHER_HALF, "gpu", "gpu experts", "pcie", "pcie in place", "cpu", "disk")
"""Rows of the viewer: lanes, and what may go on beside the rest of its lane, only where there is some."""


MOST = 400_000
"""Spans of a file, which a viewer should open; some 60 MB."""


def track_of(span: Span) -> str:
    """The row that a span is shown in."""
    if span.lane == "choice":
        return "prefill"
    return {HITS: "gpu experts", IN_PLACE: "pcie in place"}.get(span.name, span.lane)


def chrome_trace(spans: Sequence[Span], since: int = 0) -> dict[str, Any]:
    """The object that chrome://tracing and Perfetto read: a thread a track, times in microseconds.

    Holds the whole steps of ``spans``, which were asked from ``since``; the summary is of all of them, and
    the last ones are shown, of ``MOST`` spans together.
    """
    steps = whole_steps(spans, since)
    every, room = steps, MOST
    for place in range(len(steps) - 1, -1, -1):
        room -= 1 + len(steps[place].parts)
        if room < 0:
            steps = steps[place + 1 :]
            break
    origin = min((part.start for step in steps for part in (step.span, *step.parts)), default=0)
    shown = [(span, track) for step in steps for span, track in _tracks(step)]
    used = {track for _, track in shown}
    named: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "hetero"}}
    ]
    for place, track in enumerate(TRACKS):
        if track not in LANES and track not in used:
            continue
        named += [
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": place, "args": {"name": track}},
            {"ph": "M", "name": "thread_sort_index", "pid": 1, "tid": place, "args": {"sort_index": place}},
        ]
    events = [
        {
            "ph": "X",
            "name": f"step {span.step}" if span.lane == "step" else span.name,
            "cat": span.lane,
            "pid": 1,
            "tid": TRACKS.index(track),
            "ts": (span.start - origin) / 1e3,
            "dur": span.duration / 1e3,
            "args": _details(span),
        }
        for span, track in shown
    ]
    lost = spans[0].number - since if spans else 0
    return {
        "traceEvents": named + events,
        "displayTimeUnit": "ms",
        "otherData": {
            "events_overwritten": lost,
            "steps_not_shown": len(every) - len(steps),
            **summarise(every).as_dict(),
            **_summaries(every),
        },
    }


def _tracks(step: Step) -> Iterator[tuple[Span, str]]:
    """Spans of a step with their rows: halves of a chunk that take turns have rows of their own."""
    end = 0
    for span in (step.span, *step.parts):
        track = track_of(span)
        if span.lane == "choice":
            if span.start < end:
                track = OTHER_HALF
            else:
                end = span.end
        yield span, track


def _summaries(steps: Sequence[Step]) -> dict[str, Any]:
    """What there is only where a GPU stamped its work, or a strategy was chosen."""
    found: dict[str, Any] = {}
    of_decode, of_prompts = split(steps)
    for name, part in (("decode", of_decode), ("prefill", of_prompts)):
        if (one := overlap(part)).steps:
            found[name] = one.as_dict()
    if told := choices(steps):
        found["choices"] = told
    return found


def split(steps: Sequence[Step]) -> tuple[list[Step], list[Step]]:
    """Steps of decoding, and those of prompts: in these, how experts are computed was chosen."""
    prompts = [step for step in steps if any(part.lane == "choice" for part in step.parts)]
    numbers = {step.span.number for step in prompts}
    return [step for step in steps if step.span.number not in numbers], prompts


def _details(span: Span) -> dict[str, str | float]:
    details: dict[str, str | float] = {"step": span.step}
    for name, value, none in (
        ("layer", span.layer, -1),
        ("tokens", span.tokens, 0),
        ("experts", span.experts, 0),
        ("bytes", span.nbytes, 0),
    ):
        if value != none:
            details[name] = value
    return details | dict(span.details)


def summary_lines(steps: Sequence[Step]) -> list[str]:
    """What a person is told of a trace."""
    decode, prompts = split(steps)
    lines = [summarise(steps).line()]
    for name, part in (("decode", decode), ("prefill", prompts)):
        lines += [f"{name}: {line}" for line in overlap(part).lines()]
    return lines + choice_lines(choices(steps))


def check_writable(path: Path, option: str = "--trace") -> None:
    """Raises InputError or MachineError where a file cannot be written, before the work that it is of.
    ``option`` asked for it."""
    try:
        with path.open("ab"):
            pass
    except OSError as error:
        raise unwritable(error, f"{option} {path}") from None


def write(path: Path, spans: Sequence[Span], since: int = 0) -> None:
    """Raises InputError where the file cannot be written, MachineError where the disk is the reason."""
    try:
        path.write_text(json.dumps(chrome_trace(spans, since), separators=(",", ":")), encoding="utf-8")
    except OSError as error:
        raise unwritable(error, f"--trace {path}") from None


@contextmanager
def to_file(path: str | None, tell: Callable[[str], None]) -> Iterator[None]:
    """Record within it into ``path``, and ``tell`` in lines what was seen; without a path nothing happens.

    The file is written after an error as well. Raises as ``check_writable``, before anything runs.
    """
    if path is None:
        yield
        return
    target = Path(path)
    check_writable(target)
    since = recorder.next_number() + 1
    try:
        with recorder.recording(LONG_CAPACITY, stamps=True):
            yield
    finally:
        spans = recorder.spans(since)
        write(target, spans, since)
        first, *more = summary_lines(whole_steps(spans, since))
        tell(f"[trace: {first}; {path} opens in ui.perfetto.dev]")
        for line in more:
            tell(f"[trace: {line}]")
