"""Experts of a prompt's piece on the CPU, beside what the device does meanwhile."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from hetero.cpu import CpuExperts
from hetero.ops.gpu import stamps
from hetero.trace import COPY, EXPERTS, WAIT, Counted, clock, recorder


class Offloaded:
    """One piece: ``collect`` may be called once, and raises what the work raised."""

    def __init__(self, result: Future[Tensor], like: Tensor) -> None:
        self._result, self._like = result, like

    def collect(self) -> Tensor:
        """float32 [T, hidden] on the device of what was submitted."""
        result = self._result.result()
        stamps.lap(WAIT)
        if self._like.device.type == "cpu":
            return result
        out = result.to(self._like.device, non_blocking=True)
        stamps.lap(COPY, lane="pcie", nbytes=result.nbytes)
        return out


class Offload:
    """Pieces in the order of their submits, one after the other: the experts' own pool has all the cores.

    Nothing waits for the device on the calling thread: the copies of a piece are queued behind what its
    stream holds, and a thread waits for them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def submit(
        self, experts: CpuExperts, x: Tensor, ids: Tensor, weights: Tensor, layer: int = -1
    ) -> Offloaded:
        """x [T, hidden], ids and weights [T, k], on one device; they stay as they are until ``collect``.
        ``layer``: for the trace, where no tape knows it."""
        given = x.contiguous(), ids.contiguous(), weights.contiguous()
        host, there = _to_host(given)
        if there is not None:
            stamps.lap(COPY, lane="pcie", nbytes=sum(one.nbytes for one in host))
        number = stamps.layer_now(layer)

        def work() -> Tensor:
            if there is not None:
                there.synchronize()
            began = clock()
            with torch.inference_mode():
                out = experts.forward(*host)
            if recorder.active:
                ids = host[1]
                size = experts.nbytes // experts.spec.num_experts
                read = Counted(_distinct(ids, experts.spec.num_experts), size)
                recorder.add(("cpu", EXPERTS, number, began, clock(), len(ids), read))
            if there is None:
                return out
            with torch.inference_mode():
                return torch.empty_like(out, pin_memory=True).copy_(out)

        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, thread_name_prefix="hetero-prefill")
            return Offloaded(self._pool.submit(work), x)


def _to_host(given: tuple[Tensor, ...]) -> tuple[list[Tensor], Any]:
    """The tensors on the CPU, and the event at which they have come; None where they were there."""
    if given[0].device.type == "cpu":
        return list(given), None
    host = [
        torch.empty(one.shape, dtype=one.dtype, pin_memory=True).copy_(one, non_blocking=True)
        for one in given
    ]
    event: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record()
    return host, event


def _distinct(ids: Tensor, experts: int) -> int:
    real = ids[(ids >= 0) & (ids < experts)]
    return int(torch.bincount(real, minlength=1).count_nonzero())


offload = Offload()
"""The one of this process."""
