"""Memory of a benchmark: whether there is enough before it is filled, and what was taken at most."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch

from hetero.core import MachineError
from hetero.hw import memory
from hetero.hw.nvml import device, free_bytes, process_bytes
from hetero.model.synthetic import SPARSE_BYTES
from hetero.plan.hardware import Hardware
from hetero.plan.inventory import Inventory
from hetero.plan.machine import gpu_named, this_machine
from hetero.plan.sizes import gib
from hetero.plan.tiers import CUDA_HOST, Layout, Request, Tier, lay_out
from hetero.report.bandwidth import HOST_BYTES
from hetero.report.bench import Series
from hetero.report.bench_options import GPU, Options, fuses

_CERTAIN = ("dense layers", "keys, values")  # items of GPU memory that are no allowances
_POLL_S = 1.0  # torch gives back little of what it takes, and asking takes time from the experts


def free_memory() -> int | None:
    """Of the GPU, by the driver's management library, which makes no context."""
    return free_bytes(0)


class Memory:
    """What this process takes of a GPU, looked at again and again: what is free by the driver's management
    library, less what was free before. Make it before the process uses the device; where the library is
    missing, CUDA tells what is free, and the context counts as there before."""

    def __init__(self, cap: int | None, free: Callable[[], int | None] = free_memory) -> None:
        self.cap, self._free = cap, free
        found = free()
        self.source = "NVML" if found is not None else "CUDA"
        self.free_before = self._cuda_free() if found is None else found
        self.peak = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hetero-vram", daemon=True)

    @staticmethod
    def _cuda_free() -> int:
        return int(torch.cuda.mem_get_info(GPU)[0])

    def _watch(self) -> None:
        while not self._over.wait(_POLL_S):
            self.look()

    def look(self) -> int:
        """Bytes now."""
        free = self._free() if self.source == "NVML" else None
        used = max(0, self.free_before - (self._cuda_free() if free is None else free))
        self.peak = max(self.peak, used)
        return used

    @contextmanager
    def watched(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._over.set()
            self._thread.join()
            self.look()

    def as_dict(self) -> dict[str, Any]:
        total = int(torch.cuda.mem_get_info(GPU)[1])
        return {
            "source": self.source,
            "cap": self.cap,
            "peak": self.peak,
            "now": self.look(),
            "process_now": process_bytes(0),
            "used_by_others_before": max(0, total - self.free_before),
            "device_total": total,
            "torch_reserved_peak": torch.cuda.max_memory_reserved(GPU),
            "torch_allocated_peak": torch.cuda.max_memory_allocated(GPU),
            "under_cap": None if self.cap is None else self.peak <= self.cap,
        }


class HostMemory:
    """Main memory that this process has at most, from now on, resident pages of files included."""

    def __init__(self) -> None:
        # "5": the peak begins anew. Where the system does not allow it, it is of the whole process.
        with suppress(OSError), open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")
        self.before = _status("VmRSS:")

    def as_dict(self) -> dict[str, Any]:
        return {"peak": _status("VmHWM:"), "before": self.before}


def _status(key: str) -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        found = next((line for line in file if line.startswith(key)), f"{key} 0")
    return int(found.split()[1]) * 1024


def everything_in_memory(options: Options, series: Series) -> Request:
    """What the plan is asked about a benchmark, whose experts are all in main memory."""
    return Request(
        options.fmt,
        vram=options.vram if options.gpu else 0,
        ram=1 << 60,
        context=max((series.context, *series.prefills)),
        concurrency=max(series.batches),
        dense=options.dense,
    )


def host_items(layout: Layout, options: Options) -> Tier:
    """Main memory of such a plan as a benchmark fills it: large tables of synthetic models take none, and
    what measures PCIe has memory of its own."""
    tier = Tier("main memory", None)
    synthetic = options.model.kind in ("synthetic", "config")
    if options.gpu:
        tier.add("reads over PCIe", HOST_BYTES)
    for item in layout.ram.items:
        sparse = synthetic and "n-gram table" in item.name and item.bytes > SPARSE_BYTES
        if item.name not in ("system",) and not sparse:
            tier.add(item.name, item.bytes)
    return tier


def require_memory(options: Options, series: Series, inventory: Inventory) -> None:
    """Raises MachineError, with every item, where a benchmark's model does not fit main memory or the GPU's,
    before any of it is filled."""
    layout = run_layout(options, series, inventory, _gpu_bytes(options))
    available = memory.available()
    needed = Tier("main memory", available.bytes)
    for item in host_items(layout, options).items:
        # The interpreter and torch are there already.
        needed.add(item.name, CUDA_HOST * options.gpu if item.name == "process" else item.bytes)
    less = "fewer --layers or a smaller --format need less"
    if options.dense == "float32":
        less = "fewer --layers, a smaller --format or --dense bfloat16 need less"
    needed.require(options.model.name, f"that is what is left by {available.limit}; {less}")


def run_layout(options: Options, series: Series, inventory: Inventory, gpu: int | None) -> Layout:
    """Where the plan puts a benchmark's model, all experts in main memory, within ``gpu`` bytes of a GPU.
    Raises MachineError where that has too little for certain: less than weights and states take. Where only
    the plan's allowances do not fit, the run is to find out, and no expert is planned there."""
    request = replace(everything_in_memory(options, series), vram=gpu or 0)
    if options.gpu and not fuses(options.rules):
        inventory = replace(inventory, model_type="")  # transformers' modules
    try:
        return lay_out(inventory, _machine(gpu), request, options.dense)
    except MachineError as error:
        roomy = lay_out(inventory, _machine(1 << 50), replace(request, vram=1 << 50), options.dense)
        assert roomy.gpu is not None
        needed = Tier(roomy.gpu.name, gpu)
        for item in roomy.gpu.items:
            if item.name.startswith(_CERTAIN):
                needed.add(item.name, item.bytes)
        if needed.used <= (gpu or 0):
            return replace(roomy, gpu=needed, slots=0, on_gpu=0.0)
        text = str(error).removeprefix("the plan").rpartition(";")[0]
        cap = "" if options.vram is None else f" by --vram {gib(options.vram)}"
        raise MachineError(
            f"{options.model.name}{text}{cap}; a smaller --context, --batch or --dense int8 need less"
        ) from None


def _machine(gpu: int | None) -> Hardware:
    """This one with as much GPU memory."""
    here = this_machine()
    return here.model_copy(update={"gpu": None if gpu is None else gpu_named("this GPU", gpu)})


def _gpu_bytes(options: Options) -> int | None:
    """Of the GPU's memory, what a run may take."""
    if not options.gpu:
        return None
    found = device(0)
    free = int(torch.cuda.mem_get_info(GPU)[0]) if found is None else found.free
    return free if options.vram is None else min(free, options.vram)
