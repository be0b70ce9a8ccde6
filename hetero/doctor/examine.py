"""All checks in their order, and the hardware profile that they make."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hetero.config import settings
from hetero.doctor import system
from hetero.doctor.finding import Finding, examine, ok, warning
from hetero.doctor.gpu import Cuda, TorchCuda, check_gpu
from hetero.doctor.isas import check_isas
from hetero.hw.probe_disk import probe_disk
from hetero.plan.hardware import Figure, Hardware, Pcie
from hetero.plan.machine import gpu_named, guessed

_SLOW_DISK_GB_S = 0.5


def doctor(*, quick: bool, root: Path = Path("/"), cuda: Cuda | None = None) -> Iterator[Finding]:
    """Every finding, as it is made. ``quick``: nothing is measured, no instruction set tried."""
    cuda = cuda or TorchCuda()
    folder = settings().cache
    yield from examine("processor", lambda: system.check_processor(root))
    yield from examine("cores", lambda: system.check_cores(root))
    yield from examine("memory nodes", lambda: system.check_nodes(root))
    yield from examine("huge pages", lambda: system.check_huge_pages(root))
    yield from examine("memory", lambda: system.check_memory(root))
    yield from examine("load", lambda: system.check_load(root))
    yield from examine("packages", system.check_packages)
    if not quick:
        yield from examine("instruction sets", check_isas)
        yield from examine("memory reads", _memory_reads)
        yield from examine("torch on the CPU", _torch)
    yield from examine("GPU", lambda: check_gpu(cuda, measure=not quick))
    yield from examine("locked memory", lambda: system.check_locked_memory(bool(cuda.names())))
    yield from examine("disk space", lambda: system.check_space(folder))
    if not quick:
        yield from examine("disk", lambda: check_disk(folder))


def _memory_reads() -> Iterator[Finding]:
    from hetero.doctor.measure import check_memory_reads

    return check_memory_reads()


def _torch() -> Finding:
    from hetero.doctor.measure import check_torch

    return check_torch()


def check_disk(folder: Path) -> Finding:
    """Direct reads of the folder where models and packed experts are kept."""
    try:
        rates = probe_disk(folder)
    except OSError as error:
        advice = "HETERO_CACHE names a folder on another disk"
        return warning("disk", f"{folder}: cannot be measured: {error.strerror or error}", advice)
    value = f"{rates.gb_s:.2f} GB/s, {rates.latency_us:.0f} us a small read ({folder})"
    figures = {"gb_s": rates.gb_s, "latency_us": rates.latency_us}
    if rates.gb_s < _SLOW_DISK_GB_S:
        advice = "loading takes long, and experts on disk are no choice; an NVMe drive reads 3 to 7 GB/s"
        return warning("disk", value, advice, **figures)
    return ok("disk", value, **figures)


def make_profile(findings: list[Finding], root: Path = Path("/")) -> Hardware:
    """The profile of this machine: what was measured, and estimates for what was not."""
    found = {f.what: f.figures for f in findings}
    profile = guessed(root)
    when = f"hetero doctor, {datetime.now(UTC).date().isoformat()}"

    def put(old: Any, **new: tuple[str, str]) -> Any:
        """A part of the profile with the figures that a finding has: field -> (finding, its figure)."""
        changed = {
            name: Figure(measured=found[what][key], source=when)
            for name, (what, key) in new.items()
            if found.get(what, {}).get(key)
        }
        return old.model_copy(update=changed)

    cpu = put(
        profile.cpu,
        expert_share=("experts' operator", "share"),
        prefill_tops=("experts' operator", "tops"),
        dense_tflops=("torch on the CPU", "tflops"),
        op_us=("torch on the CPU", "op_us"),
        dense_share=("torch's products", "share"),
        dense16_share=("torch's products", "share16"),
        dense16_tflops=("torch on the CPU", "tflops16"),
    )
    ram = put(profile.ram, read_gb_s=("memory reads", "gb_s"))
    disk = put(profile.disk, read_gb_s=("disk", "gb_s"), latency_us=("disk", "latency_us"))
    gpu, pcie, handoff = profile.gpu, profile.pcie, profile.handoff_us
    if card := found.get("GPU 0"):
        gpu = gpu_named(str(card["name"]), int(card["total"]), sum(w.startswith("GPU ") for w in found))
        gpu = put(gpu, read_gb_s=("rates of GPU 0", "gb_s"), bf16_tflops=("rates of GPU 0", "tflops"))
        pcie = _pcie(found, when) or pcie
        handoff = handoff or Figure(estimate=10.0, source="not measured")
        pcie = pcie or Pcie(
            copy_gb_s=Figure(estimate=12.0, source="not measured"),
            read_gb_s=Figure(estimate=11.0, source="not measured"),
        )
    return profile.model_copy(
        update={
            "description": when,
            "cpu": cpu,
            "ram": ram,
            "disk": disk,
            "gpu": gpu,
            "pcie": pcie,
            "handoff_us": handoff,
        }
    )


def _pcie(found: Mapping[str, Mapping[str, Any]], when: str) -> Pcie | None:
    rate = found.get("PCIe of GPU 0", {}).get("to_gpu")
    if not rate:
        return None
    in_place = "from copies; a kernel reads in place at 0.93 of a copy on an H200"
    return Pcie(
        copy_gb_s=Figure(measured=rate, source=when), read_gb_s=Figure(estimate=0.93 * rate, source=in_place)
    )
