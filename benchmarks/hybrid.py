"""Experts over all tiers on one GPU and the CPU beside it: decode steps and prompts, without dense layers.

    python benchmarks/hybrid.py [--layers 8] [--slots 0 65 130] [--dense-us 60] [--tokens 512 2048 8192]
                                [--threads N] [--sweep] [--json FILE]

Layers of 512 experts of 2560 x 640 in int4 (--shape), 10 a token. Decode: one captured graph of all layers
with the real hand-off, where each layer begins with a kernel that waits as long as a dense part takes.
Routing from tables, ``local`` and ``uniform``, as benchmarks/cache_policy.py makes them. The rates of CPU and
PCIe are measured first, by steps that leave everything to one of them; ``balanced`` divides by these.
Prompts: random routing, each strategy; tok/s as if 48 such layers were all of a model. The table comes last.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from typing import Any

import torch

sys.path.insert(0, __file__.rpartition("/")[0] or ".")

from cache_policy import table

from hetero import cpu
from hetero.core import ExpertSpec
from hetero.cpu import CpuExperts
from hetero.engine.gpu.port import LanePort
from hetero.engine.handoff import Handoff
from hetero.formats import parse_format
from hetero.ops.gpu.hybrid import HybridExperts
from hetero.ops.gpu.hybrid_shared import HybridShared
from hetero.ops.gpu.launch import Sorted, Tiling, sorted_places
from hetero.ops.gpu.pinned import PinnedArena, pin_all

LAYERS = 48  # of the model that figures are given for
WARM, STEPS = 150, 100
CLOCK_MHZ = 1700


def say(*words: object) -> None:
    print(f"[{time.perf_counter() - START:5.1f} s]", *words, file=sys.stderr, flush=True)


START = time.perf_counter()


def make_layers(count: int, spec: ExpertSpec, fmt: str) -> list[CpuExperts]:
    """Sixteen packed experts, and mixtures of their bytes."""
    generator = torch.Generator().manual_seed(1)
    made = []
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


class Decode:
    """A captured graph of one step of all layers."""

    def __init__(
        self, experts: list[CpuExperts], arenas: list[PinnedArena], slots: int, dense_us: float, moves: int
    ) -> None:
        self.spec, self.count = experts[0].spec, len(experts)
        self.shared = HybridShared("cuda", moves=moves)
        self.handoff = Handoff(experts, rows=1, slots=self.spec.top_k, device="cuda")
        port = LanePort(self.handoff)
        self.layers = [
            HybridExperts(one, number, port, self.shared, slots=slots, arena=arena)
            for number, (one, arena) in enumerate(zip(experts, arenas, strict=True))
        ]
        self.dense = int(dense_us * CLOCK_MHZ)
        self.x = torch.randn(1, self.spec.hidden, device="cuda").bfloat16()
        self.weights = torch.full((1, self.spec.top_k), 0.1, device="cuda")
        self.table = torch.zeros(
            WARM + STEPS + 4, self.count, self.spec.top_k, dtype=torch.int64, device="cuda"
        )
        self.at = torch.zeros(1, dtype=torch.int64, device="cuda")
        with self.handoff.step({0: 1}):
            self._record()
            torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._record()

    def _record(self) -> None:
        ids = self.table.index_select(0, self.at)[0]
        self.at.add_(1)
        for number, layer in enumerate(self.layers):
            torch.cuda._sleep(self.dense)
            layer.submit(self.x, ids[number : number + 1], self.weights)
            layer.collect()
        self.shared.join()

    def run(self, ids: torch.Tensor, *, warm: int = WARM, steps: int = STEPS) -> dict[str, float]:
        """Microseconds a layer, and what each tier did."""
        self.table[: len(ids)].copy_(ids)
        self.at.zero_()
        times, work, handoff = [], 0.0, 0.0
        before = [0] * 5
        # A host that spins takes a core from the experts.
        begin, end = (torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(2))
        for step in range(warm + steps):
            if step == warm:
                before = self._totals()
            with self.handoff.step({0: 1}):
                begin.record()
                self.graph.replay()
                end.record()
                end.synchronize()
            if step >= warm:
                times.append(begin.elapsed_time(end))
                totals = self.handoff.totals(0)
                work, handoff = work + totals.work_s, handoff + totals.handoff_s
        counted = [now - then for now, then in zip(self._totals(), before, strict=True)]
        whole = steps * self.count
        used = max(1, sum(counted[:3]))
        return {
            "us_a_layer": 1e3 * sorted(times)[len(times) // 2] / self.count,
            "hits": counted[0] / used,
            "gpu": counted[0] / whole,
            "pcie": counted[1] / whole,
            "cpu": counted[2] / whole,
            "stayed": counted[3] / whole,
            "moved": counted[4] / whole,
            "cpu_work_us": 1e6 * work / whole,
            "handoff_us": 1e6 * handoff / whole,
        }

    def _totals(self) -> list[int]:
        return torch.stack([layer.cache.totals for layer in self.layers]).sum(0).tolist()

    def close(self) -> None:
        self.handoff.close()
        self.graph.reset()


def tables(kind: str, layers: int, steps: int) -> torch.Tensor:
    return torch.from_numpy(table(kind, layers, steps, 3)).transpose(0, 1).contiguous().cuda()


def decode(experts: list[CpuExperts], arenas: list[PinnedArena], options: Any) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    nbytes = experts[0].whole_bytes
    routings = {kind: tables(kind, len(experts), WARM + STEPS) for kind in ("local", "uniform")}

    def note(what: str, slots: int, split: str, found: dict[str, float]) -> None:
        line = {"routing": what, "slots": slots, "split": split, **found}
        line["tok_s"] = 1e6 / (found["us_a_layer"] * LAYERS)
        results.append(line)
        say(f"{what:8} {slots:4} slots, {split:9}:", " ".join(f"{k} {v:.3g}" for k, v in found.items()))

    # One side alone, without a dense part: what an expert takes there, end to end.
    alone = Decode(experts, arenas, 0, 0.0, 0)
    seconds = {}
    for side, share in (("cpu", 0.0), ("pcie", 1.0)):
        alone.shared.set_share(share)
        found = alone.run(routings["uniform"][:60], warm=20, steps=40)
        seconds[side] = found["us_a_layer"] * 1e-6 / options.top_k
        note("uniform", 0, f"{side} alone", found)
    alone.close()
    del alone
    rates = {side: 1.0 / value for side, value in seconds.items()}
    say("GB/s:", {side: round(rate * nbytes / 1e9, 1) for side, rate in rates.items()})
    for slots in options.slots:
        ready = Decode(experts, arenas, slots, options.dense_us, options.moves)
        for kind, ids in routings.items():
            ready.shared.set_share(0.0)
            note(kind, slots, "0", ready.run(ids))
            for share in options.shares:
                ready.shared.set_share(share)
                note(kind, slots, f"{share:g}", ready.run(ids, warm=30, steps=60))
            ready.shared.balance(rates["cpu"], rates["pcie"])
            note(kind, slots, "balanced", ready.run(ids, warm=30, steps=60))
        ready.close()
        del ready
        torch.cuda.empty_cache()
    return results


def prompts(experts: list[CpuExperts], arenas: list[PinnedArena], options: Any) -> list[dict[str, Any]]:
    results = []
    spec = experts[0].spec
    for slots in (0, options.slots[-1]):
        shared = HybridShared("cuda")
        handoff = Handoff(experts, rows=1, slots=spec.top_k, device="cuda")
        layers = [
            HybridExperts(one, number, LanePort(handoff), shared, slots=slots, arena=arena)
            for number, (one, arena) in enumerate(zip(experts, arenas, strict=True))
        ]
        for tokens in options.tokens:
            x = torch.randn(tokens, spec.hidden, device="cuda").bfloat16()
            ids = torch.rand(tokens, spec.num_experts, device="cuda").topk(spec.top_k).indices
            weights = torch.full((tokens, spec.top_k), 0.1, device="cuda")
            for strategy in ("cpu", "stream", "split", "auto"):
                if strategy == "cpu" and tokens > 2048:
                    continue
                shared.prefiller.strategy = strategy
                best = float("inf")
                for _ in range(2):
                    shared.prefiller.records.clear()
                    torch.cuda.synchronize()
                    begin = time.perf_counter()
                    for layer in layers:
                        layer.prefill(x, ids, weights)
                    torch.cuda.synchronize()
                    best = min(best, time.perf_counter() - begin)
                records = list(shared.prefiller.records)
                moved = sum(record.pcie for record in records) * arenas[0].view.shape[1]
                read = sum(record.cpu for record in records) * arenas[0].view.shape[1]
                line = {
                    "tokens": tokens, "slots": slots, "strategy": strategy,
                    "chosen": sorted({record.strategy for record in records}),
                    "ms_a_layer": 1e3 * best / len(layers),
                    "tok_s": tokens / (best / len(layers) * LAYERS),
                    "pcie_gb_s": moved / best / 1e9,
                    "cpu_gb_s": read / best / 1e9,
                    "expected_ms": 1e3 * sum(record.expected_s for record in records) / len(records),
                    "records": [asdict(record) for record in records],
                }  # fmt: skip
                results.append(line)
                say(
                    f"{tokens} tokens, {slots} slots, {strategy}:",
                    {k: round(v, 2) for k, v in line.items() if isinstance(v, float)},
                )
        handoff.close()
        del layers, shared
        torch.cuda.empty_cache()
    return results


def sweep(experts: list[CpuExperts], options: Any) -> list[dict[str, Any]]:
    """The kernels for many rows alone, on experts in GPU memory, by tiling."""
    spec = experts[0].spec
    shared = HybridShared("cuda")
    handoff = Handoff(experts[:1], rows=1, slots=spec.top_k, device="cuda")
    layer = HybridExperts(
        experts[0],
        0,
        LanePort(handoff),
        shared,
        slots=spec.num_experts,
        arena=PinnedArena(experts[0], "cuda"),
    )
    results = []
    ladder = [(16, 4), (32, 4), (64, 4), (64, 8), (128, 4), (128, 8)]
    for tokens in (512, 8192):
        x = torch.randn(tokens, spec.hidden, device="cuda").bfloat16()
        ids = torch.rand(tokens, spec.num_experts, device="cuda").topk(spec.top_k).indices
        weights = torch.full((tokens, spec.top_k), 0.1, device="cuda")
        for rows, warps in ladder:
            if (tokens == 8192) == (rows < 64):
                continue
            for blocks in (4, 8):
                for depth in (32, 64, 128):
                    for stages in (2, 3, 4):
                        shape = Tiling(rows, blocks, depth, warps, stages)
                        try:
                            found = timed_tiling(layer, x, ids, weights, shape)
                        except Exception as error:  # too much shared memory, too many registers
                            say(shape, type(error).__name__)
                            continue
                        results.append({"tokens": tokens, **shape._asdict(), "ms": found})
        best = sorted((r for r in results if r["tokens"] == tokens), key=lambda r: r["ms"])[:4]
        for line in best:
            tflops = tokens * spec.top_k * 2 * spec.params / spec.num_experts / line["ms"] / 1e9
            say(f"{tflops:.0f} TFLOP/s", line)
    handoff.close()
    return results


def timed_tiling(layer: HybridExperts, x: Any, ids: Any, weights: Any, shape: Tiling) -> float:
    """Milliseconds of all experts' products and sums, sorting left out."""
    assert layer.launch is not None
    prefiller, flat = layer.shared.prefiller, ids.flatten()
    rows = torch.bincount(flat, minlength=layer.cache.experts).cpu().numpy()
    order = torch.arange(layer.cache.experts).numpy()
    addresses = layer.cache.cache_at + layer.cache.slot_of.cpu().long().numpy() * layer.cache.stride
    from hetero.ops.gpu.hybrid_prefill import _batches

    batches, tiles, where = _batches(order, addresses, rows, shape.rows, [len(order)])
    edges = torch.tensor(tiles, dtype=torch.int32, device="cuda")
    places = sorted_places(flat)
    at = torch.tensor(where, dtype=torch.int64, device="cuda")
    out = torch.empty(len(x), x.shape[1], device="cuda")
    best = float("inf")
    for _ in range(3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for number, batch in enumerate(batches[0]):
            pairs = Sorted(*places, edges, at)
            layer.launch.many(
                layer.cache.memory, x, weights, pairs, rows=batch.rows, tiles=batch.tiles, out=out,
                room=prefiller._rooms(), shape=shape, first=number == 0,
            )  # fmt: skip
        end.record()
        torch.cuda.synchronize()
        best = min(best, begin.elapsed_time(end))
    return best


DECODE_COLUMNS = (
    ("routing", "routing", "8"), ("slots", "slots", "5"), ("split", "split", "10"),
    ("us/layer", "us_a_layer", "9.1f"), ("hits", "hits", "6.1%"), ("cpu", "cpu", "5.2f"),
    ("pcie", "pcie", "5.2f"), ("stayed", "stayed", "6.2f"), ("moved", "moved", "6.2f"),
    ("cpu us", "cpu_work_us", "7.1f"), ("hand-off us", "handoff_us", "11.1f"),
)  # fmt: skip
PROMPT_COLUMNS = (
    ("tokens", "tokens", "6"), ("slots", "slots", "5"), ("strategy", "strategy", "8"),
    ("ms/layer", "ms_a_layer", "9.2f"), ("expected", "expected_ms", "9.2f"),
    ("PCIe GB/s", "pcie_gb_s", "9.1f"), ("CPU GB/s", "cpu_gb_s", "9.1f"), ("tok/s", "tok_s", "7.0f"),
)  # fmt: skip


def show(rows: list[dict[str, Any]], columns: tuple[tuple[str, str, str], ...]) -> None:
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
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--slots", type=int, nargs="+", default=[130])
    parser.add_argument("--shares", type=float, nargs="*", default=[0.25, 0.4])
    parser.add_argument("--moves", type=int, default=2)
    parser.add_argument("--dense-us", type=float, default=60.0)
    parser.add_argument("--tokens", type=int, nargs="*", default=[512, 2048, 8192])
    parser.add_argument("--threads", type=int, help="of the CPU's pool")
    parser.add_argument(
        "--sweep", action="store_true", help="only compare tilings of the kernels for many rows"
    )
    parser.add_argument("--json")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this measures a GPU, and torch sees none")
    if options.threads:
        cpu.set_threads(options.threads)
    spec = ExpertSpec(*options.shape)
    options.top_k = spec.top_k
    with torch.inference_mode():
        experts = make_layers(options.layers, spec, options.format)
        nbytes = sum(one.nbytes for one in experts)
        say(f"{options.layers} layers, {nbytes / 1e9:.1f} GB, {cpu.threads()} threads")
        result: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "threads": cpu.threads()}
        if options.sweep:
            result["sweep"] = sweep(experts, options)
        else:
            begin = time.perf_counter()
            arenas = pin_all(experts, "cuda")
            result["pin_s"] = time.perf_counter() - begin
            say(f"pinned in {result['pin_s']:.1f} s")
            result["decode"] = decode(experts, arenas, options)
            result["prompts"] = prompts(experts, arenas, options) if options.tokens else []
            show(result["decode"], DECODE_COLUMNS)
            show(result["prompts"], PROMPT_COLUMNS)
            for arena in arenas:
                arena.close()
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
