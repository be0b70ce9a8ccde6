"""Measure the kernels of a fused decode step on a GPU: microseconds in a captured graph, and GB/s.

Every call in the graph has other weights, more in all than the L2 cache holds. Sizes are those of a shape
that hetero ships. With --sweep, each kernel is measured as it may be cut, too (hetero/ops/gpu/tuning.py), and
the fastest cuts are printed last.

    python benchmarks/gpu_kernels.py --rows 1,8 --json gpu_kernels.json
    python benchmarks/gpu_kernels.py --sweep --only project,experts
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

import hetero
from hetero.core import ExpertSpec
from hetero.formats import BLOCK_ROWS, Format, packed_bytes, parse_format
from hetero.hw.cpu import identity
from hetero.ops.gpu import attention, delta, fused, indexer, launch, mix, overlap, route
from hetero.ops.gpu.codings import BY_UNITS, CODINGS, UNIT
from hetero.ops.gpu.tuning import Cut

CACHE = 150 << 20  # bytes of weights that take turns: three times the L2 of an H200
CALLS = 48  # of one graph
DEVICE = "cuda"

Call = Callable[[], object]
Setting = dict[str, Any]


@dataclass
class Case:
    """A kernel, or what a step calls as one: ``make`` gives one call with weights of its own."""

    name: str
    nbytes: int
    make: Callable[[], Call]
    settings: list[Setting] = field(default_factory=list)
    """Of a sweep: attributes of modules to replace, by "module.NAME"; "cut" of a projection."""


def random_matrix(fmt: Format, n: int, k: int) -> fused.PackedMatrix:
    """Random bytes with scales of 2^-10, or random bf16."""
    if not fmt.quantised:
        return fused.PackedMatrix(torch.randn(n, k, device=DEVICE).bfloat16(), fmt, n, k)
    size = packed_bytes(fmt, n, k)
    packed = torch.randint(256, (size,), dtype=torch.uint8, device=DEVICE)
    m = fused.PackedMatrix(packed, fmt, n, k)
    scales = packed.view(-1, m.sizes["BLOCK_BYTES"])[:, m.sizes["SCALES_AT"] :]
    scales.view(torch.float32 if fmt.name == "fp8" else torch.float16).fill_(2.0**-10)
    return m


def project_case(fmt: Format, n: int, k: int, rows: int, current: Setting) -> Case:
    x = torch.randn(rows, k, device=DEVICE).bfloat16()
    given = fused.plain_rows(fmt, x)

    def make() -> Call:
        m = random_matrix(fmt, n, k)
        return lambda: fused.project(given, m, cut=current.get("cut"))

    cuts = [Cut(4, 16, stages=3), Cut(4, 16, stages=6), Cut(8, 32, stages=4)]
    if not fmt.quantised:
        cuts = [Cut(4, 4, stages=3), Cut(4, 8, stages=4)]
    if rows == 1 and fmt.quantised:
        cuts += [Cut(4, 16, stages=5), Cut(4, 2), Cut(4, 5), Cut(8, 3), Cut(16, 3)]
    elif rows == 1:
        cuts += [Cut(2, 5, 4), Cut(4, 3, 4), Cut(4, 5, 2), Cut(8, 3, 2)]
    if n > 50_000:
        cuts = []
    nbytes = packed_bytes(fmt, n, k) if fmt.quantised else 2 * n * k
    return Case(f"project {fmt} {k}->{n} rows {rows}", nbytes, make, [{"cut": cut} for cut in cuts])


def mix_case(s: Setting, rows: int, fmt: Format) -> Case:
    hidden, count, rank = s["hidden_size"], s["hc_count"], s["hc_lowrank"]
    streams = torch.randn(rows, count * hidden, device=DEVICE).bfloat16()
    out = torch.randn(rows, hidden, device=DEVICE)
    inject = torch.rand(rows, count, device=DEVICE)

    def make() -> Call:
        down = torch.randn(rank + count, count * hidden, device=DEVICE).bfloat16() / 100
        up = torch.randn(count * hidden, rank, device=DEVICE).bfloat16()
        weights = mix.MixWeights(torch.zeros(count * hidden, device=DEVICE), down, up, count, 1e-6)
        return lambda: mix.mix_rows(fmt, weights, streams, out, inject)

    sweep = [
        {"mix._LINES": lines, "mix._WARPS": warps, "mix._DEPTH": 256 * warps}
        for lines, warps in ((2, 2), (4, 2), (8, 2), (4, 1), (8, 1))
    ]
    sweep += [{"mix._MIX_WARPS": warps} for warps in (4, 8, 16)] + [
        {"mix._RANK_DEPTH": 32, "mix._MIX_WARPS": 8}
    ]
    nbytes = 2 * count * hidden * (2 * rank + count)
    return Case(f"mix_rows {count} streams of {hidden} rows {rows}", nbytes, make, sweep)


def delta_case(s: Setting, rows: int) -> Case:
    shape = delta.DeltaShape(
        s["linear_num_key_heads"], s["linear_num_value_heads"], s["linear_key_head_dim"],
        s["linear_value_head_dim"], s["linear_conv_kernel_dim"],
    )  # fmt: skip
    heads = shape.value_heads
    slots, positions = (torch.arange(rows, device=DEVICE) for _ in range(2))
    qkv = torch.randn(rows, shape.channels, device=DEVICE).bfloat16()
    a, b = (torch.randn(rows, heads, device=DEVICE).bfloat16() for _ in range(2))

    def make() -> Call:
        state = delta.DeltaState(shape, rows, DEVICE)
        conv = torch.randn(shape.channels, shape.taps, device=DEVICE)
        zeros = torch.zeros(heads, device=DEVICE)
        weights = delta.DeltaWeights(conv, zeros, zeros, torch.ones(shape.value_dim, device=DEVICE), 1e-6)
        return lambda: delta.delta_core(state, weights, (qkv, a, b), slots, positions)

    nbytes = rows * 8 * heads * shape.key_dim * shape.value_dim
    sweep = [{"delta._COLUMNS": c, "delta._WARPS": w} for c in (16, 32, 64) for w in (2, 4, 8)]
    return Case(f"delta_core {heads} heads rows {rows}", nbytes, make, sweep)


def attention_case(s: Setting, rows: int, context: int, fmt: Format) -> Case:
    heads, kv_heads, dim = s["num_attention_heads"], s["num_key_value_heads"], s["head_dim"]
    shape = attention.AttentionShape(heads, kv_heads, dim, dim // 4, gated=True, norm_offset=1.0)
    page = 16
    each = -(-context // page)
    pages = torch.randperm(rows * each, device=DEVICE).int().view(rows, each)
    where = pages, torch.arange(rows, device=DEVICE), torch.full((rows,), context - 1, device=DEVICE)
    q = torch.randn(rows, 2 * heads * dim, device=DEVICE).bfloat16()
    k, v = (torch.randn(rows, kv_heads * dim, device=DEVICE).bfloat16() for _ in range(2))
    norm = torch.zeros(dim, device=DEVICE)
    weights = attention.AttentionWeights(torch.rand(dim // 8, device=DEVICE), 1.0, norm, norm)

    def make() -> Call:
        cache = attention.PagedKeys(shape, rows * each, page, torch.bfloat16, DEVICE)
        return lambda: attention.attention_rows(fmt, shape, weights, cache, (q, k, v), where)

    sweep = [
        {"attention._PARTS": parts, "attention._CHUNK": chunk, "attention._WARPS": warps}
        for parts, chunk, warps in (
            (64, 16, 4),
            (64, 32, 2),
            (64, 32, 8),
            (32, 32, 4),
            (32, 64, 4),
            (128, 16, 4),
        )
    ]
    sweep += [{"attention._WIDE": wide} for wide in (32, 128)]
    nbytes = rows * context * kv_heads * dim * 4
    return Case(f"attention_rows context {context} rows {rows}", nbytes, make, sweep)


def indexed_case(s: Setting, rows: int, context: int, fmt: Format) -> Case:
    """Attention that reads chosen blocks, with the choice."""
    heads, kv_heads, dim = s["num_attention_heads"], s["num_key_value_heads"], s["head_dim"]
    shape = attention.AttentionShape(heads, kv_heads, dim, dim // 4, gated=True, norm_offset=1.0)
    ratio, budget = s["indexer_compress_ratio"], s["indexer_budget"]
    chooser = indexer.IndexerShape(s["indexer_n_heads"], s["indexer_head_dim"], ratio, budget // ratio)
    page = 16
    each = -(-context // page)
    pages = torch.randperm(rows * each, device=DEVICE).int().view(rows, each)
    where = pages, torch.arange(rows, device=DEVICE), torch.full((rows,), context - 1, device=DEVICE)
    q = torch.randn(rows, 2 * heads * dim, device=DEVICE).bfloat16()
    k, v = (torch.randn(rows, kv_heads * dim, device=DEVICE).bfloat16() for _ in range(2))
    qk = torch.randn(rows, (chooser.heads + 1) * chooser.dim, device=DEVICE).bfloat16()
    norm, index_norm = torch.zeros(dim, device=DEVICE), torch.zeros(chooser.dim, device=DEVICE)
    weights = attention.AttentionWeights(torch.rand(dim // 8, device=DEVICE), 1.0, norm, norm)

    def make() -> Call:
        cache = attention.PagedKeys(shape, rows * each, page, torch.bfloat16, DEVICE)
        keys = indexer.IndexKeys(chooser, rows, (rows * each, page), torch.bfloat16, DEVICE)
        keys.blocks.normal_()
        norms = indexer.IndexerWeights(index_norm, index_norm, 1e-6)
        parts = (shape, weights, cache), (chooser, norms, keys)
        return lambda: indexer.indexed_attention_rows(fmt, *parts, (q, k, v, qk), where)

    sweep: list[Setting] = [{"indexer._PARTS": (parts, 2)} for parts in (16, 32, 64, 128)]
    sweep += [{"indexer._SCORE_PARTS": (parts, 2)} for parts in (64, 128, 256, 512)]
    sweep += [{"indexer._SELECT_CHUNK": chunk} for chunk in (1024, 2048, 4096)]
    read = min(context, budget + ratio - 1) * kv_heads * dim * 4
    read += context // ratio * chooser.dim * 2 if context // ratio > chooser.top else 0
    return Case(f"indexed_attention_rows context {context} rows {rows}", rows * read, make, sweep)


def always(cut: Cut, *_: object) -> Cut:
    return cut


def experts_case(s: Setting, rows: int, fmt: Format) -> Case:
    top = s["num_experts_per_tok"]
    spec = ExpertSpec(s["num_experts"], s["hidden_size"], s["moe_intermediate_size"], top)
    made = launch.ExpertLaunch(spec, fmt, torch.device(DEVICE))
    up = spec.intermediate, spec.hidden
    size = sum(packed_bytes(fmt, *nk) for nk in (up, up, up[::-1]))
    x = made.rows(torch.randn(rows, spec.hidden, device=DEVICE).bfloat16())
    weights = torch.rand(rows, top, device=DEVICE)

    def make() -> Call:
        # No scale of these bytes, read as fp16, is no number.
        memory = torch.randint(64, (rows * top, size), dtype=torch.uint8, device=DEVICE)
        at = torch.arange(rows * top, device=DEVICE).view(rows, top) * size + memory.data_ptr()
        return lambda: made.few(memory, x, at, weights)

    if CODINGS[fmt.name].unit == UNIT:  # each tile has as much as two of the others or more
        ups, downs = ((2, 2), (2, 3), (4, 1), (4, 3), (8, 1)), ((4, 2), (4, 3), (8, 1), (8, 2), (8, 3))
    else:
        ups, downs = ((2, 5), (4, 3), (8, 3)), ((8, 2), (8, 3), (8, 7), (4, 4), (4, 7))  # type: ignore[assignment]
    cuts = [("up", Cut(*cut)) for cut in ups] + [("down", Cut(*cut)) for cut in downs]
    sweep: list[Setting] = [{f"launch.cut_{which}": partial(always, cut)} for which, cut in cuts]
    if fmt.name in BY_UNITS:
        sweep.append({"launch.INTEGERS_BY_UNITS": True})
    return Case(
        f"experts {fmt} {top} of {spec.hidden}x{spec.intermediate} rows {rows}",
        rows * top * size,
        make,
        sweep,
    )


def many_case(s: Setting, fmt: Format) -> Case:
    """Experts for the rows of a prompt, by tensor cores on decoded weights."""
    experts, each = 32, 64
    spec = ExpertSpec(experts, s["hidden_size"], s["moe_intermediate_size"], 1)
    made = launch.ExpertLaunch(spec, fmt, torch.device(DEVICE))
    up = spec.intermediate, spec.hidden
    size = sum(packed_bytes(fmt, *nk) for nk in (up, up, up[::-1]))
    rows, shape = experts * each, launch.tiling(each)
    x = torch.randn(rows, spec.hidden, device=DEVICE).bfloat16()
    places = torch.arange(rows, device=DEVICE, dtype=torch.int32)
    begins = torch.arange(experts, device=DEVICE, dtype=torch.int32) * each
    out, room = torch.empty(rows, spec.hidden, device=DEVICE), made.rooms(rows)
    weights = torch.ones(rows, 1, device=DEVICE)

    def make() -> Call:
        memory = torch.randint(64, (experts, size), dtype=torch.uint8, device=DEVICE)
        at = memory.data_ptr() + torch.arange(experts, device=DEVICE) * size
        pairs = launch.Sorted(places, places, torch.stack([begins, begins + each], 1), at)
        return lambda: made.many(
            memory, x, weights, pairs, rows=(0, rows), tiles=(0, experts),
            out=out, room=room, shape=shape, first=True,
        )  # fmt: skip

    name = f"many {fmt} {experts} of {spec.hidden}x{spec.intermediate} rows {rows}"
    return Case(name, experts * size, make)


def small_cases(s: Setting, rows: int, fmt: Format) -> list[Case]:
    hidden, wide, vocabulary = s["hidden_size"], s["shared_expert_intermediate_size"], s["vocab_size"]
    heads, dim = s["linear_num_value_heads"], s["linear_value_head_dim"]
    x, add = (torch.randn(rows, hidden, device=DEVICE).bfloat16() for _ in range(2))
    norm, gate_up = torch.zeros(hidden, device=DEVICE), torch.randn(rows, 2 * wide, device=DEVICE).bfloat16()
    y, z = torch.randn(rows, heads, dim, device=DEVICE), torch.randn(rows, heads * dim, device=DEVICE)
    router = torch.randn(rows, s["num_experts"], device=DEVICE).bfloat16()
    logits = torch.randn(rows, vocabulary, device=DEVICE)
    calls: dict[str, tuple[int, Call]] = {
        "plain_rows": (0, lambda: fused.plain_rows(fmt, x)),
        "norm_rows": (0, lambda: fused.norm_rows(fmt, x, norm, 1e-6, 1.0, add)),
        "swiglu_rows": (0, lambda: fused.swiglu_rows(fmt, gate_up)),
        "gated_norm_rows": (0, lambda: fused.gated_norm_rows(fmt, y, z, norm[:dim], 1e-6)),
        "route": (0, lambda: route.route(router, s["num_experts_per_tok"])),
        "argmax": (logits.nbytes, lambda: route.argmax(logits)),
    }
    sweeps = {"argmax": [{"route._CHUNK": chunk} for chunk in (1024, 4096, 8192)]}
    return [
        Case(f"{name} rows {rows}", size, lambda call=call: call, sweeps.get(name, []))  # type: ignore[misc]
        for name, (size, call) in calls.items()
    ]


FORMATS = "int4,int8,mxfp4,nvfp4,fp8,int4z g128,q4_k,q6_k,q3_k,iq4_xs"
"""Of experts in a sweep: those of most checkpoints, and all kinds of decoding."""


def cases(s: Setting, rows: int, context: int, current: Setting, formats: str = "int4") -> Iterator[Case]:
    """``formats``: of experts."""
    hidden, shared = s["hidden_size"], s["shared_expert_intermediate_size"]
    int8, int4, bf16, fp8 = map(parse_format, ("int8", "int4", "bf16", "fp8"))
    qk, v = (s[f"linear_num_{of}_heads"] * s[f"linear_{of}_head_dim"] for of in ("key", "value"))
    into, heads = 2 * qk + 2 * v + 2 * s["linear_num_value_heads"], s["num_attention_heads"] * s["head_dim"]
    out = dict.fromkeys([(into, hidden), (hidden, v), (hidden, heads)])
    for n, k in (*out, (2 * shared + BLOCK_ROWS, hidden), (hidden, shared)):
        yield project_case(int8, n, k, rows, current)
    yield project_case(int8, s["vocab_size"], hidden, rows, current)
    yield project_case(int4, hidden, v, rows, current)
    yield project_case(fp8, hidden, v, rows, current)
    for n, k in ((s["num_experts"], hidden), (into, hidden), (hidden, v)):
        yield project_case(bf16, n, k, rows, current)
    if "hc_count" in s:
        yield mix_case(s, rows, int8)
    yield delta_case(s, rows)
    yield attention_case(s, rows, context, int8)
    if "indexer_budget" in s:
        for length in dict.fromkeys((context, 8192, 131072)):
            yield indexed_case(s, rows, length, int8)
    for fmt in map(parse_format, formats.split(",")):
        yield experts_case(s, rows, fmt)
        if rows == 1:
            yield many_case(s, fmt)
    yield from small_cases(s, rows, int8)


_OWNERS = attention, delta, indexer, launch, mix, route
MODULES = {module.__name__.rpartition(".")[2]: module for module in _OWNERS}


@contextmanager
def put(setting: Setting, current: Setting) -> Iterator[None]:
    before = []
    for name, value in setting.items():
        if name == "cut":
            current["cut"] = value
            continue
        module, _, attribute = name.partition(".")
        before.append((MODULES[module], attribute, getattr(MODULES[module], attribute)))
        setattr(MODULES[module], attribute, value)
    try:
        yield
    finally:
        current.pop("cut", None)
        for owner, attribute, value in before:
            setattr(owner, attribute, value)


def measure(calls: list[Call], repeats: int) -> float:
    """Microseconds a call."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(CALLS):
            calls[i % len(calls)]()
    times = []
    for _ in range(repeats + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / CALLS)
    return statistics.median(times[1:])


