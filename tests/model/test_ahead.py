"""What is asked for ahead of a file's reader."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hetero.model import ahead
from hetero.model.source import Checkpoint


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(start, size) of all that the kernel was asked for; 1000 bytes ahead."""
    found: list[tuple[int, int]] = []

    def fadvise(_: int, start: int, size: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        found.append((start, size))

    monkeypatch.setattr(os, "posix_fadvise", fadvise)
    monkeypatch.setattr(ahead, "AHEAD", 1000)
    return found


def test_nothing_is_asked_for_twice_and_always_some_is(asked: list[tuple[int, int]]) -> None:
    reader = ahead.ReadAhead(0)
    for end in range(100, 5000, 100):
        reader.read(end)
        assert sum(asked[-1]) - end >= 500
    assert asked[0] == (100, 1000)
    for (start, size), (following, _) in pairwise(asked):
        assert start + size == following
    # Back to the beginning: it is in the cache already.
    count = len(asked)
    reader.read(200)
    assert len(asked) == count
    reader.read(20_000)
    assert asked[-1] == (20_000, 1000)


def test_a_refused_advice_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(29, "Illegal seek")

    monkeypatch.setattr(os, "posix_fadvise", refuse)
    ahead.ReadAhead(0).read(100)


def test_a_checkpoint_asks_for_what_comes_next(
    tmp_path: Path, asked: list[tuple[int, int]], generator: torch.Generator
) -> None:
    tensors = {f"w{i}": torch.randn(100, generator=generator) for i in range(8)}
    save_file(tensors, tmp_path / "model.safetensors")
    source = Checkpoint(tmp_path)
    with source:
        for name, value in tensors.items():
            assert torch.equal(source.read(name), value)
    first = source.tensors["w0"]
    assert asked[0] == (first.start + first.nbytes, 1000)
    assert len(asked) > 3
