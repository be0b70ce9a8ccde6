"""A decode step over all tiers by a model of its timeline: which policies would shorten it. No device.

    python benchmarks/step_model.py [--steps 180] [--layers 16] [--rows 1 8] [--json FILE]

A step is its layers one after the other. Of each: the dense half on the GPU; the submit; from there the CPU's
share (a lead, then its experts) beside the GPU's (the shared expert, then its hits and what it reads over
PCIe); the later of both; the flag back. What crosses PCIe beside a step takes half of it from whatever reads
there, holds up flags, and slows the CPU's reads. Routing and cache are the tables of ``hetero bench`` and the
policy of benchmarks/cache_policy.py, so hits, misses, moves and what stays are those of such a run.

First the model against the committed runs of two H200 hosts (docs/perf.md), of which its constants are; then
what each policy would give on the first of them: predictions.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

sys.path.insert(0, __file__.rpartition("/")[0] or ".")

from cache_policy import EXPERTS, TOP, Learned

from hetero.report.routing import make_table

LAYERS = 48  # of the model that tokens a second are given for


@dataclass(frozen=True)
class Machine:
    """Microseconds. ``dense``: of a layer before its submit; ``shared``: between that and the GPU's own
    experts; ``tail``: of a step outside its layers. ``cpu``: of an expert on the CPU while nothing else reads
    memory, times ``busy`` while PCIe does, ``row``: more for each further row; ``lead``: of its side besides.
    ``pcie``: of an expert that kernels read in place; ``copy``: that is copied and waited for; ``move``: that
    is copied beside, with few bytes on their way. ``hit``: of one in GPU memory; ``own``: of GPU kernels
    besides; ``gap``: between what they read first and last in place; ``empty``: of kernels that have nothing
    to do. ``choose``: until a move begins. ``there``, ``back``: of the hand-off; ``fence``, ``queue``: what
    these take more while moves cross."""

    dense: float = 47.0
    shared: float = 10.0
    tail: float = 900.0
    cpu: float = 33.0
    busy: float = 1.03
    row: float = 1.5
    lead: float = 19.0
    pcie: float = 59.0
    copy: float = 58.0
    move: float = 75.0
    hit: float = 2.2
    own: float = 24.0
    gap: float = 4.0
    empty: float = 6.0
    choose: float = 14.0
    there: float = 5.0
    fence: float = 25.0
    back: float = 5.0
    queue: float = 8.0


H200 = Machine()
"""The run of docs/perf.md: 105 GB/s by the CPU alone, 102 beside PCIe."""

OVERLAP = replace(H200, cpu=29.0, busy=1.21, pcie=63.0)
"""Another host: 99 and 81 GB/s."""


class Rates(NamedTuple):
    """By which a split is made: microseconds of an expert on either side, and besides."""

    cpu: float
    pcie: float
    lead: float = 13.5
    own: float = 15.0


@dataclass(frozen=True)
class Policy:
    """``rates``: of the split; None: none over PCIe. ``most``: moves a layer and step; ``reserve``: slots
    kept free for what is read over PCIe; ``least``: reads of a step that misses anything; ``parts``: pieces
    of an expert that the split may give to either side; ``hits``: the split knows what the GPU computes
    besides. ``early``: what crosses PCIe for the step does so from the submit on, each expert once, and is
    computed from GPU memory. ``moves``: "after" the GPU's share, "submit": from the submit on, behind what
    the step reads, or "idle": after, and only where the GPU reads nothing in this layer."""

    rates: Rates | None
    most: int = 1
    reserve: int = 3
    parts: int = 1
    early: bool = False
    hits: bool = False
    moves: str = "after"
    least: int = 0


class Layer(NamedTuple):
    """Of one step: experts found, experts missed, what the split gives PCIe (in whole experts), reads that it
    takes, moves, rows a missing expert."""

    hits: int
    misses: int
    taken: float
    reads: float
    moved: int
    rows: float


def split(policy: Policy, misses: int, hits: int, rows: float, machine: Machine) -> float:
    """How much of the misses the GPU reads, so that the later side ends soonest."""
    if policy.rates is None or not misses:
        return 0.0
    cpu, pcie, lead, own = policy.rates
    cpu += (rows - 1.0) * machine.row if policy.hits else 0.0
    own += machine.hit * hits if policy.hits else 0.0

    def ends(count: float) -> float:
        theirs = lead + (misses - count) * cpu if count < misses else 0.0
        return max(theirs, own + count * pcie if count else 0.0)

    options = [number / policy.parts for number in range(misses * policy.parts + 1)]
    return max(min(options, key=lambda count: (ends(count), count)), min(policy.least, misses))


def routed(
    ids: npt.NDArray[np.int32], slots: int, policy: Policy, machine: Machine, skipped: int
) -> Iterator[list[Layer]]:
    """What each layer does at each step after ``skipped``; ids [layers, steps, rows, TOP]."""
    layers, steps = ids.shape[:2]
    row = np.arange(layers)
    held = np.zeros((layers, EXPERTS), bool)
    held[:, : slots - policy.reserve] = True
    learned = Learned(layers, 0.04)

    @cache
    def of(misses: int, hits: int, tenths: int) -> float:
        return split(policy, misses, hits, tenths / 10, machine)

    for step in range(steps):
        pairs = np.zeros((layers, EXPERTS), np.int64)
        np.add.at(pairs, (row[:, None], ids[:, step].reshape(layers, -1)), 1)
        used = pairs > 0
        missing = used & ~held
        hits, misses = (used & held).sum(1), missing.sum(1)
        found = []
        taken = np.zeros(layers)
        for at in range(layers):
            count = int(misses[at])
            mean = float(pairs[at][missing[at]].mean()) if count else 1.0
            taken[at] = of(count, int(hits[at]), round(10 * mean))
            # Those of one row first, as the kernel takes them.
            each = np.sort(pairs[at][missing[at]])[: int(np.ceil(taken[at]))]
            reads = taken[at] if policy.early or not len(each) else taken[at] * float(each.mean())
            found.append(Layer(int(hits[at]), count, float(taken[at]), reads, 0, mean))
        free = slots - held.sum(1)
        stays = np.minimum(np.minimum(np.floor(taken), policy.reserve), free)
        held |= missing & (missing.cumsum(1) <= stays[:, None])
        values = learned.values(used)
        moved = np.zeros(layers, int)
        for _ in range(policy.most):
            best = np.where(held, -1.0, values).argmax(1)
            worst = np.where(held, values, np.inf).argmin(1)
            goes = learned.goes(values[row, best], values[row, worst])
            if policy.moves == "idle":
                goes &= taken == 0
            held[row[goes], worst[goes]] = False
            held[row[goes], best[goes]] = True
            moved += goes
        for _ in range(max(policy.reserve, 1)):
            full = held.sum(1) > slots - policy.reserve
            worst = np.where(held, values, np.inf).argmin(1)
            held[row[full], worst[full]] = False
        if step >= skipped:
            yield [one._replace(moved=int(count)) for one, count in zip(found, moved, strict=True)]


class Bus:
    """PCIe: reads that a step waits for, and moves beside them, which halve each other's speed."""

    def __init__(self) -> None:
        self.clock = 0.0
        self.moves: list[list[float]] = []  # [from when, work left]

    def add(self, begin: float, work: float) -> None:
        self.moves.append([begin, work])

    def _pass(self, until: float, speed: float) -> None:
        """Moves go on from ``clock`` until then."""
        while self.moves and self.clock < until:
            begin, work = self.moves[0]
            begin = max(begin, self.clock)
            if begin >= until:
                break
            end = begin + work / speed
            if end <= until:
                self.clock = end
                self.moves.pop(0)
            else:
                self.moves[0][1] = work - (until - begin) * speed
                break
        self.clock = max(self.clock, until)

    def read(self, begin: float, work: float) -> float:
        """When a read of so much work ends."""
        self._pass(begin, 1.0)
        now = begin
        while work > 1e-9:
            if not self.moves or self.moves[0][0] >= now + work:
                now += work
                break
            start = max(self.moves[0][0], now)
            work -= start - now
            now = self.clock = start
            both = min(2.0 * work, 2.0 * self.moves[0][1])
            work -= both / 2.0
            self._pass(now + both, 0.5)
            now += both
        self.clock = max(self.clock, now)
        return now

    def busy(self, begin: float, end: float) -> float:
        """Of that time, how much has moves pending, about."""
        self._pass(begin, 1.0)
        left = sum(work for start, work in self.moves if start < end)
        return min(left, end - begin)


