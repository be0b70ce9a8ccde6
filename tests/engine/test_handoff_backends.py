"""How a backend is chosen and named, and the kernels' text, on machines of any kind."""

from __future__ import annotations

import ctypes
import logging
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero.core import InputError, MachineError
from hetero.engine import handoff_choice
from hetero.engine.handoff_choice import make_backend
from hetero.engine.handoff_ptx import PTX
from hetero.engine.handoff_trial import Trial
from hetero.hw import cuda_driver
from tests.engine.handoffs import POINTS, SPEC, THROW, make_experts


def test_without_a_device() -> None:
    assert make_backend("auto", "cpu").name == "thread"
    assert "no GPU" in make_backend("auto", "cpu").why
    for name in handoff_choice.GPU_BACKENDS:
        with pytest.raises(InputError, match="needs a CUDA device, not cpu"):
            make_backend(name, "cpu")
    with pytest.raises(InputError, match="valid: auto, memop, spin, hostfunc, thread"):
        make_backend("graph", "cpu")
    with pytest.raises(InputError, match="does not work on cuda:0"):
        make_backend("thread", "cuda:0")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_cuda() -> None:
    with pytest.raises(MachineError, match="torch sees no CUDA device"):
        make_backend("auto", "cuda")


class Fake:
    def __init__(self, name: str, error: Exception | None) -> None:
        self.name, self.error = name, error

    def __call__(self, device: torch.device, why: str) -> Fake:
        if self.error is not None:
            raise self.error
        self.why = why
        return self


SLOW, FAST = 12.61, 7.44


@pytest.mark.parametrize("work", [False, True])
@pytest.mark.parametrize(
    ("errors", "times", "chosen", "why"),
    [
        ((None, None, None), (SLOW, FAST), "spin", "memop 12.6 us a layer, spin 7.4 us a layer"),
        ((None, None, None), (FAST, SLOW), "memop", "memop 7.4 us a layer, spin 12.6 us a layer"),
        ((None, None, None), (FAST, FAST + 0.5), "spin", "memop 7.4 us a layer, spin 7.9 us a layer"),
        (
            (MachineError("switched off"), None, None),
            (SLOW,),
            "spin",
            "spin 12.6 us a layer; memop: switched off",
        ),
        (
            (MachineError("off"), RuntimeError("no such kernel"), None),
            (SLOW,),
            "hostfunc",
            "hostfunc 12.6 us a layer; memop: off; spin: hand-off 'spin' on cuda: no such kernel",
        ),
        (
            (None, None, None),
            (SLOW, MachineError("a timed trial did not come through")),
            "memop",
            "memop 12.6 us a layer; spin: a timed trial did not come through",
        ),
    ],
)
def test_auto(  # noqa: PLR0917
    errors: tuple[Exception | None, ...],
    times: tuple[float | Exception, ...],
    chosen: str,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    work: bool,
) -> None:
    names = handoff_choice.GPU_BACKENDS
    fakes: dict[str, Any] = {name: Fake(name, error) for name, error in zip(names, errors, strict=True)}
    left = list(times)
    closed = []

    class Timed:
        """The first time is longer: nobody asks for it."""

        def __init__(self, backend: Any) -> None:
            self.found, self.runs = left.pop(0), 0

        def layer_us(self) -> float:
            if isinstance(self.found, Exception):
                raise self.found
            self.runs += 1
            return self.found + (50.0 if self.runs == 1 else 0.0)

        def close(self) -> None:
            closed.append(self)

    monkeypatch.setattr(handoff_choice, "_GPU", fakes)
    monkeypatch.setattr(handoff_choice, "_trial", lambda backend: None)
    if not work:
        monkeypatch.setattr(handoff_choice, "_NoWork", Timed)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with caplog.at_level(logging.INFO, "hetero.handoff"):
        backend = make_backend("auto", "cuda", Timed if work else None)
    if work:
        why = why.replace(" us a layer;", " us a layer with its experts;")
        why = why if ";" in why else f"{why} with its experts"
    assert (backend.name, backend.why) == (chosen, why)
    assert len(closed) == sum(not isinstance(one, Exception) for one in times)
    assert caplog.messages == [f"hand-off by {chosen} ({why})"]
    assert not left


def test_no_backend_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    names = handoff_choice.GPU_BACKENDS
    fakes: dict[str, Any] = {name: Fake(name, MachineError(f"no {name}")) for name in names}
    monkeypatch.setattr(handoff_choice, "_GPU", fakes)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(MachineError, match="no hand-off works on cuda: memop: no memop; spin: no spin"):
        make_backend("auto", "cuda")


def test_a_named_backend_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes: dict[str, Any] = {name: Fake(name, None) for name in handoff_choice.GPU_BACKENDS}
    fakes["memop"].error = MachineError("switched off")
    monkeypatch.setattr(handoff_choice, "_GPU", fakes)
    monkeypatch.setattr(handoff_choice, "_trial", lambda backend: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(MachineError, match="switched off"):
        make_backend("memop", "cuda")


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(MachineError, match="no CUDA driver: libcuda"):
        cuda_driver.Driver()


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="needs ptxas of the CUDA toolkit")
def test_kernels_assemble(tmp_path: Path) -> None:
    source = tmp_path / "handoff.ptx"
    source.write_text(PTX)
    for target in ("sm_80", "sm_90"):
        command = ["ptxas", f"-arch={target}", str(source), "-o", str(tmp_path / "out")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_a_trial_with_experts(generator: torch.Generator) -> None:
    """A thread in the GPU's place: every layer is computed, in each replay by other experts."""
    experts = make_experts(3, generator)
    trial = Trial(experts, SPEC.top_k, torch.bfloat16, torch.int64, make_backend("thread", "cpu"))
    seen = set()
    for _ in range(8):
        assert trial.layer_us() > 0.0
        seen.add(tuple(trial._ids[0].flatten().tolist()))
    assert len(seen) > 1
    assert [one[4] > 0 for one in trial._channel.times(0)] == [True] * 3
    trial._channel.inject(POINTS["work"], THROW, 0, 1, 0)
    with pytest.raises(MachineError, match=r"a timed trial: layer 1: a fault that a test asked for"):
        trial.layer_us()
    assert trial.layer_us() > 0.0
    trial.close()
