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
    LONGEST,
    SHORTEST,
    STATES,
    CacheWish,
    cache_slots,
    default_lengths,
    workspace,
)
from hetero.engine.gpu.share import Rates
from hetero.engine.gpu.vram import CONTEXT, MARGIN, Vram
from hetero.plan.kv import sequence_bytes, states
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


def test_longer_chunks_need_more() -> None:
    sizes = [workspace(Text(), chunk) for chunk in (1, 512, 2048, 8192)]
    assert sizes == sorted(set(sizes))
    assert sizes[-1] < 2 * GIB


def test_the_share_is_of_two_rates() -> None:
    assert Rates(cpu=75e9, bus=25e9).share == pytest.approx(0.25)


class Device:
    """A GPU of 80 GiB, of which others have some."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: int, begun: bool, told: int | None) -> None:
        self.free, self.reserved, self.fraction = free, 0, 0.0
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: begun)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (self.free, 80 * GIB))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: self.reserved)
        monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", self.set)
        monkeypatch.setattr("hetero.engine.gpu.vram.free_bytes", lambda index: told)

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
    assert device.fraction == pytest.approx(22 / 80)  # of torch, beside 2 GiB that it has not
    device.free = 45 * GIB
    with pytest.raises(MachineError, match=r"25.00 GiB .* are in use, more than --vram 24.00 GiB"):
        memory.hold()


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
    assert gpu_options(None, slots=1, context=None, kv_tokens=9, handoff="auto").chunk == loading.MOST_CHUNK
    with pytest.raises(InputError, match="--handoff thread: must be one of auto, memop, spin, hostfunc"):
        gpu_options(None, slots=1, context=None, kv_tokens=None, handoff="thread")


def test_a_cap_without_a_gpu() -> None:
    placement: Any = SimpleNamespace(assignments=[SimpleNamespace(op="keep", device="cpu")])
    with pytest.raises(InputError, match="--vram: the rules place nothing on a GPU"):
        loading.Graphs(None, placement, "float32", GpuOptions(vram=GIB))
    graphs = loading.Graphs(None, placement, "float32", None)
    assert graphs.fuse(100) is None
