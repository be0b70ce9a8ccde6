"""How long a decode step takes at least, term by term, from bytes and bandwidths.

The bound: dense weights are read once a step by fused kernels in one CUDA graph, then in every layer the GPU
reads its hot experts while the CPU and PCIe share the others, and a hand-off is paid for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetero.plan.hardware import Hardware
from hetero.plan.inventory import Inventory, Kind
from hetero.plan.routing import Routing, misses, touched
from hetero.plan.tiers import Layout, Request, dense_bytes, one_expert_bytes, value_width
from hetero.plan.workspace import DENSE_PACKED, fused_dense_bytes

FUSED_LAUNCHES = 25  # kernels of a layer when norms, projections, gates and recurrence are fused
# Operations of a layer of transformers' modules for one token, from graphs captured of four models.
ATTENTION_OPS, LINEAR_OPS, HYPER_OPS = 68, 117, 41
TABLE_READS = 16  # rows of an n-gram table that a token needs, all known before the step


@dataclass(frozen=True, slots=True)
class Term:
    """A part of a step. ``beside``: it runs at the same time as the others so marked, so that only the
    longest of them counts."""

    name: str
    ms: float
    bytes: int = 0
    gb_s: float | None = None
    beside: bool = False


@dataclass(frozen=True, slots=True)
class Decode:
    """A decode step of all streams."""

    routing: str
    hit_rate: float  # of the GPU's experts, 0 to 1
    terms: tuple[Term, ...]
    tokens: float  # that a step yields, over all streams

    @property
    def step_ms(self) -> float:
        return total_ms(self.terms)

    @property
    def tok_s(self) -> float:
        """Tokens a second of all streams together."""
        return self.tokens / self.step_ms * 1e3

    @property
    def binds(self) -> str:
        """The term that takes most of the step."""
        longest = max((t for t in self.terms if t.beside), key=lambda t: t.ms, default=None)
        counted = [t for t in self.terms if not t.beside or t is longest]
        return max(counted, key=lambda t: t.ms).name


def total_ms(terms: Sequence[Term]) -> float:
    """Milliseconds of terms that follow each other, and the longest of those beside each other."""
    return sum(t.ms for t in terms if not t.beside) + max((t.ms for t in terms if t.beside), default=0.0)


def expected_tokens(draft: int, accept: float) -> float:
    """Tokens that a step yields with ``draft`` drafted ones, each right with chance ``accept`` given those
    before it."""
    return sum(accept**i for i in range(draft + 1))


def both_rates(hardware: Hardware) -> tuple[float, float]:
    """GB/s of the CPU and of PCIe when both read experts at once: (CPU, PCIe); without a GPU (CPU, 0)."""
    share = hardware.cpu.expert_share.value
    alone = hardware.ram.read_gb_s.value
    pcie = hardware.pcie
    if hardware.gpu is None or pcie is None:
        return alone * share, 0.0
    if pcie.both is not None:
        return pcie.both.cpu_gb_s * share, pcie.both.pcie_gb_s
    read = pcie.read_gb_s.value
    limit = pcie.ram_limit_gb_s
    cpu = alone if limit is None else max(0.0, min(alone, limit - read))
    together = (cpu * share, read)
    # Where PCIe takes from memory's bandwidth what the CPU then lacks, the split may gain nothing.
    return together if sum(together) > alone * share else (alone * share, 0.0)


def decode(
    inventory: Inventory, hardware: Hardware, request: Request, layout: Layout, routing: Routing
) -> Decode:
    """The bound of a decode step under ``layout``."""
    rows, streams = request.draft + 1, request.concurrency
    on_gpu = layout.gpu is not None
    terms = [*dense_terms(inventory, hardware, layout), kept_term(inventory, hardware, request, layout)]
    if on_gpu:
        assert hardware.gpu is not None
        launches = FUSED_LAUNCHES * inventory.layers
        terms.append(Term(f"{launches} launches", launches * hardware.gpu.launch_us.value / 1e3))
    needed = missing = from_disk = 0.0
    for site in inventory.sites:
        size, e, k = (
            one_expert_bytes(site.spec, request.expert_format),
            site.spec.num_experts,
            site.spec.top_k,
        )
        needed += size * touched(routing, e, k, rows=rows, streams=streams)
        missing += size * misses(routing, layout.on_gpu, e, k, rows=rows, streams=streams)
        if layout.on_disk > 0:
            from_disk += size * misses(routing, 1 - layout.on_disk, e, k, rows=rows, streams=streams)
    missing = min(missing, needed)
    cpu, pcie = both_rates(hardware) if on_gpu else (both_rates(hardware)[0], 0.0)
    of_pcie = missing * pcie / (cpu + pcie)
    if on_gpu and hardware.gpu is not None and layout.on_gpu:
        rate = hardware.gpu.read_gb_s.value
        terms.append(read_term("experts, GPU memory", needed - missing, rate, beside=True))
    terms.append(read_term("experts, CPU", missing - of_pcie, cpu, beside=True))
    if of_pcie:
        terms.append(read_term("experts, PCIe", of_pcie, pcie, beside=True))
    if on_gpu and inventory.sites and hardware.handoff_us is not None:
        terms.append(Term("hand-off", len(inventory.sites) * hardware.handoff_us.value / 1e3))
    terms += disk_terms(inventory, hardware, layout, from_disk, rows * streams)
    if request.draft:
        terms.append(_drafting(inventory, hardware, layout, request.draft))
    spec = inventory.sites[0].spec if inventory.sites else None
    rate = routing.hit_rate(layout.on_gpu, spec.num_experts, spec.top_k, streams) if spec else 1.0
    return Decode(
        routing.name,
        rate if layout.on_gpu else 0.0,
        tuple(t for t in terms if t.ms > 0),
        streams * expected_tokens(request.draft, request.accept),
    )


def eager_operations(inventory: Inventory) -> int:
    """Operations of transformers' modules for one token, experts left out."""
    recurrent, others, hyper = kinds_of(inventory)
    return recurrent * LINEAR_OPS + others * ATTENTION_OPS + hyper * HYPER_OPS


