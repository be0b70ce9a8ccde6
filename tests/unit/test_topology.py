"""Topology over fake sysfs trees: nodes of every odd kind, SMT, hybrids, cpusets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from hetero.core import InputError, MachineError
from hetero.hw import topology
from hetero.hw.topology import Topology, parse_list

GIB = 2**30


def write(root: Path, path: str, text: str) -> None:
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text + "\n")


def ranges(cpus: Sequence[int]) -> str:
    """The kernel's way to write a list: runs joined by a dash."""
    out: list[list[int]] = []
    for cpu in sorted(cpus):
        if out and cpu == out[-1][-1] + 1:
            out[-1].append(cpu)
        else:
            out.append([cpu])
    return ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in out)


def sysfs(
    root: Path,
    nodes: Mapping[int, tuple[Sequence[int], int]],
    *,
    siblings: Sequence[Sequence[int]] = (),
    offline: Sequence[int] = (),
    distances: Mapping[int, str] | None = None,
) -> Path:
    """A tree with nodes: id -> (CPUs, GiB). CPUs outside ``siblings`` are cores of their own."""
    cpus = sorted(c for listed, _ in nodes.values() for c in listed)
    group = {c: ranges(g) for g in siblings for c in g}
    for cpu in cpus:
        folder = f"sys/devices/system/cpu/cpu{cpu}"
        if cpu in offline:
            write(root, f"{folder}/online", "0")
            continue
        write(root, f"{folder}/topology/thread_siblings_list", group.get(cpu, str(cpu)))
    write(root, "sys/devices/system/cpu/online", ranges([c for c in cpus if c not in offline]))
    write(root, "sys/devices/system/node/online", ranges(list(nodes)))
    for number, (listed, gib) in nodes.items():
        folder = f"sys/devices/system/node/node{number}"
        write(root, f"{folder}/cpulist", ranges([c for c in listed if c not in offline]))
        meminfo = f"Node {number} MemTotal:       {gib * GIB // 1024} kB\nNode {number} MemFree:   12 kB"
        write(root, f"{folder}/meminfo", meminfo)
        plain = " ".join("10" if other == number else "20" for other in sorted(nodes))
        write(root, f"{folder}/distance", (distances or {}).get(number, plain))
    return root


def read(root: Path, cpus: Sequence[int] | None = None) -> Topology:
    return topology.read(root, range(1024) if cpus is None else cpus)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("0-3,8,10-11", (0, 1, 2, 3, 8, 10, 11)),
        ("\n", ()),
        ("5", (5,)),
        ("2,0", (0, 2)),
        ("1-2,2-3", (1, 2, 3)),
    ],
)
def test_kernel_lists(text: str, numbers: tuple[int, ...]) -> None:
    assert parse_list(text) == numbers


def test_one_node(tmp_path: Path) -> None:
    found = read(sysfs(tmp_path, {0: (range(4), 16)}))
    assert [n.id for n in found.nodes] == [0]
    assert found.nodes[0].memory_bytes == 16 * GIB
    assert [c.cpus for c in found.cores] == [(0,), (1,), (2,), (3,)]
    assert found.split_nodes == found.mems == (0,)


def test_ids_need_not_be_dense(tmp_path: Path) -> None:
    tree = sysfs(tmp_path, {0: (range(2), 8), 2: (range(2, 4), 8)}, distances={0: "10 31", 2: "31 10"})
    found = read(tree)
    assert found.split_nodes == (0, 2)
    assert found.node(2).cpus == (2, 3)
    assert found.node(0).distance(2) == 31
    with pytest.raises(InputError, match=r"no NUMA node 1; this machine has nodes 0, 2$"):
        found.node(1)
    with pytest.raises(InputError, match=r"no NUMA node 5"):
        found.memory_node(5)


def test_a_node_without_cpus_takes_no_share_but_can_be_named(tmp_path: Path) -> None:
    """Memory on CXL or HBM: experts are split over the nodes that compute; ``node 2`` is still allowed."""
    found = read(sysfs(tmp_path, {0: (range(2), 8), 1: (range(2, 4), 8), 2: ((), 64)}))
    assert found.mems == (0, 1, 2)
    assert found.split_nodes == (0, 1)
    assert found.memory_node(2).memory_bytes == 64 * GIB


def test_cores_of_a_node_without_memory_use_the_nearest_that_has_some(tmp_path: Path) -> None:
    nodes = {0: (range(2), 8), 1: (range(2, 4), 0), 2: (range(4, 6), 8), 3: (range(6, 8), 0)}
    distances = {0: "10 21 31 31", 1: "21 10 12 31", 2: "31 12 10 11", 3: "31 31 11 10"}
    found = read(sysfs(tmp_path, nodes, distances=distances))
    assert found.mems == found.split_nodes == (0, 2)
    assert [found.home(c) for c in found.cores] == [0, 0, 2, 2, 2, 2, 2, 2]
    with pytest.raises(InputError, match=r"node 1 has no memory; memory can be placed on nodes 0, 2"):
        found.memory_node(1)


def test_sub_numa_clusters_are_four_nodes_with_their_own_siblings(tmp_path: Path) -> None:
    """SNC4 on one socket of 16 cores: the second sibling of core c is CPU c + 16."""
    nodes = {n: ([*range(4 * n, 4 * n + 4), *range(16 + 4 * n, 20 + 4 * n)], 32) for n in range(4)}
    found = read(sysfs(tmp_path, nodes, siblings=[(c, c + 16) for c in range(16)]))
    assert found.split_nodes == (0, 1, 2, 3)
    assert len(found.cores) == 16
    assert [c.node for c in found.cores] == [n for n in range(4) for _ in range(4)]
    assert found.cores[5].cpus == (5, 21)


