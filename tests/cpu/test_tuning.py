"""The choice of kernels by rows, in the operator: any plan is right, and measured times make one."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hetero import _cpu, cpu, kernel_choice, tuning
from hetero.core import ExpertSpec, InputError
from hetero.cpu import CpuExperts
from hetero.formats import parse_format
from hetero.tuning import Band, Kernel, Plan
from tests.cpu.reference import decoded, fill, random_routing, random_weights
from tests.cpu.test_operator import FORMATS, check

ISAS = [isa for isa in cpu.isas() if isa != "scalar"]
SPEC = ExpertSpec(num_experts=6, hidden=200, intermediate=96, top_k=3, has_bias=True)
FEW = ExpertSpec(num_experts=2, hidden=200, intermediate=96, top_k=2)  # up to 16 rows in an exact step


@pytest.fixture(autouse=True)
def fresh_choices() -> Iterator[None]:
    kernel_choice._choice.cache_clear()
    yield
    kernel_choice._choice.cache_clear()


def kernels_of(fmt: str) -> list[Kernel]:
    """Every kernel of a format on this machine, those of the software tiles included."""
    names = _cpu.kernels.select(_cpu.kernels.features())["kernels"]
    name = parse_format(fmt).name
    found = [Kernel(isa, c, names[isa][f"{name}.{c}"]) for isa in names for c in tuning.CLASSES]
    return found + [Kernel("amx_twin", c, f"{name}.twin") for c in ("gemm", "bulk")]


def random_bands(kernels: list[Kernel], chance: random.Random) -> tuple[Band, ...]:
    ends = sorted(chance.sample(range(1, 40), chance.randint(0, 5)))
    any_number = [kernel for kernel in kernels if kernel.row_class != "gemv"]
    bands = [Band(end, chance.choice(kernels if end <= 4 else any_number)) for end in ends]
    return (*bands, Band(None, chance.choice(any_number)))


def random_plan(fmt: str, chance: random.Random) -> Plan:
    kernels = kernels_of(fmt)
    exact = [kernel for kernel in kernels if kernel.row_class != "bulk"]
    return Plan(random_bands(exact, chance), random_bands(kernels, chance))


@pytest.mark.parametrize("fmt", FORMATS)
def test_any_plan_gives_the_same_bits_in_small_steps(fmt: str, generator: torch.Generator) -> None:
    chance = random.Random(torch.randint(2**31, (1,), generator=generator).item())
    for spec in (SPEC, FEW):
        experts = fill(CpuExperts(spec, parse_format(fmt)), random_weights(spec, generator))
        steps = [random_routing(spec, tokens, generator) for tokens in (1, 3, 5, 11, 16)]
        want = [experts.forward(*step) for step in steps]
        for _ in range(15):
            plan = random_plan(fmt, chance)
            experts.set_plan(plan)
            for step, before in zip(steps, want, strict=True):
                assert torch.equal(experts.forward(*step).view(torch.int32), before.view(torch.int32)), plan


@pytest.mark.parametrize("fmt", FORMATS)
def test_any_plan_is_right_in_large_steps(fmt: str, generator: torch.Generator) -> None:
    chance = random.Random(torch.randint(2**31, (1,), generator=generator).item())
    experts = fill(CpuExperts(SPEC, parse_format(fmt)), random_weights(SPEC, generator))
    weights = decoded(experts)
    for tokens in (17, 33, 80):
        step = random_routing(SPEC, tokens, generator)
        for _ in range(8):
            experts.set_plan(random_plan(fmt, chance))
            check(experts, experts.forward(*step), step, weights)


@pytest.mark.parametrize(
    ("exact", "large", "message"),
    [
        ([], [(9, "scalar", 1)], "any number of rows"),
        ([(9, "scalar", 1)], [], "any number of rows"),
        ([(9, "scalar", 2)], [(9, "scalar", 1)], "no such class"),
        ([(9, "scalar", 1)], [(9, "scalar", 3)], "no such class"),
        ([(5, "scalar", 0), (9, "scalar", 1)], [(9, "scalar", 1)], "1 to 4 rows"),
        ([(0, "scalar", 1), (9, "scalar", 1)], [(9, "scalar", 1)], "1 to 4 rows"),
        ([(4, "scalar", 0)], [(9, "scalar", 1)], "any number of rows"),
        ([(7, "scalar", 1), (7, "scalar", 1)], [(9, "scalar", 1)], "ascending"),
        ([(9, "sse", 1)], [(9, "scalar", 1)], "sse"),
    ],
)
def test_bands_that_are_no_plan_are_refused(
    exact: list[tuple[int, str, int]], large: list[tuple[int, str, int]], message: str
) -> None:
    experts = CpuExperts(SPEC, parse_format("int4"))
    good = [(9, "scalar", 1)], [(9, "scalar", 1)]
    with pytest.raises(ValueError, match=message):
        experts._experts.set_plan(exact, large, *good)
    with pytest.raises(ValueError, match=message):
        experts._experts.set_plan(*good, exact, large)


def test_any_plans_by_part_give_the_same_bits_in_small_steps(generator: torch.Generator) -> None:
    chance = random.Random(torch.randint(2**31, (1,), generator=generator).item())
    for up, down in (("q4_k", "q6_k"), ("bf16", "int4"), ("iq4_xs", "fp8")):
        experts = CpuExperts(FEW, parse_format(up), parse_format(down))
        fill(experts, random_weights(FEW, generator))
        weights = decoded(experts)
        for tokens in (3, 16, 40):
            step = random_routing(FEW, tokens, generator)
            want = experts.forward(*step)
            for _ in range(6):
                experts.set_plan(random_plan(up, chance), random_plan(down, chance))
                y = experts.forward(*step)
                check(experts, y, step, weights)
                assert tokens > 16 or torch.equal(y, want)


@pytest.mark.parametrize("fmt", [*FORMATS, "int8a", "int4z", "iq4_nl", "q4_k", "q6_k", "iq2_s"])
def test_times_of_every_kernel(fmt: str) -> None:
    one = parse_format(fmt)
    kernels = [("scalar", 0), ("scalar", 1), *((isa, c) for isa in ISAS for c in range(3))]
    times = _cpu.kernel_seconds(one.code, one.group, kernels, [1, 4, 5, 9], 0.0)
    assert len(times) == len(kernels)
    for (_, row_class), row in zip(kernels, times, strict=True):
        assert [math.isfinite(t) for t in row] == [True, True, row_class != 0, row_class != 0]
        assert all(t > 0 for t in row)


@pytest.mark.parametrize(
    ("group", "kernels", "rows"),
    [
        (31, [("scalar", 1)], [1]),
        (32, [("scalar", 3)], [1]),
        (32, [("sse", 1)], [1]),
        (32, [("scalar", 1)], [0]),
    ],
)
def test_times_of_what_does_not_exist(group: int, kernels: list[tuple[str, int]], rows: list[int]) -> None:
    with pytest.raises(ValueError, match=r"no such|sse|rows must"):
        _cpu.kernel_seconds(parse_format("int4").code, group, kernels, rows, 0.0)


@pytest.mark.skipif(not ISAS, reason="the scalar kernels alone have nothing to choose from")
@pytest.mark.parametrize("isa", ISAS)
def test_measured_times_are_kept_and_used(
    isa: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, generator: torch.Generator
) -> None:
    monkeypatch.setenv("HETERO_TUNE", "auto")
    monkeypatch.setenv("HETERO_CACHE", str(tmp_path))
    monkeypatch.setattr(tuning, "SECONDS", 0.01)
    experts = fill(CpuExperts(SPEC, parse_format("int4"), isa=isa), random_weights(SPEC, generator))
    (path,) = tmp_path.iterdir()
    record = json.loads(path.read_text())
    choice = kernel_choice.kernel_choice(isa, experts.format)
    assert choice.source == "measured"
    assert set(record["formats"]) == {"int4 g32"}
    # No kernel of a set beyond the chosen one may run: the user may have ruled it out.
    sets = cpu.isas()[1 : cpu.isas().index(isa) + 1]
    names = _cpu.kernels.select(_cpu.kernels.features())["kernels"]
    allowed = {names[one][f"int4.{c}"] for one in sets for c in tuning.CLASSES}
    assert set(record["formats"]["int4 g32"]) == allowed
    for tokens in (4, 40, 200):
        step = random_routing(SPEC, tokens, generator)
        cpu.reset_kernel_counts()
        check(experts, experts.forward(*step), step)
        rows = torch.bincount(step[1].flatten(), minlength=SPEC.num_experts).tolist()
        bands = choice.plan.exact if tokens <= 16 else choice.plan.large
        assert set(cpu.kernel_counts()) == {tuning.kernel_of(bands, n).name for n in rows if n}
    kernel_choice._choice.cache_clear()
    again = kernel_choice.kernel_choice(isa, experts.format)
    assert (again.source, again.plan) == ("kept", choice.plan)


@pytest.mark.skipif("avx2" not in ISAS, reason="needs two kernels to choose from")
def test_times_of_a_file_decide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, generator: torch.Generator
) -> None:
    """A file that calls the exact kernel the faster one, and ``use`` that goes back and forth."""
    isa, fmt = ISAS[-1], parse_format("bf16")
    own, others = kernel_choice.kernels_of(isa, fmt)
    times = {kernel.name: (1e-3,) * len(tuning.ROWS) for kernel in (*own, *others)}
    times["bf16.avx2.gemm"] = (1e-4,) * len(tuning.ROWS)
    path = tmp_path / "times.json"
    tuning.Table(path, {}).write("bf16", times)
    monkeypatch.setenv("HETERO_TUNE", str(path))
    experts = fill(CpuExperts(SPEC, fmt, isa=isa), random_weights(SPEC, generator))
    for chosen, count in (
        (isa, {"bf16.avx2.gemm"}),
        ("scalar", {"bf16.scalar.gemm"}),
        (isa, {"bf16.avx2.gemm"}),
    ):
        experts.use(chosen)
        step = random_routing(SPEC, 90, generator)
        cpu.reset_kernel_counts()
        check(experts, experts.forward(*step), step)
        assert set(cpu.kernel_counts()) == count
    monkeypatch.setenv("HETERO_TUNE", str(tmp_path / "missing"))
    with pytest.raises(InputError, match="HETERO_TUNE"):
        CpuExperts(SPEC, fmt)
