"""Which kernel serves how many rows, and the file of measured times."""

from __future__ import annotations

import json
import logging
import math
import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero import tuning
from hetero.core import InputError
from hetero.tuning import ROWS, Choice, Kernel, Plan, Table, Times, choose, kernel_of, make_plan

GEMV = Kernel("avx512", "gemv", "int4.avx512_vnni.gemv")
GEMM = Kernel("amx", "gemm", "int4.amx_int8.gemm")
BULK = Kernel("amx", "bulk", "int4.amx_bf16.bulk")
VNNI = Kernel("avx512", "gemm", "int4.avx512_vnni.gemm")
OWN, OTHERS = [GEMV, GEMM, BULK], [VNNI]
ALL = [*OWN, *OTHERS]
IDENTITY = {"cpu": {"model": "1"}, "extension": "ab"}


def line(start: float, each: float) -> tuple[float, ...]:
    """Seconds that grow by the row."""
    return tuple((start + each * rows) * 1e-6 for rows in ROWS)


def only_few(row: Sequence[float]) -> tuple[float, ...]:
    return tuple(t if rows <= 4 else math.inf for rows, t in zip(ROWS, row, strict=True))


def flat_times(**changed: tuple[float, ...]) -> dict[str, tuple[float, ...]]:
    """All kernels alike, but those of the classes named."""
    times = {kernel.name: line(100, 0) for kernel in ALL}
    times[GEMV.name] = only_few(line(100, 0))
    by_name = {"gemv": GEMV, "gemm": GEMM, "bulk": BULK, "vnni": VNNI}
    return times | {by_name[name].name: row for name, row in changed.items()}


def kernels(plan: Plan) -> tuple[list[Kernel], list[Kernel]]:
    """Those of each measured number of rows."""
    return [kernel_of(plan.exact, rows) for rows in ROWS], [kernel_of(plan.large, rows) for rows in ROWS]


DEFAULT = make_plan(OWN, OTHERS, None)


def test_without_times_the_plan_is_that_of_the_instruction_set() -> None:
    for rows in (1, 4):
        assert kernel_of(DEFAULT.exact, rows) == kernel_of(DEFAULT.large, rows) == GEMV
    for rows in (5, 16, 1000):
        assert kernel_of(DEFAULT.exact, rows) == GEMM
        assert kernel_of(DEFAULT.large, rows) == BULK


@pytest.mark.parametrize(("gain", "wins"), [(0.97, False), (0.90, True)])
def test_a_kernel_must_win_clearly(gain: float, wins: bool) -> None:
    plan = make_plan(OWN, OTHERS, flat_times(vnni=line(100 * gain, 0)))
    chosen = {kernel for one in kernels(plan) for kernel in one}
    assert (chosen == {VNNI}) is wins
    assert (plan == DEFAULT) is not wins


def test_a_crossing_is_found_between_the_measured_numbers() -> None:
    times = flat_times(vnni=line(20, 5), bulk=line(70, 0.5), gemm=line(70, 3), gemv=only_few(line(20, 4)))
    plan = make_plan(OWN, OTHERS, times)
    assert [kernel_of(plan.large, rows) for rows in (1, 4, 5, 8, 12, 64, 10**6)] == (
        [GEMV, GEMV, VNNI, VNNI, BULK, BULK, BULK]
    )
    assert [kernel_of(plan.exact, rows) for rows in (1, 5, 16)] == [GEMV, VNNI, VNNI]


def test_rows_between_two_kernels_go_to_the_default_one() -> None:
    """At 8 rows VNNI wins, at 12 bulk does: 9 to 11 are bulk's."""
    plan = make_plan(OWN, OTHERS, flat_times(vnni=line(20, 8), bulk=line(100, 0)))
    assert [kernel_of(plan.large, rows) for rows in (8, 9, 11, 12)] == [VNNI, BULK, BULK, BULK]


@pytest.mark.parametrize("at", range(len(ROWS) - 1))
@pytest.mark.parametrize("name", ["bulk", "gemm"])
def test_one_slow_measurement_changes_nothing(at: int, name: str) -> None:
    row = list(line(100, 0.01))
    row[at] *= 3
    assert make_plan(OWN, OTHERS, flat_times(**{name: tuple(row)})) == DEFAULT


@given(st.data())
def test_every_plan_can_run(data: st.DataObject) -> None:
    seconds = st.floats(1e-7, 1e-1)
    times = {kernel.name: tuple(data.draw(seconds) for _ in ROWS) for kernel in ALL}
    times[GEMV.name] = only_few(times[GEMV.name])
    plan = make_plan(OWN, OTHERS, times)
    for bands in (plan.exact, plan.large):
        ends = [band.rows for band in bands]
        assert ends[-1] is None
        numbers = [end for end in ends if end is not None]
        assert len(numbers) == len(ends) - 1
        assert numbers == sorted(set(numbers))
        assert all(kernel_of(bands, rows) != GEMV for rows in range(5, 200))
    assert all(band.kernel.row_class != "bulk" for band in plan.exact)


def measured(times: Times) -> tuple[Callable[[Sequence[Kernel]], Times], list[int]]:
    """A measurement that gives these times, and the number of kernels of each call."""
    calls: list[int] = []

    def measure(asked: Sequence[Kernel]) -> Times:
        calls.append(len(asked))
        return {kernel.name: times[kernel.name] for kernel in asked}

    return measure, calls


