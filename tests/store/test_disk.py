"""Experts of which a few are in RAM: the same bits as with all of them there, and faults that pass."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero import cpu
from hetero.core import ExpertSpec, HeteroError, InputError, MachineError
from hetero.cpu import CpuExperts
from hetero.formats import parse_format
from hetero.store.disk import DiskExperts, disk_speed
from hetero.store.packfile import PackFile
from hetero.trace import READ, recorder, summarise
from tests.cpu.reference import random_routing
from tests.cpu.test_numa import paper
from tests.store.made import made, written

SPEC = ExpertSpec(12, 64, 96, 4)


@pytest.fixture(autouse=True)
def this_machine_again() -> Iterator[None]:
    yield
    cpu.use_machine(None)


def on_disk(tmp_path: Path, all_of: CpuExperts, slots: int, numa: str = "off") -> DiskExperts:
    tier = DiskExperts(
        all_of.spec, all_of.format, all_of.down_format, slots=slots, isa=all_of.isa, numa=numa, layer=3
    )
    tier.attach(written(tmp_path / "x.hpack", [all_of]), 0)
    assert tier.missing() == []
    return tier


@pytest.mark.parametrize("fmt", ["int8", "int4 g64/int8a g32", "bf16", "q4_k/q6_k"])
@pytest.mark.parametrize("slots", [1, 4, 5, 11, 12, 99])
def test_the_bits_are_those_of_all_in_ram(
    tmp_path: Path, generator: torch.Generator, fmt: str, slots: int
) -> None:
    """Steps that fit the slots and steps that do not, of few tokens and of many."""
    (ram,) = made(generator, 1, SPEC, fmt)
    tier = on_disk(tmp_path, ram, slots)
    for tokens in (1, 1, 2, 1, 9, 16, 1, 17, 60, 1, 1):
        x, ids, w = random_routing(SPEC, tokens, generator)
        if tokens in (9, 60):
            ids[0, 0], ids[-1, 2], ids[1] = -1, 12, 12
        assert torch.equal(tier.forward(x, ids, w), ram.forward(x, ids, w))
        assert torch.equal(tier.gate_up(x, ids), ram.gate_up(x, ids))
        h = torch.randn(*ids.shape, SPEC.intermediate, generator=generator)
        assert torch.equal(tier.down(h, ids), ram.down(h, ids))
    nothing = torch.full((3, 4), -1)
    assert torch.equal(tier.forward(torch.ones(3, 64), nothing, torch.ones(3, 4)), torch.zeros(3, 64))
    assert torch.equal(tier.gate_up(torch.ones(3, 64), nothing), torch.zeros(3, 4, 192))
    reads = tier.reads
    assert reads.nbytes == reads.cache.misses * -(-ram.whole_bytes // 4096) * 4096
    assert reads.cache.evictions == 0 or slots < 12
    assert tier.nbytes == min(slots, 12) * ram.whole_bytes
    assert tier.disk_nbytes == ram.nbytes


@pytest.mark.parametrize("isa", cpu.isas())
@pytest.mark.parametrize("numa", ["split", "replicate", "off"])
def test_every_instruction_set_and_placement(
    tmp_path: Path, generator: torch.Generator, isa: str, numa: str
) -> None:
    cpu.use_machine(paper(2))
    (ram,) = made(generator, 1, SPEC, "int8", isa=isa)
    tier = on_disk(tmp_path, ram, 5, numa)
    for tokens in (1, 12, 40):
        x, ids, w = random_routing(SPEC, tokens, generator)
        assert torch.equal(tier.forward(x, ids, w), ram.forward(x, ids, w))


def test_what_is_used_again_is_not_read_again(tmp_path: Path, generator: torch.Generator) -> None:
    (ram,) = made(generator, 1, SPEC)
    tier = on_disk(tmp_path, ram, 6)
    x, ids, w = random_routing(SPEC, 1, generator)
    for _ in range(5):
        tier.forward(x, ids, w)
    stats = tier.reads.cache
    assert (stats.hits, stats.misses, stats.hit_rate) == (16, 4, 0.8)


class Disk:
    """A disk whose reads fail while ``broken``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.broken: set[int] = set()
        self.count = 0
        real = os.preadv

        def read(fd: int, buffers: list[memoryview], offset: int) -> int:
            self.count += 1
            if self.count in self.broken or -1 in self.broken:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(fd, buffers, offset)

        monkeypatch.setattr(os, "preadv", read)