def test_offline_cpus_do_not_count(tmp_path: Path) -> None:
    tree = sysfs(
        tmp_path, {0: (range(8), 8)}, siblings=[(0, 4), (1, 5), (2, 6), (3, 7)], offline=(4, 5, 3, 7)
    )
    found = read(tree)
    assert [c.cpus for c in found.cores] == [(0,), (1,), (2, 6)]
    assert found.nodes[0].cpus == (0, 1, 2, 6)


def test_the_affinity_mask_decides_which_cores_and_siblings_are_used(tmp_path: Path) -> None:
    tree = sysfs(tmp_path, {0: (range(8), 8)}, siblings=[(0, 4), (1, 5), (2, 6), (3, 7)])
    found = read(tree, [1, 5, 6])
    assert [c.cpus for c in found.cores] == [(1, 5), (6,)]
    with pytest.raises(MachineError, match="affinity mask"):
        read(tree, [99])


def test_a_mask_within_one_node_leaves_one_node_to_split_over(tmp_path: Path) -> None:
    found = read(sysfs(tmp_path, {0: (range(2), 8), 1: (range(2, 4), 8)}), [2, 3])
    assert found.split_nodes == (1,)
    assert found.mems == (0, 1)


def test_hybrid_cores_as_intel_names_them(tmp_path: Path) -> None:
    tree = sysfs(tmp_path, {0: (range(8), 8)}, siblings=[(0, 1), (2, 3)])
    write(tree, "sys/devices/cpu_core/cpus", "0-3")
    write(tree, "sys/devices/cpu_atom/cpus", "4-7")
    found = read(tree)
    assert [c.cpus for c in found.worker_cores] == [(0, 1), (2, 3)]
    assert len(found.cores) == 6
    assert [c.cpus for c in read(tree, [4, 5]).worker_cores] == [(4,), (5,)]


def test_hybrid_cores_by_capacity(tmp_path: Path) -> None:
    tree = sysfs(tmp_path, {0: (range(4), 8)})
    for cpu, capacity in enumerate((1024, 1009, 446, 446)):
        write(tree, f"sys/devices/system/cpu/cpu{cpu}/cpu_capacity", str(capacity))
    assert [c.cpus for c in read(tree).worker_cores] == [(0,), (1,)]


def test_a_kernel_without_numa_is_one_node(tmp_path: Path) -> None:
    write(tmp_path, "sys/devices/system/cpu/online", "0-1")
    write(tmp_path, "proc/meminfo", "MemTotal:       2048 kB\nMemFree: 12 kB")
    found = read(tmp_path)
    assert [(n.id, n.cpus, n.memory_bytes) for n in found.nodes] == [(0, (0, 1), 2 * 2**20)]
    assert len(found.cores) == 2


@pytest.mark.parametrize("version", [1, 2])
def test_a_cpuset_narrows_cpus_and_memory(tmp_path: Path, version: int) -> None:
    tree = sysfs(tmp_path, {0: (range(2), 8), 1: (range(2, 4), 8)})
    if version == 2:
        write(tree, "proc/self/cgroup", "0::/jobs/mine")
        write(tree, "sys/fs/cgroup/cpuset.cpus.effective", "0-3")
        write(tree, "sys/fs/cgroup/jobs/mine/cpuset.cpus.effective", "3")
        write(tree, "sys/fs/cgroup/jobs/mine/cpuset.mems.effective", "1")
    else:
        write(tree, "proc/self/cgroup", "7:cpuset:/mine\n3:cpu,cpuacct:/")
        write(tree, "sys/fs/cgroup/cpuset/mine/cpuset.effective_cpus", "3")
        write(tree, "sys/fs/cgroup/cpuset/mine/cpuset.effective_mems", "1")
    found = read(tree)
    assert [c.cpus for c in found.cores] == [(3,)]
    assert found.mems == found.split_nodes == (1,)
    with pytest.raises(InputError, match=r"node 0 is outside this process's cpuset"):
        found.memory_node(0)


def test_allowed_memory_nodes_of_the_process(tmp_path: Path) -> None:
    tree = sysfs(tmp_path, {0: (range(2), 8), 1: (range(2, 4), 8)})
    write(tree, "proc/self/status", "Name:\tx\nMems_allowed:\t1\nMems_allowed_list:\t0")
    found = read(tree)
    assert found.mems == (0,)
    assert [found.home(c) for c in found.cores] == [0, 0, 0, 0]


def test_this_machine_can_be_read() -> None:
    found = topology.read()
    assert found.cores
    assert found.split_nodes
    assert set(found.split_nodes) <= set(found.mems)


def test_agrees_with_libnuma() -> None:
    """The same machine through libnuma: nodes, CPUs, bytes, distances."""
    try:
        from numa import LIBNUMA, info
    except (ImportError, OSError, AttributeError) as error:
        pytest.skip(f"py-libnuma with libnuma1 is not installed: {error}")
    if not info.numa_available():
        pytest.skip("libnuma finds no NUMA support in this kernel")
    found = topology.read()
    assert found.nodes[-1].id == info.get_max_node()
    for node in found.nodes:
        assert sorted(info.node_to_cpus(node.id)) == list(node.cpus)
        assert LIBNUMA.numa_node_size64(node.id, None) == node.memory_bytes
        for other in found.nodes:
            assert node.distance(other.id) == info.numa_distance(node.id, other.id)