def choice(
    folder: Path,
    measure: Callable[[Sequence[Kernel]], Times],
    tune: str = "auto",
    identity: Mapping[str, object] = IDENTITY,
    others: Sequence[Kernel] = OTHERS,
) -> Choice:
    return choose(
        "int4 g32", OWN, others, tune=tune, folder=folder, identity=lambda: identity, measure=measure
    )


def test_times_are_measured_once_and_kept(tmp_path: Path) -> None:
    times = flat_times(vnni=line(50, 0))
    measure, calls = measured(times)
    first, second = choice(tmp_path / "new", measure), choice(tmp_path / "new", measure)
    assert (first.source, second.source, calls) == ("measured", "kept", [4])
    assert first.times == second.times == times
    assert first.plan == second.plan != DEFAULT
    assert choice(tmp_path / "new", measure, "force").source == "measured"
    assert len(list((tmp_path / "new").iterdir())) == 1


def test_off_measures_and_writes_nothing(tmp_path: Path) -> None:
    measure, calls = measured(flat_times(vnni=line(50, 0)))
    found = choice(tmp_path / "new", measure, "off")
    assert (found.plan, found.times, found.source) == (DEFAULT, None, "defaults")
    assert not calls
    assert not (tmp_path / "new").exists()


def test_times_of_other_code_or_fewer_kernels_are_measured_again(tmp_path: Path) -> None:
    measure, calls = measured(flat_times())
    assert choice(tmp_path, measure, others=[]).source == "measured"
    assert choice(tmp_path, measure).source == "measured"
    assert choice(tmp_path, measure, others=[]).source == "kept"
    assert choice(tmp_path, measure, identity={"extension": "cd"}).source == "measured"
    assert choice(tmp_path, measure).source == "kept"
    assert calls == [3, 4, 4]


def torn(text: str) -> str:
    return text[: len(text) // 2]


def changed(**fields: object) -> Callable[[str], str]:
    return lambda text: json.dumps(json.loads(text) | fields)


@pytest.mark.parametrize(
    "damage",
    [
        torn,
        lambda _: "",
        lambda _: "[]",
        lambda _: "\udcff",
        changed(version=99),
        changed(identity={"extension": "of another machine"}),
        changed(rows=[1, 2]),
        changed(formats=[]),
        changed(formats={"int4 g32": {"int4.avx512_vnni.gemv": [1, 2]}}),
        changed(formats={"int4 g32": {"int4.avx512_vnni.gemv": [0] * len(ROWS)}}),
        changed(formats={"int4 g32": {"int4.avx512_vnni.gemv": ["fast"] * len(ROWS)}}),
        changed(formats={"int4 g32": {"int4.avx512_vnni.gemv": [True] * len(ROWS)}}),
    ],
)
def test_a_damaged_file_is_made_anew(damage: Callable[[str], str], tmp_path: Path) -> None:
    measure, calls = measured(flat_times(vnni=line(50, 0)))
    good = choice(tmp_path, measure)
    (path,) = tmp_path.iterdir()
    path.write_bytes(damage(path.read_text()).encode("utf-8", "surrogateescape"))
    assert choice(tmp_path, measure).source == "measured"
    again = choice(tmp_path, measure)
    assert (again.source, again.plan, len(calls)) == ("kept", good.plan, 2)


def test_a_folder_that_cannot_be_written_costs_one_note(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    measure, calls = measured(flat_times())
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert choice(tmp_path / "file" / "cache", measure).source == "measured"
    assert len(calls) == 2
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "HETERO_CACHE" in caplog.text


def test_a_file_that_the_user_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    times = flat_times(vnni=line(50, 0))
    measure, calls = measured(times)
    choice(tmp_path, measure)
    (path,) = tmp_path.iterdir()
    named = choice(tmp_path / "unused", measure, str(path), identity={"extension": "another"})
    assert (named.source, named.times) == ("file", times)
    with pytest.raises(InputError, match=r"HETERO_TUNE=.*of: No such file.*auto, off, force"):
        choice(tmp_path, measure, "of")
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(InputError, match="not a file of measured times"):
        choice(tmp_path, measure, str(tmp_path / "other.json"))
    Table(tmp_path / "int8.json", IDENTITY).write("int8 g32", times)
    lacking = choice(tmp_path, measure, str(tmp_path / "int8.json"))
    assert (lacking.source, lacking.plan) == ("defaults", DEFAULT)
    assert "lacks times of int4 g32" in caplog.text
    assert len(calls) == 1
    assert not (tmp_path / "unused").exists()


def write_often(path: Path, fmt: str) -> None:
    for number in range(100):
        Table(path, IDENTITY).write(fmt, {"kernel": line(number + 1, 0)})


def test_two_processes_at_once(tmp_path: Path) -> None:
    """Whoever reads meanwhile sees a whole file, and the last writer's times are there."""
    path = tmp_path / "kernels.json"
    Table(path, IDENTITY).write("f32", {"kernel": line(1, 0)})
    spawn = multiprocessing.get_context("spawn")
    writers = [spawn.Process(target=write_often, args=(path, fmt)) for fmt in ("int4 g32", "int8 g32")]
    for writer in writers:
        writer.start()
    reads = 0
    while any(writer.is_alive() for writer in writers) or reads == 0:
        assert tuning._parse(path, IDENTITY)
        reads += 1
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    last = [Table(path, IDENTITY).read(fmt) for fmt in ("int4 g32", "int8 g32")]
    assert {"kernel": line(100, 0)} in last
    assert [p.name for p in tmp_path.iterdir()] == ["kernels.json"]
