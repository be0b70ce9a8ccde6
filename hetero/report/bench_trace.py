"""A benchmark's steps and prompts once more, recorded: what overlaps what, beside figures that a trace would
slow down."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hetero.overlap import choice_lines, choices, overlap
from hetero.report.bench import Bench
from hetero.trace import LONG_CAPACITY, Step, recorder, whole_steps
from hetero.trace_file import write

TOKENS = 32
"""Steps of a series that are recorded, at most."""

WARM_UP = 8
"""Steps before these, recorded too but not summed up: they fill the cache."""


def traced(bench: Bench, path: Path | None) -> list[dict[str, Any]]:
    """One entry for each routing and batch, and for each prompt; everything goes into ``path``. ``lines`` of
    an entry are for a person. Steps that no GPU stamps have no figures."""
    series, since = bench.series, recorder.next_number() + 1
    parts: list[tuple[dict[str, Any], int, int]] = []
    with recorder.recording(LONG_CAPACITY, stamps=True):
        for routing in series.routings:
            bench.route(routing)
            for rows in series.batches:
                begin, end = _decode(bench, rows)
                parts.append(({"kind": "decode", "routing": routing, "rows": rows}, begin, end))
        for tokens in series.prefills:
            begin = recorder.next_number()
            state, _ = bench.run.prefill(bench.prompt(tokens))
            bench.run.end(state)
            parts.append(({"kind": "prefill", "tokens": tokens}, begin, recorder.next_number()))
    # The clocks are compared for the last time when the recording ends.
    spans = recorder.spans(since)
    if path is not None:
        write(path, spans, since)
    steps = whole_steps(spans, since)
    return [told | summary([one for one in steps if a < one.span.number < b]) for told, a, b in parts]


def _decode(bench: Bench, rows: int) -> tuple[int, int]:
    """Numbers of the recorder around the steps that count."""
    run, begin = bench.run, 0
    states, tokens = [], []
    for _ in range(rows):
        state, token = run.prefill(bench.prompt(bench.series.prompt_tokens))
        states.append(state)
        tokens.append(token)
    most = min(WARM_UP + TOKENS, bench.series.tokens)
    for step in range(most):
        if step == min(WARM_UP, most - 1):
            begin = recorder.next_number()
        tokens = list(run.step(states, tokens))
    end = recorder.next_number()
    for state in states:
        run.end(state)
    return begin, end


def summary(steps: Sequence[Step]) -> dict[str, Any]:
    """Figures of stamped steps, and of how a prompt's experts were computed."""
    found, told = overlap(steps), choices(steps)
    strategies: dict[str, dict[str, float]] = {}
    for one in told:
        part = strategies.setdefault(one["strategy"], {"chunks": 0, "actual_ms": 0.0, "expected_ms": 0.0})
        part["chunks"] += 1
        part["actual_ms"] += one["actual_us"] / 1e3
        part["expected_ms"] += one["expected_us"] / 1e3
    return {
        "overlap": found.as_dict() if found.steps else None,
        "strategies": strategies,
        "lines": [*found.lines(), *choice_lines(told)],
    }
