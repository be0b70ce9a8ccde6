"""What the system tells without measuring: processor, nodes, pages, memory, packages."""

from __future__ import annotations

import platform
import re
import resource
import shutil
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path

from hetero.core import MachineError
from hetero.doctor.finding import Finding, ok, problem, warning
from hetero.hw import cpu, memory, topology
from hetero.plan.machine import processor
from hetero.plan.sizes import gib

GIB = 2**30
_ROOT = Path("/")
_LITTLE_MEMORY, _LITTLE_DISK = 4 * GIB, 20 * GIB
PACKAGES = ("torch", "transformers", "safetensors", "numpy")


def check_processor(root: Path = _ROOT) -> Finding:
    """Name and instruction sets, as the kernel tells them."""
    name, isa = processor(root)
    value = f"{name}, {isa}"
    if isa == "scalar":
        return warning("processor", value, "without AVX2 experts run many times slower; use another machine")
    return ok("processor", value, isa=isa)


def check_cores(root: Path = _ROOT, affinity: Iterable[int] | None = None) -> Finding:
    """Physical cores that this process may use, within mask and quota."""
    found = topology.read(root, affinity)
    cores, quota = len(found.worker_cores), cpu.quota(root)
    everything = sum(len(n.cpus) for n in found.nodes)
    used = sum(len(c.cpus) for c in found.cores)
    slow = len(found.cores) - cores
    value = f"{cores} physical cores for experts" + (f", {slow} slow ones left out" if slow else "")
    if quota is not None and quota < cores:
        advice = (
            "the cgroup's CPU quota (cpu.max) stops threads in mid-step; raise it, or hold processes to cores"
        )
        return warning("cores", f"{value}, {quota:g} CPUs' worth of time", advice, cores=int(quota) or 1)
    if used < everything:
        advice = "the affinity mask or a cpuset (taskset, docker --cpuset-cpus) leaves the others out"
        return warning("cores", f"{value}; {used} of {everything} CPUs are ours", advice, cores=cores)
    return ok("cores", value, cores=cores)


def check_load(root: Path = _ROOT) -> Finding:
    """How busy the machine is: what is measured beside other work is too low."""
    running = float((root / "proc/loadavg").read_text().split()[0])
    cores = len(topology.read().cores)
    if running > 0.5 * cores:
        advice = "measure again when it is quiet: bandwidths come out too low"
        return warning("load", f"{running:.1f} on {cores} cores", advice, load=running)
    return ok("load", f"{running:.1f} on {cores} cores", load=running)


def check_nodes(root: Path = _ROOT, affinity: Iterable[int] | None = None) -> Finding:
    """Memory nodes, and whether all may be used."""
    found = topology.read(root, affinity)
    with_memory = [n for n in found.nodes if n.memory_bytes]
    sizes = ", ".join(f"node {n.id}: {len(n.cpus)} CPUs, {gib(n.memory_bytes)}" for n in with_memory)
    value = f"{max(1, len(with_memory))} with memory ({sizes or 'the kernel tells none'})"
    closed = [n.id for n in with_memory if n.id not in found.mems]
    if closed:
        advice = "a cpuset (docker --cpuset-mems) keeps memory of the others away"
        return warning("memory nodes", f"{value}; closed to us: {', '.join(map(str, closed))}", advice)
    idle = [n for n in found.mems if n not in found.split_nodes]
    if len(found.mems) > 1 and idle:
        advice = "experts are not put there; let the process run on their CPUs too"
        return warning("memory nodes", f"{value}; without cores of ours: {', '.join(map(str, idle))}", advice)
    return ok("memory nodes", value, nodes=len(found.split_nodes))


def check_huge_pages(root: Path = _ROOT) -> Finding:
    """Whether the arenas of experts can have transparent huge pages."""
    path = root / "sys/kernel/mm/transparent_hugepage/enabled"
    try:
        chosen = re.search(r"\[(\w+)\]", path.read_text())
    except OSError:
        chosen = None
    advice = f"as root: echo madvise > {Path('/') / path.relative_to(root)}; small pages read a third slower"
    if chosen is None:
        return warning(
            "huge pages", "the kernel offers no transparent huge pages", "reads are slower without"
        )
    if chosen[1] == "never":
        return warning("huge pages", "switched off", advice)
    return ok("huge pages", chosen[1])


def check_memory(root: Path = _ROOT) -> Iterator[Finding]:
    """What may still be used, and what sets the limit; swap in use."""
    try:
        have = memory.available(root)
    except MachineError as error:
        yield warning("memory", str(error), "give --ram to commands that need to know")
        return
    value = f"{gib(have.bytes)} available ({have.limit})"
    if have.bytes < _LITTLE_MEMORY:
        yield warning("memory", value, "end other programs, or raise the limit: large models need more")
    else:
        yield ok("memory", value, available=have.bytes)
    fields = _meminfo(root)
    total, free = fields.get("SwapTotal", 0), fields.get("SwapFree", 0)
    if total and total - free > GIB // 2:
        advice = "programs were pushed out of memory; experts that are swapped cost seconds a token"
        yield warning("swap", f"{gib(total - free)} of {gib(total)} in use", advice)


def check_locked_memory(has_gpu: bool) -> Finding:
    """How much memory may be pinned for copies to a GPU."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    value = "no limit" if limit == resource.RLIM_INFINITY else f"at most {gib(limit)}"
    if has_gpu and limit != resource.RLIM_INFINITY and limit < GIB:
        advice = "ulimit -l unlimited (docker --ulimit memlock=-1): pinned memory is what PCIe reads fast"
        return warning("locked memory", value, advice)
    return ok("locked memory", value)


def check_space(folder: Path) -> Finding:
    """Room where models and packed experts are kept."""
    there = next(p for p in (folder, *folder.parents) if p.exists())
    free = shutil.disk_usage(there).free
    value = f"{gib(free)} free in {folder}"
    if free < _LITTLE_DISK:
        return warning("disk space", value, "HETERO_CACHE names another folder")
    return ok("disk space", value, free=free)


def check_packages(wanted: Mapping[str, str] | None = None) -> Iterator[Finding]:
    """Python and the packages that decide what runs, against what this package asks for.

    ``wanted``: least versions by name; None: those of the package's own metadata.
    """
    least = _least_versions() if wanted is None else wanted
    yield ok("python", platform.python_version())
    for name in PACKAGES:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield problem(name, "not installed", f"pip install '{name}>={least.get(name, '0')}'")
            continue
        if name in least and _numbers(version) < _numbers(least[name]):
            yield problem(name, version, f"pip install -U '{name}>={least[name]}'")
        else:
            yield ok(name, version)


def _least_versions() -> dict[str, str]:
    try:
        required = metadata.requires("hetero") or []
    except metadata.PackageNotFoundError:
        return {}
    found = (re.match(r"([A-Za-z0-9_.-]+)\s*>=\s*([0-9.]+)", line) for line in required)
    return {match[1].lower(): match[2] for match in found if match}


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"[0-9]+(?:\.[0-9]+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def _meminfo(root: Path) -> dict[str, int]:
    """Fields of /proc/meminfo in bytes."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return {}
    found = (re.match(r"(\w+):\s+([0-9]+) kB", line) for line in lines)
    return {match[1]: int(match[2]) * 1024 for match in found if match}
