"""Prompts over all tiers: every way to divide the experts computes the same, and the division is sound."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from hetero.core import ExpertSpec
from hetero.cpu import CpuExperts
from hetero.formats import parse_format
from hetero.ops.gpu import hybrid_prefill
from hetero.ops.gpu.chunk_tiles import batches, runs
from hetero.ops.gpu.hybrid import DirectPort, HybridExperts
from hetero.ops.gpu.hybrid_shared import HybridShared
from hetero.ops.gpu.pinned import pin_all
from hetero.ops.gpu.tiers import Rates, split_chunk
from tests.cpu.reference import fill, random_weights
from tests.triton.flips import EXACT, borders, decoded, excess

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
pytestmark = [
    *([pytest.mark.gpu] if CUDA else []),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of the interpreter's numpy
]
SPEC = ExpertSpec(16, 512, 256, 4) if CUDA else ExpertSpec(8, 32, 16, 2)
TOKENS = 300 if CUDA else 20


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double().cpu() - b.double()).norm() / b.double().norm())


def layers(
    count: int, slots: int, generator: torch.Generator, up: str = "int4", down: str = "int4"
) -> tuple[list[HybridExperts], list[CpuExperts]]:
    """Layers over all tiers, staging two experts at a time, and the same ones in f32 on the CPU."""
    packed, exact = [], []
    for _ in range(count):
        experts = CpuExperts(SPEC, parse_format(up), parse_format(down))
        packed.append(fill(experts, random_weights(SPEC, generator)))
        seen = {at: weight.float() for at, weight in decoded(experts).items()}
        exact.append(fill(CpuExperts(SPEC, parse_format("f32")), seen))
    arenas = pin_all(packed, DEVICE)
    shared = HybridShared(DEVICE, piece=2 * arenas[0].view.shape[1])
    port = DirectPort(packed, 1, DEVICE)
    made = [
        HybridExperts(one, number, port, shared, slots=slots, arena=arena)
        for number, (one, arena) in enumerate(zip(packed, arenas, strict=True))
    ]
    return made, exact


def chunk(
    generator: torch.Generator, tokens: int = TOKENS
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(tokens, SPEC.hidden, generator=generator).bfloat16()
    ids = torch.rand(tokens, SPEC.num_experts, generator=generator).topk(SPEC.top_k).indices
    ids[1, 0], ids[2] = -1, SPEC.num_experts
    return x, ids, torch.rand(tokens, SPEC.top_k, generator=generator)


@pytest.mark.parametrize(
    ("slots", "strategy"),
    [(0, "stream"), (3, "cpu"), (3, "stream"), (3, "split"), (SPEC.num_experts, "auto")],
)
def test_strategies_agree(slots: int, strategy: Any, generator: torch.Generator) -> None:
    """Two layers, the second of which may be sent ahead, each with its own chunk."""
    hybrids, exact = layers(2, slots, generator)
    prefiller = hybrids[0].shared.prefiller
    prefiller.strategy = strategy
    touched = []
    for hybrid, reference in zip(hybrids, exact, strict=True):
        x, ids, weights = chunk(generator)
        touched.append(set(ids.flatten().tolist()) - {-1, SPEC.num_experts})
        wanted = reference.forward(x, ids, weights)
        got = hybrid.prefill(x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE))
        # The CPU's kernels quantise activations, the GPU's round them to bf16.
        assert relative(got, wanted) < (6e-3 if strategy == "stream" else 2e-2)
        assert (got[2] == 0).all()
    assert prefiller.staged.sent == {}
    for number, record in enumerate(prefiller.records):
        assert (record.layer, record.tokens) == (number, TOKENS)
        here = range(slots - hybrids[0].cache.reserve)  # the first experts, as long as no step was made
        assert record.gpu == len(touched[number] & set(here))
        assert record.gpu + record.pcie + record.cpu == len(touched[number])
        assert (record.pcie > 0) == (strategy in ("stream", "split"))
        assert (record.cpu_s > 0) == (record.cpu > 0)
        if number == 0:  # of the second layer most may have been sent ahead
            assert (record.cpu > 0) == (strategy in ("cpu", "split"))
    assert hybrids[0].shared.nbytes >= prefiller.staging.numel() > 0


def test_formats_of_gate_and_down_may_differ(generator: torch.Generator) -> None:
    (hybrid,), (reference,) = layers(1, 3, generator, "q4_k", "fp8")
    hybrid.shared.prefiller.strategy = "split"
    x, ids, weights = chunk(generator)
    got = hybrid.prefill(x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE))
    assert relative(got, reference.forward(x, ids, weights)) < 2e-2


def test_few_tokens_are_computed_as_steps_are(generator: torch.Generator) -> None:
    (hybrid,), _ = layers(1, 3, generator)
    x, ids, weights = chunk(generator, 4)
    wanted = hybrid.experts.forward(x, ids, weights)
    got = hybrid.prefill(x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE))
    allowed = borders(hybrid.experts, decoded(hybrid.experts), x, ids, weights)
    assert excess(got, wanted, allowed) < EXACT
    named = ids[(ids >= 0) & (ids < SPEC.num_experts)]
    assert hybrid.uses() == torch.bincount(named, minlength=SPEC.num_experts).tolist()


def test_two_chunks_at_once(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Micro-batches, and batches of rows that are smaller than a chunk's."""
    monkeypatch.setattr(hybrid_prefill, "ROWS", 64 if CUDA else 20)
    (hybrid,), (reference,) = layers(1, 3, generator)
    hybrid.shared.prefiller.strategy = "split"
    given = [chunk(generator, 20) for _ in range(2)]
    begun = [hybrid.prefill_submit(*(part.to(DEVICE) for part in one)) for one in given]
    for one, inputs in zip(begun, given, strict=True):
        assert relative(one.collect(), reference.forward(*inputs)) < 2e-2


