"""What of a plan the operators that exist can do: the rules that can be written, and how fast they run.

Where a family's layers can be fused, a GPU is there and main memory holds all experts, that is the plan
itself, without drafts. Else dense layers are transformers' modules, run one by one, in bfloat16 at least.
Routed experts of whole layers lie on the GPU, the others on the CPU, in main memory or on disk behind a cache
there. N-gram tables lie in main memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hetero.core import MachineError
from hetero.formats import GPU_FORMATS
from hetero.plan.hardware import Hardware
from hetero.plan.inventory import Inventory, Kind
from hetero.plan.roofline import (
    Decode,
    Term,
    decode,
    dense_terms,
    disk_terms,
    eager_operations,
    kept_term,
    read_term,
)
from hetero.plan.routing import Routing, misses, touched
from hetero.plan.tiers import (
    CUDA_CONTEXT,
    DENSE_WIDTH,
    GRAPHS,
    PREFILL_CHUNK,
    Layout,
    Request,
    Tier,
    activations,
    dense_bytes,
    one_expert_bytes,
    sequences_bytes,
)
from hetero.rules.defaults import fused_rules_for

HOP_US = 60.0  # a layer's activations to the CPU and back by blocking copies
_RESERVED = 0.1  # of main memory, that the disk tier leaves alone


@dataclass(frozen=True, slots=True)
class Today:
    """A run with rules as they can be written."""

    dtype: str  # of dense layers
    gpu_layers: tuple[int, ...]  # layers whose experts lie on the GPU
    tier: str  # of the other experts: ram or disk
    ram_share: float  # of the other experts that main memory holds
    decode: Decode
    why_not: str | None  # what keeps it from loading
    fused: str | None = None  # the rule file that fuses the model's layers


def plan_today(inventory: Inventory, hardware: Hardware, request: Request, layout: Layout) -> Today:
    """What can be run, within the memory of ``layout``."""
    if (fused := _fused(inventory, layout)) is not None:
        step = decode(inventory, hardware, replace(request, draft=0), layout, Routing("local"))
        return Today("bfloat16", (), "ram", 1.0, step, None, fused)
    dtype = "bfloat16" if layout.dense == "int8" else layout.dense
    gpu_layers, why_not = _on_gpu(inventory, request, layout, dtype)
    share, missing = _in_ram(inventory, request, layout, dtype, gpu_layers)
    return Today(
        dtype=dtype,
        gpu_layers=gpu_layers,
        tier="ram" if share >= 1.0 else "disk",
        ram_share=share,
        decode=_decode(inventory, hardware, request, layout, gpu_layers=gpu_layers, share=share),
        why_not=why_not or missing,
    )


def _fused(inventory: Inventory, layout: Layout) -> str | None:
    """The rule file that fuses the layers; None where that cannot be."""
    fits = layout.copies and layout.in_ram >= 1.0 and layout.table != "disk"
    if layout.gpu is None or not inventory.sites or not fits or layout.dense not in ("bfloat16", "int8"):
        return None
    return fused_rules_for(inventory.model_type)


def _on_gpu(
    inventory: Inventory, request: Request, layout: Layout, dtype: str
) -> tuple[tuple[int, ...], str | None]:
    """Layers whose experts the GPU holds, and why the rest does not fit it."""
    if layout.gpu is None:
        return (), None
    gpu = Tier(layout.gpu.name, layout.gpu.capacity)
    gpu.add("CUDA context", CUDA_CONTEXT)
    gpu.add("workspace", GRAPHS + activations(inventory, PREFILL_CHUNK, 2))
    gpu.add(f"dense layers ({dtype})", dense_bytes(inventory, dtype))
    gpu.add("keys, values and states", sequences_bytes(inventory, request, 2))
    if message := _shortage(gpu):
        return (), message
    layers: list[int] = []
    free = gpu.free
    for site in inventory.sites:
        size = site.spec.num_experts * one_expert_bytes(site.spec, request.expert_format)
        if (
            site.layer is None
            or site.spec.staged
            or request.keep
            or request.expert_format.name not in GPU_FORMATS
        ):
            continue
        if size <= free:
            layers.append(site.layer)
            free -= size
    return tuple(layers), None


def _in_ram(
    inventory: Inventory, request: Request, layout: Layout, dtype: str, gpu_layers: tuple[int, ...]
) -> tuple[float, str | None]:
    """Share of the CPU's experts that main memory holds, and what keeps the model out of it."""
    ram = Tier(layout.ram.name, layout.ram.capacity)
    for item in layout.ram.items:
        if item.name not in ("experts", "n-gram table"):
            ram.add(item.name, item.bytes)
    ram.add("n-gram table", DENSE_WIDTH[dtype] * inventory.of(Kind.TABLE))
    largest = max(
        (w.params for w in inventory.weights if w.kind not in (Kind.EXPERTS, Kind.TABLE)), default=0
    )
    ram.add("a tensor in flight", 2 * largest)
    sites = [s for s in inventory.sites if s.layer not in gpu_layers]
    sizes = [one_expert_bytes(s.spec, request.expert_format) for s in sites]
    experts = sum(s.spec.num_experts * size for s, size in zip(sites, sizes, strict=True))
    least = sum(s.spec.top_k * size for s, size in zip(sites, sizes, strict=True))
    if ram.free >= experts:
        return 1.0, None
    room = ram.free - int(_RESERVED * (ram.capacity or 0))
    if room < least:
        ram.add("the experts of one token", least)
        ram.add("a tenth left alone", int(_RESERVED * (ram.capacity or 0)))
        return 0.0, _shortage(ram)
    return room / experts, None


def _shortage(tier: Tier) -> str | None:
    try:
        tier.require("a run with these rules", "")
    except MachineError as error:
        return str(error).rpartition("; ")[0]
    return None


def _decode(
    inventory: Inventory,
    hardware: Hardware,
    request: Request,
    layout: Layout,
    *,
    gpu_layers: tuple[int, ...],
    share: float,
) -> Decode:
    """A step without drafts, cache, PCIe share or graph, by local routing."""
    streams, routing = request.concurrency, Routing("local")
    terms = [*dense_terms(inventory, hardware, layout, fallback=True)]
    terms.append(kept_term(inventory, hardware, request, layout))
    operations = eager_operations(inventory)
    terms.append(Term(f"{operations} eager operations", operations * hardware.cpu.op_us.value / 1e3))
    by_gpu = by_cpu = from_disk = 0.0
    for site in inventory.sites:
        spec, size = site.spec, one_expert_bytes(site.spec, request.expert_format)
        needed = size * touched(routing, spec.num_experts, spec.top_k, streams=streams)
        if site.layer in gpu_layers:
            by_gpu += needed
            continue
        by_cpu += needed
        if share < 1.0:
            from_disk += size * misses(routing, share, spec.num_experts, spec.top_k, streams=streams)
    if by_gpu and hardware.gpu is not None:
        terms.append(read_term("experts, GPU", by_gpu, hardware.gpu.read_gb_s.value))
    rate = hardware.ram.read_gb_s.value * hardware.cpu.expert_share.value
    terms.append(read_term("experts, CPU", by_cpu, rate))
    if layout.gpu is not None:
        hops = len(inventory.sites) - len(gpu_layers)
        terms.append(Term("copies to the CPU and back", hops * HOP_US / 1e3))
    terms += [t for t in disk_terms(inventory, hardware, layout, from_disk, streams) if "table" not in t.name]
    hits = len(gpu_layers) / len(inventory.sites) if inventory.sites else 0.0
    return Decode("local", hits, tuple(t for t in terms if t.ms > 0), float(streams))
