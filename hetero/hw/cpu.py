"""The processor: its name, the physical cores that this process may use, its cgroup quota."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from hetero.hw import placement, topology
from hetero.hw.cgroup import levels

_ROOT = Path("/")
_SIGNATURE = ("vendor_id", "model name", "cpu family", "model", "stepping", "cache size", "flags")


def physical_cores(cpus: Iterable[int], root: Path = _ROOT) -> int:
    """Physical cores behind the logical CPUs ``cpus``; a CPU without topology counts as its own core."""
    return len(topology.read(root, cpus).cores)


def quota(root: Path = _ROOT) -> float | None:
    """CPUs' worth of time that the cgroup allows (v2 ``cpu.max``, v1 ``cfs_quota_us``), None if unlimited."""
    limits = []
    for level in levels(root / "sys/fs/cgroup", root, ""):
        try:
            allowed, period = (level / "cpu.max").read_text().split()
        except (OSError, ValueError):
            continue
        if allowed != "max":
            limits.append(int(allowed) / int(period))
    for level in levels(root / "sys/fs/cgroup/cpu", root, "cpu"):
        try:
            allowed_us = int((level / "cpu.cfs_quota_us").read_text())
            period_us = int((level / "cpu.cfs_period_us").read_text())
        except (OSError, ValueError):
            continue
        if allowed_us > 0:
            limits.append(allowed_us / period_us)
    return min(limits, default=None)


def usable_threads() -> int:
    """Threads that make sense for compute: physical cores of the affinity mask, within the quota; on a hybrid
    processor its fast cores."""
    return placement.default_threads(topology.read(), quota())


@cache
def name() -> str:
    """The processor's name, by py-cpuinfo; the architecture where that knows none. Takes about a second."""
    import cpuinfo

    return str(cpuinfo.get_cpu_info().get("brand_raw") or platform.machine())


def signature(root: Path = _ROOT) -> dict[str, str]:
    """What tells one kind of processor from another, as the kernel names it: vendor, family, model, stepping,
    flags. Cheap, unlike ``name``; empty where the kernel tells nothing."""
    try:
        first = (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
    except OSError:
        return {}
    pairs = [line.partition(":") for line in first.split("\n")]
    fields = {key.strip(): value.strip() for key, _, value in pairs}
    return {key: fields[key] for key in _SIGNATURE if key in fields}


def identity() -> dict[str, Any]:
    """What a result file must carry to be compared: CPU, cores, memory, kernel, date (UTC)."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": name(),
        "logical_cpus": len(os.sched_getaffinity(0)),
        "physical_cores": physical_cores(os.sched_getaffinity(0)),
        "cpu_quota": quota(),
        "memory_bytes": pages,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