def test_more_rows_than_a_chunk_has(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of one expert, of which a batch holds a part."""
    monkeypatch.setattr(hybrid_prefill, "ROWS", 18)
    monkeypatch.setattr("hetero.ops.gpu.hybrid.ROWS", 18)
    (hybrid,), (reference,) = layers(1, 3, generator)
    x, ids, weights = chunk(generator, 40)
    ids.fill_(-1)[:, 0] = 2
    got = hybrid.prefill_submit(x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE)).collect()
    assert relative(got, reference.forward(x, ids, weights)) < 2e-2


def test_memory_of_the_host_is_kept_until_kernels_have_read_it() -> None:
    lanes = HybridShared(DEVICE).prefiller.lanes
    done: list[bool] = []

    class Event:
        def __init__(self) -> None:
            self.number = len(done)
            done.append(False)

        def query(self) -> bool:
            return done[self.number]

    lanes.event = lambda timed=False: Event()  # type: ignore[method-assign]
    some = [torch.zeros(1) for _ in range(3)]
    lanes.lend(some[0])
    lanes.lend(some[1])
    assert [one for _, one in lanes._lent] == some[:2]
    done[0] = True
    lanes.lend(some[2])
    assert [one for _, one in lanes._lent] == some[1:]


class Words:
    """Flags whose waiting stream is the thread that asks."""

    able = True

    def __init__(self) -> None:
        self.taken, self.passed = 0, list[int]()
        self._set = [threading.Event() for _ in range(20)]

    def take(self) -> int:
        self.taken += 1
        return self.taken

    def set(self, ticket: int) -> None:
        self._set[ticket].set()

    def wait(self, ticket: int) -> None:
        assert self._set[ticket].wait(60.0)
        self.passed.append(ticket)


@pytest.mark.skipif(CUDA, reason="tests/gpu has it with a device's own waits")
def test_the_stream_waits_in_the_hosts_place(generator: torch.Generator) -> None:
    """But for the last layer; records come all the same, and what a layer's job raises comes at the next."""
    hybrids, exact = layers(3, 3, generator)
    prefiller = hybrids[0].shared.prefiller
    prefiller.strategy, words = "cpu", Words()
    prefiller.flags = words  # type: ignore[assignment]
    for hybrid, reference in zip(hybrids, exact, strict=True):
        x, ids, weights = chunk(generator)
        got = hybrid.prefill(x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE))
        assert relative(got, reference.forward(x, ids, weights)) < 2e-2
    assert (words.taken, words.passed) == (3, [1, 2])
    assert [record.layer for record in prefiller.records] == [0, 1, 2]
    assert [record.wait_s > 0 for record in prefiller.records] == [True] * 3
    assert not prefiller.unseen

    def fails(*_: object) -> None:
        raise OSError("lost")

    given = chunk(generator)
    hybrids[0].experts.forward = fails  # type: ignore[method-assign]
    hybrids[0].prefill(*given)
    with pytest.raises(OSError, match="lost"):
        hybrids[1].prefill(*given)
    hybrids[0].prefill(*given)  # a prompt that is given up here
    del hybrids[0].experts.forward
    for hybrid, reference in zip(hybrids, exact, strict=True):
        assert relative(hybrid.prefill(*given), reference.forward(*given)) < 2e-2
    hybrids[2].experts.forward = fails  # type: ignore[method-assign]
    with pytest.raises(OSError, match="lost"):
        hybrids[2].prefill(*given)
    prefiller.ahead = False
    hybrids[0].prefill(*given)
    assert words.taken == 9


@pytest.mark.parametrize("slots", [0, 3])
def test_chunks_that_take_turns_over_layers(slots: int, generator: torch.Generator) -> None:
    """Each begins a layer before the other has ended it. What was sent ahead for one lies where the other's
    few experts come."""
    hybrids, exact = layers(2, slots, generator)
    hybrids[0].shared.prefiller.strategy = "stream"
    for hybrid, reference in zip(hybrids, exact, strict=True):
        given = [chunk(generator) for _ in range(2)]
        given[1][1].fill_(SPEC.num_experts - 1)[:, 1:] = -1
        begun = [hybrid.prefill_submit(*(part.to(DEVICE) for part in one)) for one in given]
        for one, inputs in zip(begun, given, strict=True):
            assert relative(one.collect(), reference.forward(*inputs)) < 6e-3
    assert hybrids[0].shared.prefiller.staged.sent == {}


