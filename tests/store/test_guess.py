"""Experts that are read before it is known that they are needed: the same bits, whether the guess was right,
wrong, too late or unreadable."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero.core import ExpertSpec, MachineError
from hetero.cpu import CpuExperts
from hetero.store import guess
from hetero.store.disk import DiskExperts
from hetero.store.guess import Guesses
from hetero.store.packfile import PackFile
from tests.cpu.reference import random_routing
from tests.store.made import made, written

SPEC = ExpertSpec(12, 64, 96, 3)


def tiers(file: PackFile, blocks: list[CpuExperts], slots: int) -> tuple[list[DiskExperts], Guesses]:
    found = []
    for index, one in enumerate(blocks):
        tier = DiskExperts(one.spec, one.format, slots=slots)
        tier.attach(file, index)
        found.append(tier)
    guesses = Guesses(found[0].stride)
    for tier in found:
        tier.guess_with(guesses)
    return found, guesses


@pytest.mark.parametrize("slots", [3, 5, 9])
def test_the_bits_stay_and_right_guesses_are_used(
    tmp_path: Path, generator: torch.Generator, slots: int
) -> None:
    blocks = made(generator, 3, SPEC)
    layers, guesses = tiers(written(tmp_path / "x.hpack", blocks), blocks, slots)
    for tokens in (1, 1, 2, 1, 1, 40, 1, 1, 1, 3, 1):
        routed = [random_routing(SPEC, tokens, generator) for _ in layers]
        for at, (tier, ram) in enumerate(zip(layers, blocks, strict=True)):
            if at + 1 < len(layers):
                # Two of what the next layer uses, and one that it may not.
                right = torch.unique(routed[at + 1][1]).tolist()[:2]
                tier.then = lambda at=at, right=right: layers[at + 1].expect([*right, 11, -1, 99])
            x, ids, w = routed[at]
            assert torch.equal(tier.forward(x, ids, w), ram.forward(x, ids, w))
            assert tier.then is None
    assert 0 < guesses.stats.used <= guesses.stats.read
    for tier in layers:
        reads = tier.reads
        assert reads.nbytes == reads.cache.misses * tier.stride
    # All buffers have come back.
    assert guesses.take(0, []) == {}
    layers[1].expect(range(12))
    x, ids, w = random_routing(SPEC, 1, generator)
    assert torch.equal(layers[1].forward(x, ids, w), blocks[1].forward(x, ids, w))


def test_guesses_take_no_slot_and_few_buffers(tmp_path: Path, generator: torch.Generator) -> None:
    blocks = made(generator, 2, SPEC)
    layers, guesses = tiers(written(tmp_path / "x.hpack", blocks), blocks, 4)
    x, ids, w = random_routing(SPEC, 1, generator)
    layers[1].forward(x, ids, w)
    before = layers[1].reads.cache
    layers[1].expect(range(12))
    layers[1].forward(x, ids, w)
    assert layers[1].reads.cache.misses == before.misses
    assert layers[1].reads.cache.evictions == before.evictions
    assert guesses.stats.read <= guess.BUFFERS
    assert guesses.stats.used == 0


def test_a_guess_that_cannot_be_read_is_the_error_of_who_needs_it(
    tmp_path: Path, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = made(generator, 2, SPEC)
    layers, _ = tiers(written(tmp_path / "x.hpack", blocks), blocks, 4)
    real = os.preadv

    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    x, ids, w = random_routing(SPEC, 1, generator)
    monkeypatch.setattr(os, "preadv", fail)
    layers[0].expect([int(ids[0, 0])])
    layers[1].expect([0])  # of nobody's: forgotten
    with pytest.raises(MachineError, match="cannot be read"):
        layers[0].forward(x, ids, w)
    monkeypatch.setattr(os, "preadv", real)
    for tier, ram in zip(layers, blocks, strict=True):
        assert torch.equal(tier.forward(x, ids, w), ram.forward(x, ids, w))


def test_steps_that_fail_keep_no_buffer(
    tmp_path: Path, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = made(generator, 1, SPEC)
    (tier,), guesses = tiers(written(tmp_path / "x.hpack", blocks), blocks, 3)
    real = PackFile.finish

    def fail(file: PackFile, block: int, expert: int, *rest: Any) -> None:
        real(file, block, expert, *rest)
        if expert == 0:
            raise MachineError("no")

    monkeypatch.setattr(PackFile, "finish", fail)
    x, ids, w = random_routing(SPEC, 40, generator)
    ids[0, 0], ids[-1] = 0, torch.tensor([9, 10, 11])
    for _ in range(100):
        tier.expect([11, 10])  # which come after expert 0
        with pytest.raises(MachineError, match="no"):
            tier.forward(x, ids, w)
        if guesses.stats.read > guess.BUFFERS:
            break
    assert guesses.stats.read > guess.BUFFERS
    monkeypatch.undo()
    assert torch.equal(tier.forward(x, ids, w), blocks[0].forward(x, ids, w))


def test_layers_that_miss_nothing_are_not_guessed_for(tmp_path: Path, generator: torch.Generator) -> None:
    blocks = made(generator, 1, SPEC)
    (tier,), _ = tiers(written(tmp_path / "x.hpack", blocks), blocks, 12)
    assert not tier.misses_much
    x, ids, w = random_routing(SPEC, 16, generator)
    for _ in range(4):
        tier.forward(x, ids, w)
    assert not tier.misses_much
    (small,), _ = tiers(written(tmp_path / "y.hpack", blocks), blocks, 3)
    for _ in range(8):
        small.forward(*random_routing(SPEC, 1, generator))
    assert small.misses_much
