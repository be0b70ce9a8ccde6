"""The tables of plans in docs/perf.md: written by ``--write``, else compared with what is there.

    python scripts/plan_tables.py [--write]

One says what a large model does on desktops of several sizes, the other what plans predict of figures that
were measured. Both need neither torch nor a GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from hetero.core import MachineError
from hetero.formats import parse_format
from hetero.model.shapes import resolve_model
from hetero.plan.families import inventory
from hetero.plan.hardware import Hardware, load_hardware
from hetero.plan.inventory import Inventory
from hetero.plan.planner import make_plan
from hetero.plan.prefill import prefill
from hetero.plan.roofline import decode
from hetero.plan.routing import Routing
from hetero.plan.tiers import Request, all_expert_bytes, dense_bytes, lay_out, one_expert_bytes

GIB = 2**30
PERF = Path(__file__).resolve().parent.parent / "docs" / "perf.md"
FLAGSHIP, DESKTOP, SERVER = "qwen3.8-flash-next-125b", "rtx4090-7950x", "h200-xeon16"
VRAM = (16, 24, 32)
# (main memory, format of experts): groups of 128 are 5 GiB less than groups of 32, which is what 64 GiB lack.
RAM = ((32, "int4 g32"), (64, "int4 g32"), (64, "int4 g128"), (128, "int4 g32"))
INT4 = parse_format("int4")


def model(name: str) -> Inventory:
    found = inventory(resolve_model(f"synthetic:{name}").config)
    assert found is not None
    return found


def desktop_table() -> Iterator[str]:
    """Rows of the flagship on a desktop, by GPU memory and main memory."""
    columns = (
        "GPU memory",
        "main memory",
        "experts",
        "experts: GPU, RAM, disk",
        "dense",
        "bound: local",
        "uniform",
        "binds",
        "expected: local",
        "uniform",
    )
    yield f"| {' | '.join(columns)} |"
    yield f"|{' --- |' * len(columns)}"
    hardware, shape = load_hardware(DESKTOP), model(FLAGSHIP)
    for vram in VRAM:
        for ram, fmt in RAM:
            size = hardware.ram.model_copy(update={"bytes": ram * GIB})
            there = hardware.model_copy(update={"ram": size})
            start = f"| {vram} GiB | {ram} GiB | {fmt} |"
            request = Request(parse_format(fmt), vram=vram * GIB)
            try:
                plan = make_plan(FLAGSHIP, shape, there, request, alternatives=False)
            except MachineError as error:
                yield f"{start} does not fit: {error} | | | | | | |"
                continue
            layout = plan.layout
            in_ram = layout.in_ram - (layout.on_gpu if layout.copies else 0)
            shares = f"{layout.on_gpu:.0%}, {in_ram:.0%}, {layout.on_disk:.0%}"
            local, uniform = plan.decode
            now = "does not fit | |"
            if plan.fits:
                fused = " (fused)" if plan.today.fused else ""
                now = f"{plan.expected[0].tok_s:.3g}{fused} | {plan.expected[1].tok_s:.3g} |"
            yield (
                f"{start} {shares} | {layout.dense} | {local.tok_s:.0f} | {uniform.tok_s:.0f} | "
                f"{uniform.binds} | {now}"
            )


@dataclass(frozen=True, slots=True)
class Case:
    """Something that was measured, and the plan's figure for it."""

    what: str
    measured: str
    predicted: Callable[[], float]
    value: float  # of what was measured, for the ratio
    unit: str


def peer_tok_s(routing: str) -> float:
    """A step that takes 9 ms besides the experts, as was measured there, with misses over PCIe alone."""
    shape, server = model(FLAGSHIP), load_hardware(SERVER)
    share = 4075 / (48 * 512)
    spec = shape.sites[0].spec
    rate = Routing(routing).hit_rate(share, spec.num_experts, spec.top_k)
    missed = 480 * one_expert_bytes(spec, INT4) * (1 - rate)
    assert server.pcie is not None
    return 1e3 / (9.0 + missed / server.pcie.read_gb_s.value / 1e6)