def kinds_of(inventory: Inventory) -> tuple[int, int, int]:
    """Layers with a recurrence, other layers, and of both those with hyper-connections."""
    recurrent = sum(s.kind in ("delta", "recurrent") for s in inventory.states)
    layers = max(inventory.layers, len(inventory.states))
    return recurrent, layers - recurrent, layers if inventory.of(Kind.HYPER) else 0


def read_term(name: str, size: float, gb_s: float, *, beside: bool = False) -> Term:
    """Reading ``size`` bytes."""
    return Term(name, size / gb_s / 1e6 if size else 0.0, int(size), gb_s, beside)


def dense_terms(
    inventory: Inventory, hardware: Hardware, layout: Layout, fallback: bool = False
) -> list[Term]:
    """Dense weights that every token reads."""
    dtype = "bfloat16" if fallback and layout.dense in DENSE_PACKED else layout.dense
    if layout.fused and not fallback:
        size = fused_dense_bytes(inventory, layout.dense)
    else:
        unread = inventory.dense_params - inventory.read_params
        size = dense_bytes(inventory, dtype) - unread * value_width(dtype)
    if layout.gpu is not None and hardware.gpu is not None:
        return [read_term("dense layers, GPU memory", size, hardware.gpu.read_gb_s.value)]
    return [read_term("dense layers, CPU", size, hardware.ram.read_gb_s.value)]


def kept_term(inventory: Inventory, hardware: Hardware, request: Request, layout: Layout) -> Term:
    """Keys, values and states that attention reads."""
    width = value_width(layout.dense)
    size = request.concurrency * sum(s.read_bytes(request.context, width) for s in inventory.states)
    gpu = hardware.gpu if layout.gpu is not None else None
    rate = hardware.ram.read_gb_s.value if gpu is None else gpu.read_gb_s.value
    return read_term("keys and values", size, rate)


def disk_terms(
    inventory: Inventory, hardware: Hardware, layout: Layout, from_disk: float, tokens: int
) -> list[Term]:
    """Experts that no memory holds, and rows of a table on disk."""
    if hardware.disk is None:
        return []
    found = []
    latency = hardware.disk.latency_us.value / 1e3 if hardware.disk.latency_us else 0.1
    if from_disk:
        read = read_term("experts, disk", from_disk, hardware.disk.read_gb_s.value)
        waits = len(inventory.sites) * latency
        found.append(Term(read.name, read.ms + waits, read.bytes, read.gb_s))
    if layout.table == "disk":
        # All rows of a step are asked for at once, 4 KiB each.
        size = tokens * TABLE_READS * 4096
        found.append(Term("n-gram table, disk", latency + size / hardware.disk.read_gb_s.value / 1e6, size))
    return found


def _drafting(inventory: Inventory, hardware: Hardware, layout: Layout, draft: int) -> Term:
    """Drafted tokens by a layer for the purpose: each reads one layer's dense weights and the head. Its own
    experts are few, and taken to be where the dense layers are."""
    (dense, *_) = dense_terms(inventory, hardware, layout)
    head = inventory.of(Kind.HEAD) / max(1, inventory.read_params)
    each = dense.ms * (head + (1 - head) / max(1, inventory.layers))
    launches = FUSED_LAUNCHES * hardware.gpu.launch_us.value / 1e3 if layout.gpu and hardware.gpu else 0.0
    return Term(f"{draft} drafts", draft * (each + launches))
