"""Experts on a machine with two memory nodes, emulated by QEMU: ``make test-numa``.

Skipped where HETERO_TEST_NUMA is not set, since the machine takes minutes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.numa import machine

EXPERTS = 6  # of the guest's blocks

pytestmark = [
    pytest.mark.timeout(1500),
    pytest.mark.skipif(
        not os.environ.get("HETERO_TEST_NUMA"), reason="two-node machine: run by make test-numa"
    ),
]


@pytest.fixture(scope="module")
def guest() -> dict[str, Any]:
    if absent := machine.missing_tools():
        pytest.fail(
            f"{', '.join(absent)} not found; apt-get install qemu-system-x86 busybox-static e2fsprogs"
        )
    cache = Path(os.environ["HETERO_TEST_NUMA"])
    cache.mkdir(parents=True, exist_ok=True)
    return machine.run(cache)


def test_topology(guest: dict[str, Any]) -> None:
    assert [(n[0], n[1], n[3]) for n in guest["nodes"]] == [
        (0, [0, 1], [[0, 10], [1, 21]]),
        (1, [2, 3], [[0, 21], [1, 10]]),
    ]
    assert all(1 << 30 < n[2] < 1536 << 20 for n in guest["nodes"])
    assert guest["cores"] == [[[0], 0], [[1], 0], [[2], 1], [[3], 1]]
    assert guest["threads"] == 4


def test_topology_as_libnuma_sees_it(guest: dict[str, Any]) -> None:
    seen = guest["libnuma"]
    if "absent" in seen:
        pytest.skip(f"py-libnuma with libnuma1 is not installed: {seen['absent']}")
    assert seen["max_node"] == 1
    assert seen["cpus"] == {"0": [0, 1], "1": [2, 3]}
    assert seen["bytes"] == {str(n[0]): n[2] for n in guest["nodes"]}
    assert seen["distance"] == {"0 0": 10, "0 1": 21, "1 0": 21, "1 1": 10}


def test_workers_are_pinned_and_one_core_is_left(guest: dict[str, Any]) -> None:
    assert guest["workers"] == [[1], [2], [3]]


def test_every_placement_gives_the_same_bits(guest: dict[str, Any]) -> None:
    same = guest["layouts"]["same"]
    assert len(same) == 20
    assert [kind for kind, equal in same.items() if not equal] == []
    assert guest["layouts"]["error"] < 1e-6


def test_every_instruction_set_gives_the_same_bits(guest: dict[str, Any]) -> None:
    assert guest["isas"] == {"scalar": True, "avx2": True}
    assert any("avx2" in name for name in guest["kernels"])


@pytest.mark.parametrize("fmt", ["f32", "bf16", "int8 g128", "int4 g32"])
def test_the_kernel_finds_the_pages_on_the_nodes_asked_for(guest: dict[str, Any], fmt: str) -> None:
    pages = guest["layouts"]["pages"]
    asked = {
        kind: [node for node, _ in pages[f"{fmt} {kind}"]]
        for kind in ("split", "replicate", "node 0", "node 1")
    }
    assert asked == {"split": [0, 1], "replicate": [0, 1], "node 0": [0], "node 1": [1]}
    for kind in asked:
        for node, found in pages[f"{fmt} {kind}"]:
            there = {int(where): count for where, count in found.items() if int(where) >= 0}
            assert set(there) == {node}, kind
            assert sum(count for where, count in found.items() if int(where) < 0) <= 1, kind
    parts = [sum(found.values()) for _, found in pages[f"{fmt} split"]]
    whole = sum(pages[f"{fmt} node 1"][0][1].values())
    assert abs(parts[0] - parts[1]) <= 1 + whole // 20
    # Whole experts begin on pages of their own, those that are cut follow each other.
    assert -1 <= whole - sum(parts) <= EXPERTS


def test_a_whole_model_says_the_same_under_every_placement(guest: dict[str, Any]) -> None:
    tokens = guest["model"]
    assert list(tokens) == ["off", "split", "replicate", "node 0", "node 1"]
    assert all(len(said) == 6 and said == tokens["off"] for said in tokens.values())


def test_denied_binding_is_one_warning_and_the_same_output(guest: dict[str, Any]) -> None:
    denied = guest["denied"]
    assert denied["same"] == [True] * 5
    assert denied["lines_before"] == 0
    assert len(denied["lines"]) == 1
    assert "Operation not permitted" in denied["lines"][0]


def test_a_node_that_is_not_there(guest: dict[str, Any]) -> None:
    assert guest["refused"] == "there is no NUMA node 5; this machine has nodes 0, 1"
