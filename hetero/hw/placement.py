"""Where threads sit and where the experts' memory goes, on the machine that ``topology`` describes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum

from hetero.core import InputError
from hetero.hw.topology import Topology

NUMA_WORDS = ("split", "replicate", "off")
_NODE = re.compile(r"node (\d{1,6})")


class Spread(IntEnum):
    """How experts lie over memory nodes; the numbers of cpu_ext/weights.h."""

    WHOLE = 0
    SPLIT = 1
    REPLICATE = 2


@dataclass(frozen=True, slots=True)
class Placement:
    """Arenas by node, in the order of ``Topology.split_nodes``, by the kernel's numbers; -1: not bound."""

    spread: Spread
    nodes: tuple[int, ...]
    only: int = -1  # index into split_nodes of the node whose threads do the work; -1: all of them

    @property
    def copies(self) -> int:
        """How many times the experts lie in memory."""
        return len(self.nodes) if self.spread is Spread.REPLICATE else 1


@dataclass(frozen=True, slots=True)
class Seat:
    """Where one thread of the pool runs: a node, as index into split_nodes, and CPUs; none: anywhere."""

    node: int
    cpus: tuple[int, ...] = ()


def parse_numa(text: str) -> int | None:
    """The number in "node N"; None for the words of NUMA_WORDS. Raises InputError on anything else."""
    if text in NUMA_WORDS:
        return None
    if found := _NODE.fullmatch(text):
        return int(found.group(1))
    raise InputError(f"numa '{text}': must be one of {', '.join(NUMA_WORDS)}, node N")


def place(numa: str, topology: Topology) -> Placement:
    """Where experts go under a rule's ``numa``. Raises InputError for another word or an absent node.

    split: every expert cut over the nodes that have both memory and worker cores; replicate: a copy on each
    of them; node N: on one node, worked on by its own cores where it has some; off: wherever the kernel puts
    it. On a machine with one such node split and replicate are the same as that node.
    """
    number = parse_numa(numa)
    split = topology.split_nodes
    binds = topology.bound and len(topology.mems) > 1
    if number is not None:
        node = topology.memory_node(number).id
        only = split.index(node) if node in split and len(split) > 1 else -1
        return Placement(Spread.WHOLE, (node if binds else -1,), only)
    if numa == "off":
        return Placement(Spread.WHOLE, (-1,))
    nodes = split if binds else (-1,) * len(split)
    if len(split) == 1:
        return Placement(Spread.WHOLE, nodes)
    return Placement(Spread.SPLIT if numa == "split" else Spread.REPLICATE, nodes)


def default_threads(topology: Topology, quota: float | None) -> int:
    """One thread a worker core, within the CPUs' worth of time that the cgroup allows."""
    cores = len(topology.worker_cores)
    return max(1, cores if quota is None else min(cores, int(quota)))


def seats(topology: Topology, threads: int, quota: float | None = None) -> list[Seat]:
    """Seats for ``threads`` threads, dealt over the nodes in turn; the first is the caller's.

    A pool of all worker cores gets one core a thread, its first SMT sibling; the first core with all its
    siblings is the caller's. A smaller pool, or one under a CPU quota, shares the machine with others whose
    place is not known: its threads are held to their node, one sibling a core, and the kernel chooses. More
    threads than cores may use all siblings.
    """
    split = topology.split_nodes
    by_node: dict[int, list[tuple[int, ...]]] = {node: [] for node in split}
    for core in topology.worker_cores:
        by_node[topology.home(core)].append(core.cpus)
    turn = sorted((i, n) for n, node in enumerate(split) for i in range(len(by_node[node])))
    own_core = quota is None and threads == len(turn)
    found = []
    for i in range(threads):
        rank, n = turn[i % len(turn)]
        cores = by_node[split[n]]
        if not topology.bound or (i == 0 and not own_core):
            cpus: tuple[int, ...] = ()
        elif own_core:
            cpus = cores[rank] if i == 0 else (cores[rank][0],)
        elif threads <= len(turn):
            cpus = tuple(core[0] for core in cores)
        else:
            cpus = tuple(cpu for core in cores for cpu in core)
        found.append(Seat(n, cpus))
    return found
