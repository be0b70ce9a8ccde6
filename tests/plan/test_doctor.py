"""The doctor on machines that are laid out as files, with a fake CUDA, and once on this one."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hetero import cli
from hetero.doctor import examine as examining
from hetero.doctor import system
from hetero.doctor.finding import Finding, examine, ok
from hetero.doctor.gpu import check_gpu
from hetero.doctor.isas import check_isas
from hetero.hw import probe_disk as disk
from hetero.plan.hardware import load_hardware
from hetero.plan.machine import guessed, this_machine
from tests.unit.test_topology import sysfs, write

GIB = 2**30


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("HETERO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two nodes of four CPUs, one thread a core, huge pages on request."""
    there = sysfs(tmp_path / "root", {0: (range(4), 64), 1: (range(4, 8), 64)})
    flags = "fpu avx2 avx512f avx512bw avx512vl avx512dq amx_tile amx_int8"
    write(
        there, "proc/cpuinfo", f"vendor_id : Paper\nmodel name : Paper 9000\nflags : {flags}\n\nprocessor : 1"
    )
    write(there, "proc/meminfo", f"MemTotal: {128 * GIB // 1024} kB\nMemAvailable: {100 * GIB // 1024} kB")
    write(there, "proc/loadavg", "0.10 0.20 0.30 1/100 1234")
    write(there, "sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never")
    return there


def test_a_good_machine(root: Path) -> None:
    assert system.check_processor(root) == ok("processor", "Paper 9000, amx", isa="amx")
    cores = system.check_cores(root, range(8))
    assert (cores.status, cores.figures["cores"]) == ("ok", 8)
    assert system.check_nodes(root, range(8)).figures["nodes"] == 2
    assert system.check_huge_pages(root).status == "ok"
    (memory,) = system.check_memory(root)
    assert (memory.status, memory.figures["available"]) == ("ok", 100 * GIB)


def test_cores_that_others_keep(root: Path) -> None:
    masked = system.check_cores(root, range(3))
    assert masked.status == "warning"
    assert "3 of 8 CPUs are ours" in masked.value
    write(root, "sys/fs/cgroup/cpu.max", "250000 100000")
    held = system.check_cores(root, range(8))
    assert held.status == "warning"
    assert "2.5 CPUs' worth of time" in held.value
    assert "cpu.max" in held.advice


def test_nodes_that_are_closed_or_without_cores(root: Path) -> None:
    far = system.check_nodes(root, range(4))
    assert far.status == "warning"
    assert "without cores of ours: 1" in far.value
    write(root, "proc/self/status", "Name: x\nMems_allowed_list: 0")
    closed = system.check_nodes(root, range(8))
    assert "closed to us: 1" in closed.value


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("always [madvise] never", "ok"),
        ("[always] madvise never", "ok"),
        ("always madvise [never]", "warning"),
        ("", "warning"),
    ],
)
def test_huge_pages(root: Path, text: str, status: str) -> None:
    write(root, "sys/kernel/mm/transparent_hugepage/enabled", text)
    found = system.check_huge_pages(root)
    assert found.status == status
    assert "never" in text or status == "warning"


def test_little_memory_and_swap(root: Path) -> None:
    write(root, "sys/fs/cgroup/memory.max", str(3 * GIB))
    write(root, "sys/fs/cgroup/memory.current", str(GIB))
    swap = f"\nSwapTotal: {8 * GIB // 1024} kB\nSwapFree: {GIB // 1024} kB"
    write(root, "proc/meminfo", f"MemAvailable: {100 * GIB // 1024} kB{swap}")
    memory, swapped = system.check_memory(root)
    assert memory.status == "warning"
    assert "2.0 GiB available (cgroup limit" in memory.value
    assert "7.0 GiB of 8.0 GiB in use" in swapped.value


def test_a_machine_that_tells_nothing(tmp_path: Path) -> None:
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    found = list(examining.doctor(quick=True, root=nothing, cuda=FakeCuda([])))
    assert {f.what for f in found} >= {"processor", "cores", "memory nodes", "memory", "torch", "GPU"}
    assert not [f for f in found if f.status == "problem"]
    assert guessed(nothing).cpu.isa == "scalar"


def test_a_check_that_fails_is_a_warning() -> None:
    def fails() -> Finding:
        raise ZeroDivisionError("on this machine only")

    (found,) = examine("odd", fails)
    assert (found.status, found.what) == ("warning", "odd")
    assert "ZeroDivisionError: on this machine only" in found.value


