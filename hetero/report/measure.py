"""Timed steps, plain reads and peak loops, taken in turns, so that a noisy machine touches all alike."""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from hetero import cpu
from hetero.core import ExpertSpec, MachineError
from hetero.cpu import CpuExperts, Part
from hetero.formats import FP8, Format, expert_bytes
from hetero.hw import memory
from hetero.report.schema import ENOUGH_ROUNDS, Cell, Peak, Sample, Sweep, ThreadPoint, Weights

PACKED = 4
"""Experts that are really packed; the others repeat their bytes, which costs reads the same."""

READ_BYTES = 256 * 2**20
"""A plain read of a round: long enough to time, on to the next bytes every round."""

_TIMES_L3 = 4  # weights over L3 where memory allows: random experts then hit it a quarter of the time at most
_PROBE_S = 0.3e-3  # of one chunk of a peak loop
_MOST_STEPS = 16  # timed steps of one round


class Budget:
    """Seconds that may still be spent."""

    def __init__(self, seconds: float) -> None:
        self._end = time.perf_counter() + seconds

    @property
    def left(self) -> float:
        return self._end - time.perf_counter()


@dataclass
class Step:
    """Inputs of one call, and how many different experts it touches."""

    x: torch.Tensor  # [tokens, hidden] float32
    ids: torch.Tensor  # [tokens, top_k] int64
    weights: torch.Tensor  # [tokens, top_k] float32
    distinct: int


def make_step(spec: ExpertSpec, tokens: int, generator: torch.Generator) -> Step:
    """Random tokens, each with top_k different experts, all experts equally likely."""
    x = torch.randn(tokens, spec.hidden, generator=generator)
    ids = torch.rand(tokens, spec.num_experts, generator=generator).topk(spec.top_k, dim=-1).indices
    weights = torch.rand(tokens, spec.top_k, generator=generator)
    return Step(x, ids, weights, len(set(ids.flatten().tolist())))


