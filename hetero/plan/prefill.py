"""How long a prompt takes at least, by each way of bringing experts and tokens together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hetero.plan.hardware import Hardware
from hetero.plan.inventory import Inventory, Kind
from hetero.plan.products import many_tflops
from hetero.plan.roofline import Term, both_rates, total_ms
from hetero.plan.routing import distinct
from hetero.plan.tiers import PREFILL_CHUNK, Layout, Request, one_expert_bytes, value_width


@dataclass(frozen=True, slots=True)
class Prefill:
    """A prompt by one way."""

    tokens: int
    way: str
    terms: tuple[Term, ...]  # of the whole prompt

    @property
    def ms(self) -> float:
        return total_ms(self.terms)

    @property
    def tok_s(self) -> float:
        return self.tokens / self.ms * 1e3


@dataclass(frozen=True, slots=True)
class Work:
    """A chunk: what must be computed and read."""

    dense_ops: float
    expert_ops: float
    touched: float  # bytes of the experts that its tokens choose
    everything: float  # bytes of all experts


def prefill(
    inventory: Inventory, hardware: Hardware, request: Request, layout: Layout, tokens: int
) -> list[Prefill]:
    """Every way, the fastest first."""
    if layout.gpu is None:
        ways = [_on_cpu(inventory, hardware, request, layout, tokens)]
    else:
        ways = list(_with_gpu(inventory, hardware, request, layout, tokens))
    return sorted(ways, key=lambda way: way.ms)


def work_of(inventory: Inventory, request: Request, tokens: int) -> Work:
    """Of a chunk of ``tokens``."""
    projections = sum(w.params for w in inventory.weights if w.matrix and w.kind is not Kind.HEAD)
    ops = reads = everything = 0.0
    for site in inventory.sites:
        spec = site.spec
        size = one_expert_bytes(spec, request.expert_format)
        ops += 2.0 * tokens * spec.top_k * spec.params / spec.num_experts
        reads += size * distinct(spec.num_experts, spec.top_k, tokens)
        everything += size * spec.num_experts
    return Work(2.0 * projections * tokens, ops, reads, everything)


def chunks_of(tokens: int, most: int) -> list[int]:
    """Tokens of each chunk of a prompt."""
    return [most] * (tokens // most) + ([tokens % most] if tokens % most else [])


def merged(tokens: int, way: str, chunks: Iterable[list[Term]]) -> Prefill:
    """One term for each name, over all chunks."""
    merged: dict[str, Term] = {}
    for terms in chunks:
        for t in terms:
            old = merged.get(t.name, Term(t.name, 0.0, 0, t.gb_s, t.beside))
            merged[t.name] = Term(t.name, old.ms + t.ms, old.bytes + t.bytes, t.gb_s, t.beside)
    return Prefill(tokens, way, tuple(t for t in merged.values() if t.ms > 0))


def _on_cpu(
    inventory: Inventory, hardware: Hardware, request: Request, layout: Layout, tokens: int
) -> Prefill:
    chunks = []
    tflops = max(many_tflops(hardware, 4), many_tflops(hardware, value_width(layout.dense)))
    for count in chunks_of(tokens, PREFILL_CHUNK):
        work = work_of(inventory, request, count)
        terms = [
            Term("dense layers, CPU", work.dense_ops / tflops / 1e9),
            cpu_experts(hardware, work.touched, work.expert_ops, hardware.ram.read_gb_s.value),
        ]
        chunks.append(terms + disk_experts(hardware, layout, work))
    return merged(tokens, "CPU", chunks)


def cpu_experts(hardware: Hardware, size: float, ops: float, gb_s: float, *, beside: bool = False) -> Term:
    """Experts that the CPU computes: by memory or by its arithmetic, whichever is slower."""
    reading = size / gb_s / 1e6
    computing = ops / hardware.cpu.prefill_tops.value / 1e9
    name = "experts, CPU (reads)" if reading >= computing else "experts, CPU (arithmetic)"
    return Term(name, max(reading, computing), int(size), gb_s, beside)


def disk_experts(hardware: Hardware, layout: Layout, work: Work) -> list[Term]:
    """Reads of the experts that no memory holds; none where there are none."""
    if not layout.on_disk or hardware.disk is None:
        return []
    size = work.touched * layout.on_disk
    rate = hardware.disk.read_gb_s.value
    return [Term("experts, disk", size / rate / 1e6, int(size), rate)]


def _with_gpu(
    inventory: Inventory, hardware: Hardware, request: Request, layout: Layout, tokens: int
) -> Iterable[Prefill]:
    gpu, pcie = hardware.gpu, hardware.pcie
    assert gpu is not None
    assert pcie is not None
    flops, copy = gpu.bf16_tflops.value, pcie.copy_gb_s.value
    cold = 1.0 - layout.on_gpu

    def gpu_ms(ops: float) -> float:
        return ops / flops / 1e9

    by_cpu: list[list[Term]] = []
    by_touched: list[list[Term]] = []
    by_stream: list[list[Term]] = []
    by_split: list[list[Term]] = []
    for count in chunks_of(tokens, layout.chunk):
        work = work_of(inventory, request, count)
        dense = Term("dense layers, GPU", gpu_ms(work.dense_ops))
        every = Term("dense layers and experts, GPU", gpu_ms(work.dense_ops + work.expert_ops), beside=True)
        disk = disk_experts(hardware, layout, work)
        cpu = cpu_experts(
            hardware, work.touched * cold, work.expert_ops * cold, hardware.ram.read_gb_s.value, beside=True
        )
        hot = Term("experts, GPU memory", gpu_ms(work.expert_ops * layout.on_gpu), beside=True)
        by_cpu.append([dense, cpu, hot, *disk])
        for chunks, size in ((by_touched, work.touched * cold), (by_stream, work.everything)):
            chunks.append([every, Term("experts, PCIe", size / copy / 1e6, int(size), copy, True), *disk])
        by_split.append([dense, *_split(hardware, work, cold), hot, *disk])
    yield merged(tokens, "experts on the CPU", by_cpu)
    yield merged(tokens, "touched experts over PCIe", by_touched)
    yield merged(tokens, "all experts over PCIe, layer by layer", by_stream)
    if both_rates(hardware)[1]:
        yield merged(tokens, "experts split between CPU and PCIe", by_split)


def _split(hardware: Hardware, work: Work, cold: float) -> list[Term]:
    """Both finish together: the CPU takes the share that its slower limit allows."""
    cpu, pcie = both_rates(hardware)
    cpu /= hardware.cpu.expert_share.value
    size, ops = work.touched * cold, work.expert_ops * cold
    by_cpu = max(size / cpu / 1e6, ops / hardware.cpu.prefill_tops.value / 1e9)
    by_pcie = size / pcie / 1e6
    share = by_pcie / (by_pcie + by_cpu) if by_pcie + by_cpu else 0.0
    rest = size * (1 - share)
    return [
        cpu_experts(hardware, size * share, ops * share, cpu, beside=True),
        Term("experts, PCIe", rest / pcie / 1e6, int(rest), pcie, True),
    ]