def test_packages() -> None:
    found = {f.what: f for f in system.check_packages({"torch": "2.0", "transformers": "99.1"})}
    assert found["torch"].status == "ok"
    assert found["transformers"].status == "problem"
    assert "transformers>=99.1" in found["transformers"].advice
    assert {f.status for f in system.check_packages()} == {"ok"}


class FakeCuda:
    """A machine with the cards of the list; rates are of a good one unless given."""

    def __init__(self, cards: list[str], *, built: str | None = "13.0", copy: float = 25.0) -> None:
        self.cards, self.version, self.copy = cards, built, copy

    def built(self) -> str | None:
        return self.version

    def names(self) -> list[str]:
        return self.cards

    def memory(self, index: int) -> tuple[int, int]:
        return 20 * GIB, 24 * GIB

    def copy_gb_s(self, index: int, *, to_gpu: bool) -> float:
        return self.copy if to_gpu else self.copy - 1

    def read_gb_s(self, index: int) -> float:
        return 900.0

    def bf16_tflops(self, index: int) -> float:
        return 150.0


def test_gpus(tmp_path: Path) -> None:
    driver = tmp_path / "version"
    driver.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.03  Tue\nGCC\n")
    card, pcie, rates, handoff = check_gpu(FakeCuda(["NVIDIA GeForce RTX 4090"]), driver=driver)
    assert card.status == "ok"
    assert "20.0 GiB of 24.0 GiB free, driver 580.159.03" in card.value
    assert pcie.figures == {"to_gpu": 25.0, "back": 24.0}
    assert rates.figures == {"gb_s": 900.0, "tflops": 150.0}
    assert "not measured" in handoff.value
    slow = list(check_gpu(FakeCuda(["X"], copy=3.0), driver=driver))[1]
    assert slow.status == "warning"
    assert "slot" in slow.advice
    (blind,) = check_gpu(FakeCuda([], built=None), driver=driver)
    assert (blind.status, "build for the CPU" in blind.value) == ("warning", True)
    (hidden,) = check_gpu(FakeCuda([]), driver=driver)
    assert hidden.status == "problem"


def child(text: str) -> tuple[str, ...]:
    return (sys.executable, "-c", text)


def test_a_set_that_kills_its_process_is_a_problem() -> None:
    script = 'import os, signal; print(\'{"isa": "amx"}\', flush=True); os.kill(os.getpid(), signal.SIGILL)'
    (found,) = check_isas(child(script))
    assert (found.what, found.status) == ("set amx", "problem")
    assert "SIGILL" in found.value
    denied = 'print(\'{"isa": "amx", "error": "denied"}\')'
    (found,) = check_isas(child(denied))
    assert (found.status, "arch_prctl" in found.value) == ("warning", True)
    (found,) = check_isas(child("raise SystemExit('no extension')"))
    assert (found.status, found.value) == ("problem", "no extension")
    (found,) = check_isas(child("import time; time.sleep(60)"), timeout=0.2)
    assert found.status == "warning"


def test_direct_reads_of_the_disk(tmp_path: Path) -> None:
    try:
        rates = disk.probe_disk(tmp_path, seconds=0.5, sample=8 * 2**20)
    except OSError as error:
        pytest.skip(f"no direct reads here: {error}")
    assert rates.gb_s > 0
    assert rates.latency_us > 0
    assert list(tmp_path.iterdir()) == []
    big = tmp_path / "model" / "weights"
    big.parent.mkdir()
    big.write_bytes(os.urandom(9 * 2**20))
    assert disk.largest_file(tmp_path, 8 * 2**20) == big
    assert disk.largest_file(tmp_path, 10 * 2**20) is None
    assert disk.probe_disk(tmp_path, seconds=0.5, sample=8 * 2**20).bytes <= 9 * 2**20


def test_a_disk_without_direct_reads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(examining, "probe_disk", refuse)
    found = examining.check_disk(tmp_path)
    assert (found.status, "Invalid argument" in found.value) == ("warning", True)


MEASURED = [
    ok("memory reads", "", gb_s=60.0),
    ok("experts' operator", "", share=0.8, tops=1.5),
    ok("disk", "", gb_s=3.0, latency_us=90.0),
    ok("GPU 0", "", name="NVIDIA GeForce RTX 4090", total=24 * GIB, free=23 * GIB),
    ok("PCIe of GPU 0", "", to_gpu=26.0, back=25.0),
    ok("rates of GPU 0", "", gb_s=930.0, tflops=150.0),
]


