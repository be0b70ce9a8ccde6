"""Available memory and cores from fake proc and sysfs trees."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hetero.core import InputError, MachineError
from hetero.hw import cpu, memory

MIB = 2**20


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def meminfo(mib: int) -> dict[str, str]:
    return {"proc/meminfo": f"MemTotal: 99999999 kB\nMemFree: 1 kB\nMemAvailable: {mib * 1024} kB"}


def test_meminfo_alone(tmp_path: Path) -> None:
    got = memory.available(tree(tmp_path, meminfo(100)))
    assert got.bytes == 100 * MIB
    assert "MemAvailable" in got.limit


def test_cgroup_v2_counts_cache_as_free_and_takes_the_tightest_level(tmp_path: Path) -> None:
    files = {
        **meminfo(1000),
        "proc/self/cgroup": "0::/user/job",
        "sys/fs/cgroup/memory.stat": "",
        "sys/fs/cgroup/user/memory.max": str(300 * MIB),
        "sys/fs/cgroup/user/memory.current": str(250 * MIB),
        "sys/fs/cgroup/user/memory.stat": f"anon 1\ninactive_file {20 * MIB}\nactive_file 5",
        "sys/fs/cgroup/user/job/memory.max": "max",
        "sys/fs/cgroup/user/job/memory.current": str(240 * MIB),
    }
    got = memory.available(tree(tmp_path, files))
    assert got.bytes == 70 * MIB
    assert str(300 * MIB) in got.limit


def test_cgroup_v2_in_a_container_that_sees_only_its_own_root(tmp_path: Path) -> None:
    files = {
        **meminfo(1000),
        "proc/self/cgroup": "0::/docker/0123",
        "sys/fs/cgroup/memory.max": str(64 * MIB),
        "sys/fs/cgroup/memory.current": str(65 * MIB),
    }
    assert memory.available(tree(tmp_path, files)).bytes == 0


def test_cgroup_v1(tmp_path: Path) -> None:
    base = "sys/fs/cgroup/memory"
    files = {
        **meminfo(1000),
        "proc/self/cgroup": "5:cpu,cpuacct:/a\n4:memory:/a\n0::/ignored",
        f"{base}/memory.limit_in_bytes": "9223372036854771712",
        f"{base}/memory.usage_in_bytes": str(500 * MIB),
        f"{base}/a/memory.limit_in_bytes": str(200 * MIB),
        f"{base}/a/memory.usage_in_bytes": str(150 * MIB),
        f"{base}/a/memory.stat": f"total_inactive_file {10 * MIB}",
    }
    assert memory.available(tree(tmp_path, files)).bytes == 60 * MIB


def test_require_says_needed_and_available(tmp_path: Path) -> None:
    root = tree(tmp_path, meminfo(3000))
    memory.require(3000 * MIB, "the experts", root)
    with pytest.raises(MachineError) as error:
        memory.require(3000 * MIB + 1, "the experts", root)
    assert error.value.exit_code == 3
    text = str(error.value)
    assert text.startswith("the experts needs 2.93 GiB (3145728001 bytes) of memory")
    assert "2.93 GiB (3145728000 bytes) is available (MemAvailable of /proc/meminfo)" in text


def test_nothing_readable(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="cannot read the available memory"):
        memory.available(tmp_path)


def test_free_memory_of_a_node(tmp_path: Path) -> None:
    lines = [
        "MemTotal: 100 kB",
        "MemFree: 40 kB",
        "Active(file): 5 kB",
        "Inactive(file): 7 kB",
        "KReclaimable: 3 kB",
    ]
    root = tree(tmp_path, {"sys/devices/system/node/node2/meminfo": "".join(f"Node 2 {x}\n" for x in lines)})
    assert memory.node_available(2, root) == 55 * 1024
    assert memory.node_available(0, root) is None
    memory.require_on_node(2, 55 * 1024, "experts", root)
    memory.require_on_node(0, 2**60, "experts", root)  # nothing tells: nothing to hold against it
    with pytest.raises(
        MachineError, match=r"share of NUMA node 2 is .*56321 bytes.*56320 bytes\) is free there"
    ):
        memory.require_on_node(2, 55 * 1024 + 1, "experts", root)


def test_this_machine() -> None:
    assert 0 < memory.available().bytes < 2**50


def test_siblings_share_a_core(tmp_path: Path) -> None:
    topology = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    files = {topology.format(i): f"{i % 2},{i % 2 + 2}" for i in range(4)}
    root = tree(tmp_path, files)
    assert cpu.physical_cores([0, 1, 2, 3], root) == 2
    assert cpu.physical_cores([1, 3], root) == 1


def test_quota(tmp_path: Path) -> None:
    assert cpu.quota(tree(tmp_path / "none", {"proc/self/cgroup": "0::/"})) is None
    v2 = {
        "proc/self/cgroup": "0::/a",
        "sys/fs/cgroup/cpu.max": "400000 100000",
        "sys/fs/cgroup/a/cpu.max": "max 100000",
    }
    assert cpu.quota(tree(tmp_path / "v2", v2)) == 4.0
    v1 = {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "150000", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}
    assert cpu.quota(tree(tmp_path / "v1", v1)) == 1.5
    unlimited = {**v1, "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1"}
    assert cpu.quota(tree(tmp_path / "free", unlimited)) is None


def test_identity_of_a_result_file() -> None:
    identity = cpu.identity()
    assert identity["cpu"]
    assert 1 <= identity["physical_cores"] <= identity["logical_cpus"]
    assert identity["memory_bytes"] > 2**28
    json.dumps(identity)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("20GiB", 20 << 30),
        ("20G", 20 << 30),
        ("1.5 gib", 3 << 29),
        ("512MiB", 512 << 20),
        ("64k", 65536),
        ("20GB", 20 * 10**9),
        ("4096", 4096),
        ("4096b", 4096),
        (" 2 TiB ", 2 << 40),
    ],
)
def test_sizes_as_people_write_them(text: str, size: int) -> None:
    assert memory.parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "much", "-1", "1.5", "3iB", "1e9", "GiB", "0", "20GiBs", "٣GiB x"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(InputError, match="is no size"):
        memory.parse_bytes(text)


def test_what_the_user_says_wins_over_the_machine_but_not_over_cgroups(tmp_path: Path) -> None:
    write = {
        "proc/meminfo": "MemAvailable: 1000 kB\n",
        "proc/self/status": "RssAnon:\t 300 kB\nRssShmem:\t 100 kB\nRssFile:\t 9000 kB\n",
        "proc/self/cgroup": "0::/\n",
    }
    for name, text in write.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    try:
        memory.state(2000 * 1024)
        have = memory.available(tmp_path)
        assert have.bytes == 1600 * 1024
        assert have.limit.startswith("--ram 2.0 MiB")
        group = tmp_path / "sys/fs/cgroup"
        group.mkdir(parents=True)
        (group / "memory.max").write_text("900000")
        (group / "memory.current").write_text("100000")
        assert memory.available(tmp_path).bytes == 800000
        memory.state(None)
        assert memory.available(tmp_path).bytes == 800000
    finally:
        memory.state(None)
