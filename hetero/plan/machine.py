"""A profile of this machine without measuring: what the system tells, and estimates for the rest.

``hetero doctor`` measures and keeps its profile in the cache folder; a plan for this machine uses that where
it is of the same processor.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from hetero import jsonfile
from hetero.config import settings
from hetero.core import HeteroError
from hetero.hw import cpu, topology
from hetero.plan import constants
from hetero.plan.hardware import (
    Cpu,
    Disk,
    Figure,
    Gpu,
    Hardware,
    Isa,
    Pcie,
    Ram,
    hardware_names,
    load_hardware,
    parse_hardware,
)

_NOT_MEASURED = "not measured; hetero doctor measures it"
_CORE_GB_S, _NODE_GB_S = 12.0, 50.0  # what a core and a node read, at least, on most machines
_TOPS = {"scalar": 0.01, "avx2": 0.1, "avx512": 0.3, "amx": 0.5}  # of a core
_TFLOPS = 0.03  # of a core, in float32
_SMI = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")


def estimate(value: float, source: str = _NOT_MEASURED) -> Figure:
    """A figure that nobody measured."""
    return Figure(estimate=value, source=source)


def this_machine(root: Path = Path("/")) -> Hardware:
    """The doctor's profile of this machine, else what the system tells with estimates."""
    guess = guessed(root)
    kept = kept_profile()
    if kept is None or (kept.cpu.name, kept.cpu.cores) != (guess.cpu.name, guess.cpu.cores):
        return guess
    # The profile may be older than the card, and memory is what there is now.
    return kept.model_copy(update={"ram": kept.ram.model_copy(update={"bytes": guess.ram.bytes})})


def profile_path() -> Path:
    """Where the doctor keeps the profile of this machine."""
    return settings().cache / "hardware.json"


def kept_profile() -> Hardware | None:
    """The doctor's last profile, None where there is none or it cannot be read."""
    path = profile_path()
    try:
        return parse_hardware(jsonfile.parse(path.read_bytes()), str(path))
    except (OSError, ValueError, HeteroError):
        return None


def guessed(root: Path = Path("/")) -> Hardware:
    """What the system tells under ``root``, and estimates."""
    found = topology.read(root)
    kind, isa = processor(root)
    cores = len(found.worker_cores)
    quota = cpu.quota(root)
    if quota is not None:
        cores = max(1, min(cores, int(quota)))
    memory = sum(n.memory_bytes for n in found.nodes if n.id in found.mems) or _physical()
    nodes = max(1, len(found.split_nodes))
    read = min(_CORE_GB_S * cores, _NODE_GB_S * nodes)
    gpu = find_gpu()
    return Hardware(
        name="this machine",
        description="What the system tells; bandwidths are estimates.",
        cpu=Cpu(
            name=kind,
            cores=cores,
            isa=isa,
            expert_share=estimate(0.75),
            prefill_tops=estimate(_TOPS[isa] * cores),
            dense_tflops=estimate(_TFLOPS * cores),
            dense16_tflops=_with_bf16(root, cores) if isa == "avx512" else None,
            op_us=estimate(14.0),
        ),
        ram=Ram(bytes=memory, read_gb_s=estimate(read), nodes=nodes),
        gpu=gpu,
        pcie=None if gpu is None else Pcie(copy_gb_s=estimate(12.0), read_gb_s=estimate(11.0)),
        handoff_us=None if gpu is None else estimate(10.0),
        disk=Disk(read_gb_s=estimate(1.0)),
    )


def _with_bf16(root: Path, cores: int) -> Figure | None:
    """Products of many rows in bfloat16 where the processor has instructions for them, tiles apart."""
    if "avx512_bf16" not in cpu.signature(root).get("flags", "").split():
        return None
    return estimate(_TFLOPS * cores * constants.MANY_ROWS_BF16)


def processor(root: Path = Path("/")) -> tuple[str, Isa]:
    """The processor's name and its best instruction set, as the kernel tells them."""
    signature = cpu.signature(root)
    flags = set(signature.get("flags", "").split())
    name = signature.get("model name", "unknown processor")
    if {"amx_tile", "amx_int8", "avx512f"} <= flags:
        return name, "amx"
    if {"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= flags:
        return name, "avx512"
    return name, "avx2" if "avx2" in flags else "scalar"


def _physical() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def find_gpu() -> Gpu | None:
    """The first NVIDIA card as nvidia-smi names it; its rates are those of a shipped profile of that card."""
    if shutil.which(_SMI[0]) is None:
        return None
    try:
        told = subprocess.run(_SMI, capture_output=True, text=True, timeout=10, check=True).stdout
        name, _, mib = told.strip().splitlines()[0].rpartition(",")
        size = int(mib) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None
    return gpu_named(name.strip(), size, len(told.strip().splitlines()))


def gpu_named(name: str, size: int, count: int = 1) -> Gpu:
    """A card of ``size`` bytes: rates of the shipped profile that has it, else estimates of a small card."""
    for one in hardware_names():
        known = load_hardware(one).gpu
        if known is not None and known.name == name:
            return known.model_copy(update={"bytes": size, "count": count})
    return Gpu(
        name=name,
        bytes=size,
        read_gb_s=estimate(300.0),
        bf16_tflops=estimate(20.0),
        launch_us=estimate(1.3),
        count=count,
    )
