"""Experts that are added one layer later: which, when, and that none is lost."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from hetero import cpu
from hetero.core import InputError
from hetero.cpu import CpuExperts
from hetero.engine.handoff import Handoff, HandoffError
from hetero.ops.gpu.deferral import parted, put_off
from hetero.trace import DEFERRED, EXPERTS, recorder
from tests.engine.handoffs import SPEC, STALL, THROW, Played, make_experts


@pytest.fixture(autouse=True)
def small_pool() -> None:
    cpu.set_threads(2)


def chosen(rows: int, generator: torch.Generator, experts: int = SPEC.num_experts) -> tuple[Tensor, Tensor]:
    """Ids, some of them not the CPU's, and weights, some of them equal."""
    ids = torch.rand(rows, experts, generator=generator).argsort(dim=1)[:, : SPEC.top_k]
    gone = torch.rand(ids.shape, generator=generator) < 0.3
    weights = torch.randint(1, 6, ids.shape, generator=generator).float() / 8
    return torch.where(gone, -1, ids), weights


def test_the_lowest_of_the_cpus_own_are_put_off(generator: torch.Generator) -> None:
    for count in range(SPEC.top_k + 2):
        ids, weights = chosen(50, generator)
        marked = put_off(ids, weights, count, SPEC.num_experts)
        for before, after, weight in zip(ids.tolist(), marked.tolist(), weights.tolist(), strict=True):
            mine = [i for i, one in enumerate(before) if one >= 0]
            wanted = sorted(mine, key=lambda i: (weight[i], -i))[:count]
            assert [i for i in range(len(after)) if after[i] >= SPEC.num_experts] == sorted(wanted)
            assert [one % SPEC.num_experts if one >= 0 else -1 for one in after] == before


def test_parts_make_the_whole(generator: torch.Generator) -> None:
    ids, weights = chosen(20, generator)
    marked = put_off(ids, weights, 2, SPEC.num_experts)
    now, later = parted(marked, SPEC.num_experts, last=False)
    assert torch.equal(torch.maximum(now, later), ids)
    assert not ((now >= 0) & (later >= 0)).any()
    assert (later >= 0).any()
    assert torch.equal(parted(marked, SPEC.num_experts, last=True)[0], ids)
    assert (parted(marked, SPEC.num_experts, last=True)[1] == -1).all()


class Deferred(Played):
    """Steps whose payload has deferred ids, and what must come out."""

    def fresh(self) -> None:
        super().fresh()
        for place in self.places:
            ids, weights = chosen(self.handoff.rows, self.generator)
            self.weights[place].copy_(weights)
            self.ids[place].copy_(put_off(ids, weights, random.randint(0, 3), SPEC.num_experts))

    def check(self, rows: dict[int, int] | None = None, lanes: set[int] | None = None) -> None:
        for lane in range(self.handoff.lanes):
            carry: Tensor | float = 0.0
            n = self.handoff.rows if rows is None else rows[lane]
            for layer, experts in enumerate(self.handoff.experts):
                place = lane, layer
                x, weights = self.x[place][:n], self.weights[place][:n]
                last = layer + 1 == self.handoff.layers
                now, later = parted(self.ids[place][:n], SPEC.num_experts, last=last)
                assert torch.equal(self.out[place][:n], experts.forward(x, now, weights) + carry), place
                carry = experts.forward(x, later, weights)


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("streams", [False, True])
def test_deferred_experts_are_in_the_next_layers_result(
    lanes: int, streams: bool, generator: torch.Generator
) -> None:
    """Random delays everywhere, fewer rows than the graph has, lanes on one stream or two."""
    played = Deferred(make_experts(4, generator), generator, lanes=lanes, streams=streams, defer=True)
    for delay in (0.0, 20e-6, 200e-6):
        played.jitter(delay)
        for _ in range(30):
            played.step({lane: random.randint(1, played.handoff.rows) for lane in range(lanes)})
    played.close()


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
def test_ids_of_either_width(ids_dtype: torch.dtype, generator: torch.Generator) -> None:
    played = Deferred(make_experts(3, generator), generator, lanes=1, ids_dtype=ids_dtype, defer=True)
    for _ in range(10):
        played.step()
    played.close()


def test_without_the_option_such_ids_are_nobodys(generator: torch.Generator) -> None:
    played = Played(make_experts(2, generator), generator, lanes=1)
    played.fresh()
    for place in played.places:
        played.ids[place].random_(SPEC.num_experts, 2 * SPEC.num_experts, generator=generator)
    played.replay()
    assert all((out == 0).all() for out in played.out.values())
    played.close()


def test_one_layer_defers_nothing(generator: torch.Generator) -> None:
    played = Deferred(make_experts(1, generator), generator, lanes=1, defer=True)
    for _ in range(5):
        played.step()
    played.close()


def test_a_failure_of_deferred_work_is_the_steps(generator: torch.Generator) -> None:
    """Whatever fails after the result of layer 1 is out; the next step begins with nothing carried over."""
    played = Deferred(make_experts(3, generator), generator, lanes=1, defer=True)
    played.step()
    for _ in range(3):
        played.fresh()
        ids = played.ids[0, 1]
        ids.copy_(torch.arange(SPEC.top_k) + SPEC.num_experts)  # all of layer 1 is deferred
        played.inject("work", STALL, layer=1)  # of no time; the layer itself meets it
        played.inject("work", THROW, layer=1)
        with pytest.raises(HandoffError, match="layer 1, deferred"):
            played.replay()
        played.step()
    played.close()


def test_deferred_work_is_told(generator: torch.Generator) -> None:
    played = Deferred(make_experts(3, generator), generator, lanes=1, defer=True, numbers=[3, 5, 9])
    played.fresh()
    for place in played.places:
        played.ids[place].copy_(torch.arange(SPEC.top_k))
        played.ids[place][:, 1] += SPEC.num_experts
    since = recorder.next_number() + 1
    with recorder.recording():
        played.replay()
    played.check()
    times = played.handoff.times(0)
    for one, after in pairwise(times):
        assert one.published <= one.later_began <= one.later_ended <= after.looked
    assert [one.later_experts for one in times] == [1, 1, 0]
    assert [one.experts for one in times] == [SPEC.top_k - 1, SPEC.top_k - 1, SPEC.top_k]
    spans = [(span.name, span.layer, span.experts) for span in recorder.spans(since)]
    assert [one for one in spans if one[0] == DEFERRED] == [(DEFERRED, 3, 1), (DEFERRED, 5, 1)]
    assert [one for one in spans if one[0] == EXPERTS] == [(EXPERTS, 3, 3), (EXPERTS, 5, 3), (EXPERTS, 9, 4)]
    totals = played.handoff.totals(0)
    whole = (times[-1].published - times[0].looked) / 1e9
    assert totals.wait_s + totals.work_s + totals.handoff_s <= whole
    played.step()
    assert [one.later_experts for one in played.handoff.times(0)][-1] == 0
    played.close()


def test_a_depth_of_one_is_refused(generator: torch.Generator) -> None:
    experts: list[CpuExperts] = make_experts(2, generator)
    with pytest.raises(InputError, match="depth of 2"):
        Handoff(experts, rows=1, slots=SPEC.top_k, depth=1, defer=True)
