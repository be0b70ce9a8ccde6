"""Memory that this process may still use: the least of MemAvailable and the limits of its cgroups."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hetero.core import InputError, MachineError
from hetero.hw.cgroup import levels

_UNLIMITED = 1 << 60  # cgroup v1 writes a number near 2^63 where there is no limit


@dataclass(frozen=True, slots=True)
class Available:
    """Bytes that can still be used, and what sets the limit, in words for a message."""

    bytes: int
    limit: str


_SIZE = re.compile(r"\s*(\d{1,15}(?:\.\d{1,6})?)\s*([kmgt]?)(i?)b?\s*", re.IGNORECASE)
_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}

# What the user says that this process may hold in all; None: what the machine says of itself.
_stated: int | None = None

# What tells how many bytes this process has taken for what it will ask for.
_ahead: list[Callable[[], int]] = []


def parse_bytes(text: str | int) -> int:
    """``20GiB``, ``20G``, ``512MiB`` (1024), ``20GB`` (1000) or a number of bytes. Raises InputError."""
    match = _SIZE.fullmatch(str(text))
    if match is None or (match[2] == "" and (match[3] or "." in match[1])):
        raise InputError(f"'{text}' is no size: write one like 20GiB, 512MiB or a number of bytes")
    decimal = not match[3] and str(text).strip().lower().endswith("b")
    size = int(float(match[1]) * (1000 if decimal and match[2] else 1024) ** _UNITS[match[2].lower()])
    if size < 1:
        raise InputError(f"'{text}' is no size: it must be at least one byte")
    return size


def state(ram: int | None) -> None:
    """Count on so many bytes for this process from now on, whatever the machine says of its memory, which
    some virtual machines grow as it is used; None: believe the machine again. Limits of cgroups hold
    nonetheless, since the kernel ends a process that passes them."""
    global _stated  # noqa: PLW0603 (one a process, like the memory)
    _stated = ram


@contextlib.contextmanager
def taken_ahead(count: Callable[[], int]) -> Iterator[None]:
    """While it lasts, ``count`` tells of bytes that this process has taken already for what is still going to
    ask whether it fits: they count as available."""
    _ahead.append(count)
    try:
        yield
    finally:
        _ahead.remove(count)


def available(root: Path = Path("/")) -> Available:
    """Available memory as the tree under ``root`` tells it (``proc`` and ``sys/fs/cgroup``), or what is left
    of what ``state`` said.

    Page cache counts as free, since the kernel gives it up under pressure, and swap never counts. Raises
    MachineError where nothing can be read.
    """
    ahead = sum(count() for count in _ahead)
    if _stated is None:
        found = _meminfo(root)
    else:
        held = sum(_status(root, key) for key in ("RssAnon:", "RssShmem:"))
        found = [Available(max(0, _stated - held), f"--ram {gib(_stated)}, {gib(held)} of it in use")]
    found += [*_cgroup_v2(root), *_cgroup_v1(root)]
    if not found:
        raise MachineError("cannot read the available memory from /proc/meminfo or /sys/fs/cgroup")
    least = min(found, key=lambda a: a.bytes)
    return Available(least.bytes + ahead, least.limit) if ahead else least


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
    have = node_available(node, root) if _stated is None else None
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


def _status(root: Path, key: str) -> int:
    for line in (_read(root / "proc/self/status") or "").splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    return 0


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
