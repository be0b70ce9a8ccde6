"""Measure the whole expert operator of one MoE layer: decode and prefill, on every instruction set.

Plain reads of the same memory and the instruction sets take turns, round by round, so that a noisy machine
touches all of them alike; medians are printed. Weights are random, a few experts repeated.

    python benchmarks/experts.py --shape qwen3.8-flash-next-125b --formats "int4 g32" --threads 2
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hetero import cpu
from hetero.core import ExpertSpec
from hetero.cpu import CpuExperts
from hetero.formats import parse_format
from hetero.hw.cpu import identity

SHAPES = Path(__file__).parent / "shapes"
PACKED = 4  # experts that are really packed; the others repeat them


@dataclass
class Step:
    """Inputs of one call, and how many distinct experts it reads."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    distinct: int


def read_shapes(names: list[str]) -> list[tuple[str, ExpertSpec]]:
    """Shapes by name, or all: lines "name hidden intermediate experts top_k" of benchmarks/shapes/*.txt."""
    found: dict[str, ExpertSpec] = {}
    for path in sorted(SHAPES.glob("*.txt")):
        for line in path.read_text().splitlines():
            if line.strip() and not line.startswith("#"):
                name, *numbers = line.split()
                hidden, intermediate, experts, top_k = map(int, numbers)
                found[name] = ExpertSpec(experts, hidden, intermediate, top_k)
    missing = [n for n in names if n not in found]
    if missing:
        raise SystemExit(f"no shape {', '.join(missing)}; there are {', '.join(found)}")
    return [(n, found[n]) for n in names or found]


def build(spec: ExpertSpec, fmt: str, generator: torch.Generator) -> CpuExperts:
    """A layer of random packed experts."""
    experts = CpuExperts(spec, parse_format(fmt))
    for e in range(spec.num_experts):
        if e >= PACKED:
            experts.copy_expert(e % PACKED, e)
            continue
        for part in ("gate", "up", "down"):
            n, k = (spec.hidden, spec.intermediate) if part == "down" else (spec.intermediate, spec.hidden)
            experts.put(e, part, torch.randn(n, k, generator=generator) / k**0.5)
    return experts


def make_step(spec: ExpertSpec, tokens: int, generator: torch.Generator) -> Step:
    """Random tokens, each with top_k different experts."""
    x = torch.randn(tokens, spec.hidden, generator=generator)
    ids = torch.rand(tokens, spec.num_experts, generator=generator).topk(spec.top_k, dim=-1).indices
    weights = torch.rand(tokens, spec.top_k, generator=generator)
    return Step(x, ids, weights, int(ids.unique().numel()))


def timed_read(layers: list[CpuExperts], clock: Callable[[], float]) -> float:
    """Bytes a second of one plain read of every layer."""
    start = clock()
    total = sum(layer.plain_read() for layer in layers)
    return total / (clock() - start)


def measure(
    layers: list[CpuExperts],
    isas: list[str],
    tokens: int,
    rounds: int,
    *,
    clock: Callable[[], float],
    generator: torch.Generator,
) -> tuple[dict[str, list[float]], float, list[int]]:
    """Seconds of each step by instruction set, plain read bandwidth, distinct experts of the steps.

    A round runs the same steps on each instruction set, each step on the next layer.
    """
    spec = layers[0].spec
    per_round = max(1, min(32, 64 // tokens))
    seconds: dict[str, list[float]] = {isa: [] for isa in isas}
    reads, distinct = [], []
    for number in range(rounds + 1):
        steps = [make_step(spec, tokens, generator) for _ in range(per_round)]
        if number:
            reads.append(timed_read(layers, clock))
            distinct += [s.distinct for s in steps]
        for isa in isas:
            for layer in layers:
                layer.use(isa)
            for i, step in enumerate(steps):
                start = clock()
                layers[i % len(layers)].forward(step.x, step.ids, step.weights)
                if number:  # the first round warms up the workspace
                    seconds[isa].append(clock() - start)
    return seconds, statistics.median(reads), distinct


def report(
    name: str, layer: CpuExperts, tokens: int, isa: str, *, times: list[float], read: float, used: float
) -> dict[str, Any]:
    """One line of results; GB/s counts each distinct expert of a step once."""
    spec = layer.spec
    median = statistics.median(times)
    gbs = used * layer.nbytes / spec.num_experts / median / 1e9
    tops = 6 * tokens * spec.top_k * spec.hidden * spec.intermediate / median / 1e12
    print(
        f"{name:26} {layer.format!s:9} {tokens:5} {isa:8} {median * 1e3:9.3f} ms {gbs:7.1f} GB/s "
        f"{gbs / read * 1e11:5.0f}% of {read / 1e9:5.1f} {tops:7.3f} TOPS"
    )
    return {
        "shape": name,
        "format": str(layer.format),
        "tokens": tokens,
        "isa": isa,
        "median_s": median,
        "min_s": min(times),
        "steps": len(times),
        "gb_s": gbs,
        "read_gb_s": read / 1e9,
        "read_share": gbs * 1e9 / read,
        "tops": tops,
        "distinct_experts": used,
    }


def main() -> None:
    """Parse the options, measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", action="append", default=[], help="name in benchmarks/shapes; default all")
    parser.add_argument("--formats", nargs="+", default=["int4 g32"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 4, 256, 1024])
    parser.add_argument("--isas", nargs="+", default=[i for i in cpu.isas() if i != "scalar"])
    parser.add_argument("--threads", type=int, default=cpu.threads())
    parser.add_argument("--layers", type=int, default=1, help="arenas in turn, so that caches hold none")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write results with the hardware's identity")
    parser.add_argument(
        "--clock",
        choices=["wall", "cpu"],
        default="wall",
        help="cpu: processor time, with one thread; the figure to trust on a busy machine",
    )
    options = parser.parse_args()
    if options.clock == "cpu" and options.threads != 1:
        parser.error("--clock cpu needs --threads 1")
    clock = time.process_time if options.clock == "cpu" else time.perf_counter
    torch.set_num_threads(1)
    cpu.set_threads(options.threads)
    generator = torch.Generator().manual_seed(0)
    results: list[dict[str, Any]] = []
    for name, spec in read_shapes(options.shape):
        for fmt in options.formats:
            layers = [build(spec, fmt, generator) for _ in range(options.layers)]
            for tokens in options.tokens:
                rounds = options.rounds if tokens <= 64 else max(1, options.rounds // 2)
                cpu.reset_kernel_counts()
                seconds, read, distinct = measure(
                    layers, options.isas, tokens, rounds, clock=clock, generator=generator
                )
                counts = cpu.kernel_counts()
                for isa, times in seconds.items():
                    line = report(
                        name, layers[0], tokens, isa, times=times, read=read, used=statistics.mean(distinct)
                    )
                    results.append({**line, "kernels": counts})
            del layers
    if options.json:
        document = {
            "machine": identity(),
            "threads": options.threads,
            "layers": options.layers,
            "clock": options.clock,
            "results": results,
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