def dense_graph_ms(name: str, kernels: int) -> float:
    """A graph of transformers' modules: dense weights once, and each kernel as long as those of qwen3_moe."""
    shape, server = model(name), load_hardware(SERVER)
    assert server.gpu is not None
    rate = server.gpu.read_gb_s.value
    # The profile's launch time comes from this one model, so that the others are predictions.
    each = (8.8 - dense_bytes(model("qwen3-30b-a3b"), "bfloat16") / rate / 1e6) / 3243
    return dense_bytes(shape, "bfloat16") / rate / 1e6 + kernels * each


def experts_ms(fmt: str, name: str = FLAGSHIP) -> float:
    """A layer of experts on the CPU with one token."""
    spec, server = model(name).sites[0].spec, load_hardware(SERVER)
    size = spec.top_k * one_expert_bytes(spec, parse_format(fmt))
    return size / (120.0 * server.cpu.expert_share.value) / 1e6


def prefill_s(tokens: int, way: str) -> float:
    shape, server = model(FLAGSHIP), load_hardware(SERVER)
    request = Request(INT4, vram=24 * GIB)
    layout = replace(lay_out(shape, server, request, "bfloat16"), chunk=tokens)  # as FreeToken does
    ways = prefill(shape, server, request, layout, tokens)
    return next(w.ms for w in ways if w.way.startswith(way)) / 1e3


def cpu_prefill_ms(tokens: int) -> float:
    """A layer of experts on the CPU with many tokens."""
    spec, server = model(FLAGSHIP).sites[0].spec, load_hardware(SERVER)
    ops = 6.0 * tokens * spec.top_k * spec.hidden * spec.intermediate
    return max(ops / server.cpu.prefill_tops.value / 1e9, 512 * one_expert_bytes(spec, INT4) / 116e6)


def on(hardware: str, name: str, bits: str, *, gpu_experts: bool, draft: int = 0) -> float:
    """The bound of a published system's hardware: local routing, experts of so many bits."""
    shape, there = model(name), load_hardware(hardware)
    request = Request(parse_format(bits), draft=draft, ram=128 * GIB)
    layout = lay_out(shape, there, request, "int8")
    if not gpu_experts:
        layout = replace(layout, on_gpu=0.0, slots=0, in_ram=1.0, copies=True)
        there = without_pcie(there)
    return decode(shape, there, request, layout, Routing("local")).tok_s


def without_pcie(hardware: Hardware) -> Hardware:
    assert hardware.pcie is not None
    slow = hardware.pcie.model_copy(update={"ram_limit_gb_s": 1.0, "both": None})
    return hardware.model_copy(update={"pcie": slow})


