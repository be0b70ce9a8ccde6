"""Memory that this process may still use: the least of MemAvailable and the limits of its cgroups."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hetero.core import MachineError
from hetero.hw.cgroup import levels

_UNLIMITED = 1 << 60  # cgroup v1 writes a number near 2^63 where there is no limit


@dataclass(frozen=True, slots=True)
class Available:
    """Bytes that can still be used, and what sets the limit, in words for a message."""

    bytes: int
    limit: str


def available(root: Path = Path("/")) -> Available:
    """Available memory as the tree under ``root`` tells it (``proc`` and ``sys/fs/cgroup``).

    Page cache counts as free, since the kernel gives it up under pressure. Raises MachineError where nothing
    can be read.
    """
    found = [*_meminfo(root), *_cgroup_v2(root), *_cgroup_v1(root)]
    if not found:
        raise MachineError("cannot read the available memory from /proc/meminfo or /sys/fs/cgroup")
    return min(found, key=lambda a: a.bytes)


def require(needed: int, what: str, root: Path = Path("/")) -> None:
    """Raises MachineError when fewer than ``needed`` bytes are available for ``what``."""
    have = available(root)
    if needed > have.bytes:
        raise MachineError(
            f"{what} needs {gib(needed)} of memory, {gib(have.bytes)} is available ({have.limit}); "
            "a smaller weight format or fewer experts on the CPU need less"
        )


def node_available(node: int, root: Path = Path("/")) -> int | None:
    """Bytes free on one memory node, page cache and reclaimable memory included; None where nothing tells."""
    found = {}
    for line in (_read(root / f"sys/devices/system/node/node{node}/meminfo") or "").splitlines():
        key, _, value = line.removeprefix(f"Node {node} ").partition(":")
        if value.strip():
            found[key] = int(value.split()[0]) * 1024
    if "MemFree" not in found:
        return None
    return sum(found.get(key, 0) for key in ("MemFree", "Active(file)", "Inactive(file)", "KReclaimable"))


def require_on_node(node: int, needed: int, what: str, root: Path = Path("/")) -> None:
    """Raises MachineError when a node has fewer than ``needed`` bytes for its share of ``what``."""
    have = node_available(node, root)
    if have is not None and needed > have:
        raise MachineError(
            f"{what}: the share of NUMA node {node} is {gib(needed)}, {gib(have)} is free there; "
            "'numa: off' places experts wherever there is memory"
        )


def gib(n: int) -> str:
    """Bytes for a reader: GiB from one up, else MiB, with the exact count."""
    return f"{n / 2**30:.2f} GiB ({n} bytes)" if n >= 2**30 else f"{n / 2**20:.1f} MiB ({n} bytes)"


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _read_int(path: Path) -> int | None:
    text = _read(path)
    return int(text) if text is not None and text.isdigit() else None


def _meminfo(root: Path) -> list[Available]:
    for line in (_read(root / "proc/meminfo") or "").splitlines():
        key, _, rest = line.partition(":")
        if key == "MemAvailable":
            return [Available(int(rest.split()[0]) * 1024, "MemAvailable of /proc/meminfo")]
    return []


def _stat(path: Path, key: str) -> int:
    for line in (_read(path) or "").splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return int(value)
    return 0


def _cgroup_v2(root: Path) -> list[Available]:
    found = []
    for level in levels(root / "sys/fs/cgroup", root, ""):
        limit = _read_int(level / "memory.max")
        used = _read_int(level / "memory.current")
        if limit is None or used is None:
            continue
        free = limit - used + _stat(level / "memory.stat", "inactive_file")
        found.append(Available(max(0, free), f"cgroup limit of {limit} bytes"))
    return found


def _cgroup_v1(root: Path) -> list[Available]:
    found = []
    for level in levels(root / "sys/fs/cgroup/memory", root, "memory"):
        limit = _read_int(level / "memory.limit_in_bytes")
        used = _read_int(level / "memory.usage_in_bytes")
        if limit is None or used is None or limit >= _UNLIMITED:
            continue
        free = limit - used + _stat(level / "memory.stat", "total_inactive_file")
        found.append(Available(max(0, free), f"cgroup limit of {limit} bytes"))
    return found
