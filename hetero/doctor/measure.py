"""What main memory and the cores reach: plain reads by node, the experts' operator, torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from hetero import cpu
from hetero.core import ExpertSpec, MachineError
from hetero.cpu import CpuExperts
from hetero.doctor.finding import Finding, ok, warning
from hetero.formats import expert_bytes, parse_format
from hetero.hw import memory
from hetero.hw.caches import l3_bytes

_SPEC = ExpertSpec(num_experts=1, hidden=2560, intermediate=640, top_k=8)
_FORMAT = parse_format("int4")
MOST_BYTES = 2**30
_ROUNDS = 7
_PREFILL_TOKENS = 256
_MATRIX = (4096, 2048)  # of the products of one row
_SLOW_CORE_GB_S = 2.0  # a core that reads less is shared, or its memory has a single narrow channel


def check_memory_reads(limit: int = MOST_BYTES) -> Iterator[Finding]:
    """GB/s of plain reads of each memory node and of all, then what the experts' operator and torch's
    products reach of them."""
    nodes = cpu.machine().split_nodes
    room = min(limit, memory.available().bytes // 4)
    if room < 64 * 2**20:
        raise MachineError(f"only {memory.gib(room)} may be used to measure with")
    if len(nodes) > 1:
        for node in nodes:
            experts = _experts(room // len(nodes), f"node {node}")
            yield ok(f"reads of node {node}", f"{_reads(experts):.1f} GB/s", gb_s=_reads(experts))
            del experts
    experts = _experts(room, "split")
    l3 = l3_bytes()
    cached = l3 is not None and experts.nbytes < 2 * l3
    plain = _reads(experts)
    where = f"; {memory.gib(experts.nbytes)} may lie in the caches ({memory.gib(l3 or 0)})" if cached else ""
    value = f"{plain:.1f} GB/s by {cpu.threads()} threads{where}"
    if plain < _SLOW_CORE_GB_S * cpu.threads() or plain < 10:
        advice = "other programs run, or memory does not fill every channel (dmidecode -t memory)"
        yield warning("memory reads", value, advice, gb_s=plain)
    else:
        yield ok("memory reads", value, gb_s=plain)
    yield from _operator(experts)
    yield _products(experts)


def check_torch() -> Finding:
    """TFLOPS of torch's float32 products and microseconds of a small operation."""
    a, b = torch.randn(512, 1024), torch.randn(1024, 1024)
    tflops = 2 * 512 * 1024 * 1024 / _fastest(lambda: torch.mm(a, b)) / 1e12
    c, d = a.bfloat16(), b.bfloat16()
    tflops16 = 2 * 512 * 1024 * 1024 / _fastest(lambda: torch.mm(c, d), 3) / 1e12
    x = torch.randn(1, 1, 256)
    weight = torch.randn(256, 256)

    def chain() -> None:
        y = x
        for _ in range(8):
            y = (
                torch.nn.functional.linear(y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6), weight)
                + x
            )

    with torch.no_grad():
        op_us = _fastest(chain) / (8 * 7) * 1e6
    value = (
        f"{tflops * 1e3:.0f} GFLOPS in float32, {tflops16 * 1e3:.0f} in bfloat16, "
        f"{op_us:.1f} us a small operation"
    )
    return ok("torch on the CPU", value, tflops=tflops, tflops16=tflops16, op_us=op_us)


