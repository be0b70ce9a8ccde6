"""``hetero profile`` on tiny shapes, its options and its messages."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner, Result

from hetero import cli, cpu, tuning
from hetero.core import InputError, MachineError
from hetero.formats import parse_format
from hetero.hw.caches import l3_bytes
from hetero.report.measure import Layers, Peaks, make_step, step_ops
from hetero.report.profile import make_options, thread_counts
from hetero.report.schema import Report, RowsBand, read_report
from hetero.report.shapes import find_shape
from hetero.report.text import bands
from tests.report.made import cell, report

TINY = "128x64x16x2x3"


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    # A large cache would ask for hundreds of layers of a tiny shape.
    monkeypatch.setattr("hetero.report.profile.l3_bytes", lambda: 2**20)


def call(*args: object) -> Result:
    return CliRunner().invoke(cli.app, ["profile", *(str(arg) for arg in args)])


def test_a_tiny_profile_ends_and_tells_all(tmp_path: Path) -> None:
    out, page = tmp_path / "out.json", tmp_path / "page.html"
    start = time.monotonic()
    result = call(
        "--shapes", TINY, "--budget", 2, "--tokens", "1,4,32", "--formats", "int4,bf16", "--json", out,
        "--html", page, "--threads", 2, "--memory", "64M",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert time.monotonic() - start < 60
    found = read_report(out)
    assert found.shape.layers == 3
    assert found.settings.threads == 2
    isas = [i for i in cpu.isas() if i != "scalar"] or ["scalar"]
    assert found.settings.isas == isas
    first = found.find("int4 g32", 1, isas[-1])
    assert first is not None
    assert first.ops == 6 * 2 * 128 * 64
    assert first.distinct_experts == 2
    assert sum(first.kernels.values()) > 0
    assert all(name.startswith("int4.") for name in first.kernels)
    assert found.bound(first) == pytest.approx(1 / (3 * first.seconds.median))
    assert found.sweep is not None
    assert [p.threads for p in found.sweep.points] == [1, 2]
    assert found.machine.cpu
    assert found.advice
    for word in ("Decode (1 token", "TOPS", "int4 g32", *isas):
        assert word in result.stdout
    assert page.read_text().startswith("<!DOCTYPE html>")


def test_every_default_format_is_measured_with_its_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HETERO_TUNE", "auto")
    monkeypatch.setenv("HETERO_CACHE", str(tmp_path))
    monkeypatch.setattr("hetero.tuning.SECONDS", 0.01)
    made, page = tmp_path / "out.json", tmp_path / "page.html"
    result = call(
        "--shapes", TINY, "--budget", 100, "--tokens", "1,40", "--memory", "8M", "--json", made,
        "--html", page,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    found = read_report(made)
    formats = ["int4 g32", "int8 g32", "bf16", "fp8", "mxfp4", "nvfp4"]
    assert list(dict.fromkeys(c.format for c in found.cells)) == formats
    assert [(t.format, len(t.rows)) for t in found.times] == [(fmt, len(tuning.ROWS)) for fmt in formats]
    sets = found.settings.isas
    assert {(c.format, c.isa) for c in found.choices} == {(fmt, isa) for fmt in formats for isa in sets}
    assert {c.source for c in found.choices} <= {"measured", "kept"}
    for one in found.cells:
        (choice,) = (c for c in found.choices if (c.format, c.isa) == (one.format, one.isa))
        allowed = choice.exact if one.tokens <= 16 else choice.large
        assert set(one.kernels) <= {band.kernel for band in allowed}
    for text in (result.stdout, page.read_text()):
        assert "Kernels by the rows of an expert" in text
        assert "times measured now" in text


def test_bands_are_told_by_their_rows() -> None:
    made = [(1, "int4.a.gemv"), (4, "int4.b.gemv"), (5, "int4.c.gemm"), (None, "int4.d.bulk")]
    shown = bands([RowsBand(rows=rows, kernel=kernel) for rows, kernel in made])
    assert shown == "1 a.gemv, 2-4 b.gemv, 5 c.gemm, 6- d.bulk"


def test_json_alone_goes_to_stdout() -> None:
    result = call("--shapes", TINY, "--budget", 0.3, "--tokens", 1, "--formats", "int4", "--json", "-")
    assert result.exit_code == 0, result.output
    assert Report.model_validate_json(result.stdout).kind == "hetero.profile"


def test_a_budget_that_is_too_short_says_what_it_left_out() -> None:
    result = call("--shapes", "512x256x64x4", "--budget", 0.05, "--json", "-")
    assert result.exit_code == 0, result.output
    found = Report.model_validate_json(result.stdout)
    assert {c.tokens for c in found.cells if c.format == "int4 g32"} >= {1}
    assert any("left out" in note for note in found.notes)


def test_fewer_experts_where_memory_lacks() -> None:
    result = call(
        "--shapes", "256x128x64x2", "--budget", 0.3, "--tokens", 1, "--formats", "bf16", "--memory", "1M",
        "--json", "-",
    )  # fmt: skip
    found = Report.model_validate_json(result.stdout)
    assert found.weights[0].experts < 64
    assert found.weights[0].bytes <= 2**20
    assert found.weights[0].larger_than_l3 is False
    text = " ".join(found.notes)
    assert f"measured on {found.weights[0].experts} of 64 experts" in text
    assert "fit the L3 cache" in text


def test_a_result_is_shown_again_with_another_beside_it(tmp_path: Path) -> None:
    for name, seconds in (("mine", 1e-3), ("theirs", 2e-3)):
        made = report([cell("avx2", 1, seconds)], cpu=name)
        (tmp_path / name).write_text(made.model_dump_json())
    page = tmp_path / "page.html"
    result = call("--load", tmp_path / "mine", "--compare", tmp_path / "theirs", "--html", page)
    assert result.exit_code == 0, result.output
    assert "mine, 8 threads" in result.stdout
    assert "theirs, 8 threads" in result.stdout
    assert "All results of theirs" in page.read_text()


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--shapes", "qwen3.8-flash"], "did you mean qwen3.8-flash-next-125b"),
        (["--shapes", "0x64x16x2"], "numbers must be at least 1"),
        (["--shapes", "128x64x2x4"], "top-k at most the experts"),
        (["--isa", "avx1024"], "no instruction set 'avx1024'"),
        (["--formats", "int5"], "unknown weight format 'int5'"),
        (["--tokens", "1,two"], "--tokens 1,two: must be whole numbers"),
        (["--tokens", "0"], "--tokens 0: must be from 1"),
        (["--threads", "0"], "--threads 0: must be from 1 to 4096"),
        (["--budget", "0"], "--budget 0: must be more than 0"),
        (["--numa", "sideways"], "sideways"),
        (["--numa", "node 77"], "no NUMA node 77"),
        (["--memory", "lots"], "--memory lots: must be a size such as 4G"),
        (["--memory", "0"], "--memory: must be more than 0"),
        (["--json", "/nowhere/out.json"], "/nowhere/out.json: cannot be written"),
        (["--html", "/nowhere/page.html"], "/nowhere/page.html: cannot be written"),
        (["--compare", "/nowhere/a.json"], "/nowhere/a.json: cannot be read"),
    ],
)
def test_bad_input_is_one_message(args: list[str], told: str) -> None:
    shapes = [] if "--shapes" in args else ["--shapes", TINY]
    result = call(*shapes, *args)
    assert result.exit_code == 2, result.output
    lines = [line for line in result.stderr.splitlines() if line]
    assert len(lines) == 1
    assert told in lines[0]
    assert lines[0].startswith("hetero: ")


def test_an_instruction_set_that_the_machine_lacks_is_exit_code_3(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks(name: str) -> None:
        raise RuntimeError("amx_tile, amx_int8")

    monkeypatch.setattr("hetero.cpu._cpu.check_isa", lacks)
    result = call("--shapes", TINY, "--isa", "amx")
    assert result.exit_code == 3
    assert "instruction set 'amx': this machine lacks amx_tile, amx_int8; it has scalar" in result.stderr


def test_memory_for_less_than_one_token_is_exit_code_3() -> None:
    result = call("--shapes", TINY, "--memory", "1k")
    assert result.exit_code == 3
    assert "the profile may use" in result.stderr


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"kind": "other"}, "field 'kind'"),
        ({"cells": [{"format": 3}]}, "field 'cells.0."),
        ({"surprise": 1}, "field 'surprise'"),
    ],
)
def test_a_foreign_file_is_told_by_its_first_wrong_field(
    tmp_path: Path, change: dict[str, object], told: str
) -> None:
    path = tmp_path / "foreign.json"
    data = report([cell("avx2", 1, 1e-3)]).model_dump()
    path.write_text(json.dumps(data | change))
    with pytest.raises(InputError, match="not a result of hetero profile") as caught:
        read_report(path)
    assert told in str(caught.value)
    path.write_text("no json")
    with pytest.raises(InputError, match="not a result"):
        read_report(path)


def test_a_result_survives_its_file(tmp_path: Path) -> None:
    made = report([cell("avx2", 1, 1e-3)])
    (tmp_path / "r.json").write_text(made.model_dump_json())
    assert read_report(tmp_path / "r.json") == made
    with pytest.raises(ValidationError):
        made.model_validate({**made.model_dump(), "seconds": "long"})


def test_the_schema_names_every_field() -> None:
    result = call("--schema")
    schema = json.loads(result.stdout)
    assert set(schema["properties"]) == set(Report.model_fields)
    documented = (Path(__file__).parents[2] / "docs/profile.md").read_text()
    assert [f for f in Report.model_fields if f"`{f}`" not in documented] == []


def test_the_shape_of_a_known_model_is_read_from_its_configuration() -> None:
    shape, spec = find_shape("qwen3.8-flash-next-125b")
    assert (shape.hidden, shape.intermediate, shape.experts, shape.top_k) == (2560, 640, 512, 10)
    assert shape.layers == 48
    assert spec.num_experts == 512
    biased, _ = find_shape("synthetic:gpt-oss-120b")
    assert biased.has_bias


def test_experts_with_bias_and_without_a_gate_can_be_profiled() -> None:
    from hetero.core import ExpertSpec

    for has_gate in (True, False):
        spec = ExpertSpec(6, 64, 32, 2, has_gate=has_gate, has_bias=True)
        layers = Layers(spec, parse_format("int8"), 2**24, None)
        import torch

        step = make_step(spec, 3, torch.Generator().manual_seed(0))
        assert layers.run(step) > 0
        assert step_ops(spec, 3) == 2 * (3 if has_gate else 2) * 3 * 2 * 64 * 32
        assert layers.layers[0].nbytes == layers.bytes == 6 * layers.expert_bytes


def test_too_little_memory_is_an_error_of_the_machine() -> None:
    _, spec = find_shape(TINY)
    with pytest.raises(MachineError, match="--memory"):
        Layers(spec, parse_format("f32"), 1000, None)


def test_layers_outgrow_the_cache_where_memory_allows() -> None:
    _, spec = find_shape(TINY)
    one = Layers(spec, parse_format("int8"), 2**24, None).bytes
    many = Layers(spec, parse_format("int8"), 2**24, 2 * one)
    assert many.bytes == 8 * one
    assert len(Layers(spec, parse_format("int8"), 3 * one, 2 * one).layers) == 3
    assert len(Layers(spec, parse_format("int8"), 2**24, 2 * one, seconds=0).layers) == 1


def test_every_executed_kernel_has_its_instruction() -> None:
    peaks = Peaks(cpu.isas())
    from hetero.cpu import _cpu

    tables = _cpu.kernels.select(dict(_cpu.kernels.features()))["kernels"]
    for kernels in tables.values():
        for name in kernels.values():
            assert peaks.of_kernel(name) in peaks.probes, name


@pytest.mark.parametrize(
    ("kernel", "instruction"),
    [
        ("int4.amx_int8.bulk", "tdpbusd tmm"),
        ("int4.amx_bf16.bulk", "tdpbf16ps tmm"),
        ("bf16.amx_bf16.bulk", "tdpbf16ps tmm"),
        ("int8.avx512_vnni.gemv", "vpdpbusd zmm"),
        ("int8.avx512.gemv", "vpmaddubsw zmm"),
        ("bf16.avx512_bf16.bulk", "vdpbf16ps zmm"),
        ("bf16.avx512.gemv", "vfmadd231ps zmm"),
        ("int4a.avx2.gemm", "vpmaddubsw ymm"),
        ("f32.avx2.gemm", "vfmadd231ps ymm"),
        ("fp8.avx2.gemm", "vfmadd231ps ymm"),
        ("fp8.avx512.gemv", "vfmadd231ps zmm"),
        ("mxfp4.avx512_vnni.gemv", "vpdpbusd zmm"),
        ("int8.scalar.gemv", "pmaddwd xmm"),
    ],
)
def test_a_kernel_is_measured_against_its_own_instruction(kernel: str, instruction: str) -> None:
    assert Peaks.of_kernel(None, kernel) == instruction  # type: ignore[arg-type]


def test_probes_are_faster_the_wider_they_are() -> None:
    cpu.set_threads(1)
    peaks = Peaks(cpu.isas())
    rates = {name: max(peaks.run(name)[0] for _ in range(5)) for name in peaks.probes}
    assert all(rate > 1e-4 for rate in rates.values())
    if "tdpbusd tmm" in rates:
        assert rates["tdpbusd tmm"] > rates["vpmaddubsw ymm"]
    _, hertz = cpu.run_probe("", 1)
    assert 2e8 < hertz < 1e10
    with pytest.raises(ValueError, match="no such probe"):
        cpu.run_probe("vtriple zmm", 1)


def test_thread_counts() -> None:
    assert thread_counts(1) == [1]
    assert thread_counts(2) == [1, 2]
    assert thread_counts(16) == [1, 2, 4, 8, 15, 16]


def test_options_are_completed() -> None:
    options = make_options(
        shape=TINY, isas=[], formats=["int4", "int4 g32"], tokens=[4, 1, 4], threads=None, memory_bytes=None,
        budget_s=1,
    )  # fmt: skip
    assert options.tokens == (1, 4)
    assert [str(f) for f in options.formats] == ["int4 g32"]
    assert options.threads == cpu.threads()
    assert 0 < options.memory_bytes <= 8 * 2**30


def test_plain_reads_stay_within_the_experts() -> None:
    _, spec = find_shape(TINY)
    layers = Layers(spec, parse_format("int8"), 2**24, None)
    experts = layers.layers[0]
    assert experts.plain_read() == experts.nbytes
    assert experts.plain_read(3, 2) == 2 * layers.expert_bytes
    for first, count in ((15, 2), (-1, 1), (0, 17)):
        with pytest.raises(ValueError, match="of 16"):
            experts.plain_read(first, count)


def test_the_l3_is_read_from_a_tree(tmp_path: Path) -> None:
    for number, shared, size in ((0, "0-1", "32768K"), (1, "0-1", "32768K"), (2, "2-3", "16M")):
        for index, level in (("index2", "2"), ("index3", "3")):
            folder = tmp_path / f"sys/devices/system/cpu/cpu{number}/cache/{index}"
            folder.mkdir(parents=True)
            (folder / "level").write_text(level)
            (folder / "size").write_text(size)
            (folder / "shared_cpu_list").write_text(shared)
    assert l3_bytes(tmp_path, [0, 1, 2]) == 48 * 2**20
    assert l3_bytes(tmp_path, [0]) == 32 * 2**20
    assert l3_bytes(tmp_path, [7]) is None
