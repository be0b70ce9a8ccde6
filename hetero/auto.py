"""``--auto``: the plan of this machine, written as a rule file that a person can read and change."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path

from hetero.config import settings
from hetero.core import MachineError
from hetero.formats import Format, parse_format
from hetero.hw import memory, nvml
from hetero.model.gguf_file import locate
from hetero.plan import families
from hetero.plan.hardware import Figure, Hardware, Pcie
from hetero.plan.inventory import Inventory, from_modules
from hetero.plan.machine import gpu_named, this_machine
from hetero.plan.planner import Plan, family_format, make_plan
from hetero.plan.quantised import kept_format
from hetero.plan.rulefile import rule_file
from hetero.plan.sizes import gib
from hetero.plan.tiers import DEFAULT_CONTEXT, Request
from hetero.wholefile import write_whole


@dataclass(frozen=True, slots=True)
class Auto:
    """What was decided for a run."""

    rules: Path
    dtype: str
    note: str


def plan_run(
    folder: Path,
    name: str,
    *,
    context: int | None = None,
    concurrency: int = 1,
    device: tuple[str, int] | None,
    dtype: str | None = None,
) -> Auto:
    """Plan a checkpoint for this machine as it is now, and write the rules into the cache folder.

    ``device``: name and free bytes of the GPU, None for none. ``dtype``: of dense layers, None for what fits.
    Raises MachineError, with needed and available bytes, where nothing fits that can be run today.
    """
    inventory = inventory_of(folder)
    hardware = _here(device)
    wanted = DEFAULT_CONTEXT if context is None else context
    kept = _own_format(folder)
    request = Request(
        expert_format=kept or _format(inventory, device is not None),
        keep=kept is not None,
        vram=device[1] if device else 0,
        ram=memory.available().bytes,
        context=min(wanted, inventory.context or wanted),
        concurrency=concurrency,
        dense=dtype or "auto",
    )
    plan = make_plan(name, inventory, hardware, request, any_format=kept is None, alternatives=False)
    if plan.today.why_not is not None:
        raise MachineError(f"--auto: {plan.today.why_not}; hetero plan tells what would help")
    path = settings().cache / "plans" / f"{re.sub(r'[^A-Za-z0-9._-]', '-', name)}.yaml"
    with contextlib.suppress(OSError):  # the write tells what is wrong
        path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, rule_file(plan), "--auto (HETERO_CACHE names another folder):")
    return Auto(path, plan.today.dtype, _note(plan, path))


def gpu_now(vram: int | None) -> tuple[str, int] | None:
    """Name of the GPU that torch can use and bytes of it that a run may take, at most ``vram``; None for
    none. The driver's management library is asked, so that no context is made: what is in use before one
    counts where memory is measured (``engine.gpu.vram``)."""
    import torch

    from hetero.engine.gpu.vram import MARGIN

    if not torch.cuda.is_available():
        return None
    found = nvml.device(0)
    if found is None:
        found = nvml.Device(torch.cuda.get_device_name(0), *reversed(torch.cuda.mem_get_info(0)))
    free = found.free - MARGIN
    return found.name, free if vram is None else min(vram, free)


def _own_format(folder: Path) -> Format | None:
    """The format that a quantised checkpoint's experts keep; None where it is not quantised."""
    from hetero.model.quantised import stated_quantisation

    gguf = locate(folder)
    if gguf is not None:
        return gguf_format(gguf)
    told = stated_quantisation(folder)
    return None if told is None else kept_format({"quantization_config": told})


def gguf_format(path: Path) -> Format | None:
    """The format that most experts of a GGUF file keep; None where it has none that are quantised."""
    from hetero.model.sources import open_source

    with open_source(path) as source:
        sizes: dict[Format, int] = {}
        for name, info in source.tensors.items():
            if "experts" in name and "shared" not in name and info.format is not None:
                sizes[info.format] = sizes.get(info.format, 0) + info.nbytes
    return max(sizes, key=lambda fmt: sizes[fmt]) if sizes else None


def inventory_of(folder: Path) -> Inventory:
    """Of a checkpoint, by arithmetic where its type is known, else by its module tree."""
    import torch

    from hetero.model.build import build_meta, describe
    from hetero.model.config import load_config

    config = load_config(folder)
    data = config.to_dict()
    return families.inventory(data) or from_modules(data, describe(build_meta(config, torch.bfloat16)))


def _here(device: tuple[str, int] | None) -> Hardware:
    """This machine with the GPU that torch can use, or without one."""
    found = this_machine()
    if device is None:
        return found.model_copy(update={"gpu": None})
    if found.gpu is not None and found.gpu.name == device[0]:
        return found
    guess = "not measured; hetero doctor measures it"
    pcie = Pcie(copy_gb_s=Figure(estimate=12.0, source=guess), read_gb_s=Figure(estimate=11.0, source=guess))
    return found.model_copy(
        update={
            "gpu": gpu_named(*device),
            "pcie": found.pcie or pcie,
            "handoff_us": found.handoff_us or Figure(estimate=10.0, source=guess),
        }
    )


def _format(inventory: Inventory, has_gpu: bool) -> Format:
    """The family's, and never one that only checkpoints have."""
    found = family_format(inventory.model_type, has_gpu)
    return parse_format("int8") if found.kept_only else found


def _note(plan: Plan, path: Path) -> str:
    now = plan.today
    parts = [f"experts in {plan.request.expert_format}"] if plan.inventory.sites else []
    parts.append(f"dense layers in {plan.layout.dense if now.fused else now.dtype}")
    if now.fused is not None:
        parts.append(f"a cache of experts on the GPU beside layers that {now.fused} fuses")
    elif plan.layout.gpu is not None and plan.inventory.sites:
        parts.append(f"experts of {len(now.gpu_layers)} of {len(plan.inventory.sites)} layers on the GPU")
    if now.tier == "disk":
        parts.append(f"{now.ram_share:.0%} of the CPU's experts in main memory, the rest on disk")
    used = sum(item.bytes for item in plan.layout.ram.items)
    return f"auto: {', '.join(parts)}; about {gib(used)} of main memory; rules in {path}"
