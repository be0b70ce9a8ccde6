"""Experts in memory and their file, for tests."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero.core import ExpertSpec
from hetero.cpu import CpuExperts
from hetero.formats import parse_format
from hetero.store.manifest import Manifest, SourceIdentity, block_of
from hetero.store.packfile import PackFile, PackWriter
from hetero.store.reads import DirectFile
from tests.cpu.reference import fill, random_weights

SPEC = ExpertSpec(6, 64, 96, 2)


def never(text: str) -> None:
    raise AssertionError(f"nobody else packs here: {text}")


def made(
    generator: torch.Generator, blocks: int = 3, spec: ExpertSpec = SPEC, fmt: str = "int8", **options: Any
) -> list[CpuExperts]:
    first, _, down = fmt.partition("/")
    formats = (parse_format(first), parse_format(down) if down else None)
    return [
        fill(CpuExperts(spec, *formats, **options), random_weights(spec, generator)) for _ in range(blocks)
    ]


def manifest_of(experts: list[CpuExperts], time: int = 1) -> Manifest:
    source = SourceIdentity((("model.safetensors", 10, time),), "00")
    return Manifest(
        source,
        tuple(
            block_of(f"layers.{i}", one.spec, (str(one.format), str(one.down_format)), one.whole_bytes)
            for i, one in enumerate(experts)
        ),
    )


def written(path: Path, experts: list[CpuExperts]) -> PackFile:
    manifest = manifest_of(experts)
    writer = PackWriter(path, manifest, never)
    for index, one in enumerate(experts):
        writer.put_block(index, one)
    assert writer.finish() == path
    return PackFile(path)


def read_block(file: PackFile, block: int, experts: CpuExperts) -> int:
    """Returns how many bytes were read."""
    reads = file.read_blocks({block: experts})
    try:
        reads.finish(block, experts)
        return reads.nbytes
    finally:
        reads.stop()


def failing_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads of whole blocks meet EIO from now on, as the kernel says of memory that nothing is mapped to."""
    nothing = os.open("/proc/self/mem", os.O_RDONLY)
    monkeypatch.setattr(DirectFile, "descriptors", property(lambda file: (nothing, nothing)))


def empty(experts: CpuExperts, numa: str = "off") -> CpuExperts:
    return CpuExperts(experts.spec, experts.format, experts.down_format, numa=numa)


def content(experts: CpuExperts) -> list[bytes]:
    found = []
    for expert in range(experts.spec.num_experts):
        data = memoryview(bytearray(experts.whole_bytes))
        experts.save(expert, data)
        found.append(bytes(data))
    return found