class Layers:
    """Packed experts of one format, as many layers in turn as leave the caches behind and fit the limit."""

    def __init__(
        self,
        spec: ExpertSpec,
        fmt: Format,
        limit: int,
        l3: int | None,
        *,
        seconds: float = math.inf,
        numa: str = "off",
    ) -> None:
        """Packing stops after about ``seconds``, but not before the first layer."""
        self.format = fmt
        self.expert_bytes = expert_bytes(
            fmt, spec.hidden, spec.intermediate, has_gate=spec.has_gate, has_bias=spec.has_bias
        )
        fit = limit // self.expert_bytes
        if fit < spec.top_k:
            raise MachineError(
                f"{spec.top_k} experts in {fmt} need {memory.gib(spec.top_k * self.expert_bytes)}, "
                f"the profile may use {memory.gib(limit)} (--memory)"
            )
        self.spec = replace(spec, num_experts=min(spec.num_experts, fit), staged=False)
        one = self.spec.num_experts * self.expert_bytes
        wanted = -(-_TIMES_L3 * (l3 or 0) // one)
        count = max(1, min(wanted, limit // one))
        generator = torch.Generator().manual_seed(1)
        budget = Budget(seconds)
        self.layers = [_random_experts(self.spec, fmt, numa, generator)]
        while len(self.layers) < count and budget.left > 0:
            self.layers.append(_random_experts(self.spec, fmt, numa, generator))
        self._turn = 0
        self._read_at = 0

    @property
    def bytes(self) -> int:
        return self.expert_bytes * self.spec.num_experts * len(self.layers)

    def use(self, isa: str) -> None:
        for layer in self.layers:
            layer.use(isa)

    def run(self, step: Step) -> float:
        """Seconds of a step on the next layer."""
        self._turn += 1
        layer = self.layers[self._turn % len(self.layers)]
        start = time.perf_counter()
        layer.forward(step.x, step.ids, step.weights)
        return time.perf_counter() - start

    def read(self) -> float:
        """GB/s of plain reads of the next ``READ_BYTES``."""
        count = max(1, min(self.spec.num_experts, READ_BYTES // self.expert_bytes))
        if self._read_at + count > self.spec.num_experts:
            self._read_at = 0
            self._turn += 1
        layer = self.layers[self._turn % len(self.layers)]
        start = time.perf_counter()
        done = layer.plain_read(self._read_at, count)
        seconds = time.perf_counter() - start
        self._read_at += count
        return done / seconds / 1e9

    def describe(self, l3: int | None, reads: Sequence[float]) -> Weights:
        return Weights(
            format=str(self.format),
            experts=self.spec.num_experts,
            layers=len(self.layers),
            bytes=self.bytes,
            expert_bytes=self.expert_bytes,
            larger_than_l3=None if l3 is None else self.bytes > l3,
            read_gb_s=Sample(rounds=list(reads)),
        )


def _random_experts(spec: ExpertSpec, fmt: Format, numa: str, generator: torch.Generator) -> CpuExperts:
    experts = CpuExperts(spec, fmt, numa=numa)
    parts: list[Part] = ["gate", "up", "down"] if spec.has_gate else ["up", "down"]
    for e in range(spec.num_experts):
        if e >= PACKED:
            experts.copy_expert(e % PACKED, e)
            continue
        for part in parts:
            n, k = (spec.hidden, spec.intermediate) if part == "down" else (spec.intermediate, spec.hidden)
            experts.put(e, part, torch.randn(n, k, generator=generator) / k**0.5)
        if spec.has_bias:
            biases: dict[Part, int] = {"up_bias": spec.intermediate, "down_bias": spec.hidden}
            if spec.has_gate:
                biases["gate_bias"] = spec.intermediate
            for bias, n in biases.items():
                experts.put(e, bias, torch.randn(n, generator=generator) * 0.1)
    return experts


class Peaks:
    """Peak loops, each with a number of rounds that takes about ``_PROBE_S`` here."""

    def __init__(self, isas: Sequence[str]) -> None:
        wanted = {"scalar", *isas} if list(isas) == ["scalar"] else set(isas)
        # The kernels of AMX rest on those of AVX-512 for few rows.
        wanted |= {"avx512"} if "amx" in wanted else set()
        self.probes = {p.instruction: p for p in cpu.probes() if p.isa in wanted}
        self._rounds = {name: self._calibrate(name) for name in self.probes}

    @staticmethod
    def _calibrate(name: str) -> int:
        trial = 2000
        seconds = min(cpu.run_probe(name, trial)[0] for _ in range(3))
        return max(1, int(trial * _PROBE_S / seconds))

    def run(self, name: str) -> tuple[float, float]:
        """TOPS of all threads, and GHz right after."""
        chunks = 4 * cpu.threads()
        rounds = self._rounds[name]
        seconds, hertz = cpu.run_probe(name, rounds, chunks)
        return self.probes[name].ops * rounds * chunks / seconds / 1e12, hertz / 1e9

    def measure(self, rounds: int, budget: Budget) -> tuple[list[Peak], Sample, Sample]:
        """Every peak, the clock of idle vector units, and the share of their cores that the threads got; in
        turns, at least one round."""
        tops: dict[str, list[float]] = {name: [] for name in self.probes}
        clocks: dict[str, list[float]] = {name: [] for name in self.probes}
        idle: list[float] = []
        shares: list[float] = []
        for number in range(rounds):
            if number and budget.left <= 0:
                break
            idle.append(cpu.run_probe("", 1)[1] / 1e9)
            start, used = time.perf_counter(), time.process_time()
            for name in self.probes:
                rate, clock = self.run(name)
                tops[name].append(rate)
                clocks[name].append(clock)
            asked = (time.perf_counter() - start) * cpu.threads()
            shares.append(max(1e-3, (time.process_time() - used) / asked))
        found = [
            Peak(
                instruction=probe.instruction,
                isa=probe.isa,
                kind=probe.kind,
                threads=cpu.threads(),
                tops=Sample(rounds=tops[name]),
                clock_ghz=Sample(rounds=clocks[name]),
            )
            for name, probe in self.probes.items()
        ]
        return found, Sample(rounds=idle), Sample(rounds=shares)

    def of_kernel(self, kernel: str) -> str:
        """The instruction that a kernel spends its products on, by the kernel's name."""
        fmt, code, _ = kernel.split(".")
        floats = fmt in ("f32", "bf16", *FP8)
        if code.startswith("amx") and "twin" not in code:
            return "tdpbf16ps tmm" if fmt == "bf16" or "bf16" in code else "tdpbusd tmm"
        if code.startswith("avx512"):
            if floats:
                return "vdpbf16ps zmm" if "bf16" in code else "vfmadd231ps zmm"
            return "vpdpbusd zmm" if "vnni" in code else "vpmaddubsw zmm"
        if code.startswith("avx2"):
            return "vfmadd231ps ymm" if floats else "vpmaddubsw ymm"
        return "mulps xmm" if floats else "pmaddwd xmm"


@dataclass
class _Turn:
    """What the rounds of one instruction set gather."""

    peak_of: str
    seconds: list[float] = field(default_factory=list)
    peaks: list[float] = field(default_factory=list)
    kernels: Counter[str] = field(default_factory=Counter)


def measure_cell(
    layers: Layers,
    tokens: int,
    isas: Sequence[str],
    peaks: Peaks,
    *,
    seconds: float,
    budget: Budget,
    most_rounds: int,
    generator: torch.Generator,
) -> list[Cell]:
    """Steps of ``tokens`` tokens on every instruction set, in turns, within about ``seconds``.

    A round reads plainly, runs the peak loop of each set and the same steps on each; its first set changes
    from round to round. There is at least one round after the warm-up; ``ENOUGH_ROUNDS`` may take more than
    ``seconds``, but not more than ``budget`` has left.
    """
    spec = layers.spec
    turns: dict[str, _Turn] = {}
    first = make_step(spec, tokens, generator)
    round_s = 0.0
    for isa in isas:
        layers.use(isa)
        cpu.reset_kernel_counts()
        layers.run(first)
        counts = cpu.kernel_counts()
        turns[isa] = _Turn(peaks.of_kernel(max(counts, key=lambda name: counts[name])))
        round_s += layers.run(first)
    per_round = max(1, min(_MOST_STEPS, 64 // tokens, int(seconds / most_rounds / round_s)))
    reads: list[float] = []
    distinct: list[int] = []
    share = Budget(seconds)
    for number in range(most_rounds):
        limit = budget if number < ENOUGH_ROUNDS else share
        if number and limit.left < round_s * per_round:
            break
        steps = [make_step(spec, tokens, generator) for _ in range(per_round)]
        distinct += [s.distinct for s in steps]
        reads.append(layers.read())
        order = [*isas[number % len(isas) :], *isas[: number % len(isas)]]
        for isa in order:
            turn = turns[isa]
            turn.peaks.append(peaks.run(turn.peak_of)[0])
            layers.use(isa)
            cpu.reset_kernel_counts()
            turn.seconds.append(statistics.median(layers.run(step) for step in steps))
            turn.kernels.update(cpu.kernel_counts())
    touched = statistics.mean(distinct)
    return [
        Cell(
            format=str(layers.format),
            tokens=tokens,
            isa=isa,
            threads=cpu.threads(),
            seconds=Sample(rounds=turn.seconds),
            read_gb_s=Sample(rounds=reads),
            peak_tops=Sample(rounds=turn.peaks),
            peak_of=turn.peak_of,
            distinct_experts=touched,
            bytes=touched * layers.expert_bytes,
            ops=step_ops(spec, tokens),
            kernels=dict(turn.kernels),
        )
        for isa, turn in turns.items()
    ]


def step_ops(spec: ExpertSpec, tokens: int) -> int:
    """Multiplications and additions of the projections of a step."""
    return 2 * (3 if spec.has_gate else 2) * tokens * spec.top_k * spec.hidden * spec.intermediate


def measure_sweep(
    layers: Layers,
    isa: str,
    counts: Sequence[int],
    prefill_tokens: int,
    *,
    budget: Budget,
    most_rounds: int,
    generator: torch.Generator,
) -> Sweep:
    """Plain reads, decode and prefill by threads, in turns; the pool gets its size back at the end."""
    spec = layers.spec
    before = cpu.threads()
    reads: Mapping[int, list[float]] = {n: [] for n in counts}
    decode: Mapping[int, list[float]] = {n: [] for n in counts}
    prefill: Mapping[int, list[float]] = {n: [] for n in counts}
    layers.use(isa)
    try:
        for number in range(most_rounds):
            if number and budget.left <= 0:
                break
            singles = [make_step(spec, 1, generator) for _ in range(8)]
            many = make_step(spec, prefill_tokens, generator)
            for threads in counts:
                cpu.set_threads(threads)
                layers.run(singles[0])  # starts the threads
                reads[threads].append(layers.read())
                decode[threads].append(statistics.median(layers.run(step) for step in singles))
                prefill[threads].append(layers.run(many))
    finally:
        cpu.set_threads(before)
    return Sweep(
        format=str(layers.format),
        isa=isa,
        decode_bytes=spec.top_k * layers.expert_bytes,
        prefill_tokens=prefill_tokens,
        prefill_ops=step_ops(spec, prefill_tokens),
        points=[
            ThreadPoint(
                threads=n,
                read_gb_s=Sample(rounds=reads[n]),
                decode_s=Sample(rounds=decode[n]),
                prefill_s=Sample(rounds=prefill[n]),
            )
            for n in counts
        ],
    )
