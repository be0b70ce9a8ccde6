"""Steps over all tiers against the CPU's own, whatever sits where."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from hetero.core import Activation, ActKind, ExpertSpec, InputError
from hetero.cpu import CpuExperts
from hetero.formats import parse_format
from hetero.ops.gpu.hybrid import DirectPort, HybridExperts, TierCounts
from hetero.ops.gpu.hybrid_shared import LONGEST, SIZES, HybridShared, Sides
from hetero.ops.gpu.pinned import PinnedArena, pin_all
from tests.cpu.reference import Weights, fill, random_weights
from tests.triton.flips import EXACT, beyond, borders, decoded, excess

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
pytestmark = [
    *([pytest.mark.gpu] if CUDA else []),
    # The interpreter computes by numpy, which warns of what stands in rows that nobody computes.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
SPEC = ExpertSpec(12, 32, 16, 2)
ODD = ExpertSpec(9, 40, 24, 2)
BIAS = ExpertSpec(9, 64, 16, 2, Activation(ActKind.SILU, alpha=1.702, up_offset=1.0), has_bias=True)
ROWS = 4


def make(
    spec: ExpertSpec, fmt: str, slots: int, share: float, generator: torch.Generator, *, early: bool = True
) -> HybridExperts:
    """``fmt``: of gate and up, with another one of down after a stroke."""
    up, _, down = fmt.partition("/")
    experts = CpuExperts(spec, parse_format(up), parse_format(down or up))
    fill(experts, random_weights(spec, generator))
    shared = HybridShared(DEVICE, share=share, early=early, soon=early)
    port = DirectPort([experts], ROWS, DEVICE)
    return HybridExperts(experts, 0, port, shared, slots=slots, arena=PinnedArena(experts, DEVICE))


def inputs(
    spec: ExpertSpec, rows: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(rows, spec.hidden, generator=generator).bfloat16()
    ids = torch.rand(rows, spec.num_experts, generator=generator).topk(spec.top_k).indices
    ids[-1, 0] = -1 if rows % 2 else spec.num_experts
    return x, ids, torch.rand(rows, spec.top_k, generator=generator)


def check_steps(
    hybrid: HybridExperts, steps: int, generator: torch.Generator, parts: Weights | None = None
) -> None:
    spec = hybrid.experts.spec
    parts = parts or decoded(hybrid.experts)
    for number in range(steps):
        x, ids, weights = inputs(spec, (3, 1, ROWS)[number % 3], generator)
        wanted = hybrid.experts.forward(x, ids, weights)
        hybrid.submit(x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE))
        assert beyond(hybrid.experts, parts, hybrid.collect(), wanted, (x, ids, weights)) < EXACT, number


@pytest.mark.parametrize(
    ("slots", "share", "early"),
    [
        (0, 0.0, True), (0, 1.0, True), (0, 1.0, False), (3, 0.0, True), (3, 1.0, False), (9, 0.5, True),
        (9, 1.0, False), (12, 0.5, True),
    ],
)  # fmt: skip
def test_steps_equal_the_cpu(slots: int, share: float, early: bool, generator: torch.Generator) -> None:
    """Experts come and go between the steps. On a GPU many of them."""
    hybrid = make(SPEC, "int4", slots, share, generator, early=early)
    steps = 300 if CUDA else 2
    check_steps(hybrid, steps, generator)
    counts = hybrid.counts()
    assert counts.gpu + counts.pcie + counts.cpu > steps
    if slots == 0 or (slots == 9 and CUDA):  # in few steps, or with three, chance decides
        assert (counts.gpu == 0) == (slots == 0)
    if slots == SPEC.num_experts:
        assert counts.hit_rate == 1.0
    elif share in (0.0, 1.0):
        assert (counts.cpu if share else counts.pcie) == 0


@pytest.mark.parametrize(
    ("spec", "fmt"),
    [(ODD, "int8"), (ODD, "bf16"), (BIAS, "int4 g64"), (BIAS, "mxfp4"), (ODD, "fp8/q6_k")],
)
def test_other_shapes_and_formats(spec: ExpertSpec, fmt: str, generator: torch.Generator) -> None:
    early = fmt in ("int8", "fp8/q6_k")
    hybrid = make(spec, fmt, 8, 0.6, generator, early=early)
    x, _, weights = inputs(spec, 1, generator)
    absent = torch.tensor([[7, 8]])
    wanted = hybrid.experts.forward(x, absent, weights)
    hybrid.submit(x.to(DEVICE), absent.to(DEVICE), weights.to(DEVICE))
    allowed = borders(hybrid.experts, decoded(hybrid.experts), x, absent, weights)
    assert excess(hybrid.collect(), wanted, allowed) < EXACT
    hybrid.shared.join()
    # Biases lie apart from what a program brings that computes, so with them nothing stays.
    assert hybrid.counts().stayed == (not spec.has_bias)
    check_steps(hybrid, 100 if CUDA else 1, generator)


@pytest.mark.skipif(not CUDA, reason="a thousand steps of the interpreter are too slow")
def test_a_thousand_steps_of_migrations(generator: torch.Generator) -> None:
    """Any experts change places between steps, besides what the policy moves."""
    hybrid = make(ExpertSpec(32, 128, 64, 4), "int4", 12, 0.4, generator)
    parts = decoded(hybrid.experts)
    for number in range(1000):
        if number % 5 == 0:
            hybrid.seed(torch.rand(32, generator=generator).tolist())
        check_steps(hybrid, 1, generator, parts)
    assert hybrid.counts().stayed > 0


def test_the_cpu_alone(generator: torch.Generator) -> None:
    """A format that no kernel of the GPU reads, and no memory for it to read."""
    experts = fill(CpuExperts(SPEC, parse_format("f32")), random_weights(SPEC, generator))
    shared = HybridShared(DEVICE, share=1.0)
    hybrid = HybridExperts(experts, 0, DirectPort([experts], ROWS, DEVICE), shared)
    check_steps(hybrid, 2, generator)
    assert hybrid.counts().cpu > 0
    assert hybrid.nbytes == 0


def test_what_is_brought_crosses_once(generator: torch.Generator) -> None:
    """Experts of several rows first: one into each free slot, then as many as there is room for, each listed
    once; the others are read in place."""
    experts = fill(CpuExperts(SPEC, parse_format("int4")), random_weights(SPEC, generator))
    arena = PinnedArena(experts, DEVICE)
    stride = arena.view.shape[1]
    shared = HybridShared(DEVICE, share=1.0, piece=stride, early=True, soon=True)
    hybrid = HybridExperts(experts, 0, DirectPort([experts], ROWS, DEVICE), shared, slots=8, arena=arena)
    x, _, weights = inputs(SPEC, 4, generator)
    ids = torch.tensor([[0, 5], [6, 7], [8, 9], [10, 7]])  # 0 is here
    hybrid.submit(x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE))
    count, *listed = hybrid._coming.tolist()
    assert count == hybrid.cache.reserve + 2 == 5
    host, cache = hybrid.cache.host_at, hybrid.cache.cache_at
    assert listed[:10:2] == [host + expert * stride for expert in (5, 6, 7, 8, 9)]
    room = shared.staging.data_ptr()
    assert sorted(listed[1:10:2]) == sorted(
        [*(cache + slot * stride for slot in (5, 6, 7)), room, room + stride]
    )
    step = hybrid._pending[-1]
    assert step.addresses.tolist() == [[cache, 0], [0, 0], [0, 0], [0, 0]]
    assert step.later is not None
    read = step.later.addresses
    assert read[1, 1] == read[3, 1] == cache + 5 * stride
    assert read[3, 0] == host + 10 * stride
    assert torch.equal(step.later.every, step.addresses + read)
    wanted = experts.forward(x, ids, weights)
    given = x, ids, weights
    assert beyond(experts, decoded(experts), hybrid.collect(), wanted, given) < EXACT
    shared.join()
    assert hybrid.counts() == TierCounts(gpu=1, pcie=6, cpu=0, stayed=3, moved=0)
    # A step that begins before another one is collected has no room there.
    for _ in range(2):
        hybrid.submit(x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE))
    assert [one.later is None for one in hybrid._pending] == [False, True]
    hybrid.forget()
    assert shared.stages(1, stride) == 2
    shared.turns = True
    assert shared.stages(1, stride) == 0
    hybrid.submit(x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE))
    assert beyond(experts, decoded(experts), hybrid.collect(), wanted, given) < EXACT


def test_halves_that_take_turns_count_alike(generator: torch.Generator) -> None:
    """What either of them uses is learned from, and moves come once both are through."""
    hybrid = make(SPEC, "int4", 9, 0.5, generator)
    hybrid.shared.turns = True
    halves = [inputs(SPEC, rows, generator) for rows in (2, 1)]
    for half in halves:
        hybrid.submit(*(part.to(DEVICE) for part in half))
    hybrid.collect()
    assert not any(hybrid.uses())
    hybrid.collect()
    hybrid.shared.join()
    named = torch.cat([ids.flatten() for _, ids, _ in halves])
    named = named[(named >= 0) & (named < SPEC.num_experts)]
    assert hybrid.uses() == torch.bincount(named, minlength=SPEC.num_experts).tolist()


@pytest.mark.skipif(CUDA, reason="it counts what the interpreter runs")
@pytest.mark.parametrize(("early", "wanted"), [(True, ["bring", "fetch"]), (False, ["choose", "fetch"])])
def test_a_layer_is_few_launches(
    early: bool, wanted: list[str], generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.runtime.interpreter import GridExecutor

    names: list[str] = []
    run = GridExecutor.__call__

    def counted(executor: Any, *args: Any, **kwargs: Any) -> Any:
        names.append(executor.fn.__name__)
        return run(executor, *args, **kwargs)

    hybrid = make(SPEC, "int4", 9, 0.5, generator, early=early)
    monkeypatch.setattr(GridExecutor, "__call__", counted)
    hybrid.submit(*(part.to(DEVICE) for part in inputs(SPEC, 1, generator)))
    hybrid.collect()
    projections = ["gate_up", *(["gate_up"] if early else []), "quantise_rows", "down"]
    assert sorted(names) == sorted(["submit", *wanted, *projections, "add"])


def test_two_steps_in_flight_and_something_extra(generator: torch.Generator) -> None:
    """Micro-batches: collected in the order of their submits. The payload here is one, so the first is read
    before the second is computed."""
    hybrid = make(SPEC, "int4", SPEC.num_experts, 1.0, generator)
    steps = [inputs(SPEC, rows, generator) for rows in (2, 3)]
    for x, ids, weights in steps:
        hybrid.submit(x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE))
    for x, ids, weights in steps:
        extra = torch.randn(x.shape, generator=generator).bfloat16()
        wanted = hybrid.experts.forward(x, ids, weights) + extra.float()
        allowed = borders(hybrid.experts, decoded(hybrid.experts), x, ids, weights)
        assert excess(hybrid.collect(extra.to(DEVICE)), wanted, allowed) < EXACT
    with pytest.raises(RuntimeError, match="collect of layer 0, which was not submitted"):
        hybrid.collect()


def test_a_collect_that_fails_leaves_the_slots_whole(generator: torch.Generator) -> None:
    """Experts that were chosen to come are there, though the step was lost."""
    hybrid = make(SPEC, "int4", 3, 0.0, generator)
    cache, port = hybrid.cache, hybrid.port

    class Failing:
        payload, record_submit = port.payload, port.record_submit

        def record_collect(self, layer: int) -> None:
            raise OSError("lost")

    hybrid.port = Failing()
    ids = torch.tensor([[10, 11]])
    for _ in range(6):
        x, _, weights = inputs(SPEC, 1, generator)
        hybrid.submit(x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE))
        with pytest.raises(OSError, match="lost"):
            hybrid.collect()
    hybrid.shared.join()
    assert hybrid.counts().moved > 0
    whole = hybrid.experts.whole_bytes
    for expert, slot in enumerate(cache.slot_of.tolist()):
        if slot >= 0:
            assert torch.equal(cache.memory[slot, :whole].cpu(), cache.host[expert, :whole])


def test_the_split_ends_both_sides_together() -> None:
    shared = HybridShared("cpu", share=0.4)
    assert shared.shares()[:, :6].tolist() == [[0, 0, 1, 1, 2, 2]] * len(SIZES)
    assert Sides(cpu=0.5, pcie=1.0, lead=0.0, own=0.0).split()[:7] == [0, 0, 0, 1, 1, 1, 2]
    sides = [Sides(cpu / 29e3, 1 / 17e3, 12e-6, 15e-6) for cpu in (1.0, 0.9, 0.8, 0.7, 0.6)]
    shared.balance(sides)
    for table, (cpu, pcie, lead, own) in zip(shared.shares().tolist(), sides, strict=True):
        for misses in (1, 2, 3, 8, 80, LONGEST):
            ends = [
                max((misses > t) * lead + (misses - t) * cpu, t and own + t * pcie) for t in range(misses + 1)
            ]
            assert ends[table[misses]] == min(ends)
    assert torch.equal(shared.split_of(3), shared.split_of(4))
    assert shared.split_of(8).tolist() == sides[3].split()
    assert [shared.most_of(rows).item() for rows in (1, 2, 3, 16, 40)] == [1, 1, 2, 2, 2]
    saved = shared.shares().tolist()
    shared.set_share(0.0)
    assert [shared.most_of(rows).item() for rows in (1, 16)] == [2, 2]
    shared.set_split(saved)
    assert shared.shares().tolist() == saved
    for wrong in ([1], [-1] * (LONGEST + 1)):
        with pytest.raises(ValueError, match="a split needs 1025 counts"):
            shared.set_split(wrong)
    with pytest.raises(ValueError, match=r"share of 1\.5"):
        shared.set_share(1.5)
    with pytest.raises(ValueError, match="an expert takes some time"):
        shared.balance([Sides(0, 1)] * len(SIZES))


def test_refusals(generator: torch.Generator) -> None:
    hybrid = make(SPEC, "int4", 3, 0.0, generator)
    x, ids, weights = (part.to(DEVICE) for part in inputs(SPEC, 2, generator))
    with pytest.raises(
        ValueError, match=r"a step of torch.float32 \[2, 32\] for a payload of torch.bfloat16"
    ):
        hybrid.submit(x.float(), ids, weights)
    with pytest.raises(ValueError, match=r"a step of torch.bfloat16 \[2, 31\]"):
        hybrid.submit(x[:, 1:], ids, weights)
    experts = CpuExperts(SPEC, parse_format("f32"))
    port, shared = DirectPort([experts], ROWS, DEVICE), HybridShared(DEVICE)
    with pytest.raises(InputError, match="format f32 is not read there; valid: bf16, int8, int4"):
        HybridExperts(experts, 0, port, shared, arena=PinnedArena(experts, DEVICE))
    with pytest.raises(ValueError, match="slots without memory"):
        HybridExperts(experts, 0, port, shared, slots=1)
    blocks = CpuExperts(ExpertSpec(2, 256, 256, 1), parse_format("int4"), parse_format("q2_k blocks"))
    with pytest.raises(InputError, match="format q2_k blocks is not read there"):
        HybridExperts(blocks, 0, port, shared, arena=PinnedArena(blocks, DEVICE))


def test_arenas_show_the_experts(generator: torch.Generator) -> None:
    layers = [fill(CpuExperts(SPEC, parse_format("int8")), random_weights(SPEC, generator)) for _ in range(2)]
    arenas = pin_all(layers, DEVICE)
    for experts, arena in zip(layers, arenas, strict=True):
        assert arena.view.shape[0] == SPEC.num_experts
        whole = torch.empty(experts.whole_bytes, dtype=torch.uint8)
        experts.save(7, whole.numpy().data)
        assert torch.equal(arena.view[7, : len(whole)], whole)
        if CUDA:
            assert arena.view.is_pinned()
        arena.close()
        arena.close()
        if CUDA:
            assert not arena.view.is_pinned()