def test_the_cpu_alone(generator: torch.Generator) -> None:
    experts = fill(CpuExperts(SPEC, parse_format("f32")), random_weights(SPEC, generator))
    hybrid = HybridExperts(experts, 0, DirectPort([experts], 1, DEVICE), HybridShared(DEVICE))
    x, ids, weights = chunk(generator)
    got = hybrid.prefill(x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE))
    assert relative(got, experts.forward(x, ids, weights)) < 1e-6
    assert [record.strategy for record in hybrid.shared.prefiller.records] == ["cpu"]
    assert hybrid.takes_turns(2 * 16 * SPEC.num_experts)
    assert not hybrid.takes_turns(2)


def test_neighbours_are_copied_at_once() -> None:
    assert list(runs([0, 1, 2, 5, 7, 8, 9], 8)) == [(0, 0, 3), (3, 5, 1), (4, 7, 1), (5, 8, 2)]
    assert list(runs([], 8)) == []


def test_batches_hold_every_row_once(generator: torch.Generator) -> None:
    rows = torch.randint(0, 41, (30,), generator=generator).numpy().astype(np.int64)
    order = torch.randperm(30, generator=generator).numpy()
    ends = [0, 7, 7, 30]
    groups, tiles, where = batches(order, 1000 + order, rows, 16, ends, most=40)
    edges = tiles.tolist()
    at = 0
    for group, experts in zip(groups, (order[:0], order[:7], order[:0], order[7:]), strict=True):
        total = 0
        for batch in group:
            begin, end = batch.rows
            assert begin == at
            assert end - begin <= 40
            assert edges[batch.tiles[0]][0] == begin
            assert edges[batch.tiles[1] - 1][1] == end
            at, total = end, total + end - begin
        assert total == rows[experts].sum()
    of_row = []
    for (first, last), address in zip(edges, where.tolist(), strict=True):
        of_row += [address - 1000] * (last - first)
    assert of_row == np.repeat(order, rows[order]).tolist()


def test_both_sides_end_together(generator: torch.Generator) -> None:
    """No other number of the least used experts on the CPU ends sooner."""
    rates = Rates(lead=1e-5, crossing=0.0)
    rows = torch.randint(0, 60, (64,), generator=generator).numpy().astype(np.int64)
    rows[0] = 0
    here = (torch.rand(64, generator=generator) < 0.25).numpy()
    given: dict[str, Any] = {"tokens": 512, "expert_bytes": 2_760_000, "ops": 9_830_400, "rates": rates}
    none = np.array([], dtype=np.int64)
    found = split_chunk(rows, here, none, **given)
    assert found.strategy == "split"
    assert sorted([*found.gpu, *found.pcie, *found.cpu]) == np.flatnonzero(rows).tolist()
    assert here[found.gpu].all()
    assert not here[found.pcie].any()
    assert rows[found.cpu].max() <= rows[found.pcie].min()
    for count in range(len(found.cpu) + len(found.pcie) + 1):
        missing = np.flatnonzero((rows > 0) & ~here)
        theirs = missing[np.argsort(rows[missing], kind="stable")][:count]
        cpu = count and rates.lead + rates.cpu_seconds(rows[theirs], given["expert_bytes"]).sum()
        pcie = (len(missing) - count) * given["expert_bytes"] / rates.pcie
        assert max(cpu, pcie) >= found.seconds * (1 - 1e-9)
    assert found.work_s == pytest.approx(rates.cpu_seconds(rows[found.cpu], given["expert_bytes"]).sum())
    # What is on its way costs nothing and is used.
    sent = np.array([*found.cpu[:5], *np.flatnonzero(rows == 0)[:1]], dtype=np.int64)
    ahead = split_chunk(rows, here, sent, **given)
    assert set(found.cpu[:5]) <= set(ahead.pcie)
    assert ahead.seconds <= found.seconds
    assert split_chunk(rows, here, none, **given, strategy="cpu").strategy == "cpu"
    assert split_chunk(rows, here, none, **given, strategy="stream").strategy == "touched"
    assert split_chunk(np.maximum(rows, 1), here, none, **given, strategy="stream").strategy == "stream"
    assert split_chunk(rows, rows > 0, none, **given).strategy == "gpu"


def test_rates_fall_with_rows() -> None:
    seconds = Rates().cpu_seconds(np.array([0, 1, 4, 64, 1024, 2048]), 10**6)
    assert seconds[0] == 0
    assert (np.diff(seconds) > 0).all()
    assert seconds[-1] == pytest.approx(2 * seconds[-2])