def shown(setting: Setting) -> str:
    parts = []
    for name, value in setting.items():
        cut = value() if callable(value) else value
        parts.append(f"{name.rpartition('.')[2]}={tuple(cut) if isinstance(cut, Cut) else cut}")
    return " ".join(parts) or "as it is"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="qwen3.8-flash-next-125b", help="a name in hetero/data/shapes")
    parser.add_argument("--rows", default="1", help="of a step, by commas")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--formats", help="of experts, by commas; of a sweep ten, else int4")
    parser.add_argument("--only", default="", help="kernels whose names begin with one of these, by commas")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--overlap", action="store_true", help="let a kernel begin before the last one ends")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this machine has no CUDA device")
    path = Path(hetero.__file__).parent / "data" / "shapes" / f"{options.shape}.json"
    config = json.loads(path.read_text())
    sizes = config.get("text_config", config)
    overlap.ENABLED = options.overlap
    results: list[Setting] = []
    current: Setting = {}
    for rows in map(int, options.rows.split(",")):
        formats = options.formats or (FORMATS if options.sweep else "int4")
        for case in cases(sizes, rows, options.context, current, formats):
            if not case.name.startswith(tuple(options.only.split(","))):
                continue
            copies = min(max(-(-CACHE // max(case.nbytes, 1)), 1), CALLS) if case.nbytes else 1
            calls = [case.make() for _ in range(copies)]
            for setting in [{}, *(case.settings if options.sweep else [])]:
                what = shown(setting)
                try:
                    with put(setting, current):
                        us = measure(calls, options.repeats)
                except Exception as error:  # a cut that does not fit this GPU is a result as well
                    print(f"{case.name}: {what}: {type(error).__name__}: {str(error).splitlines()[0][:90]}")
                    continue
                results.append({"kernel": case.name, "setting": what, "us": us, "bytes": case.nbytes})
            del calls
    if options.json:
        report = {
            "identity": identity(),
            "gpu": torch.cuda.get_device_name(),
            "options": {key: str(value) for key, value in vars(options).items()},
            "results": results,
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    for r in results:
        speed = f"{r['bytes'] / r['us'] / 1e3:8.0f} GB/s" if r["bytes"] else ""
        print(f"{r['kernel']:58} {r['us']:8.2f} us {speed:14} {r['setting']}")
    if options.sweep:
        print("the fastest of each:")
        for name in dict.fromkeys(r["kernel"] for r in results):
            best = min((r for r in results if r["kernel"] == name), key=lambda r: float(r["us"]))
            print(f"{name:58} {best['us']:8.2f} us  {best['setting']}")


if __name__ == "__main__":
    main()