CASES = (
    Case(
        "dense weights of qwen3_5_moe 122B, bf16",
        "12.3 GB",
        lambda: dense_bytes(model("qwen3.5-122b-a10b"), "bfloat16") / 1e9,
        12.3,
        "GB",
    ),
    Case(
        "dense weights of qwen4_exp 125B without its table, bf16",
        "9.8 GB",
        lambda: dense_bytes(model(FLAGSHIP), "bfloat16") / 1e9,
        9.8,
        "GB",
    ),
    Case(
        "all experts of the 125B model, int4 g32",
        "63.3 GiB",
        lambda: all_expert_bytes(model(FLAGSHIP), INT4) / GIB,
        63.3,
        "GiB",
    ),
    Case(
        "dense half of qwen3_next 80B, transformers in one graph, H200",
        "12.8 ms",
        lambda: dense_graph_ms("qwen3-next-80b-a3b", 5021),
        12.8,
        "ms",
    ),
    Case(
        "dense half of qwen3_5_moe 122B, the same",
        "14.7 ms",
        lambda: dense_graph_ms("qwen3.5-122b-a10b", 5086),
        14.7,
        "ms",
    ),
    Case(
        "one layer of experts, 16 cores, 1 token, int4, 120 GB/s (the profile's share is from here)",
        "0.273 ms",
        lambda: experts_ms("int4"),
        0.273,
        "ms",
    ),
    Case("the same, int8", "0.468 ms", lambda: experts_ms("int8"), 0.468, "ms"),
    Case("the same, bf16", "0.878 ms", lambda: experts_ms("bf16"), 0.878, "ms"),
    Case(
        "the same, int4, 3072 x 1024 x 256 top-8",
        "0.460 ms",
        lambda: experts_ms("int4", "qwen3.5-122b-a10b"),
        0.460,
        "ms",
    ),
    Case("the same, 1024 tokens, int4", "19.6 to 24.3 ms", lambda: cpu_prefill_ms(1024), 22.0, "ms"),
    Case(
        "the same, 8192 tokens, int4 (the profile's rate is from here)",
        "148 to 166 ms",
        lambda: cpu_prefill_ms(8192),
        157.0,
        "ms",
    ),
    Case(
        "FreeToken, offload, local routing, 24 GiB, H200",
        "70.4 tok/s",
        lambda: peer_tok_s("local"),
        70.4,
        "tok/s",
    ),
    Case("FreeToken, offload, uniform routing", "31.8 tok/s", lambda: peer_tok_s("uniform"), 31.8, "tok/s"),
    Case(
        "FreeToken, 8000 tokens of prompt, by streaming all experts",
        "3.44 s",
        lambda: prefill_s(8000, "all experts"),
        3.44,
        "s",
    ),
    Case(
        "FreeToken, 512 tokens of prompt, over PCIe alone",
        "1.27 s",
        lambda: prefill_s(512, "all experts"),
        1.27,
        "s",
    ),
    Case(
        "llama.cpp, Qwen3.5-122B Q4_K, experts on the CPU, 4090 + 7950X",
        "15.7 tok/s",
        lambda: on(DESKTOP, "qwen3.5-122b-a10b", "int4", gpu_experts=False),
        15.7,
        "tok/s",
    ),
    Case(
        "llama.cpp, the same with a cache of hot experts",
        "22.7 tok/s",
        lambda: on(DESKTOP, "qwen3.5-122b-a10b", "int4", gpu_experts=True),
        22.7,
        "tok/s",
    ),
    Case(
        "FreeToken, 125B NVFP4, 4090",
        "36 tok/s",
        lambda: on(DESKTOP, FLAGSHIP, "nvfp4", gpu_experts=True),
        36.0,
        "tok/s",
    ),
    Case(
        "Strata, 125B Q4_K_XL, 3090",
        "36-38 tok/s (a fork 66-77)",
        lambda: on("rtx3090-5950x", FLAGSHIP, "int4", gpu_experts=True),
        37.0,
        "tok/s",
    ),
    Case(
        "Strata, 125B at about 3 bits with MTP, 4090 + 7950X",
        "133 tok/s",
        lambda: on(DESKTOP, FLAGSHIP, "q3_k", gpu_experts=True, draft=3),
        133.0,
        "tok/s",
    ),
)


def compared_table() -> Iterator[str]:
    yield "| what | measured | predicted | predicted / measured |"
    yield "| --- | --- | --- | --- |"
    for case in CASES:
        found = case.predicted()
        yield f"| {case.what} | {case.measured} | {found:.3g} {case.unit} | {found / case.value:.2f} |"


TABLES = {"desktop": desktop_table, "compared": compared_table}


def filled(text: str) -> str:
    """The document with the tables as they are now, between their marks."""
    for name, rows in TABLES.items():
        first, last = f"<!-- table: {name} -->\n", f"<!-- end: {name} -->"
        before, found, rest = text.partition(first)
        _, closed, after = rest.partition(last)
        if not found or not closed:
            raise SystemExit(f"{PERF}: no marks of table '{name}'")
        text = before + first + "\n".join(rows()) + "\n" + last + after
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    old = PERF.read_text(encoding="utf-8")
    new = filled(old)
    if parser.parse_args().write:
        PERF.write_text(new, encoding="utf-8")
    elif new != old:
        sys.exit("docs/perf.md has other tables: run scripts/plan_tables.py --write")


if __name__ == "__main__":
    main()
