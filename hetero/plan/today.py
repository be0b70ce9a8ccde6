"""What of a plan the operators that exist can do: the rules that can be written, and how fast they run.

Where a family's layers can be fused, a GPU is there and main memory holds all experts, that is the plan
itself, without drafts. Else dense layers are transformers' modules, run one by one, in bfloat16 at least.
Routed experts of whole layers lie on the GPU, the others on the CPU, in main memory or on disk behind a cache
there. N-gram tables lie in main memory, or on disk where it has no room for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hetero.core import MachineError
from hetero.formats import on_gpu
from hetero.plan import constants
from hetero.plan.estimate import estimate
from hetero.plan.hardware import Hardware
from hetero.plan.inventory import Inventory, Kind
from hetero.plan.prefill import Prefill
from hetero.plan.products import passes, row_gb_s
from hetero.plan.prompt import expected_prefill
from hetero.plan.roofline import (
    Decode,
    Term,
    dense_terms,
    disk_terms,
    eager_operations,
    kept_term,
    read_term,
)
from hetero.plan.routing import Routing, misses, touched
from hetero.plan.tiers import (
    CUDA_CONTEXT,
    GRAPHS,
    PREFILL_CHUNK,
    Layout,
    Request,
    Tier,
    activations,
    dense_bytes,
    one_expert_bytes,
    place_table,
    reordered_bytes,
    sequences_bytes,
    value_width,
)
from hetero.plan.workspace import DENSE_PACKED, fused_rules

GRAPHED_TOKENS = 4096
"""Of a sequence up to which steps of transformers' modules are graphs."""

SHORT_PROMPT = 512
"""Tokens of the shorter of the prompts that are told."""

_PLAIN = ("attention", "sliding", "mla")  # states whose caches hold keys and values alone
HOP_US = 60.0  # a layer's activations to the CPU and back by blocking copies
_RESERVED = 0.1  # of main memory, that the disk tier leaves alone


@dataclass(frozen=True, slots=True)
class Today:
    """A run with rules as they can be written."""

    dtype: str  # of dense layers
    gpu_layers: tuple[int, ...]  # layers whose experts lie on the GPU
    tier: str  # of the other experts: ram or disk
    ram_share: float  # of the other experts that main memory holds
    steps: tuple[Decode, ...]  # what a decode step is expected to take, by routing
    prompts: tuple[Prefill, ...]  # what prompts are expected to take, of the plan's lengths
    why_not: str | None  # what keeps it from loading
    fused: str | None = None  # the rule file that fuses the model's layers
    table: str = ""  # where an n-gram table is: ram or disk
    tiers: tuple[Tier, ...] = ()  # GPU memory, main memory, disk, as far as they are used

    @property
    def decode(self) -> Decode:
        """By local routing."""
        return next(step for step in self.steps if step.routing == "local")


def plan_today(
    inventory: Inventory, hardware: Hardware, request: Request, layout: Layout, routings: Sequence[Routing]
) -> Today:
    """What can be run, within the memory of ``layout``. ``routings``: local among them."""

    def prompts(run: Layout, *, fused: bool = False, gpu_share: float = 0.0) -> tuple[Prefill, ...]:
        lengths = sorted({min(SHORT_PROMPT, request.prompt), request.prompt})
        return tuple(
            expected_prefill(inventory, hardware, request, run, n, fused=fused, gpu_share=gpu_share)
            for n in lengths
        )

    if (fused := _fused(inventory, layout)) is not None:
        steps = tuple(estimate(inventory, hardware, request, layout, one) for one in routings)
        tiers = tuple(tier for tier in (layout.gpu, layout.ram, layout.disk) if tier is not None)
        told = prompts(layout, fused=True)
        return Today("bfloat16", (), "ram", 1.0, steps, told, None, fused, layout.table, tiers)
    dtype = "bfloat16" if layout.dense in DENSE_PACKED else layout.dense
    gpu, gpu_layers, why_not = _on_gpu(inventory, request, layout, dtype)
    ram, disk = Tier(layout.ram.name, layout.ram.capacity), Tier(layout.disk.name, None)
    share, table, missing = _in_ram(inventory, request, layout, gpu_layers, dtype, ram=ram, disk=disk)
    run = replace(layout, table=table)
    return Today(
        dtype=dtype,
        gpu_layers=gpu_layers,
        tier="ram" if share >= 1.0 else "disk",
        ram_share=share,
        steps=tuple(
            modules_step(inventory, hardware, request, run, one, gpu_layers=gpu_layers, share=share)
            for one in routings
        ),
        prompts=prompts(run, gpu_share=len(gpu_layers) / len(inventory.sites) if gpu_layers else 0.0),
        why_not=why_not or missing,
        table=table,
        tiers=tuple(tier for tier in (gpu, ram, disk) if tier is not None),
    )


def _fused(inventory: Inventory, layout: Layout) -> str | None:
    """The rule file that fuses the layers; None where that cannot be."""
    fits = layout.fused and layout.copies and layout.in_ram >= 1.0
    return fused_rules(inventory.model_type) if fits else None


