"""Memory nodes, the cores beside them, and which of both this process may use: sysfs, procfs and cgroups.

Everything is read under a ``root``, so that tests can lay out any machine. Numbers of nodes and CPUs are the
kernel's and need not be dense: a machine may have nodes 0 and 2.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hetero.core import InputError, MachineError
from hetero.hw.cgroup import levels

_ROOT = Path("/")
_CPU = "sys/devices/system/cpu"
_NODE = "sys/devices/system/node"
# Of two kinds of cores, those below this share of the fastest count as the slow kind. Cores of one kind
# differ by a few percent where the firmware prefers some of them.
_SLOW = 0.8
_LOCAL, _REMOTE = 10, 20  # the kernel's distances where firmware tells none


@dataclass(frozen=True, slots=True)
class Core:
    """A physical core with at least one usable CPU."""

    cpus: tuple[int, ...]  # usable SMT siblings, ascending; threads are placed on the first
    node: int  # the node that its CPUs belong to, with memory or without
    fast: bool  # False for the efficiency cores of a hybrid processor


@dataclass(frozen=True, slots=True)
class Node:
    """A memory node of the kernel."""

    id: int
    cpus: tuple[int, ...]  # online CPUs, usable or not; none on a memory-only node
    memory_bytes: int  # 0 on a node without memory
    distances: tuple[tuple[int, int], ...]  # (other node, distance); itself at 10

    def distance(self, other: int) -> int:
        """The kernel's distance to another node; a plain remote one where it tells none."""
        return dict(self.distances).get(other, _LOCAL if other == self.id else _REMOTE)


@dataclass(frozen=True, slots=True)
class Topology:
    """Nodes of the machine and the cores that this process may use, both in ascending order."""

    nodes: tuple[Node, ...]
    cores: tuple[Core, ...]
    mems: tuple[int, ...]  # nodes with memory that this process may allocate on
    # False: a machine on paper, as tests run on. Threads are grouped by its nodes, but the kernel is asked to
    # place nothing.
    bound: bool = True

    def node(self, number: int) -> Node:
        """The node with the kernel's number. Raises InputError listing the nodes that exist."""
        for node in self.nodes:
            if node.id == number:
                return node
        raise InputError(f"there is no NUMA node {number}; this machine has {_listed(self.nodes)}")

    def memory_node(self, number: int) -> Node:
        """As ``node``, and InputError where this process cannot allocate on it."""
        node = self.node(number)
        if number not in self.mems:
            why = "has no memory" if node.memory_bytes == 0 else "is outside this process's cpuset"
            usable = _listed([n for n in self.nodes if n.id in self.mems])
            raise InputError(f"NUMA node {number} {why}; memory can be placed on {usable}")
        return node

    def home(self, core: Core) -> int:
        """The node of ``mems`` nearest to a core: its own where that has memory, else by distance."""
        own = next((n for n in self.nodes if n.id == core.node), None)
        if own is None:
            return self.mems[0]
        return min(self.mems, key=lambda m: (m != own.id, own.distance(m), m))

    @property
    def worker_cores(self) -> tuple[Core, ...]:
        """Cores for compute threads: the fast ones; slow ones only where there are no others."""
        return tuple(c for c in self.cores if c.fast) or self.cores

    @property
    def split_nodes(self) -> tuple[int, ...]:
        """Nodes over which experts are split: those with memory that a worker core has as its home."""
        return tuple(sorted({self.home(c) for c in self.worker_cores}))


def read(root: Path = _ROOT, affinity: Iterable[int] | None = None) -> Topology:
    """The machine under ``root`` for a process that may run on ``affinity`` (default: this process's mask).

    A cgroup's cpuset narrows the mask and the memory nodes. Raises MachineError where no CPU is left.
    """
    online = _online(root)
    allowed = set(os.sched_getaffinity(0) if affinity is None else affinity) & set(online)
    if cpuset := _cpuset(root, "cpus"):
        # An empty or foreign cpuset file (a container that sees its host's tree) must not empty the mask.
        allowed = allowed & set(cpuset) or allowed
    if not allowed:
        raise MachineError("no CPU of this process's affinity mask is online")
    nodes = _nodes(root, online)
    return Topology(nodes, _cores(root, sorted(allowed), nodes), _mems(root, nodes))


def parse_list(text: str) -> tuple[int, ...]:
    """The kernel's list format: "0-3,8" is 0, 1, 2, 3, 8; empty for none. Raises ValueError on other text."""
    numbers: set[int] = set()
    for part in filter(None, (p.strip() for p in text.strip().split(","))):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(numbers))


def _read_list(path: Path) -> tuple[int, ...] | None:
    try:
        return parse_list(path.read_text())
    except (OSError, ValueError):
        return None


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _numbered(folder: Path, prefix: str) -> list[int]:
    """Numbers of the entries prefix0, prefix1, ... of a folder, ascending."""
    if not folder.is_dir():
        return []
    tails = (p.name[len(prefix) :] for p in folder.iterdir() if p.name.startswith(prefix))
    return sorted(int(t) for t in tails if t.isdigit())


