"""The GPU backends without a GPU: over a libcuda of the test's own that runs every operation at once."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hetero.core import MachineError
from hetero.engine import handoff as handoffs
from hetero.engine.gpu.gate import FlagGate
from hetero.engine.handoff import Handoff
from hetero.engine.handoff_backends import (
    GpuBackend,
    HostFuncBackend,
    MemopBackend,
    SpinBackend,
    ThreadBackend,
)
from hetero.engine.handoff_ptx import PTX
from hetero.hw.cuda_driver import Driver
from tests.engine.handoffs import SPEC, make_experts

SOURCE = Path(__file__).with_name("fake_libcuda.c")
STREAM = 77
Make = Callable[..., tuple[Driver, ctypes.CDLL]]


@pytest.fixture
def make_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    real = ctypes.CDLL

    def make(*flags: str) -> tuple[Driver, ctypes.CDLL]:
        library = tmp_path / "libcuda.so.1"
        command = ["gcc", "-Wall", "-Werror", "-shared", "-fPIC", "-O1", *flags, str(SOURCE), "-o"]
        subprocess.run([*command, str(library)], check=True)
        fake = real(str(library))
        monkeypatch.setattr(ctypes, "CDLL", lambda name: {"libcuda.so.1": fake}[name])
        return Driver(), fake

    return make


def test_calls(make_driver: Make) -> None:
    driver, _ = make_driver()
    assert driver.version() == 13000
    assert driver.attribute(92, 0) == 1
    assert driver.attribute(1, 0) == 0
    assert driver.no_memory_operations(1) is None  # the second version needs no attribute
    value = ctypes.c_uint32(5)
    at = driver.device_address(ctypes.addressof(value))
    driver.write_value(STREAM, at, 9)
    assert value.value == 9
    driver.wait_value(STREAM, at, 9)
    other = ctypes.c_uint32(12)
    driver.copy_up(at, ctypes.addressof(other), 4, STREAM)
    assert value.value == 12
    with pytest.raises(MachineError, match="cuMemcpyHtoDAsync: a failure"):
        driver.copy_up(at, ctypes.addressof(other), 4, 0)
    assert driver.function(driver.load_module(PTX), "hetero_collect") == 2
    assert driver.graph_nodes(5) == {"kernel": 3, "memop": 2}
    for call in (
        lambda: driver.graph_nodes(0),
        lambda: driver.write_value(0, at, 1),
        lambda: driver.load_module("no text"),
        lambda: driver.function(driver.load_module(PTX), "hetero_receive"),
        lambda: driver.launch(1, 1, 1, 0, []),
    ):
        with pytest.raises(MachineError, match=r"a failure that the test asked for \(CUDA error 999\)"):
            call()


def test_first_version_of_memory_operations(make_driver: Make) -> None:
    driver, _ = make_driver("-DOLD")
    assert driver.no_memory_operations(0) is None
    assert driver.no_memory_operations(1) == "the driver has stream memory operations switched off"
    value = ctypes.c_uint32(0)
    driver.write_value(STREAM, driver.device_address(ctypes.addressof(value)), 3)
    assert value.value == 3


def over_fake(kind: type[GpuBackend], driver: Driver, fake: ctypes.CDLL) -> GpuBackend:
    """A backend whose device is this process: what it takes from torch.cuda is put in its place."""

    class Faked(kind):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            self.why = "a test"
            self._driver = driver
            module = driver.load_module(PTX)
            self._send = driver.function(module, "hetero_send")
            self._collect = driver.function(module, "hetero_collect")
            self._bases = []
            self._launch_send([], 0)

        def _stream(self) -> int:
            return STREAM

        def memory(self, nbytes: int) -> Tensor:
            found = ThreadBackend().memory(nbytes)
            at = driver.device_address(found.data_ptr())
            self._bases.append((found.data_ptr(), nbytes, at))
            for name, value in (("channel_begin", at), ("channel_end", at + nbytes)):
                ctypes.c_uint64.in_dll(fake, name).value = value
            return found

        def device_view(self, memory: Tensor) -> Tensor:
            return memory

        def synchronize(self) -> None:
            pass

    return Faked()


@pytest.mark.parametrize("kind", [MemopBackend, SpinBackend, HostFuncBackend])
def test_steps(
    kind: type[GpuBackend],
    make_driver: Make,
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Recording is running here, so a step records anew; the same bits as the operator's."""
    driver, fake = make_driver()
    backend: Any = over_fake(kind, driver, fake)
    monkeypatch.setattr(handoffs, "make_backend", lambda name, device, work: backend)
    experts = make_experts(3, generator)
    handoff = Handoff(experts, rows=3, slots=SPEC.top_k, lanes=2)
    for step in range(60):
        rows = step % 3 + 1
        x = torch.randn(3, SPEC.hidden, generator=generator).bfloat16()
        ids = torch.randint(-1, SPEC.num_experts + 1, (3, SPEC.top_k), generator=generator)
        weights = torch.rand(3, SPEC.top_k, generator=generator)
        results: list[Sequence[Tensor]] = []
        with handoff.step({0: rows, 1: rows}):
            for layer in range(3):
                for lane in range(2):
                    handoff.record_submit(lane, layer, x, ids, weights)
                outs = [handoff.record_collect(lane, layer, torch.empty(3, SPEC.hidden)) for lane in range(2)]
                results.append(outs)
        for layer, outs in enumerate(results):
            want = experts[layer].forward(x[:rows], ids[:rows], weights[:rows])
            assert all(torch.equal(out[:rows], want) for out in outs)
    with pytest.raises(ValueError, match="outside the memory"):
        backend.submit(12345)
    with pytest.raises(ValueError, match="whole 32-bit words"):
        backend.receive(torch.zeros(3, dtype=torch.uint8), handoff._base)
    handoff.close()


@pytest.mark.parametrize("kind", [MemopBackend, SpinBackend, HostFuncBackend])
def test_a_gate_that_nobody_opens(kind: type[GpuBackend], make_driver: Make) -> None:
    """Whatever the backend, the stream goes on after a time, and says so once."""
    driver, fake = make_driver()
    backend: Any = over_fake(kind, driver, fake)
    backend.limit_s = 0.02
    gate = FlagGate(backend, 2)
    gate.open(1)
    gate.record(1)  # the stream is this thread, and comes through
    assert not gate.failed(1)
    for _ in range(2):
        gate.record(0)
        gate.open(0)  # too late
        assert gate.failed(0)
        assert not gate.failed(0)
    assert not gate.failed(1)
    gate.open(0)
    gate.record(0)
    assert not gate.failed(0)
    gate.open(0)
    gate.shut(0)  # no step has come through
    gate.record(0)
    assert gate.failed(0)
