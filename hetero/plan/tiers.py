"""What lies where: GPU memory, main memory, disk, each item with its bytes."""

from __future__ import annotations

from dataclasses import dataclass, field

from hetero.core import ExpertSpec, InputError, MachineError
from hetero.formats import Format, expert_bytes
from hetero.formats import on_gpu as gpu_reads
from hetero.plan.hardware import Hardware
from hetero.plan.inventory import Inventory, Kind
from hetero.plan.kv import sequence_bytes
from hetero.plan.sizes import gib
from hetero.plan.workspace import (
    CHUNK,
    CONTEXT,
    DENSE_PACKED,
    LATER,
    LEAST_CHUNK,
    MOST_CHUNK,
    fused_dense_bytes,
    fuses,
    host_bytes,
    workspace_bytes,
)
from hetero.rules.embedding_options import DEFAULT_ROWS_RAM

GIB, MIB = 2**30, 2**20
CUDA_CONTEXT = 512 * MIB
GRAPHS = 320 * MIB  # a decode graph each for 1, 2, 4, 8 and 16 rows
STAGING = 512 * MIB  # of experts on their way to the GPU, twice a quarter of a GiB
PROCESS = 432 * MIB  # interpreter, torch, tokenizer and the tree, before a weight
CUDA_HOST = 768 * MIB  # what CUDA's libraries take of main memory besides
EXPERT_WORKSPACE = 16 * MIB  # of the CPU's experts, besides the rows of a step
EXPERT_ROWS = 64 * MIB  # of these at most
SYSTEM = 2 * GIB  # of a whole machine's memory, for everything else on it
PREFILL_CHUNK = 512  # tokens of a prompt that transformers' modules read at once
TABLE_WIDTH = 2  # bytes of a value of an n-gram table, which keeps the checkpoint's dtype
LEAST_RESIDENT = 0.1  # of the experts that must lie in memory; with fewer, every token waits for the disk
DENSE_WIDTH = {"float32": 4, "bfloat16": 2, "float16": 2}