def _online(root: Path) -> tuple[int, ...]:
    listed = _read_list(root / _CPU / "online")
    return listed or tuple(_numbered(root / _CPU, "cpu")) or tuple(sorted(os.sched_getaffinity(0)))


def _nodes(root: Path, online: Sequence[int]) -> tuple[Node, ...]:
    """Online nodes; a kernel without NUMA support is one node 0 with everything."""
    present = _numbered(root / _NODE, "node")
    listed = _read_list(root / _NODE / "online")
    numbers = [n for n in present if listed is None or n in listed]
    if not numbers:
        total = _meminfo(root / "proc/meminfo")
        return (Node(0, tuple(online), total, ((0, _LOCAL),)),)
    nodes = []
    for number in numbers:
        folder = root / _NODE / f"node{number}"
        cpus = tuple(c for c in _read_list(folder / "cpulist") or () if c in online)
        nodes.append(Node(number, cpus, _meminfo(folder / "meminfo"), _distances(folder, numbers)))
    return tuple(nodes)


def _distances(folder: Path, numbers: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The file lists one number for each online node, in ascending order of their ids."""
    try:
        values = [int(v) for v in (folder / "distance").read_text().split()]
    except (OSError, ValueError):
        return ()
    return tuple(zip(numbers, values, strict=True)) if len(values) == len(numbers) else ()


def _meminfo(path: Path) -> int:
    """MemTotal in bytes; "Node 0 MemTotal:  1024 kB" in a node's file."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        before, found, after = line.partition("MemTotal:")
        if found and (not before or before.startswith("Node")):
            return int(after.split()[0]) * 1024
    return 0


def _cores(root: Path, allowed: Sequence[int], nodes: Sequence[Node]) -> tuple[Core, ...]:
    siblings: dict[tuple[int, ...], list[int]] = {}
    for cpu in allowed:
        folder = root / _CPU / f"cpu{cpu}" / "topology"
        group = _read_list(folder / "core_cpus_list") or _read_list(folder / "thread_siblings_list") or (cpu,)
        siblings.setdefault(group, []).append(cpu)
    node_of = {cpu: node.id for node in nodes for cpu in node.cpus}
    slow = _slow_cpus(root, allowed)
    cores = (
        Core(tuple(cpus), node_of.get(cpus[0], nodes[0].id), cpus[0] not in slow)
        for cpus in siblings.values()
    )
    return tuple(sorted(cores, key=lambda c: c.cpus))


def _slow_cpus(root: Path, cpus: Sequence[int]) -> set[int]:
    """Efficiency cores: as the perf units of Intel's hybrids name them, else by relative capacity."""
    if atoms := _read_list(root / "sys/devices/cpu_atom/cpus"):
        return set(atoms)
    capacity = {cpu: _read_int(root / _CPU / f"cpu{cpu}" / "cpu_capacity") for cpu in cpus}
    known = {cpu: value for cpu, value in capacity.items() if value is not None and value > 0}
    most = max(known.values(), default=0)
    return {cpu for cpu, value in known.items() if value < _SLOW * most}


def _cpuset(root: Path, what: str) -> tuple[int, ...] | None:
    """CPUs ("cpus") or memory nodes ("mems") of the innermost cgroup that tells them, v2 then v1."""
    v2 = [level / f"cpuset.{what}.effective" for level in levels(root / "sys/fs/cgroup", root, "")]
    v1 = [
        level / f"cpuset.effective_{what}" for level in levels(root / "sys/fs/cgroup/cpuset", root, "cpuset")
    ]
    return next((found for path in (*v2, *v1) if (found := _read_list(path))), None)


def _mems(root: Path, nodes: Sequence[Node]) -> tuple[int, ...]:
    """Nodes with memory within Mems_allowed and the cpuset; never empty."""
    with_memory = [n.id for n in nodes if n.memory_bytes > 0] or [nodes[0].id]
    allowed = set(with_memory)
    for limit in (_mems_allowed(root), _cpuset(root, "mems")):
        if limit is not None:
            allowed = allowed & set(limit) or allowed
    return tuple(sorted(allowed))


def _mems_allowed(root: Path) -> tuple[int, ...] | None:
    try:
        lines = (root / "proc/self/status").read_text().splitlines()
    except OSError:
        return None
    value = next((line.split(":", 1)[1] for line in lines if line.startswith("Mems_allowed_list:")), "")
    return parse_list(value) or None


def _listed(nodes: Sequence[Node]) -> str:
    words = "node" if len(nodes) == 1 else "nodes"
    return f"{words} {', '.join(str(n.id) for n in nodes)}"
