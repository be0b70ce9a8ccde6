"""Readers of foreign files on what fuzzing has found, and on files that were changed at random."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.fuzz.targets import TARGETS, run, seeds

CORPUS = Path(__file__).parent / "corpus"
FOUND = sorted(path.relative_to(CORPUS).as_posix() for path in CORPUS.glob("*/*"))
# Bytes that readers of numbers, lengths and JSON trip over.
ODD = (
    b"\x00",
    b"\xff" * 8,
    b"\x00" * 8,
    b"-1",
    b"1e999",
    b"NaN",
    b"[]",
    b"{}",
    b"null",
    b'"',
    b"\\ud800",
    b"9" * 30,
)


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_stays_fixed(name: str, tmp_path: Path) -> None:
    run(TARGETS[name.partition("/")[0]], (CORPUS / name).read_bytes(), tmp_path / "model.gguf")


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_are_right(name: str, tmp_path: Path) -> None:
    """A fuzzer that begins with files that are refused at once would never come far."""
    path = tmp_path / "model.gguf"
    for number, data in enumerate(seeds(name, tmp_path)):
        if name == "index" or (name, number) in {("gguf", 1), ("config", 2)}:
            continue  # parts of a whole that is not there
        if name == "safetensors":
            data = len(data).to_bytes(8, "little") + data + bytes(64)  # noqa: PLW2901
        assert TARGETS[name](data, path) is not None or name == "safetensors"


@pytest.mark.parametrize("name", TARGETS)
def test_changed_at_random(name: str, tmp_path: Path) -> None:
    path = tmp_path / ("folder" if name in ("index", "generation") else "model.gguf")
    made = seeds(name, tmp_path)
    for _ in range(60):
        data = changed(random.choice(made))
        try:
            run(TARGETS[name], data, path)
        except BaseException:
            print(f"{name}: {data!r}")  # noqa: T201
            raise


def changed(data: bytes) -> bytes:
    """With a few bytes flipped, cut, doubled or replaced."""
    for _ in range(random.randint(1, 4)):
        at = random.randrange(len(data) + 1)
        end = min(len(data), at + random.choice((1, 2, 8, 40)))
        kind = random.randrange(5)
        if kind == 0 and at < len(data):
            data = data[:at] + bytes([data[at] ^ (1 << random.randrange(8))]) + data[at + 1 :]
        elif kind == 1:
            data = data[:at] + data[end:]
        elif kind == 2:
            data = data[:end] + data[at:]
        elif kind == 3:
            data = data[:at] + random.choice(ODD) + data[end:]
        else:
            data = data[:at]
    return data