DEFAULT_CONTEXT = 4096
"""Tokens of a sequence where nobody says."""


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked of a plan. Sizes in bytes; None: what the hardware has."""

    expert_format: Format
    vram: int | None = None
    ram: int | None = None
    context: int = DEFAULT_CONTEXT
    concurrency: int = 1
    draft: int = 0  # tokens that are drafted for each step
    accept: float = 0.7  # chance that a drafted token is right, given those before
    dense: str = "auto"  # of dense layers: auto, bfloat16, float32, float16 or int8
    prompt: int = 8192  # tokens of the prompt that prefill is told for
    counts: tuple[tuple[float, ...], ...] = ()  # [layers][experts], how often each was chosen
    keep: bool = False  # the format is the checkpoint's own, and its values stay as they are


@dataclass(frozen=True, slots=True)
class Item:
    """Something that takes memory."""

    name: str
    bytes: int


@dataclass(slots=True)
class Tier:
    """A place with room for ``capacity`` bytes; None: as much as it takes."""

    name: str
    capacity: int | None
    items: list[Item] = field(default_factory=list)

    def add(self, name: str, size: int) -> None:
        if size:
            self.items.append(Item(name, size))

    @property
    def used(self) -> int:
        return sum(item.bytes for item in self.items)

    @property
    def free(self) -> int:
        return (self.capacity or 0) - self.used

    def require(self, what: str, advice: str) -> None:
        """Raises MachineError, with every item, where more is used than there is."""
        if self.capacity is None or self.used <= self.capacity:
            return
        parts = ", ".join(f"{item.name} {gib(item.bytes)}" for item in self.items)
        raise MachineError(
            f"{what} needs {gib(self.used)} of {self.name} ({parts}); {gib(self.capacity)} is available"
            f" ({self.used} > {self.capacity} bytes); {advice}"
        )


@dataclass(frozen=True, slots=True)
class Layout:
    """Where everything lies. ``gpu`` is None on a plan without one."""

    gpu: Tier | None
    ram: Tier
    disk: Tier
    dense: str  # bfloat16, float16, float32 or int8
    expert_bytes: int  # of all experts
    on_gpu: float  # shares of the experts
    in_ram: float
    copies: bool  # experts on the GPU lie in main memory too
    slots: int  # experts that the GPU holds
    table: str  # where the n-gram table is: "", "ram" or "disk"
    fused: bool = False  # layers are fused by the shipped rules, whatever main memory holds
    chunk: int = MOST_CHUNK  # tokens of a prompt that the GPU reads at once

    @property
    def on_disk(self) -> float:
        """Share of the experts that neither the GPU nor main memory holds."""
        resident = self.in_ram if self.copies else self.in_ram + self.on_gpu
        return max(0.0, round(1.0 - resident, 9))


def all_expert_bytes(inventory: Inventory, fmt: Format) -> int:
    """Bytes of all routed experts, packed."""
    return sum(s.spec.num_experts * one_expert_bytes(s.spec, fmt) for s in inventory.sites)


def one_expert_bytes(spec: ExpertSpec, fmt: Format) -> int:
    """Bytes of one packed expert of a block."""
    return expert_bytes(fmt, spec.hidden, spec.intermediate, has_gate=spec.has_gate, has_bias=spec.has_bias)


def dense_bytes(inventory: Inventory, dtype: str) -> int:
    """Bytes of dense weights: a dtype, or a format of linear layers such as ``int8``: their matrices in it,
    the rest in bfloat16."""
    if dtype in DENSE_WIDTH:
        return inventory.dense_params * DENSE_WIDTH[dtype]
    rest = inventory.dense_params - inventory.matrix_params
    return int(inventory.matrix_params * DENSE_PACKED[dtype].bits_per_weight / 8) + 2 * rest


def value_width(dtype: str) -> int:
    """Bytes of a value of activations, keys and values beside dense layers of this dtype."""
    return DENSE_WIDTH.get(dtype, 2)


def lay_out(inventory: Inventory, hardware: Hardware, request: Request, dense: str) -> Layout:
    """Place a model with dense layers in ``dtype``. Raises MachineError with needed and available bytes."""
    vram = _vram(hardware, request)
    ram = Tier("main memory", hardware.ram.bytes if request.ram is None else request.ram)
    ram.add("process", PROCESS + (CUDA_HOST if vram else 0))
    fused = bool(vram) and fuses(inventory, dense)
    if request.ram is None:
        ram.add("system", SYSTEM)
    disk = Tier("disk", None)
    weights, kept = dense_bytes(inventory, dense), sequences_bytes(inventory, request, value_width(dense))
    experts = all_expert_bytes(inventory, request.expert_format)
    count = sum(s.spec.num_experts for s in inventory.sites)
    gpu: Tier | None = None
    slots, on_gpu, chunk = 0, 0.0, MOST_CHUNK
    if vram:
        gpu = Tier("GPU memory", vram)
        if fused:
            weights = fused_dense_bytes(inventory, dense)
            chunk = _chunk(inventory, request, vram - CONTEXT - LATER - weights - kept)
            gpu.add("CUDA context and kernels", CONTEXT)
            gpu.add("workspace and graphs", workspace_bytes(inventory, chunk))
            gpu.add("kept free for later", LATER)
            ram.add("embeddings", host_bytes(inventory))
        else:
            gpu.add("CUDA context", CUDA_CONTEXT)
            space = activations(inventory, PREFILL_CHUNK, value_width(dense))
            gpu.add("workspace and graphs", GRAPHS + space)
        gpu.add(f"dense layers ({dense})", weights)
        gpu.add("keys, values and states", kept)
        gpu.require(
            "the plan",
            "a smaller --ctx or --concurrency"
            + ("" if dense in DENSE_PACKED else ", or dense layers in 8 bits (--dense int8)")
            + " would take less",
        )
        staging = 0 if fused else STAGING
        # In a format that no kernel of a GPU reads the CPU computes all.
        readable = not fused or gpu_reads(request.expert_format)
        if count and readable and gpu.free > staging:
            slots = min(count, int((gpu.free - staging) // (experts / count)))
        if slots:
            gpu.add("staging of experts", staging)
            gpu.add(f"hot experts ({slots} of {count})", int(slots * experts / count))
            on_gpu = slots / count
    else:
        ram.add(f"dense layers ({dense})", weights)
        ram.add("keys, values and states", kept)
    space = cpu_workspace(inventory)
    if not vram:
        space += activations(inventory, PREFILL_CHUNK, 4) + reordered_bytes(inventory, dense)
    ram.add("workspace", space)
    narrower = not vram and dense == "float32"
    ram.require(
        "the plan",
        "a smaller --ctx or --concurrency, "
        + ("dense layers in bfloat16 (--dense bfloat16), " if narrower else "")
        + "or more memory",
    )
    table = place_table(inventory, ram, disk, experts)
    in_ram, copies = _experts_in_ram(ram, disk, experts, on_gpu)
    return Layout(gpu, ram, disk, dense, experts, on_gpu, in_ram, copies, slots, table, fused, chunk)


def _chunk(inventory: Inventory, request: Request, room: int) -> int:
    """Tokens of a prompt that a run reads at once where ``room`` bytes are left for it: as it does, half as
    many until they fit."""
    chunk = min(CHUNK, max(request.context, 1))
    while workspace_bytes(inventory, chunk) > room and chunk // 2 >= LEAST_CHUNK:
        chunk //= 2
    return chunk


def _vram(hardware: Hardware, request: Request) -> int:
    """Bytes of GPU memory that may be used. Raises InputError where there is no GPU to have them."""
    if request.vram is None:
        return hardware.gpu.bytes if hardware.gpu else 0
    if request.vram and hardware.gpu is None:
        raise InputError(f"--vram: {hardware.name} has no GPU; another --hardware has one")
    return request.vram


def sequences_bytes(inventory: Inventory, request: Request, width: int) -> int:
    """Bytes of what all running sequences keep, drafted tokens included."""
    tokens = request.context + request.draft
    return request.concurrency * sequence_bytes(inventory.states, tokens, width)


def activations(inventory: Inventory, tokens: int, width: int) -> int:
    """Bytes of a forward pass beside its weights, about: eight tensors of the widest projection a token, and
    one row of logits in float32."""
    widest = max(
        (w.shape[0] for w in inventory.weights if w.matrix and w.layer is not None and w.shape), default=0
    )
    widest = max(widest, 4 * inventory.hidden)
    return 8 * tokens * widest * width + 8 * inventory.vocabulary


def reordered_bytes(inventory: Inventory, dense: str) -> int:
    """Bytes of the copy that torch makes of a matrix of 16 bits before the CPU multiplies by it: of the
    largest, which is the head more often than not."""
    if DENSE_WIDTH.get(dense, 2) != 2:
        return 0
    matrices = (w.params for w in inventory.weights if w.matrix or w.head)
    return 2 * max(matrices, default=0)


def cpu_workspace(inventory: Inventory) -> int:
    """Bytes of main memory that the CPU's experts take for a chunk of a prompt."""
    rows = max((4 * PREFILL_CHUNK * s.spec.top_k * s.spec.hidden for s in inventory.sites), default=0)
    return EXPERT_WORKSPACE + min(rows, EXPERT_ROWS)


