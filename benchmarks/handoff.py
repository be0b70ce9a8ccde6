"""Measure the hand-off: microseconds a layer of each backend, beside the CPU's own work.

One stream records all layers (on a GPU: one captured CUDA graph) and is replayed. "empty": every id is the
GPU's, so that the CPU has nothing to compute and what remains is the hand-off. "real": random experts of a
shape. With copies, x, ids and weights come from device tensors and the sum goes to one; without, kernels are
taken to use the payload in place. Backends take turns, round by round; medians are printed.

    python benchmarks/handoff.py                                      # whatever the machine has
    python benchmarks/handoff.py --shape qwen3.8-flash-next-125b --layers 48 --json handoff.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from experts import build, read_shapes

from hetero import cpu
from hetero.core import ExpertSpec, HeteroError
from hetero.cpu import CpuExperts
from hetero.engine.handoff import Handoff
from hetero.engine.handoff_backends import ThreadBackend
from hetero.engine.handoff_choice import GPU_BACKENDS, make_backend
from hetero.hw.cpu import identity


class Recorded:
    """A stream of all layers, and how long a replay takes."""

    def __init__(self, experts: list[CpuExperts], backend: str, rows: int, copies: bool) -> None:
        device = torch.device("cpu" if backend == "thread" else "cuda")
        spec = experts[0].spec
        self.handoff = Handoff(experts, rows=rows, slots=spec.top_k, device=device, backend=backend)
        self.name, self.copies = backend, copies
        self.layers = len(experts)
        self.x = torch.randn(rows, spec.hidden, device=device).bfloat16()
        self.ids = [
            torch.zeros(rows, spec.top_k, dtype=torch.int64, device=device) for _ in range(self.layers)
        ]
        self.weights = torch.rand(rows, spec.top_k, device=device)
        self.out = torch.zeros(rows, spec.hidden, device=device)
        for layer in range(min(2, self.layers)):  # the slots of depth 2, for a run without copies
            payload = self.handoff.payload(0, layer, host=True)
            payload.x.copy_(self.x)
            payload.weights.copy_(self.weights)
        self.time = self._record_gpu() if device.type == "cuda" else self._record_twin()

    def _record(self) -> None:
        for layer in range(self.layers):
            if self.copies:
                self.handoff.record_submit(0, layer, self.x, self.ids[layer], self.weights)
                self.handoff.record_collect(0, layer, self.out)
            else:
                self.handoff.record_submit(0, layer)
                self.handoff.record_collect(0, layer)

    def _record_twin(self) -> Callable[[], float]:
        backend = self.handoff.backend
        assert isinstance(backend, ThreadBackend)
        self._record()

        def seconds() -> float:
            backend.launch()
            backend.synchronize()
            return float(backend.twin.last_ns) / 1e9

        return seconds

    def _record_gpu(self) -> Callable[[], float]:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            self._record()
        start = torch.cuda.Event(enable_timing=True)
        # A host that spins would take a core from the experts.
        end = torch.cuda.Event(enable_timing=True, blocking=True)

        def seconds() -> float:
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            return float(start.elapsed_time(end)) / 1e3

        return seconds

    def route(self, ids: list[torch.Tensor]) -> None:
        """What the next replay asks for. Without copies the ids stay in the slots: all layers share two."""
        for layer, chosen in enumerate(ids):
            self.ids[layer].copy_(chosen)
            if not self.copies and layer < 2:
                self.handoff.payload(0, layer, host=True).ids.copy_(chosen)
        if self.x.is_cuda:
            torch.cuda.synchronize()

    def replay(self, rows: int) -> dict[str, float]:
        """Microseconds a layer of one replay."""
        with self.handoff.step({0: rows}):
            seconds = self.time()
        totals = self.handoff.totals(0)
        scale = 1e6 / self.layers
        return {
            "layer_us": seconds * scale,
            "work_us": totals.work_s * scale,
            "above_us": (seconds - totals.work_s) * scale,
            "cpu_side_us": totals.handoff_s * scale,
        }


def random_ids(spec: ExpertSpec, rows: int, layers: int, real: bool) -> list[torch.Tensor]:
    if not real:
        return [torch.full((rows, spec.top_k), -1, dtype=torch.int64)] * layers
    scores = torch.rand(layers, rows, spec.num_experts)
    return list(scores.topk(spec.top_k, dim=-1).indices)


def usable(names: list[str]) -> tuple[list[str], dict[str, str]]:
    """Backends that work here, and why the others do not."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    works, refused = [], {}
    for name in names:
        try:
            make_backend(name, "cpu" if name == "thread" else device)
            works.append(name)
        except HeteroError as error:
            refused[name] = str(error)
    return works, refused


