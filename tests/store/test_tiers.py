"""What is decided of RAM and disk, and the sizes that messages name."""

from __future__ import annotations

import re

import pytest

from hetero.core import ExpertSpec, MachineError
from hetero.engine.tiers import Site, decide
from hetero.hw import memory
from hetero.store.manifest import block_of

MIB, GIB = 1 << 20, 1 << 30


def sites(tier: str) -> list[Site]:
    """24 layers of 64 experts of 100 MiB each, 150 GiB in all."""
    spec = ExpertSpec(64, 2048, 1024, 8)
    block = block_of("layers", spec, ("int8", "int8"), 100 * MIB)
    return [Site(f"layers.{i}", f"layers.{i}", spec, {"tier": tier}, block) for i in range(24)]


def refusal(tier: str, available: int, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(memory, "available", lambda: memory.Available(available, "MemAvailable"))
    with pytest.raises(MachineError) as caught:
        decide(sites(tier), 4 * GIB, 0, "loading m")
    return str(caught.value)


def test_the_ram_that_a_message_advises_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    told = refusal("disk", 16 * GIB, monkeypatch)
    assert "a tenth and 256 MiB are kept for steps" in told
    found = re.search(r"--ram (\d+)GiB", told)
    assert found is not None
    advised = memory.Available(
        int(found[1]) * GIB - (512 << 20), "--ram"
    )  # what a process has beside weights
    monkeypatch.setattr(memory, "available", lambda: advised)
    assert set(decide(sites("disk"), 4 * GIB, 0, "loading m").slots.values()) == {8}


def test_the_disk_is_advised_where_it_works_and_from_its_least_on(monkeypatch: pytest.MonkeyPatch) -> None:
    told = refusal("ram", 32 * GIB, monkeypatch)
    found = re.search(r"--tier disk \(.*: from .* \((\d+) bytes\) on, a tenth and 256 MiB of it", told)
    assert found is not None
    least = int(found[1])
    assert "--tier disk" not in refusal("ram", int(least * 0.99), monkeypatch)
    for share in (0.99, 1.01):
        have = memory.Available(int(least * share), "MemAvailable")
        monkeypatch.setattr(memory, "available", lambda have=have: have)
        if share < 1:
            with pytest.raises(MachineError, match="is left for the experts of the disk tier"):
                decide(sites("disk"), 4 * GIB, 0, "loading m")
        else:
            assert decide(sites("disk"), 4 * GIB, 0, "loading m").slots