def _experts_in_ram(ram: Tier, disk: Tier, experts: int, on_gpu: float) -> tuple[float, bool]:
    """Share of the experts in main memory, and whether those of the GPU lie there too.

    All of them where there is room, so that a cache on the GPU may change without traffic back; else those
    that the GPU lacks. The rest stays on disk.
    """
    if not experts:
        return 1.0, True
    room = max(0, ram.free)
    if experts <= room:
        ram.add("experts", experts)
        return 1.0, True
    elsewhere = int(experts * (1 - on_gpu))
    held = min(elsewhere, room)
    share = 1.0 - on_gpu if held == elsewhere else held / experts
    if share + on_gpu < LEAST_RESIDENT:
        needed = ram.used + int(experts * (LEAST_RESIDENT - on_gpu))
        raise MachineError(
            f"the plan needs {gib(needed)} of main memory with a tenth of its experts ({gib(experts)}); "
            f"{gib(ram.capacity or 0)} is available ({needed} > {ram.capacity} bytes); a smaller --format or "
            "more memory"
        )
    ram.add("experts", held)
    disk.add("experts", elsewhere - held)
    return share, False


def place_table(inventory: Inventory, ram: Tier, disk: Tier, experts: int) -> str:
    """The n-gram table: in main memory where that has room for it and ``experts`` bytes of experts, else on
    disk, with some of its rows in main memory."""
    size = TABLE_WIDTH * inventory.of(Kind.TABLE)
    if not size:
        return ""
    if size + experts <= ram.free:
        ram.add("n-gram table", size)
        return "ram"
    ram.add("rows of the n-gram table", min(size, DEFAULT_ROWS_RAM))
    disk.add("n-gram table", size)
    return "disk"
