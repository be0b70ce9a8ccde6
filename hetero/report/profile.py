"""``hetero profile``: plans what fits the budget, measures, and puts the report together."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version

import torch

from hetero import cpu, tuning
from hetero.core import ExpertSpec, InputError
from hetero.formats import Format, parse_format
from hetero.hw import cpu as hw_cpu
from hetero.hw import memory
from hetero.hw.caches import l3_bytes
from hetero.hw.placement import place
from hetero.kernel_choice import kernel_choice
from hetero.report.advice import advise
from hetero.report.measure import Budget, Layers, Peaks, measure_cell, measure_sweep, step_ops
from hetero.report.schema import (
    ENOUGH_ROUNDS,
    Cell,
    KernelChoice,
    KernelTimes,
    Machine,
    Report,
    RowsBand,
    Sample,
    Settings,
    Shape,
    Sweep,
    Versions,
    Weights,
)
from hetero.report.shapes import find_shape

TOKENS = (1, 2, 4, 8, 16, 64, 256, 1024)
FORMATS = ("int4", "int8", "bf16", "fp8", "mxfp4", "nvfp4")
QUICK_TOKENS = (1, 4, 256)
MOST_MEMORY = 8 * 2**30
_SWEEP_TOKENS = 64  # of the prefill point of the thread sweep
_ROUNDS = 15


@dataclass(frozen=True, slots=True)
class Options:
    """What to profile; checked by ``make_options``."""

    shape: Shape
    spec: ExpertSpec
    isas: tuple[str, ...]
    formats: tuple[Format, ...]
    tokens: tuple[int, ...]
    threads: int
    memory_bytes: int
    budget_s: float
    numa: str = "split"
    seed: int = 0
    command: tuple[str, ...] = ()


def make_options(
    *,
    shape: str,
    isas: Sequence[str],
    formats: Sequence[str],
    tokens: Sequence[int],
    threads: int | None,
    memory_bytes: int | None,
    budget_s: float,
    numa: str = "split",
    seed: int = 0,
    command: Sequence[str] = (),
) -> Options:
    """Check and complete options. No ``isas``: all of this machine but scalar, where there is another.

    Raises InputError for what is wrong, MachineError for an instruction set that this machine lacks.
    """
    if budget_s <= 0:
        raise InputError(f"--budget {budget_s:g}: must be more than 0 seconds")
    if bad := [n for n in tokens if not 1 <= n <= 2**20]:
        raise InputError(f"--tokens {bad[0]}: must be from 1 to {2**20}")
    if threads is not None and threads < 1:
        raise InputError(f"--threads {threads}: must be at least 1")
    if memory_bytes is not None and memory_bytes < 1:
        raise InputError("--memory: must be more than 0")
    chosen = [cpu.pick_isa(name) for name in dict.fromkeys(isas)]
    here = cpu.isas()
    chosen = sorted(set(chosen) or ({*here} - {"scalar"} or {"scalar"}), key=here.index)
    place(numa, cpu.machine())
    parsed = dict.fromkeys(parse_format(text) for text in formats)
    found, spec = find_shape(shape)
    return Options(
        shape=found,
        spec=spec,
        isas=tuple(chosen),
        formats=tuple(parsed),
        tokens=tuple(sorted(set(tokens))),
        threads=threads or cpu.threads(),
        memory_bytes=memory_bytes or min(memory.available().bytes // 4, MOST_MEMORY),
        budget_s=budget_s,
        numa=numa,
        seed=seed,
        command=tuple(command),
    )


def profile(options: Options, progress: Callable[[str], None] = lambda _: None) -> Report:
    """Measure within about ``budget_s`` seconds; whatever it leaves out is told in the report's notes.

    ``progress`` gets a line for each part. At least the first format with the fewest tokens is measured.
    """
    before = cpu.threads()
    cpu.set_threads(options.threads)
    try:
        return _Profile(options, progress).run()
    finally:
        cpu.set_threads(before)


class _Profile:
    def __init__(self, options: Options, progress: Callable[[str], None]) -> None:
        self.options = options
        self.progress = progress
        self.start = time.perf_counter()
        self.budget = Budget(options.budget_s)
        self.generator = torch.Generator().manual_seed(options.seed)
        self.l3 = l3_bytes()
        self.cells: list[Cell] = []
        self.choices: list[KernelChoice] = []
        self.times: list[KernelTimes] = []
        self.weights: list[Weights] = []
        self.notes: list[str] = []
        self.sweep: Sweep | None = None

    def run(self) -> Report:
        options = self.options
        self.progress("peaks of the instructions")
        self.peaks = Peaks(options.isas)
        self.peak_list, idle, share = self.peaks.measure(9, Budget(options.budget_s * 0.05))
        for left, fmt in zip(range(len(options.formats), 0, -1), options.formats, strict=True):
            if self.cells and self.budget.left <= 0:
                self.notes.append(f"The budget of {options.budget_s:g} s left out {fmt}.")
                continue
            self._format(fmt, Budget(max(0.0, self.budget.left / left)))
        return self._report(idle, share)

    def _format(self, fmt: Format, budget: Budget) -> None:
        options = self.options
        self.progress(f"{fmt}: kernels by rows")
        self._choices(fmt)
        self.progress(f"{fmt}: packing")
        layers = Layers(
            options.spec, fmt, options.memory_bytes, self.l3, seconds=budget.left * 0.25, numa=options.numa
        )
        if layers.spec.num_experts < options.spec.num_experts:
            self.notes.append(
                f"{fmt}: measured on {layers.spec.num_experts} of {options.spec.num_experts} experts, "
                f"which is what {memory.gib(options.memory_bytes)} hold (--memory): steps of many tokens "
                "touch fewer experts, with more rows each, than the model's would."
            )
        layers.read()  # wakes the threads
        reads = [layers.read()]
        while len(reads) < 5 and budget.left > 0:
            reads.append(layers.read())
        if self.sweep is None and options.threads > 1 and budget.left > 0:
            self.progress(f"{fmt}: by threads")
            self.sweep = measure_sweep(
                layers,
                options.isas[-1],
                thread_counts(options.threads),
                _SWEEP_TOKENS,
                budget=Budget(min(budget.left * 0.4, options.budget_s * 0.15)),
                most_rounds=9,
                generator=self.generator,
            )
        left_out: dict[tuple[str, ...], list[str]] = {}
        order = _by_value(options.tokens)
        for number, tokens in enumerate(order):
            isas = self._affordable(layers, tokens, reads[0], budget.left)
            missing = tuple(isa for isa in options.isas if isa not in isas)
            if missing:
                left_out.setdefault(missing, []).append(str(tokens))
            if not isas:
                continue
            self.progress(f"{fmt}: {tokens} tokens")
            self.cells += measure_cell(
                layers,
                tokens,
                isas,
                self.peaks,
                seconds=max(0.02, budget.left / (len(order) - number)),
                budget=budget,
                most_rounds=_ROUNDS,
                generator=self.generator,
            )
        if left_out:
            parts = [f"{', '.join(counts)} tokens on {', '.join(isas)}" for isas, counts in left_out.items()]
            self.notes.append(f"The budget of {options.budget_s:g} s left out of {fmt}: {'; '.join(parts)}.")
        self.weights.append(layers.describe(self.l3, reads))

    def _choices(self, fmt: Format) -> None:
        """What the steps use; timed here where no earlier run has. The last set's times hold all kernels."""
        times: tuning.Times | None = None
        for isa in reversed(self.options.isas):
            found = kernel_choice(isa, fmt)
            times = times or found.times
            exact, large = (
                [RowsBand(rows=band.rows, kernel=band.kernel.name) for band in bands]
                for bands in (found.plan.exact, found.plan.large)
            )
            self.choices.append(
                KernelChoice(format=str(fmt), isa=isa, source=found.source, exact=exact, large=large)
            )
        if times is not None:
            seconds = {name: [t if math.isfinite(t) else None for t in row] for name, row in times.items()}
            self.times.append(KernelTimes(format=str(fmt), rows=list(tuning.ROWS), seconds=seconds))

    def _affordable(self, layers: Layers, tokens: int, read_gb_s: float, left: float) -> list[str]:
        """Instruction sets whose warm-up and first rounds fit, the best first; the very first cell always."""
        if not self.cells:
            return list(self.options.isas)
        ops = step_ops(layers.spec, tokens)
        distinct = layers.spec.num_experts * (1 - (1 - layers.spec.top_k / layers.spec.num_experts) ** tokens)
        reading = distinct * layers.expert_bytes / read_gb_s / 1e9
        chosen = []
        for isa in reversed(self.options.isas):
            peak = max(p.tops.median for p in self.peak_list if p.isa == isa)
            known = [
                c.seconds.median * tokens / c.tokens for c in self.cells if _alike(c, layers.format, isa)
            ]
            # Without a step to go by, take a third of the peak.
            step = max(reading, min(known, default=3 * ops / peak / 1e12))
            left -= step * (2 + ENOUGH_ROUNDS)
            if left < 0:
                break
            chosen.append(isa)
        return [isa for isa in self.options.isas if isa in chosen]

    def _report(self, idle: Sample, share: Sample) -> Report:
        options = self.options
        identity = hw_cpu.identity()
        for weights in self.weights:
            if weights.larger_than_l3 is False:
                self.notes.append(
                    f"{weights.format}: {memory.gib(weights.bytes)} of weights fit the L3 cache "
                    f"({memory.gib(self.l3 or 0)}): its GB/s are of the cache, not of memory."
                )
        report = Report(
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            command=list(options.command),
            seconds=round(time.perf_counter() - self.start, 3),
            machine=Machine(
                cpu=identity["cpu"],
                logical_cpus=identity["logical_cpus"],
                physical_cores=identity["physical_cores"],
                cpu_quota=identity["cpu_quota"],
                memory_bytes=identity["memory_bytes"],
                l3_bytes=self.l3,
                kernel=identity["kernel"],
                isas=cpu.isas(),
            ),
            versions=Versions(
                hetero=version("hetero"), torch=str(torch.__version__), python=identity["python"]
            ),
            shape=options.shape,
            settings=Settings(
                threads=options.threads,
                isas=list(options.isas),
                formats=[str(fmt) for fmt in options.formats],
                tokens=list(options.tokens),
                numa=options.numa,
                memory_bytes=options.memory_bytes,
                budget_s=options.budget_s,
                seed=options.seed,
            ),
            idle_clock_ghz=idle,
            cpu_share=share,
            peaks=self.peak_list,
            choices=self.choices,
            times=self.times,
            weights=self.weights,
            cells=sorted(self.cells, key=self._order),
            sweep=self.sweep,
            notes=self.notes,
            advice=[],
        )
        return report.model_copy(update={"advice": advise(report)})

    def _order(self, cell: Cell) -> tuple[int, int, int]:
        formats = [str(fmt) for fmt in self.options.formats]
        return formats.index(cell.format), cell.tokens, self.options.isas.index(cell.isa)


def _alike(cell: Cell, fmt: Format, isa: str) -> bool:
    return cell.format == str(fmt) and cell.isa == isa and cell.tokens >= 16


def _by_value(tokens: Sequence[int]) -> list[int]:
    """The fewest first, then the most, then the rest: what a short budget should not miss."""
    return list(dict.fromkeys([tokens[0], tokens[-1], *tokens]))


def thread_counts(most: int) -> list[int]:
    """Powers of two up to ``most``, ``most`` itself, and one less, which leaves a core to the engine."""
    counts = {most, most - 1} | {1 << i for i in range(most.bit_length()) if 1 << i <= most}
    return sorted(counts - {0})
