"""Variants of a decode step over all tiers, side by side, on one GPU and the CPU beside it.

    python benchmarks/step_variants.py [--layers 6] [--rows 1 8] [--slots 114] [--threads N]
        [--only VARIANT ...] [--json FILE]

Layers of 512 experts of 2560 x 640 in int4 (--shape), 10 a token, in one captured graph with the real
hand-off. Each begins with a kernel that waits as long as a dense half takes, and has another one for the
shared expert behind its submit. Routing: the tables of ``hetero bench``. The split is made by what the CPU
and PCIe take in this very run (hetero/engine/gpu/share.py).

Variants: reads over PCIe ``late`` (by the kernels that compute them, where they lie) or ``early`` (from the
submit on, into GPU memory); moves ``after`` the GPU's own share or ``soon`` (at once); how many; the split
by the times of one row for all numbers of rows, as it was once; no share of PCIe; fewer bytes on their way.
``early, soon`` is the default of the product (HETERO_PCIE=early), ``late, after`` what HETERO_PCIE=late
gives. About a minute, of which Triton's compiler takes a third. ``--device cpu`` runs the same by the
kernels' interpreter, for tests.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from hetero import cpu
from hetero.core import ExpertSpec
from hetero.cpu import CpuExperts
from hetero.engine.gpu import share
from hetero.engine.gpu.port import LanePort
from hetero.engine.handoff import Handoff
from hetero.formats import parse_format
from hetero.ops.gpu import cache
from hetero.ops.gpu.hybrid import DirectPort, HybridExperts
from hetero.ops.gpu.hybrid_shared import SIZES, HybridShared, Sides
from hetero.ops.gpu.pinned import PinnedArena, pin_all
from hetero.report.routing import make_table

LAYERS = 48  # of the model that figures are given for
CLOCK_MHZ = 1700
START = time.perf_counter()
ROUTINGS = ("local", "uniform")


def say(*words: object) -> None:
    print(f"[{time.perf_counter() - START:5.1f} s]", *words, file=sys.stderr, flush=True)


def make_layers(count: int, spec: ExpertSpec, fmt: str) -> list[CpuExperts]:
    """Sixteen packed experts, and mixtures of their bytes."""
    generator = torch.Generator().manual_seed(1)
    made: list[CpuExperts] = []
    for _ in range(count):
        experts = CpuExperts(spec, parse_format(fmt))
        first = made[0] if made else None
        sources = min(16, spec.num_experts)
        for expert in range(sources):
            if first is not None:
                whole = torch.empty(first.whole_bytes, dtype=torch.uint8)
                first.save(expert, whole.numpy().data)
                experts.restore(expert, whole.numpy().data)
                continue
            for part, shape in (
                ("gate", (spec.intermediate, spec.hidden)),
                ("up", (spec.intermediate, spec.hidden)),
                ("down", (spec.hidden, spec.intermediate)),
            ):
                experts.put(expert, part, torch.randn(shape, generator=generator) * shape[1] ** -0.5)  # type: ignore[arg-type]
        if first is not None:
            experts.filled(range(sources))
        experts.replicate(sources)
        made.append(experts)
    return made


class Steps:
    """One step of all layers, a captured graph where there is a GPU. ``dense_us``: of each before its submit;
    ``shared_us``: behind it."""

    def __init__(
        self,
        experts: Sequence[CpuExperts],
        arenas: Sequence[PinnedArena],
        shared: HybridShared,
        *,
        slots: int,
        rows: int = 1,
        steps: int = 254,
        dense_us: float = 0.0,
        shared_us: float = 0.0,
    ) -> None:
        self.spec, self.count, self.rows, self.shared = experts[0].spec, len(experts), rows, shared
        self.device, self.top_k = shared.device, experts[0].spec.top_k
        self.handoff: Handoff | None = None
        if self.device.type == "cuda":
            self.handoff = Handoff(experts, rows=rows, slots=self.top_k, device=self.device)
            port: Any = LanePort(self.handoff)
        else:
            port = DirectPort(experts, rows)
        self.layers = [
            HybridExperts(one, number, port, shared, slots=slots, arena=arena)
            for number, (one, arena) in enumerate(zip(experts, arenas, strict=True))
        ]
        self._sleeps = int(dense_us * CLOCK_MHZ), int(shared_us * CLOCK_MHZ)
        self.x = torch.randn(rows, self.spec.hidden, device=self.device).bfloat16()
        self.weights = torch.full((rows, self.top_k), 0.1, device=self.device)
        shape = steps, self.count, rows, self.top_k
        self.table = torch.zeros(shape, dtype=torch.int64, device=self.device)
        self.at = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.graph: Any = None
        if self.handoff is None:
            return
        with self.handoff.step({0: rows}):
            self._record()
            torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._record()

    def _sleep(self, which: int) -> None:
        if self.graph is not None or self.handoff is not None:
            torch.cuda._sleep(self._sleeps[which])

    def _record(self) -> None:
        ids = self.table.index_select(0, self.at)[0]
        self.at.add_(1)
        for number, layer in enumerate(self.layers):
            self._sleep(0)
            layer.submit(self.x, ids[number], self.weights)
            self._sleep(1)
            layer.collect()
        self.shared.join()

    def run(self, ids: torch.Tensor, *, warm: int, steps: int) -> dict[str, float]:
        """Microseconds a layer, and what each tier did. ids [steps, layers, rows, k]."""
        self.table[: len(ids)].copy_(ids)
        self.at.zero_()
        times, work, handoff = [], 0.0, 0.0
        before = [0] * 5
        for step in range(warm + steps):
            if step == warm:
                before = self._totals()
            times.append(self._step())
            if step >= warm and self.handoff is not None:
                totals = self.handoff.totals(0)
                work, handoff = work + totals.work_s, handoff + totals.handoff_s
        counted = [now - then for now, then in zip(self._totals(), before, strict=True)]
        whole = steps * self.count
        used = max(1, sum(counted[:3]))
        return {
            "us_a_layer": statistics.median(times[warm:]) / self.count,
            "hits": counted[0] / used,
            "gpu": counted[0] / whole,
            "pcie": counted[1] / whole,
            "cpu": counted[2] / whole,
            "stayed": counted[3] / whole,
            "moved": counted[4] / whole,
            "cpu_work_us": 1e6 * work / whole,
            "handoff_us": 1e6 * handoff / whole,
        }

    def _step(self) -> float:
        """Microseconds of a step."""
        if self.handoff is None:
            began = time.perf_counter()
            self._record()
            return 1e6 * (time.perf_counter() - began)
        # A host that spins takes a core from the experts.
        begin, end = (torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(2))
        with self.handoff.step({0: self.rows}):
            begin.record()
            self.graph.replay()
            end.record()
            end.synchronize()
        return 1e3 * float(begin.elapsed_time(end))

    def _totals(self) -> list[int]:
        found: list[int] = torch.stack([layer.cache.totals for layer in self.layers]).sum(0).tolist()
        return found

    def close(self) -> None:
        if self.handoff is not None:
            self.handoff.close()
            self.graph.reset()


class Variant(NamedTuple):
    """``rows_of_one``: the split by what a step of one row takes; ``most``: moves, None: as the split says;
    ``alone``: no share of PCIe; ``programs``: of the kernels that move and that bring experts (16 and 32 KB
    of each are on their way), None: as they are."""

    name: str
    early: bool
    soon: bool
    rows_of_one: bool = False
    most: int | None = None
    alone: bool = False
    programs: tuple[int, int] | None = None


VARIANTS = (
    Variant("late, after, split of one row", False, False, rows_of_one=True),
    Variant("late, after", False, False),
    Variant("late, soon", False, True),
    Variant("early, after", True, False),
    Variant("early, soon", True, True),
    Variant("early, soon, no moves", True, True, most=0),
    Variant("early, soon, one move", True, True, most=1),
    Variant("early, soon, two moves", True, True, most=2),
    Variant("no share, soon", True, True, alone=True),
    Variant("early, soon, 12 move", True, True, programs=(12, 32)),
    Variant("early, soon, 16 bring", True, True, programs=(24, 16)),
)

PROGRAMS = cache._FETCHERS, cache._BRINGERS
NOMINAL = [Sides(33e-6, 58e-6, 24e-6, 24e-6)] * len(SIZES)  # where nothing can be measured


def compare(
    experts: Sequence[CpuExperts], arenas: Sequence[PinnedArena], device: torch.device, options: Any
) -> dict[str, Any]:
    sides, spec = NOMINAL, experts[0].spec
    if device.type == "cuda":
        found = share.measure(experts, arenas, device, max(options.rows))
        sides = found.sides
        say(f"{found.rates.cpu / 1e9:.1f} GB/s by the CPU beside {found.rates.bus / 1e9:.1f} over PCIe")
        for rows, one in zip(SIZES, sides, strict=True):
            say(f"{rows:2} rows:", ", ".join(f"{k} {1e6 * v:.1f} us" for k, v in one._asdict().items()))
    results: list[dict[str, Any]] = []
    for rows in options.rows:
        warm, steps = (options.warm, options.steps) if rows == 1 else (options.warm // 2, options.steps // 2)
        tables = {
            kind: torch.from_numpy(
                make_table(kind, layers=len(experts), steps=warm + steps, rows=rows,
                           experts=spec.num_experts, top_k=spec.top_k)
            ).transpose(0, 1).long().to(device)
            for kind in ROUTINGS
        }  # fmt: skip
        ready: Steps | None = None
        captured: tuple[object, ...] = ()
        for variant in VARIANTS:
            if options.only and variant.name not in options.only:
                continue
            if ready is None or captured != (variant.early, variant.soon, variant.programs):
                captured = variant.early, variant.soon, variant.programs
                if ready is not None:
                    ready.close()
                ready = None  # its memory goes before more is taken
                cache._FETCHERS, cache._BRINGERS = variant.programs or PROGRAMS
                shared = HybridShared(device, share=0.5, early=variant.early, soon=variant.soon)
                ready = Steps(
                    experts, arenas, shared, slots=options.slots, rows=rows, steps=warm + steps + 2,
                    dense_us=options.dense_us, shared_us=options.shared_us,
                )  # fmt: skip
            if variant.alone:
                ready.shared.set_share(0.0)
            else:
                ready.shared.balance([sides[0]] * len(SIZES) if variant.rows_of_one else sides)
            if variant.most is not None:
                ready.shared.set_most(variant.most)
            for kind in ROUTINGS:
                line = {"rows": rows, "variant": variant.name, "routing": kind}
                line |= ready.run(tables[kind], warm=warm, steps=steps)
                line["tok_s"] = rows * 1e6 / (line["us_a_layer"] * LAYERS)
                results.append(line)
                say(rows, variant.name, kind, f"{line['us_a_layer']:.1f} us a layer")
        if ready is not None:
            ready.close()
    return {"sides": [one._asdict() for one in sides], "steps": results}


COLUMNS = (
    ("rows", "rows", "4"), ("variant", "variant", "30"), ("routing", "routing", "8"),
    ("us/layer", "us_a_layer", "8.1f"), ("tok/s", "tok_s", "7.1f"), ("hits", "hits", "6.1%"),
    ("cpu", "cpu", "6.2f"), ("pcie", "pcie", "6.2f"), ("stayed", "stayed", "6.2f"),
    ("moved", "moved", "6.2f"), ("cpu us", "cpu_work_us", "7.1f"), ("hand-off us", "handoff_us", "11.1f"),
)  # fmt: skip


def show(rows: Sequence[dict[str, Any]], columns: Sequence[tuple[str, str, str]]) -> None:
    def width(spec: str) -> int:
        return int(spec.partition(".")[0])

    print("\n" + " ".join(f"{title:>{width(spec)}}" for title, _, spec in columns))
    for row in rows:
        print(" ".join(f"{row[key]:>{spec}}" for _, key, spec in columns))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", type=int, nargs=4, default=[512, 2560, 640, 10], help="experts ... top-k")
    parser.add_argument("--format", default="int4")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--slots", type=int, default=114)
    parser.add_argument("--dense-us", type=float, default=47.0)
    parser.add_argument("--shared-us", type=float, default=10.0)
    parser.add_argument("--warm", type=int, default=120)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--threads", type=int, help="of the CPU's pool")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", nargs="+", choices=[one.name for one in VARIANTS], metavar="VARIANT")
    parser.add_argument("--json")
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("this measures a GPU, and torch sees none")
    if options.threads:
        cpu.set_threads(options.threads)
    with torch.inference_mode():
        experts = make_layers(options.layers, ExpertSpec(*options.shape), options.format)
        arenas = pin_all(experts, device)
        say(f"{options.layers} layers, {sum(one.nbytes for one in experts) / 1e9:.1f} GB, pinned")
        result = compare(experts, arenas, device, options)
        for arena in arenas:
            arena.close()
    result |= {"threads": cpu.threads(), "device": str(device), "options": vars(options)}
    if device.type == "cuda":
        result["gpu"] = torch.cuda.get_device_name()
    show(result["steps"], COLUMNS)
    for rows in options.rows:
        for kind in ROUTINGS:
            best = max(
                (one for one in result["steps"] if (one["rows"], one["routing"]) == (rows, kind)),
                key=lambda one: one["tok_s"],
            )
            print(f"{rows} rows, {kind}: best {best['variant']}, {best['tok_s']:.1f} tok/s")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
