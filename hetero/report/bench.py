"""Decode and prefill of one loaded model, beside what memory and PCIe give in the same run.

One load serves all routings, batches and prompts that are asked for. ``docs/bench.md`` explains the figures.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hetero import cpu
from hetero.core import InputError
from hetero.plan.roofline import Decode, Term
from hetero.report.bench_runs import Counts, Run
from hetero.report.bound import Bound
from hetero.report.forced import ForcedRouting
from hetero.report.routing import KINDS, TRACE, Table, load_table, make_table, measured_reuse

VERSION = 1
_SAMPLE = 8  # a step in so many is asked for its own times
_WARM_UP = 16
"""Tokens after a change of routing that fill the cache and are not timed."""


@dataclass(frozen=True, slots=True)
class Series:
    """What is measured with one loaded model."""

    routings: tuple[str, ...] = ("router",)
    batches: tuple[int, ...] = (1,)
    prefills: tuple[int, ...] = ()
    context: int = 1024  # tokens that a sequence has when a run ends
    prompt: int | None = None  # of a decode run; None: what leaves room for its tokens in the context
    tokens: int = 128
    runs: int = 5
    seed: int = 7

    @property
    def prompt_tokens(self) -> int:
        return self.context - self.tokens if self.prompt is None else self.prompt


def check_series(series: Series) -> None:
    """Raises InputError for what cannot be measured."""
    for name, value, least, most in (
        ("--tokens", series.tokens, 1, 1 << 20),
        ("--runs", series.runs, 1, 1000),
        ("--context", series.context, 2, 1 << 30),
    ):
        if not least <= value <= most:
            raise InputError(f"{name} {value}: must be from {least} to {most}")
    for batch in series.batches:
        if not 1 <= batch <= 16:
            raise InputError(f"--batch {batch}: must be from 1 to 16")
    for tokens in series.prefills:
        if tokens < 1:
            raise InputError(f"--prefill {tokens}: must be at least 1")
    for kind in series.routings:
        if kind not in KINDS and not (kind.startswith(TRACE) and kind != TRACE):
            raise InputError(f"--routing {kind}: must be one of {', '.join(KINDS)} or {TRACE}FILE")
    if series.prompt is not None and series.prompt < 1:
        raise InputError(f"--prompt {series.prompt}: must be at least 1")
    prompt = series.prompt_tokens
    if prompt < 1 or prompt + series.tokens > series.context:
        raise InputError(
            f"--context {series.context}: has no room for a prompt of {max(1, prompt)} and then "
            f"{series.tokens} tokens (--tokens)"
        )


def spread(rounds: Sequence[float]) -> dict[str, Any]:
    """Median and quartiles, with every round."""
    low = high = statistics.median(rounds)
    if len(rounds) > 1:
        low, _, high = statistics.quantiles(rounds, n=4, method="inclusive")
    return {"median": statistics.median(rounds), "q1": low, "q3": high, "rounds": list(rounds)}


@dataclass
class Bench:
    """``run``: the model. ``extra``: of a decode series, from (rows) after it, for what only one kind of run
    can tell. ``say``: what goes on."""

    run: Run
    series: Series
    vocabulary: int
    bound: Bound | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    extra: Callable[[int], dict[str, Any]] = lambda rows: {}
    say: Callable[[str], None] = lambda text: None
    tables: dict[str, Any] = field(default_factory=dict)  # routing -> what its table is like

    def __post_init__(self) -> None:
        most = max(self.series.batches, default=1)
        if most > self.run.most_rows:
            raise InputError(f"--batch {most}: this model runs at most {self.run.most_rows} sequences a step")
        self._random = torch.Generator().manual_seed(self.series.seed)
        self._forced: ForcedRouting | None = None

    def decode_all(self) -> Iterator[dict[str, Any]]:
        """Every routing with every batch."""
        for routing in self.series.routings:
            self.route(routing)
            for rows in self.series.batches:
                one = self.decode(routing, rows)
                self.say(f"decode, {routing} routing, batch {rows}: {one['tok_s']['median']:.1f} tok/s")
                yield one

    def prefill_all(self) -> Iterator[dict[str, Any]]:
        """Every length of a prompt; experts by the router."""
        if self._forced is not None and self.series.prefills:
            self.route("router")
        for tokens in self.series.prefills:
            one = self.prefill(tokens)
            self.say(f"prefill of {tokens} tokens: {one['ttft_s']['median']:.3f} s")
            yield one

    def table(self, routing: str) -> Table:
        """Ids for all layers of a routing by a table, for the rows of the largest batch."""
        spec = self.run.specs[0]
        rows = self.run.rows_of(max(self.series.batches))
        layers = len(self.run.specs)
        if any((s.num_experts, s.top_k) != (spec.num_experts, spec.top_k) for s in self.run.specs):
            raise InputError(f"--routing {routing}: layers of different numbers of experts; use router")
        if routing.startswith(TRACE):
            path = Path(routing.removeprefix(TRACE))
            return load_table(path, layers=layers, experts=spec.num_experts, top_k=spec.top_k, rows=rows)
        steps = min(2000, (self.series.runs + 1) * self.series.tokens + _WARM_UP)
        return make_table(
            routing,
            layers=layers,
            steps=steps,
            rows=rows,
            experts=spec.num_experts,
            top_k=spec.top_k,
            seed=self.series.seed,
        )

    def route(self, routing: str) -> None:
        """Take experts so from now on; what was captured follows, or is captured anew."""
        if routing == "router":
            self._forced = None
            self.run.force(None)
            return
        table = self.table(routing)
        reuse = measured_reuse(table)
        self.tables[routing] = {
            "steps": table.shape[1],
            "rows": table.shape[2],
            "reuse_last": reuse.last,
            "reuse_8": reuse.window,
        }
        if self._forced is not None and self._forced.steps == table.shape[1]:
            self._forced.use(table)
            return
        self._forced = ForcedRouting(table, self.device)
        self.run.force(self._forced)

    def prompt(self, tokens: int) -> list[int]:
        """Random token ids."""
        ids: list[int] = torch.randint(self.vocabulary, (tokens,), generator=self._random).tolist()
        return ids

    def decode(self, routing: str, rows: int) -> dict[str, Any]:
        """One series: a run is a new prompt for each row, then tokens one step after the other."""
        series, run = self.series, self.run
        rates: list[float] = []
        first: list[float] = []
        steps: list[float] = []
        counts = Counts()
        if self._forced is not None:
            self._forced.start(0)
        for number in range(series.runs + 1):  # the first run warms up
            states, tokens = [], []
            began = time.perf_counter()
            for _ in range(rows):
                state, token = run.prefill(self.prompt(series.prompt_tokens))
                states.append(state)
                tokens.append(token)
            reading = time.perf_counter() - began
            # What prompts need is not counted.
            before = run.counts()
            times = []
            for step in range(series.tokens):
                start = time.perf_counter()
                tokens = list(run.step(states, tokens))
                times.append(time.perf_counter() - start)
                if step % _SAMPLE == 0 and number:
                    run.sample()
            if number:
                counts = counts.plus(run.counts().since(before))
            for state in states:
                run.end(state)
            if number:
                rates.append(rows * len(times) / sum(times))
                first.append(reading / rows)
                steps += times
        told: dict[str, Any] = {
            "routing": routing,
            "rows": rows,
            "context": series.prompt_tokens + series.tokens,
            "tokens": series.tokens,
            "tok_s": spread(rates),
            "step_ms": {**spread([1e3 * t for t in steps]), "rounds": None, "longest": 1e3 * max(steps)},
            "prompt_s": spread(first),
            **self._tiers(counts, series.runs * series.tokens),
        }
        told |= {name: spread(rounds) | {"rounds": None} for name, rounds in run.samples().items()}
        told |= self.extra(rows)
        if self.bound is not None:
            told["bound"] = _bound(self.bound, told, routing, rows)
        return told

    def _tiers(self, counts: Counts, steps: int) -> dict[str, Any]:
        each = self.run.expert_bytes / steps
        return {
            "hit_rate": counts.hit_rate if counts.gpu + counts.pcie + counts.moved else None,
            "bytes_a_step": {
                "gpu": counts.gpu * each,
                "pcie": counts.pcie * each,
                "cpu": counts.cpu * each,
                "moved": counts.moved * each,
            },
        }

    def prefill(self, tokens: int) -> dict[str, Any]:
        """The time to the first token of a prompt; three runs after one that warms up."""
        times = []
        for number in range(min(3, self.series.runs) + 1):
            prompt = self.prompt(tokens)
            began = time.perf_counter()
            state, _ = self.run.prefill(prompt)
            took = time.perf_counter() - began
            self.run.end(state)
            if number:
                times.append(took)
        told: dict[str, Any] = {
            "tokens": tokens,
            "ttft_s": spread(times),
            "tok_s": spread([tokens / t for t in times]),
        }
        if self.bound is not None:
            best = self.bound.prefill(tokens)
            told["bound"] = {
                "tok_s": best.tok_s,
                "way": best.way,
                "share": told["tok_s"]["median"] / best.tok_s,
                "terms": [_term(term) for term in best.terms],
            }
        return told


def _bound(bound: Bound, told: dict[str, Any], routing: str, rows: int) -> dict[str, Any]:
    """What the planner says of the same step, and how much of that was reached."""
    best = bound.decode(routing, rows, told["context"])
    found = _as_dict(best, told["tok_s"]["median"])
    if rows == 1 and told["hit_rate"] is not None and bound.slots:
        at_hits = bound.decode(routing, rows, told["context"], hits=told["hit_rate"])
        found["at_counted_hits"] = _as_dict(at_hits, told["tok_s"]["median"])
    return found


def _as_dict(best: Decode, reached: float) -> dict[str, Any]:
    return {
        "tok_s": best.tok_s,
        "share": reached / best.tok_s,
        "binds": best.binds,
        "hit_rate": best.hit_rate,
        "terms": [_term(term) for term in best.terms],
    }


def _term(term: Term) -> dict[str, Any]:
    return {"name": term.name, "ms": term.ms, "bytes": term.bytes, "gb_s": term.gb_s, "beside": term.beside}


def cpu_facts() -> dict[str, Any]:
    """What computed experts: threads, and the kernels that ran."""
    return {"threads": cpu.threads(), "kernels": cpu.kernel_counts()}