def _on_gpu(
    inventory: Inventory, request: Request, layout: Layout, dtype: str
) -> tuple[Tier | None, tuple[int, ...], str | None]:
    """GPU memory, the layers whose experts it holds, and why the rest does not fit it."""
    if layout.gpu is None:
        return None, (), None
    gpu = Tier(layout.gpu.name, layout.gpu.capacity)
    gpu.add("CUDA context", CUDA_CONTEXT)
    gpu.add("workspace", GRAPHS + activations(inventory, PREFILL_CHUNK, 2))
    gpu.add(f"dense layers ({dtype})", dense_bytes(inventory, dtype))
    gpu.add("keys, values and states", sequences_bytes(inventory, request, 2))
    if message := _shortage(gpu):
        return gpu, (), message
    layers: list[int] = []
    free = gpu.free
    for site in inventory.sites:
        size = site.spec.num_experts * one_expert_bytes(site.spec, request.expert_format)
        if site.layer is None or site.spec.staged or not on_gpu(request.expert_format):
            continue
        if size <= free:
            layers.append(site.layer)
            free -= size
    gpu.add(f"experts of {len(layers)} of {len(inventory.sites)} layers", gpu.free - free)
    return gpu, tuple(layers), None


def _in_ram(
    inventory: Inventory,
    request: Request,
    layout: Layout,
    gpu_layers: tuple[int, ...],
    dtype: str,
    *,
    ram: Tier,
    disk: Tier,
) -> tuple[float, str, str | None]:
    """Fill main memory and disk: the share of the CPU's experts that main memory holds, where the n-gram
    table is, and what keeps the model out of them."""
    for item in layout.ram.items:
        if item.name.startswith("dense layers"):
            ram.add(f"dense layers ({dtype})", dense_bytes(inventory, dtype))
        elif item.name not in ("experts", "embeddings") and "n-gram table" not in item.name:
            ram.add(item.name, item.bytes)
    largest = max(
        (w.params for w in inventory.weights if w.kind not in (Kind.EXPERTS, Kind.TABLE)), default=0
    )
    # One that is loaded, where a step does not take as much anyway.
    on_cpu = layout.gpu is None
    ram.add("a tensor in flight", max(0, 2 * largest - on_cpu * reordered_bytes(inventory, layout.dense)))
    sites = [s for s in inventory.sites if s.layer not in gpu_layers]
    sizes = [one_expert_bytes(s.spec, request.expert_format) for s in sites]
    experts = sum(s.spec.num_experts * size for s, size in zip(sites, sizes, strict=True))
    least = sum(s.spec.top_k * size for s, size in zip(sites, sizes, strict=True))
    table = place_table(inventory, ram, disk, experts)
    if ram.free >= experts:
        ram.add("experts", experts)
        return 1.0, table, None
    room = ram.free - int(_RESERVED * (ram.capacity or 0))
    ram.add("a tenth left alone", int(_RESERVED * (ram.capacity or 0)))
    if room < least:
        ram.add("the experts of one token", least)
        return 0.0, table, _shortage(ram)
    ram.add("experts", room)
    disk.add("experts", experts - room)
    return room / experts, table, None


def in_graph(inventory: Inventory, request: Request, layout: Layout, share: float = 1.0) -> bool:
    """Whether a step of transformers' modules is captured as a graph: on a GPU, of one sequence that is not
    too long, whose layers all keep plain keys and values, with no expert on disk."""
    plain = all(state.kind in _PLAIN for state in inventory.states)
    one = request.concurrency == 1 and request.context <= GRAPHED_TOKENS
    return layout.gpu is not None and one and plain and share >= 1.0


def _shortage(tier: Tier) -> str | None:
    try:
        tier.require("a run with these rules", "")
    except MachineError as error:
        return str(error).rpartition("; ")[0]
    return None


def _dense_on_cpu(inventory: Inventory, hardware: Hardware, request: Request, layout: Layout) -> list[Term]:
    """Dense layers, keys and values as torch's operations go over them."""
    width = value_width(layout.dense)
    kept = [s.read_bytes(request.context, width) * passes(s) for s in inventory.states]
    return [
        read_term("dense layers, CPU", inventory.read_params * width, row_gb_s(hardware, width)),
        read_term(
            f"keys and values of {request.context} tokens, copied and read",
            request.concurrency * sum(kept),
            hardware.ram.read_gb_s.value,
        ),
    ]


def modules_step(
    inventory: Inventory,
    hardware: Hardware,
    request: Request,
    layout: Layout,
    routing: Routing,
    *,
    gpu_layers: tuple[int, ...] = (),
    share: float = 1.0,
) -> Decode:
    """A step of transformers' modules: without drafts, cache, PCIe share or graph. ``gpu_layers``: whose
    experts lie on the GPU; ``share``: of the others, that main memory holds."""
    streams = request.concurrency
    on_cpu = layout.gpu is None
    if on_cpu:
        terms = _dense_on_cpu(inventory, hardware, request, layout)
    else:
        terms = [*dense_terms(inventory, hardware, layout, fallback=True)]
        terms.append(kept_term(inventory, hardware, request, layout))
    operations = eager_operations(inventory)
    graphed = in_graph(inventory, request, layout, share)
    if graphed:
        ms = operations * constants.MODULE_KERNEL_US / 1e3
        terms.append(Term(f"{operations} kernels of modules in a graph", ms))
    else:
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
    if not on_cpu:
        hops = len(inventory.sites) - len(gpu_layers)
        if graphed and hardware.handoff_us is not None:
            terms.append(Term("hand-off", hops * hardware.handoff_us.value / 1e3))
        else:
            terms.append(Term("copies to the CPU and back", hops * HOP_US / 1e3))
    terms += disk_terms(inventory, hardware, layout, from_disk, streams)
    hits = len(gpu_layers) / len(inventory.sites) if inventory.sites else 0.0
    return Decode(routing.name, hits, tuple(t for t in terms if t.ms > 0), float(streams))