def measure(recorded: list[Recorded], real: bool, rows: int, repeats: int) -> list[dict[str, Any]]:
    spec = recorded[0].handoff.experts[0].spec
    found: dict[int, list[dict[str, float]]] = {i: [] for i in range(len(recorded))}
    for round_ in range(repeats + 3):
        ids = random_ids(spec, rows, recorded[0].layers, real)
        for i, one in enumerate(recorded):
            one.route(ids)
            figures = one.replay(rows)
            if round_ >= 3:
                found[i].append(figures)
    results = []
    for i, one in enumerate(recorded):
        columns = {key: [figures[key] for figures in found[i]] for key in found[i][0]}
        result: dict[str, Any] = {
            "backend": one.name,
            "experts": "real" if real else "empty",
            "copies": one.copies,
            "rows": rows,
        }
        result |= {key: statistics.median(values) for key, values in columns.items()}
        result["above_p95_us"] = sorted(columns["above_us"])[int(len(columns["above_us"]) * 0.95)]
        results.append(result)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="qwen3.8-flash-next-125b", help="of benchmarks/shapes/*.txt")
    parser.add_argument("--format", default="int4 g32")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument(
        "--distinct", type=int, default=2, help="layers of own weights; the others repeat them"
    )
    parser.add_argument("--experts", type=int, default=64, help="experts a layer, to fit memory")
    parser.add_argument("--rows", default="1", help="of a step, by commas")
    parser.add_argument("--backends", default=",".join((*GPU_BACKENDS, "thread")))
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.threads:
        cpu.set_threads(options.threads)
    ((_, shape),) = read_shapes([options.shape])
    spec = ExpertSpec(options.experts, shape.hidden, shape.intermediate, shape.top_k)
    generator = torch.Generator().manual_seed(0)
    start = time.monotonic()
    own = [build(spec, options.format, generator) for _ in range(options.distinct)]
    layers = [own[i % len(own)] for i in range(options.layers)]
    works, refused = usable(options.backends.split(","))
    print(f"{len(own)} layers packed in {time.monotonic() - start:.1f} s, {cpu.threads()} threads")
    for name, why in refused.items():
        print(f"{name}: {why}")
    results = []
    for rows in map(int, options.rows.split(",")):
        recorded = [Recorded(layers, name, rows, copies) for name in works for copies in (False, True)]
        for real in (False, True):
            results += measure(recorded, real, rows, options.repeats)
        for one in recorded:
            one.handoff.close()
    if options.json:
        report = {
            "identity": identity(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "threads": cpu.threads(),
            "options": {key: str(value) for key, value in vars(options).items()},
            "refused": refused,
            "results": results,
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    head = f"{'backend':10}{'experts':8}{'copies':8}{'rows':5}{'layer us':>10}{'work us':>10}"
    print(f"{head}{'above us':>10}{'p95':>8}{'cpu side us':>13}")
    for r in results:
        print(
            f"{r['backend']:10}{r['experts']:8}{'yes' if r['copies'] else 'no':8}{r['rows']:<5}"
            f"{r['layer_us']:10.1f}{r['work_us']:10.1f}{r['above_us']:10.1f}{r['above_p95_us']:8.1f}"
            f"{r['cpu_side_us']:13.2f}"
        )


if __name__ == "__main__":
    main()
