"""How GPU memory is divided between states, workspace and experts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hetero.core import InputError, MachineError
from hetero.engine.gpu import loading
from hetero.engine.gpu.loading import GpuOptions, gpu_options
from hetero.engine.gpu.room import (
    FEW,
    LONGEST,
    SHORTEST,
    STATES,
    CacheWish,
    cache_slots,
    default_lengths,
    fill,
    first_slots,
)
from hetero.engine.gpu.vram import CONTEXT, MARGIN, MODULES, Vram
from hetero.plan import workspace
from hetero.plan.kv import sequence_bytes, states
from hetero.plan.workspace import LATER, LEAST_CHUNK
from hetero.rules.gpu_options import parse_cache

GIB = 1 << 30


def wishes(*sizes: str, experts: int = 10, nbytes: int = 100, rule: str = "one") -> list[CacheWish]:
    return [CacheWish(experts, nbytes, parse_cache(size), rule) for size in sizes]


def test_what_is_left_goes_to_all_layers_alike() -> None:
    assert cache_slots(wishes("auto", "auto", "auto"), 1000, 0) == [4, 3, 3]
    assert cache_slots(wishes("auto", "auto"), 1000, 600) == [2, 2]
    assert cache_slots(wishes("auto", "auto"), 100, 600) == [0, 0]
    assert cache_slots(wishes("auto", "auto"), 10**9, 0) == [10, 10]
    assert cache_slots(wishes("auto", "auto"), None, 0) == [10, 10]


def test_sizes_that_rules_name_come_first() -> None:
    assert cache_slots(wishes("30%", "auto", rule="one"), 1000, 0) == [3, 7]
    # 1000 bytes are of both blocks of the rule together.
    assert cache_slots(wishes("1000", "1000"), 5000, 0) == [5, 5]
    assert cache_slots([*wishes("0"), *wishes("100%", rule="two")], 5000, 0) == [0, 10]


def test_a_size_that_does_not_fit_is_refused() -> None:
    with pytest.raises(MachineError, match=r"cache of experts needs .*2000 bytes.* a step .*400 bytes.*2300"):
        cache_slots(wishes("100%", "100%"), 2300, 400)
    assert cache_slots(wishes("100%", "100%"), 2400, 400) == [10, 10]
    assert cache_slots(wishes("0", "0"), 10, 400) == [0, 0]


class Text:
    """As much of a configuration as is read."""

    def __init__(self, **values: Any) -> None:
        self.values = {
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "hidden_size": 512,
            "moe_intermediate_size": 128,
            "num_experts_per_tok": 4,
            **values,
        }

    def to_dict(self) -> dict[str, Any]:
        return self.values


def test_lengths_that_leave_most_to_experts() -> None:
    text = Text()
    layers, _ = states(text.to_dict())
    for left in (1 << 20, 1 << 24, 1 << 28, 1 << 30, 1 << 34):
        memory: Any = SimpleNamespace(left=left)
        for slots in (1, 8):
            context, together = default_lengths(text, slots, 100_000, memory)
            assert context <= together <= slots * context
            taken = sequence_bytes(layers, together, 2)
            assert together == context == SHORTEST or taken <= left // STATES
            more = sequence_bytes(layers, together + together // 100, 2)
            assert together == slots * LONGEST or context < LONGEST or more > left // STATES
            assert context == LONGEST or sequence_bytes(layers, 2 * context, 2) > left // STATES
    assert default_lengths(text, 2, 100_000, None) == (LONGEST, 2 * LONGEST)
    assert default_lengths(text, 1, 512, None) == (512, 512)


class Card:
    """A GPU whose memory is ``cap``, with a model on it: what is held for good, what a capture and a token of
    a chunk take on top, and caches. ``hidden``: what torch takes after the second capture; ``graphs``: what
    the driver takes for it."""

    def __init__(
        self, cap: int, fixed: int, each: int, wishes: list[CacheWish], *, hidden: int = 0, graphs: int = 0
    ) -> None:
        self.cap, self.fixed, self.each, self.wishes, self.hidden = cap, fixed, each, wishes, hidden
        self.slots, self.kept, self.captures, self.chunk = first_slots(wishes), 0, 0, 4096
        self.graphs, self.held, self.limit = graphs, list[bool](), cap - fixed

    @property
    def besides(self) -> int:
        """What is not torch's."""
        return self.fixed + (self.graphs if self.captures else 0)

    @property
    def used(self) -> int:
        sizes = (n * wish.expert_bytes for n, wish in zip(self.slots, self.wishes, strict=True))
        return self.besides + self.kept + sum(-(-size // (2 << 20)) * (2 << 20) for size in sizes)

    @property
    def left(self) -> int:
        return max(0, self.cap - self.used)

    def hold(self) -> None:
        self.held.append(self.used <= self.cap)
        self.limit = self.cap - self.besides

    def _take(self, size: int) -> None:
        """Torch keeps what it has taken, until caches are made anew."""
        if self.used - self.kept + max(size, self.kept) - self.besides > self.limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB.")
        self.kept = max(size, self.kept)

    def capture(self, *, prompt: bool = True) -> None:
        assert not prompt
        self.captures += 1

    def read_longest(self) -> None:
        self._take(self.each * self.chunk + (self.hidden if self.captures else 0))

    def resize(self, slots: Any) -> None:
        self.slots, self.kept = list(slots), 0
        if self.used > self.cap:
            raise torch.OutOfMemoryError("CUDA out of memory.")


@pytest.mark.parametrize("cap", [16 * GIB, 24 * GIB, 32 * GIB])
@pytest.mark.parametrize("each", [100_000, 400_000])
def test_a_cache_takes_what_steps_and_prompts_leave(cap: int, each: int) -> None:
    model = wishes(*["auto"] * 48, experts=512, nbytes=2_764_800)
    card = Card(cap, 7 * GIB, each, model)
    slots = fill(card, card, model, card.resize)
    assert slots == card.slots
    assert max(slots) - min(slots) <= 1
    assert card.captures == 1
    assert card.held == [True, True]
    # All but the margin, and less than what one more expert takes from the driver.
    assert LATER <= card.left < LATER + 2 * (2 << 20) + 2_764_800
    assert card.chunk == 4096


def test_a_cache_that_turns_out_too_large_is_made_smaller(caplog: pytest.LogCaptureFixture) -> None:
    model = wishes(*["auto"] * 48, experts=512, nbytes=2_764_800)
    roomy = Card(24 * GIB, 7 * GIB, 100_000, model)
    fill(roomy, roomy, model, roomy.resize)
    card = Card(24 * GIB, 7 * GIB, 100_000, model, hidden=LATER + GIB // 2)
    slots = fill(card, card, model, card.resize)
    assert 0.9 * sum(roomy.slots) < sum(slots) < sum(roomy.slots)
    assert card.captures == 2
    assert "made smaller" in caplog.text
    # What graphs take is not torch's, which is held to what they leave.
    graphed = Card(24 * GIB, 7 * GIB, 100_000, model, hidden=LATER // 2, graphs=LATER // 2 + GIB // 4)
    fill(graphed, graphed, model, graphed.resize)
    assert graphed.used <= graphed.cap
    # What nothing helps is told.
    lost = Card(24 * GIB, 7 * GIB, 100_000, model, hidden=30 * GIB)
    with pytest.raises(MachineError, match="no room for a step and 4096 tokens of a prompt"):
        fill(lost, lost, model, lost.resize)


def test_long_chunks_that_do_not_fit_are_halved(caplog: pytest.LogCaptureFixture) -> None:
    model = wishes(*["auto"] * 4, experts=512, nbytes=2_764_800)
    card = Card(8 * GIB, 7 * GIB, 400_000, model)
    slots = fill(card, card, model, card.resize)
    assert card.chunk == 2048
    assert "prompts are read 2048 tokens at a time" in caplog.text
    assert card.left >= LATER or not any(slots)
    full = Card(8 * GIB, 8 * GIB - (100 << 20), 4_000_000, model)
    with pytest.raises(MachineError, match=r"no room .* (256|511) tokens of a prompt.*--set dense=int8"):
        fill(full, full, model, full.resize)
    assert full.chunk == LEAST_CHUNK


def test_sizes_that_rules_name_are_kept_or_refused() -> None:
    model = wishes("10%", "auto", experts=100, nbytes=4 << 20)
    assert first_slots(model) == [FEW, FEW]
    assert first_slots(wishes("0", "2%", "auto", experts=100)) == [0, 2, FEW]
    card = Card(GIB, GIB // 4, 10_000, model)
    first, second = fill(card, card, model, card.resize)
    assert first == 10  # a tenth of the layer
    assert second > first
    named = wishes("100%", "100%", experts=100, nbytes=4 << 20)
    small = Card(GIB // 2, GIB // 4, 10_000, named)
    with pytest.raises(MachineError, match="the cache of experts needs"):
        fill(small, small, named, small.resize)


def test_large_caches_are_counted_as_the_driver_gives_them() -> None:
    model = wishes("auto", experts=1000, nbytes=(2 << 20) + 1)
    (count,) = cache_slots(model, 100 << 20, 0)
    assert -(-count * ((2 << 20) + 1) // (2 << 20)) * (2 << 20) <= 100 << 20
    assert -(-(count + 1) * ((2 << 20) + 1) // (2 << 20)) * (2 << 20) > 100 << 20


class Device:
    """A GPU of 80 GiB, of which others have some."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: int, begun: bool, told: int | None) -> None:
        self.free, self.reserved, self.fraction = free, 0, 0.0
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: begun)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (self.free, 80 * GIB))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: self.reserved)
        monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", self.set)
        monkeypatch.setattr("hetero.engine.gpu.vram.free_bytes", lambda index: told)
        self.own: int | None = None
        monkeypatch.setattr("hetero.engine.gpu.vram.process_bytes", lambda index: self.own)

    def set(self, fraction: float, device: object) -> None:
        self.fraction = fraction


def test_memory_as_the_driver_tells_it(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, free=69 * GIB, begun=False, told=70 * GIB)
    memory = Vram("cuda:0", 24 * GIB)
    assert memory.used == GIB  # the context, which asking has made
    assert memory.left == 23 * GIB
    device.free, device.reserved = 49 * GIB, 19 * GIB
    assert memory.used == 21 * GIB
    memory.require(3 * GIB, "that")
    with pytest.raises(MachineError, match=r"that: 4.00 GiB .* 3.00 GiB .* is left of --vram 24.00 GiB"):
        memory.require(4 * GIB, "that")
    memory.hold()
    # Of torch, beside 2 GiB that it has not and what the driver may still load.
    assert device.fraction == pytest.approx((22 * GIB - MODULES) / (80 * GIB))
    device.free = 45 * GIB
    with pytest.raises(MachineError, match=r"25.00 GiB .* are in use, more than --vram 24.00 GiB"):
        memory.hold()


def test_what_others_take_does_not_count_where_the_driver_tells_them_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Device(monkeypatch, free=69 * GIB, begun=False, told=70 * GIB)
    assert not Vram("cuda:0", 24 * GIB).by_process
    device.own = GIB
    memory = Vram("cuda:0", 24 * GIB)
    assert memory.by_process
    assert memory.basis == "by this process"
    device.free -= 30 * GIB  # another process
    assert (memory.used, memory.left) == (GIB, 23 * GIB)
    # It does not tell any more, or of another process of this number.
    for device.own, device.reserved in ((None, 0), (GIB // 2, GIB), (10 * GIB, GIB)):
        assert memory.used == 31 * GIB


def test_memory_without_a_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, free=10 * GIB, begun=True, told=None)
    memory = Vram("cuda:0")
    assert memory.used == CONTEXT
    assert memory.left == 10 * GIB - MARGIN
    memory.hold()
    assert device.fraction == 1.0
    device.free = 0
    assert memory.left == 0


def test_a_cap_beyond_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    Device(monkeypatch, free=70 * GIB, begun=True, told=None)
    with pytest.raises(MachineError, match=r"--vram 100.00 GiB .*: cuda:0 has 80.00 GiB"):
        Vram("cuda:0", 100 * GIB)


def test_options_of_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HETERO_PREFILL_CHUNK", raising=False)
    said = gpu_options(GIB, slots=3, context=64, kv_tokens=None, handoff="spin")
    assert said == GpuOptions(vram=GIB, slots=3, context=64, handoff="spin")
    monkeypatch.setenv("HETERO_PREFILL_CHUNK", "77")
    assert gpu_options(None, slots=1, context=None, kv_tokens=9, handoff="auto").chunk == 77
    monkeypatch.setenv("HETERO_PREFILL_CHUNK", "70000")
    assert gpu_options(None, slots=1, context=None, kv_tokens=9, handoff="auto").chunk == workspace.MOST_CHUNK
    with pytest.raises(InputError, match="--handoff thread: must be one of auto, memop, spin, hostfunc"):
        gpu_options(None, slots=1, context=None, kv_tokens=None, handoff="thread")


def test_a_cap_without_a_gpu() -> None:
    placement: Any = SimpleNamespace(assignments=[SimpleNamespace(op="keep", device="cpu")])
    with pytest.raises(InputError, match="--vram: the rules place nothing on a GPU"):
        loading.Graphs(None, placement, "float32", GpuOptions(vram=GIB))
    with pytest.raises(InputError, match="--handoff spin: of fused layers, and the rules fuse none"):
        loading.Graphs(None, placement, "float32", GpuOptions(handoff="spin"))
    graphs = loading.Graphs(None, placement, "float32", None)
    assert graphs.fuse(100) is None