def test_measurements_become_a_profile(root: Path, tmp_path: Path) -> None:
    profile = examining.make_profile(MEASURED, root)
    figures = dict(profile.figures())
    assert figures["ram.read_gb_s"].value == 60.0
    assert figures["ram.read_gb_s"].basis == "measured"
    assert figures["gpu.read_gb_s"].value == 930.0
    assert figures["pcie.copy_gb_s"].value == 26.0
    assert figures["cpu.expert_share"].value == 0.8
    assert figures["cpu.op_us"].basis == "estimate"
    assert (profile.cpu.name, profile.cpu.isa, profile.ram.bytes) == ("Paper 9000", "amx", 128 * GIB)
    file = tmp_path / "here.json"
    file.write_text(profile.model_dump_json(exclude_none=True))
    assert load_hardware(str(file)) == profile
    told = CliRunner().invoke(cli.app, ["plan", "synthetic:qwen3-30b-a3b", "--hardware", str(file), "--json"])
    assert told.exit_code == 0, told.output
    assert json.loads(told.output)["figures"]["ram.read_gb_s"]["basis"] == "measured"


def test_plans_of_this_machine_use_what_the_doctor_kept(root: Path, own_cache: Path) -> None:
    assert this_machine(root).ram.read_gb_s.basis == "estimate"
    own_cache.mkdir()
    kept = examining.make_profile(MEASURED[:3], root)
    (own_cache / "hardware.json").write_text(kept.model_dump_json(exclude_none=True))
    assert this_machine(root).ram.read_gb_s.basis == "measured"
    # Of another processor, or torn: as if it were not there.
    write(root, "proc/cpuinfo", "model name : Other\nflags : avx2")
    assert this_machine(root).ram.read_gb_s.basis == "estimate"
    (own_cache / "hardware.json").write_text("{")
    assert this_machine(root).ram.read_gb_s.basis == "estimate"


def test_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own_cache: Path) -> None:
    def findings(status: str) -> Callable[..., list[Finding]]:
        return lambda **_: [*MEASURED[:3], Finding("GPU", status, "a value", "an advice")]  # type: ignore[arg-type]

    monkeypatch.setattr(examining, "doctor", findings("problem"))
    told = CliRunner().invoke(cli.app, ["doctor"])
    assert told.exit_code == 3
    assert "-> an advice" in told.output
    assert (own_cache / "hardware.json").is_file()
    assert "wrote" not in told.output
    monkeypatch.setattr(examining, "doctor", findings("warning"))
    file = tmp_path / "profile.json"
    told = CliRunner().invoke(cli.app, ["doctor", "--json", "--write-profile", str(file)])
    assert told.exit_code == 0
    report = json.loads(told.stdout)
    assert list(report) == ["kind", "version", "ok", "findings"]
    assert list(report["findings"][0]) == ["what", "status", "value", "advice", "figures"]
    assert load_hardware(str(file)).ram.read_gb_s.value == 60.0
    told = CliRunner().invoke(cli.app, ["doctor", "--write-profile", "/no/such/folder/x.json"])
    assert told.exit_code == 2
    assert "--write-profile /no/such/folder/x.json: cannot be written" in told.output


def test_this_machine(own_cache: Path) -> None:
    quick = CliRunner().invoke(cli.app, ["doctor", "--quick"])
    assert quick.exit_code in (0, 3)
    assert "Traceback" not in quick.output
    assert not (own_cache / "hardware.json").exists()


def test_every_set_of_this_machine_computes_alike() -> None:
    found = list(check_isas())
    assert found
    assert [f for f in found if f.status == "problem"] == []
    from hetero import cpu

    assert {f.what for f in found} >= {f"set {isa}" for isa in cpu.isas()}


def test_measuring_memory_yields_rates() -> None:
    from hetero.doctor.measure import check_memory_reads, check_torch

    by_name = {f.what: f for f in check_memory_reads(64 * 2**20)}
    assert by_name["memory reads"].figures["gb_s"] > 0
    assert 0 < by_name["experts' operator"].figures["share"] <= 1
    assert by_name["experts' operator"].figures["tops"] > 0
    assert check_torch().figures["tflops"] > 0
