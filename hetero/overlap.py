"""What CPU, GPU and PCIe did at the same time: the summary of a trace whose GPU stamped its work.

Busy are: the CPU while experts compute; the GPU in all of its laps but those in which it only waits for the
CPU or the host; PCIe while experts are read in place, moved or streamed. The share of one that is hidden
under another is the part of its busy time in which the other was busy as well.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from hetero.intervals import Interval, intersect, length, subtract, union
from hetero.trace import (
    DEFERRED,
    EXPERTS,
    HITS,
    IN_PLACE,
    MOVE,
    PLAN,
    PREFILL,
    STAMPED,
    STREAM,
    SUBMIT,
    WAIT,
    Span,
    Step,
)

_IDLE = (WAIT, PLAN)


@dataclass(frozen=True, slots=True)
class HandOff:
    """Of one layer of one step, in seconds. ``cost``: from the submit's end, or that of what the CPU was
    still at (deferred experts, another lane), until the CPU begins; and from its end, or the moment that the
    GPU began to wait if that is later, until the GPU goes on. Errors of the clocks' alignment cancel where
    the GPU waits. ``submit``: looking up experts and handing them over. ``wait``: for the CPU, the
    hand-off's cost among it."""

    layer: int
    submit: float
    cost: float
    wait: float


@dataclass(frozen=True, slots=True)
class Overlap:
    """Of whole stamped steps; seconds are sums over them, shares between 0 and 1, bytes of weights."""

    steps: int
    tokens: int
    seconds: float
    cpu_s: float
    gpu_s: float
    pcie_s: float
    host_s: float  # neither CPU experts nor GPU nor PCIe: launching, sampling
    cpu_hidden: float  # under the GPU
    gpu_hidden: float  # under the CPU
    pcie_hidden: float  # under the CPU
    layers: int  # hand-offs a step
    handoff_us: float  # median over layers and steps
    submit_us: float
    wait_us: float  # mean
    hits: int  # experts found in GPU memory
    in_place: int  # read from host memory by the GPU
    cpu_experts: int
    gpu_bytes: int  # experts in GPU memory
    in_place_bytes: int
    cpu_bytes: int
    moved_bytes: int  # into the cache
    streamed_bytes: int  # of prefills

    @property
    def hit_rate(self) -> float:
        """Of the distinct experts of every step and layer, those found in GPU memory."""
        total = self.hits + self.in_place + self.cpu_experts
        return self.hits / total if total else 0.0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"hit_rate": self.hit_rate}

    def lines(self) -> list[str]:
        """For a person."""
        if not self.steps:
            return []
        each = self.seconds / self.steps * 1e3
        times = {"CPU experts": self.cpu_s, "GPU": self.gpu_s, "PCIe": self.pcie_s, "host alone": self.host_s}
        busy = (f"{name} {seconds / self.seconds:.0%}" for name, seconds in times.items())
        lines = [
            f"{self.steps} stamped steps, {each:.2f} ms each, busy: {', '.join(busy)}",
            f"of the CPU's time {self.cpu_hidden:.0%} is hidden under the GPU's, of the GPU's "
            f"{self.gpu_hidden:.0%} under the CPU's, of PCIe's {self.pcie_hidden:.0%} under the CPU's",
        ]
        if self.layers:
            lines.append(
                f"hand-off {self.handoff_us:.1f} us a layer beyond the CPU's work (median of {self.layers} "
                f"layers a step), submit {self.submit_us:.1f} us; the GPU waits {self.wait_us:.1f} us a layer"
            )
        read = {"GPU": self.gpu_bytes, "PCIe in place": self.in_place_bytes, "CPU": self.cpu_bytes,
                "moved": self.moved_bytes, "streamed": self.streamed_bytes}  # fmt: skip
        told = ", ".join(f"{name} {n / self.steps / 1e6:.1f}" for name, n in read.items() if n)
        if told:
            lines.append(f"hit rate {self.hit_rate:.1%}; MB of experts a step: {told}")
        return lines