@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("broken", [{-1}, {2}, {5}])
def test_a_read_error_ends_the_step_and_not_the_next_one(
    tmp_path: Path,
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
    tokens: int,
    broken: set[int],
) -> None:
    (ram,) = made(generator, 1, SPEC)
    tier = on_disk(tmp_path, ram, 5)
    x, ids, w = random_routing(SPEC, tokens, generator)
    disk = Disk(monkeypatch)
    disk.broken = broken
    if tokens == 40 or broken != {5}:
        with pytest.raises(MachineError, match=r"x\.hpack: expert \d+ of layers\.0 cannot be read: Input"):
            tier.forward(x, ids, w)
    disk.broken = set()
    for _ in range(2):
        assert torch.equal(tier.forward(x, ids, w), ram.forward(x, ids, w))


def test_a_kernel_that_fails_leaves_no_read_behind(
    tmp_path: Path, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group is being read while another is worked on: its slots are free only when the read has ended."""
    (ram,) = made(generator, 1, SPEC)
    tier = on_disk(tmp_path, ram, 6)
    x, ids, w = random_routing(SPEC, 40, generator)
    tier.forward(*random_routing(SPEC, 1, generator))

    def failing(*_: Any) -> None:
        raise MachineError("no workspace")

    with monkeypatch.context() as patched:
        patched.setattr(tier.resident, "pairs", failing)
        with pytest.raises(MachineError, match="no workspace"):
            tier.forward(x, ids, w)
    assert torch.equal(tier.forward(x, ids, w), ram.forward(x, ids, w))


@pytest.mark.parametrize("tokens", [1, 40])
def test_an_interrupt_leaves_no_expert_that_is_not_whole(
    tmp_path: Path, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    """What was on its way is read again, whether the interrupt met the wait or the start of the reads."""
    (ram,) = made(generator, 1, SPEC)
    x, ids, w = random_routing(SPEC, tokens, generator)
    for method in ("start", "finish"):
        tier = on_disk(tmp_path / method, ram, 5)
        real, calls = getattr(PackFile, method), 0

        def interrupted(*args: Any, real: Any = real) -> Any:
            nonlocal calls
            calls += 1
            if calls == 2:
                raise KeyboardInterrupt
            return real(*args)

        with monkeypatch.context() as patched:
            patched.setattr(PackFile, method, interrupted)
            with pytest.raises(KeyboardInterrupt):
                tier.forward(x, ids, w)
        assert torch.equal(tier.forward(x, ids, w), ram.forward(x, ids, w))


def test_a_damaged_expert_is_that_step_s_error(tmp_path: Path, generator: torch.Generator) -> None:
    (ram,) = made(generator, 1, SPEC)
    tier = on_disk(tmp_path, ram, 4)
    with (tmp_path / "x.hpack").open("r+b") as raw:
        raw.seek(-5000, 2)
        raw.write(b"\xaa" * 900)
    x = torch.randn(1, 64, generator=generator)
    with pytest.raises(MachineError, match=r"expert 11 .* is damaged"):
        tier.forward(x, torch.tensor([[11, 0, 1, 2]]), torch.ones(1, 4))
    good = torch.tensor([[3, 0, 1, 2]])
    assert torch.equal(tier.forward(x, good, torch.ones(1, 4)), ram.forward(x, good, torch.ones(1, 4)))


def test_reads_are_traced_and_weights_refused(tmp_path: Path, generator: torch.Generator) -> None:
    (ram,) = made(generator, 1, SPEC)
    tier = on_disk(tmp_path, ram, 4)
    since = recorder.next_number()
    with recorder.recording():
        tier.forward(*random_routing(SPEC, 1, generator))
        (span,) = [span for span in recorder.spans(since) if span.lane == "disk"]
    assert (span.name, span.layer, span.tokens, span.nbytes) == (READ, 3, 4, tier.reads.nbytes)
    assert summarise([]).disk_bytes == 0
    with pytest.raises(InputError, match="file of packed experts"):
        tier.put(0, "up", torch.zeros(96, 64))
    bare = DiskExperts(SPEC, parse_format("int8"), slots=4)
    assert bare.missing()
    with pytest.raises(HeteroError, match="no file yet"):
        bare.forward(*random_routing(SPEC, 1, generator))
    assert disk_speed(written(tmp_path / "y.hpack", [ram]), 0.01) > 0
