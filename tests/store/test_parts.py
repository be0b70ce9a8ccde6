"""What the extension gives the tiers: whole experts in and out of every placement, and steps in groups."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hetero import _cpu, cpu
from hetero.core import ExpertSpec
from hetero.cpu import CpuExperts
from hetero.formats import parse_format
from tests.cpu.reference import fill, random_routing, random_weights
from tests.cpu.test_numa import paper


@pytest.fixture(autouse=True)
def this_machine_again() -> Iterator[None]:
    yield
    cpu.use_machine(None)


@pytest.fixture
def generator() -> torch.Generator:
    generator = torch.Generator()
    generator.seed()
    return generator


@pytest.mark.parametrize("fmt", ["int8", "int4 g64", "bf16"])
@pytest.mark.parametrize(("hidden", "intermediate", "gate"), [(64, 96, True), (72, 33, False)])
def test_whole_experts_go_into_every_placement(
    fmt: str, hidden: int, intermediate: int, gate: bool, generator: torch.Generator
) -> None:
    cpu.use_machine(paper(3))
    spec = ExpertSpec(4, hidden, intermediate, 2, has_gate=gate, has_bias=not gate)
    first = fill(CpuExperts(spec, parse_format(fmt)), random_weights(spec, generator))
    buffers = [memoryview(bytearray(first.whole_bytes)) for _ in range(4)]
    for expert, buffer in enumerate(buffers):
        first.save(expert, buffer)
        view = first.view(expert)
        assert view is not None
        assert view[: len(buffer)] == buffer
    x, ids, w = random_routing(spec, 6, generator)
    want = first.forward(x, ids, w)
    for numa in ("off", "split", "replicate", "node 1"):
        other = CpuExperts(spec, parse_format(fmt), numa=numa)
        for expert, buffer in enumerate(buffers):
            other.restore(expert, buffer)
        other.filled(range(4))
        assert torch.equal(other.forward(x, ids, w), want)
        assert (other.view(0) is None) == (numa in ("split", "replicate"))
        back = memoryview(bytearray(first.whole_bytes))
        other.save(3, back)
        assert back == buffers[3]


@pytest.mark.parametrize("fmt", ["f32", "int8", "int4"])
@pytest.mark.parametrize("isa", cpu.isas())
@pytest.mark.parametrize("tokens", [1, 7, 16, 17, 90])
def test_groups_of_experts_sum_to_the_same_bits(
    fmt: str, isa: str, tokens: int, generator: torch.Generator
) -> None:
    spec = ExpertSpec(12, 96, 64, 5, has_bias=True)
    experts = fill(CpuExperts(spec, parse_format(fmt), isa=isa), random_weights(spec, generator))
    x, ids, w = random_routing(spec, tokens, generator)
    ids[0, 1], ids[-1, 0] = -1, 12
    # Waves and passes that are so small that a step has several, and the usual ones.
    for wave_bytes, store_bytes in ((1 << 12, 1 << 14), (64 << 20, 160 << 20)):
        before = _cpu.set_tuning(wave_bytes, store_bytes, 0)
        try:
            want = experts.forward(x, ids, w)
            results = torch.empty(*ids.shape, spec.hidden)
            for group in torch.randperm(12, generator=generator).split([1, 4, 5, 2]):
                mine = torch.where(torch.isin(ids, group), ids, -1)
                experts.pairs(x, mine, results)
            assert torch.equal(experts.weighted_sum(results, ids, w, 12), want)
        finally:
            _cpu.set_tuning(*before)


def test_sums_of_results_that_are_not_side_by_side(generator: torch.Generator) -> None:
    spec = ExpertSpec(5, 64, 32, 3)
    experts = fill(CpuExperts(spec, parse_format("f32")), random_weights(spec, generator))
    x, ids, w = random_routing(spec, 4, generator)
    results = torch.zeros(*ids.shape, 64)
    experts.pairs(x, ids, results)
    spread = torch.empty(*ids.shape, 128)[..., ::2].copy_(results)
    assert torch.equal(experts.weighted_sum(spread, ids, w, 5), experts.forward(x, ids, w))
    with pytest.raises(ValueError, match="contiguous"):
        experts.pairs(x, ids, spread)
    with pytest.raises(ValueError, match="results of torch"):
        experts.weighted_sum(results.bfloat16(), ids, w, 5)
    with pytest.raises(ValueError, match="weights"):
        experts.weighted_sum(results, ids, w[:1], 5)


def test_a_checksum_sees_every_byte_and_its_place(generator: torch.Generator) -> None:
    for size in (1, 7, 64, 200):
        data = bytearray(torch.randint(0, 256, (size,), generator=generator).tolist())
        sums = {cpu.checksum(memoryview(data))}
        for at in range(size):
            data[at] ^= 1 << at % 8
            sums.add(cpu.checksum(memoryview(data)))
            data[at] ^= 1 << at % 8
        assert len(sums) == size + 1
    words = bytearray(range(128))
    swapped = words[64:] + words[:64]
    assert cpu.checksum(memoryview(words)) != cpu.checksum(memoryview(swapped))
    assert cpu.checksum(memoryview(b"")) == 0