def hand_offs(step: Step) -> list[HandOff]:
    """Of the layers whose experts the CPU computed, in order."""
    named: dict[tuple[str, int], Span] = {}
    for part in step.parts:
        if part.name in (SUBMIT, WAIT, EXPERTS):
            named[part.name, part.layer] = part
    ends = sorted(part.end for part in step.parts if part.lane == "cpu")
    found: list[HandOff] = []
    for (name, layer), work in sorted(named.items(), key=lambda item: item[1].start):
        submit, wait = named.get((SUBMIT, layer)), named.get((WAIT, layer))
        if name != EXPERTS or submit is None or wait is None:
            continue
        at = bisect_right(ends, work.start)
        ready = max(submit.end, ends[at - 1]) if at else submit.end
        cost = work.start - ready + wait.end - max(work.end, wait.start)
        found.append(HandOff(layer, submit.duration / 1e9, cost / 1e9, wait.duration / 1e9))
    return found


def overlap(steps: Iterable[Step]) -> Overlap:
    """Of those of the steps that are stamped."""
    stamped = [step for step in steps if step.span.name == STAMPED]
    times = dict.fromkeys(("cpu", "gpu", "pcie", "host", "cpu_gpu", "pcie_cpu"), 0)
    crossings: list[HandOff] = []
    for step in stamped:
        cpu, gpu, pcie = (_busy(step.parts, lane) for lane in ("cpu", "gpu", "pcie"))
        whole = union([(step.span.start, step.span.end)])
        parts = {
            "cpu": cpu, "gpu": gpu, "pcie": pcie,
            "host": subtract(whole, union([*cpu, *gpu, *pcie])),
            "cpu_gpu": intersect(cpu, gpu), "pcie_cpu": intersect(pcie, cpu),
        }  # fmt: skip
        for name, moments in parts.items():
            times[name] += length(moments)
        crossings += hand_offs(step)
    every = [part for step in stamped for part in step.parts]

    def total(field: str, *names: str) -> int:
        return sum(getattr(part, field) for part in every if part.name in names)

    def middle(values: Sequence[float]) -> float:
        return median(values) * 1e6 if values else 0.0

    def share(part: str, of: str) -> float:
        return times[part] / times[of] if times[of] else 0.0

    return Overlap(
        steps=len(stamped),
        tokens=sum(step.span.tokens for step in stamped),
        seconds=sum(step.span.duration for step in stamped) / 1e9,
        cpu_s=times["cpu"] / 1e9,
        gpu_s=times["gpu"] / 1e9,
        pcie_s=times["pcie"] / 1e9,
        host_s=times["host"] / 1e9,
        cpu_hidden=share("cpu_gpu", "cpu"),
        gpu_hidden=share("cpu_gpu", "gpu"),
        pcie_hidden=share("pcie_cpu", "pcie"),
        layers=len(crossings) // len(stamped) if stamped else 0,
        handoff_us=middle([one.cost for one in crossings]),
        submit_us=middle([one.submit for one in crossings]),
        wait_us=sum(one.wait for one in crossings) / len(crossings) * 1e6 if crossings else 0.0,
        hits=total("experts", HITS),
        in_place=total("experts", IN_PLACE),
        cpu_experts=total("experts", EXPERTS, DEFERRED),
        gpu_bytes=total("nbytes", HITS),
        in_place_bytes=total("nbytes", IN_PLACE),
        cpu_bytes=total("nbytes", EXPERTS, DEFERRED),
        moved_bytes=total("nbytes", MOVE),
        streamed_bytes=total("nbytes", STREAM),
    )


def choices(steps: Iterable[Step]) -> list[dict[str, Any]]:
    """How each chunk of a prompt was computed: strategy, expected and actual time."""
    return [
        {"step": part.step, "layer": part.layer, "tokens": part.tokens, "actual_us": part.duration / 1e3}
        | dict(part.details)
        for step in steps
        for part in step.parts
        if part.name == PREFILL
    ]


def choice_lines(told: Sequence[dict[str, Any]]) -> list[str]:
    """One for each strategy, for a person."""
    lines: list[str] = []
    for strategy in dict.fromkeys(one["strategy"] for one in told):
        of = [one for one in told if one["strategy"] == strategy]
        expected, actual = (sum(one[key] for one in of) / 1e3 for key in ("expected_us", "actual_us"))
        tokens = sum(one["tokens"] for one in of)
        lines.append(
            f"prefill by '{strategy}': {len(of)} times, {tokens} rows, "
            f"{actual:.1f} ms, expected {expected:.1f} ms"
        )
    return lines


def _busy(parts: Iterable[Span], lane: str) -> list[Interval]:
    return union((part.start, part.end) for part in parts if part.lane == lane and part.name not in _IDLE)
