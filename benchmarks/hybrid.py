"""Experts over all tiers on one GPU and the CPU beside it: shares of decode steps, and prompts.

    python benchmarks/hybrid.py [--layers 8] [--slots 0 65 130] [--dense-us 60] [--tokens 512 2048 8192]
                                [--threads N] [--sweep] [--json FILE]

Layers of 512 experts of 2560 x 640 in int4 (--shape), 10 a token. Decode: one captured graph of all layers
with the real hand-off, as benchmarks/step_variants.py makes it, which compares ways to move and read experts;
here it is how many are read over PCIe: shares, and ``balanced``, the split by what both sides take. Prompts:
random routing, each strategy; ``host waits`` is auto where the host waits for the CPU's sums instead of
streams; before each layer come as many small kernels as another layer's dense part launches. tok/s as if 48
such layers were all of a model; milliseconds a layer: of the CPU's pool, and of the host until the choices
were there, until the CPU was told, until all was launched, and waiting for the CPU. The tables come last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict
from typing import Any

import torch

sys.path.insert(0, __file__.rpartition("/")[0] or ".")

from step_variants import LAYERS, ROUTINGS, Steps, make_layers, say, show

from hetero import cpu
from hetero.core import ExpertSpec
from hetero.cpu import CpuExperts
from hetero.engine.gpu import share
from hetero.engine.gpu.port import LanePort
from hetero.engine.handoff import Handoff
from hetero.ops.gpu.chunk_tiles import batches
from hetero.ops.gpu.hybrid import HybridExperts
from hetero.ops.gpu.hybrid_prefill import ROWS
from hetero.ops.gpu.hybrid_shared import HybridShared
from hetero.ops.gpu.launch import Sorted, Tiling, sorted_places
from hetero.ops.gpu.pinned import PinnedArena, pin_all
from hetero.report.routing import make_table

WARM, STEPS = 150, 100


def tables(kind: str, layers: int, steps: int, spec: ExpertSpec) -> torch.Tensor:
    size = {"layers": layers, "steps": steps, "rows": 1, "experts": spec.num_experts, "top_k": spec.top_k}
    return torch.from_numpy(make_table(kind, **size)).transpose(0, 1).long().cuda()


def decode(experts: list[CpuExperts], arenas: list[PinnedArena], options: Any) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    spec, device = experts[0].spec, torch.device("cuda")
    routings = {kind: tables(kind, len(experts), WARM + STEPS, spec) for kind in ROUTINGS}
    sides = share.measure(experts, arenas, device, 1).sides
    say("us:", {key: round(1e6 * value, 1) for key, value in sides[0]._asdict().items()})

    def note(what: str, slots: int, split: str, found: dict[str, float]) -> None:
        line = {"routing": what, "slots": slots, "split": split, **found}
        line["tok_s"] = 1e6 / (found["us_a_layer"] * LAYERS)
        results.append(line)
        say(f"{what:8} {slots:4} slots, {split:9}:", " ".join(f"{k} {v:.3g}" for k, v in found.items()))

    for slots in options.slots:
        shared = HybridShared(device, share=0.5, moves=options.moves)
        ready = Steps(experts, arenas, shared, slots=slots, steps=WARM + STEPS + 2, dense_us=options.dense_us)
        for kind, ids in routings.items():
            for part in (0.0, *options.shares):
                shared.set_share(part)
                note(kind, slots, f"{part:g}", ready.run(ids, warm=30 if part else WARM, steps=60))
            shared.balance(sides)
            note(kind, slots, "balanced", ready.run(ids, warm=30, steps=60))
        ready.close()
        del ready, shared
        torch.cuda.empty_cache()
    return results


def prompts(experts: list[CpuExperts], arenas: list[PinnedArena], options: Any) -> list[dict[str, Any]]:
    results = []
    spec = experts[0].spec
    small = torch.zeros(256, device="cuda")
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
            for strategy in ("cpu", "stream", "split", "auto", "host waits"):
                if strategy == "cpu" and tokens > 2048:
                    continue
                shared.prefiller.strategy = "auto" if strategy == "host waits" else strategy
                shared.prefiller.ahead = strategy != "host waits"
                best = float("inf")
                for _ in range(3):
                    shared.prefiller.records.clear()
                    torch.cuda.synchronize()
                    begin = time.perf_counter()
                    for layer in layers:
                        for _ in range(options.launches):
                            small.add_(1.0)
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
                    **{
                        key: 1e3 * statistics.median(getattr(record, key) for record in records)
                        for key in ("cpu_s", "route_s", "plan_s", "launch_s", "wait_s")
                    },
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
    groups, tiles, where = batches(order, addresses, rows, shape.rows, [len(order)], most=ROWS)
    edges = torch.tensor(tiles, dtype=torch.int32, device="cuda")
    places = sorted_places(flat)
    at = torch.tensor(where, dtype=torch.int64, device="cuda")
    out = torch.empty(len(x), x.shape[1], device="cuda")
    best = float("inf")
    for _ in range(3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for number, batch in enumerate(groups[0]):
            pairs = Sorted(*places, edges, at)
            layer.launch.many(
                layer.cache.memory, x, weights, pairs, rows=batch.rows, tiles=batch.tiles, out=out,
                room=prefiller.room(), shape=shape, first=number == 0,
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
    ("tokens", "tokens", "6"), ("slots", "slots", "5"), ("strategy", "strategy", "10"),
    ("ms/layer", "ms_a_layer", "9.2f"), ("expected", "expected_ms", "9.2f"),
    ("PCIe GB/s", "pcie_gb_s", "9.1f"), ("CPU GB/s", "cpu_gb_s", "9.1f"), ("tok/s", "tok_s", "7.0f"),
    ("CPU ms", "cpu_s", "7.2f"), ("routed", "route_s", "6.2f"), ("planned", "plan_s", "7.2f"),
    ("launched", "launch_s", "8.2f"), ("waited", "wait_s", "6.2f"),
)  # fmt: skip


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
    parser.add_argument(
        "--launches", type=int, default=100, help="of small kernels before each layer of a prompt"
    )
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