class Timed(NamedTuple):
    """Microseconds a layer: all, the CPU's work, its waits; and experts."""

    layer: float
    work: float
    waits: float
    late: float
    hits: float
    pcie: float
    moved: float
    tok_s: float


def simulate(
    machine: Machine,
    policy: Policy,
    routing: str,
    *,
    slots: int,
    rows: int,
    layers: int,
    steps: int,
    seed: int = 7,
) -> Timed:
    """Means over the steps after the first third. Layers of a model are as many as ``layers``; a step's tail
    counts by its share of 48."""
    ids = _ids(routing, layers, steps, rows)
    bus, now = Bus(), 0.0
    work = late = 0.0
    counts = np.zeros(4)
    count = 0
    for step in routed(ids, slots, policy, machine, steps // 3):
        for one in step:
            counts += one.hits, one.misses, one.taken, one.moved
            count += 1
            sent = now + machine.dense + machine.there / 2
            sent += bus.busy(sent, sent + machine.fence)
            told = sent + machine.there / 2
            theirs = one.misses - one.taken
            own = sent + machine.shared
            if one.hits or one.reads:
                hits = own + machine.hit * one.hits
                if policy.early:
                    there = bus.read(sent, one.reads * machine.copy)
                    gpu = max(hits + machine.own + machine.empty, there + machine.own - machine.gap)
                elif one.reads:
                    there = bus.read(own, one.reads * machine.pcie)
                    gpu = max(hits, there) + machine.own + machine.gap
                else:
                    gpu = hits + machine.own
            else:
                gpu = own
            cpu = told
            if theirs > 0:
                took = machine.lead + theirs * (machine.cpu + machine.row * (one.rows - 1))
                shared = min(one.reads * machine.pcie, took) + bus.busy(told, told + took)
                took += theirs * machine.cpu * (machine.busy - 1) * min(shared / took, 1.0)
                cpu, work = told + took, work + took
            late += max(gpu - cpu, 0.0)
            for number in range(one.moved):
                begin = sent if policy.moves == "submit" else gpu
                bus.add(begin + machine.choose if not number else begin, machine.move)
            now = max(gpu, cpu)
            now += machine.back + bus.busy(now, now + machine.queue)
        now += machine.tail * layers / LAYERS
    whole = now / count
    experts = counts / count
    return Timed(
        whole, work / count, whole - work / count - 1.0 - machine.tail / LAYERS, late / count,
        experts[0] / (experts[0] + experts[1]), experts[2], experts[3], rows * 1e6 / (whole * LAYERS),
    )  # fmt: skip


@cache
def _ids(routing: str, layers: int, steps: int, rows: int) -> npt.NDArray[np.int32]:
    return make_table(routing, layers=layers, steps=steps, rows=rows, experts=EXPERTS, top_k=TOP)


def rates(cpu: float, pcie: float) -> Rates:
    """Of an expert of 2.76 MB, by what was measured at load, GB/s."""
    return Rates(2764.8 / cpu, 2764.8 / pcie)


MEASURED = (
    ("one move", H200, Policy(rates(65, 48)), "local", 114, 112.8),
    ("one move", H200, Policy(rates(65, 48)), "uniform", 114, 68.8),
    ("two moves", OVERLAP, Policy(rates(66, 45), most=2), "local", 116, 108.1),
    ("two moves", OVERLAP, Policy(rates(66, 45), most=2), "uniform", 116, 67.7),
)
"""What, host, policy, routing, slots a layer, tokens a second."""

SLOTS = 114  # a layer

AHEAD = replace(H200, tail=450.0)
"""The same with a host that has launched a step before it looks at the last one's token."""

TRUE = Rates(H200.cpu, H200.pcie, lead=24.0, own=38.0)  # of the shared expert, too
EARLY = Rates(H200.cpu, H200.copy, lead=24.0, own=24.0)

POLICIES: dict[str, Policy] = {
    "as measured": Policy(rates(65, 48)),
    "split by true times": Policy(TRUE),
    "the same by hits, too": Policy(TRUE, hits=True),
    "true, halves of experts": Policy(TRUE, parts=2),
    "true, moves where nothing is read": Policy(TRUE, moves="idle"),
    "true, one read at least, no moves": Policy(TRUE, most=0, least=1),
    "no share, two moves": Policy(None, most=2, reserve=0),
    "no share, two moves at submit": Policy(None, most=2, reserve=0, moves="submit"),
    "true, moves at submit": Policy(TRUE, moves="submit"),
    "reads at submit, no moves": Policy(EARLY, early=True, most=0),
    "reads at submit, moves after": Policy(EARLY, early=True),
    "reads and moves at submit": Policy(EARLY, early=True, moves="submit"),
    "the same, two moves": Policy(EARLY, early=True, moves="submit", most=2),
    "the same, four moves": Policy(EARLY, early=True, moves="submit", most=4),
    "the same, halves": Policy(EARLY, early=True, moves="submit", parts=2),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=180)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--json")
    options = parser.parse_args()
    size = {"layers": options.layers, "steps": options.steps}
    results = []
    for name, machine, policy, routing, slots, measured in MEASURED:
        found = simulate(machine, policy, routing, slots=slots, rows=1, **size)
        off = found.tok_s / measured - 1.0
        print(f"{name:10} {routing:8} measured {measured:6.1f}, model {found.tok_s:6.1f} ({off:+.1%})")
        results.append({"policy": name, "routing": routing, "measured": measured, **found._asdict()})
    print(
        "\npredicted: tok/s; microseconds a layer (CPU's work, how much later the GPU ends); experts a layer"
    )
    cases = [(name, H200, policy) for name, policy in POLICIES.items()]
    cases.append(("reads and moves at submit, host ahead", AHEAD, POLICIES["reads and moves at submit"]))
    for rows in options.rows:
        for name, machine, policy in cases:
            line = f"{name:37} {rows:2} "
            for routing in ("local", "uniform"):
                found = simulate(machine, policy, routing, slots=SLOTS, rows=rows, **size)
                line += (
                    f"| {routing} {found.tok_s:6.1f} {found.layer:6.0f} ({found.work:.0f}, {found.late:.0f})"
                )
                line += f" hits {found.hits:.0%} read {found.pcie:.2f} moved {found.moved:.2f} "
                results.append({"policy": name, "routing": routing, "rows": rows, **found._asdict()})
            print(line)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"machine": asdict(H200), "slots": SLOTS, "results": results}, file, indent=1)


if __name__ == "__main__":
    main()