def _experts(size: int, numa: str) -> CpuExperts:
    """About ``size`` bytes of experts of one random set of weights."""
    one = expert_bytes(_FORMAT, _SPEC.hidden, _SPEC.intermediate, has_gate=True, has_bias=False)
    count = max(2 * _SPEC.top_k, size // one)
    spec = ExpertSpec(count, _SPEC.hidden, _SPEC.intermediate, _SPEC.top_k)
    experts = CpuExperts(spec, _FORMAT, numa=numa)
    generator = torch.Generator().manual_seed(1)
    experts.put(0, "gate", torch.randn(spec.intermediate, spec.hidden, generator=generator) / 50)
    experts.put(0, "up", torch.randn(spec.intermediate, spec.hidden, generator=generator) / 50)
    experts.put(0, "down", torch.randn(spec.hidden, spec.intermediate, generator=generator) / 25)
    for expert in range(1, count):
        experts.copy_expert(0, expert)
    return experts


def _reads(experts: CpuExperts) -> float:
    experts.plain_read()  # wakes the threads
    return experts.nbytes / _fastest(experts.plain_read) / 1e9


def _operator(experts: CpuExperts) -> Iterator[Finding]:
    """The operator with one token, as a share of plain reads in turns, and with many."""
    spec = experts.spec
    one = experts.nbytes / spec.num_experts * spec.top_k
    generator = torch.Generator().manual_seed(2)
    steps, reads = [], []
    for _ in range(4 * _ROUNDS):
        ids = torch.randperm(spec.num_experts, generator=generator)[: spec.top_k][None]
        x = torch.randn(1, spec.hidden, generator=generator)
        began = time.perf_counter()
        experts.forward(x, ids, torch.ones(1, spec.top_k))
        middle = time.perf_counter()
        read = experts.plain_read(0, min(spec.num_experts, 4 * spec.top_k))
        end = time.perf_counter()
        steps.append(one / (middle - began))
        reads.append(read / (end - middle))
    share = min(1.0, max(steps) / max(reads))
    ids = torch.rand(_PREFILL_TOKENS, 2 * spec.top_k, generator=generator).topk(spec.top_k, dim=-1).indices
    x = torch.randn(_PREFILL_TOKENS, spec.hidden, generator=generator)
    weights = torch.ones(_PREFILL_TOKENS, spec.top_k)
    seconds = _fastest(lambda: experts.forward(x, ids, weights), 3)
    ops = 2 * 3 * _PREFILL_TOKENS * spec.top_k * spec.hidden * spec.intermediate
    tops = ops / seconds / 1e12
    value = (
        f"one token at {share:.0%} of plain reads, many at {tops:.2f} TOPS ({experts.isa}, {experts.format})"
    )
    if share < 0.4:
        advice = "busy cores do that: a step waits for its slowest thread; try fewer (HETERO_THREADS)"
        yield warning("experts' operator", value, advice, share=share, tops=tops)
    else:
        yield ok("experts' operator", value, share=share, tops=tops)


def _products(experts: CpuExperts) -> Finding:
    """torch's product of one row by dense matrices, as a share of plain reads in turns."""
    spec = experts.spec
    found: dict[torch.dtype, list[float]] = {torch.float32: [], torch.bfloat16: []}
    # So many that none is in a cache still when its turn comes again.
    some = max(2, min(experts.nbytes, MOST_BYTES) // 4 // (4 * _MATRIX[0] * _MATRIX[1]))
    matrices = {dtype: [torch.ones(_MATRIX, dtype=dtype) for _ in range(some)] for dtype in found}
    reads = []
    with torch.no_grad():
        for _ in range(_ROUNDS):
            for dtype, rates in found.items():
                x = torch.ones(1, _MATRIX[1], dtype=dtype)
                began = time.perf_counter()
                for matrix in matrices[dtype]:
                    torch.nn.functional.linear(x, matrix)
                rates.append(sum(m.nbytes for m in matrices[dtype]) / (time.perf_counter() - began))
            began = time.perf_counter()
            done = experts.plain_read(0, min(spec.num_experts, 8 * spec.top_k))
            reads.append(done / (time.perf_counter() - began))
    share, share16 = (min(1.0, max(rates) / max(reads)) for rates in found.values())
    value = f"one row at {share:.0%} of plain reads in float32, {share16:.0%} in bfloat16"
    return ok("torch's products", value, share=share, share16=share16)


def _fastest(call: Callable[[], object], rounds: int = _ROUNDS) -> float:
    """Seconds of the fastest call after one to warm up: what other programs take is not the machine's."""
    call()
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return min(times)
