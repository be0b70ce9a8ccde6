"""Where threads sit and where memory goes, on machines of every kind."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetero.core import InputError
from hetero.hw.placement import Placement, Seat, Spread, default_threads, parse_numa, place, seats
from hetero.hw.topology import Core, Node, Topology

GIB = 2**30


def machine(*nodes: tuple[int, list[tuple[int, ...]], int], mems: tuple[int, ...] | None = None) -> Topology:
    """Nodes of (id, cores as their CPUs, GiB)."""
    found = tuple(
        Node(n, tuple(sorted(c for core in cores for c in core)), gib * GIB, ()) for n, cores, gib in nodes
    )
    cores = tuple(Core(core, n, True) for n, listed, _ in nodes for core in listed)
    return Topology(found, cores, mems or tuple(n for n, _, gib in nodes if gib))


ONE = machine((0, [(0, 4), (1, 5), (2, 6), (3, 7)], 16))
TWO = machine((0, [(0, 4), (1, 5)], 16), (2, [(2, 6), (3, 7)], 16))


@pytest.mark.parametrize(("text", "number"), [("split", None), ("off", None), ("node 0", 0), ("node 12", 12)])
def test_words(text: str, number: int | None) -> None:
    assert parse_numa(text) == number


@pytest.mark.parametrize("text", ["", "node", "node -1", "node x", "Split", "node 1 2", "nodes 1"])
def test_other_words_are_refused_with_the_right_ones(text: str) -> None:
    with pytest.raises(InputError, match=r"must be one of split, replicate, off, node N$"):
        parse_numa(text)


@pytest.mark.parametrize("numa", ["off", "split", "replicate", "node 0"])
def test_one_node_is_never_bound(numa: str) -> None:
    assert place(numa, ONE) == Placement(Spread.WHOLE, (-1,))


def test_two_nodes() -> None:
    assert place("off", TWO) == Placement(Spread.WHOLE, (-1,))
    assert place("split", TWO) == Placement(Spread.SPLIT, (0, 2))
    assert place("replicate", TWO) == Placement(Spread.REPLICATE, (0, 2))
    assert place("replicate", TWO).copies == 2
    assert place("node 2", TWO) == Placement(Spread.WHOLE, (2,), 1)
    with pytest.raises(InputError, match=r"no NUMA node 5; this machine has nodes 0, 2"):
        place("node 5", TWO)


def test_a_node_without_cores_is_worked_on_by_all() -> None:
    far = machine((0, [(0,)], 8), (1, [(1,)], 8), (2, [], 64))
    assert place("split", far).nodes == (0, 1)
    assert place("node 2", far) == Placement(Spread.WHOLE, (2,), -1)


def test_one_usable_node_of_two_is_bound_whole() -> None:
    part = replace(TWO, cores=tuple(c for c in TWO.cores if c.node == 2))
    assert place("split", part) == Placement(Spread.WHOLE, (2,))


def test_machines_on_paper_are_not_bound() -> None:
    assert place("split", replace(TWO, bound=False)) == Placement(Spread.SPLIT, (-1, -1))


def test_all_cores_get_a_thread_each_and_the_first_is_the_callers() -> None:
    assert seats(ONE, 4) == [Seat(0, (0, 4)), Seat(0, (1,)), Seat(0, (2,)), Seat(0, (3,))]
    assert seats(TWO, 4) == [Seat(0, (0, 4)), Seat(1, (2,)), Seat(0, (1,)), Seat(1, (3,))]


def test_a_smaller_pool_is_held_to_its_nodes() -> None:
    assert seats(TWO, 3) == [Seat(0), Seat(1, (2, 3)), Seat(0, (0, 1))]
    assert seats(ONE, 1) == [Seat(0)]


def test_a_quota_frees_the_choice_of_core() -> None:
    """Every container under a quota would pin its threads to the same first cores."""
    assert seats(ONE, 4, quota=4.0)[1:] == [Seat(0, (0, 1, 2, 3))] * 3
    assert default_threads(ONE, 2.5) == 2
    assert default_threads(ONE, 0.5) == 1
    assert default_threads(ONE, 64.0) == default_threads(ONE, None) == 4


def test_more_threads_than_cores_use_all_siblings() -> None:
    assert seats(TWO, 6)[3:] == [Seat(1, (2, 6, 3, 7)), Seat(0, (0, 4, 1, 5)), Seat(1, (2, 6, 3, 7))]


def test_slow_cores_get_no_thread() -> None:
    hybrid = replace(ONE, cores=tuple(replace(c, fast=c.cpus[0] < 2) for c in ONE.cores))
    assert default_threads(hybrid, None) == 2
    assert seats(hybrid, 2) == [Seat(0, (0, 4)), Seat(0, (1,))]


def test_cores_beside_no_memory_count_to_their_nearest_node() -> None:
    odd = machine((0, [(0,)], 8), (1, [(1,)], 0), (2, [(2,)], 8))
    assert [s.node for s in seats(odd, 3)] == [0, 1, 0]


def test_uneven_nodes_get_threads_by_their_cores() -> None:
    uneven = machine((0, [(0,), (1,), (2,)], 8), (1, [(3,)], 8))
    assert [s.node for s in seats(uneven, 4)] == [0, 1, 0, 0]
