"""The GPU: what it is, its memory, and how fast PCIe and its own memory are.

The measurements go through ``Cuda``, so that what is made of them is tested where there is no GPU.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from hetero.doctor.finding import Finding, ok, problem, warning
from hetero.plan.sizes import gib

COPY_BYTES = 256 * 2**20
READ_BYTES = 2**30
_SLOW_PCIE_GB_S = 10.0
_DRIVER = Path("/proc/driver/nvidia/version")


class Cuda(Protocol):
    """What is asked of CUDA."""

    def built(self) -> str | None:
        """The CUDA version that torch was built for; None for a build without."""

    def names(self) -> list[str]:
        """Of the devices that may be used."""

    def memory(self, index: int) -> tuple[int, int]:
        """Bytes free and in all."""

    def copy_gb_s(self, index: int, *, to_gpu: bool) -> float:
        """Of copies between pinned memory and the device."""

    def read_gb_s(self, index: int) -> float:
        """Of a device that reads its own memory."""

    def bf16_tflops(self, index: int) -> float:
        """Of large products in bfloat16."""


class TorchCuda:
    """CUDA by torch."""

    def built(self) -> str | None:
        import torch

        return torch.version.cuda

    def names(self) -> list[str]:
        import torch

        return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]

    def memory(self, index: int) -> tuple[int, int]:
        import torch

        return torch.cuda.mem_get_info(index)

    def copy_gb_s(self, index: int, *, to_gpu: bool) -> float:
        import torch

        size = min(COPY_BYTES, self.memory(index)[0] // 4)
        host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        device = torch.empty(size, dtype=torch.uint8, device=f"cuda:{index}")
        source, target = (host, device) if to_gpu else (device, host)
        return size / self._seconds(index, lambda: target.copy_(source, non_blocking=True)) / 1e9

    def read_gb_s(self, index: int) -> float:
        import torch

        size = min(READ_BYTES, self.memory(index)[0] // 4)
        values = torch.zeros(size // 4, dtype=torch.float32, device=f"cuda:{index}")
        return size / self._seconds(index, values.sum) / 1e9

    def bf16_tflops(self, index: int) -> float:
        import torch

        a = torch.randn(4096, 4096, dtype=torch.bfloat16, device=f"cuda:{index}")
        return 2 * 4096**3 / self._seconds(index, lambda: torch.mm(a, a)) / 1e12

    def _seconds(self, index: int, call: Call) -> float:
        """Of one of several calls in a row, the fastest of three rounds."""
        import torch

        event: Any = torch.cuda.Event
        times: list[float] = []
        with torch.cuda.device(index):
            call()
            for _ in range(3):
                start, end = event(enable_timing=True), event(enable_timing=True)
                start.record()
                for _ in range(4):
                    call()
                end.record()
                end.synchronize()
                times.append(start.elapsed_time(end) / 4e3)
        return min(times)


class Call(Protocol):
    """Something to time."""

    def __call__(self) -> object: ...


def check_gpu(cuda: Cuda, *, measure: bool = True, driver: Path = _DRIVER) -> Iterator[Finding]:
    """Each GPU, its memory and, where ``measure``, its rates."""
    names = cuda.names()
    version = _driver_version(driver)
    if not names:
        if version is None and shutil.which("nvidia-smi") is None:
            yield ok("GPU", "none: everything runs on the CPU")
        elif cuda.built() is None:
            advice = "install a CUDA build of torch: https://pytorch.org/get-started"
            yield warning("GPU", f"driver {version or 'unknown'}, but torch is a build for the CPU", advice)
        else:
            advice = "CUDA_VISIBLE_DEVICES may hide it, or the driver is older than torch's CUDA needs"
            yield problem(
                "GPU", f"driver {version or 'unknown'}, torch for CUDA {cuda.built()} finds no device", advice
            )
        return
    driver_text = f", driver {version}" if version else ""
    for index, name in enumerate(names):
        free, total = cuda.memory(index)
        value = f"{name}, {gib(free)} of {gib(total)} free{driver_text}, torch for CUDA {cuda.built()}"
        what = f"GPU {index}"
        figures = {"name": name, "total": total, "free": free}
        if free < total // 2:
            yield warning(what, value, "other programs hold most of its memory (nvidia-smi)", **figures)
        else:
            yield ok(what, value, **figures)
        if measure:
            yield from _rates(cuda, index)


def _rates(cuda: Cuda, index: int) -> Iterator[Finding]:
    there, back = cuda.copy_gb_s(index, to_gpu=True), cuda.copy_gb_s(index, to_gpu=False)
    value = f"{there:.1f} GB/s to the GPU, {back:.1f} back, pinned memory"
    if there < _SLOW_PCIE_GB_S:
        advice = "the card may sit in a narrow slot (nvidia-smi -q, 'Link Width') or save power"
        yield warning(f"PCIe of GPU {index}", value, advice, to_gpu=there, back=back)
    else:
        yield ok(f"PCIe of GPU {index}", value, to_gpu=there, back=back)
    read, tflops = cuda.read_gb_s(index), cuda.bf16_tflops(index)
    value = f"{read:.0f} GB/s, {tflops:.0f} TFLOPS in bfloat16"
    yield ok(f"rates of GPU {index}", value, gb_s=read, tflops=tflops)
    yield ok(f"hand-off to GPU {index}", "not measured here: runs do not use it yet")


def _driver_version(path: Path) -> str | None:
    try:
        words = path.read_text().splitlines()[0].split()
    except (OSError, IndexError):
        return None
    return next((word for word in words if word[:1].isdigit() and "." in word), None)
