"""The routed experts of one layer over all tiers: GPU memory, the CPU, and host memory read over PCIe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hetero.cpu import CpuExperts
from hetero.ops.gpu.hybrid_shared import HybridShared
from hetero.ops.gpu.pinned import PinnedArena


class Port(Protocol):
    """The CPU's side of a decode step, by MoE layer, from 0: a hand-off's lane, or ``DirectPort``."""

    def payload(self, layer: int) -> Any:
        """Tensors ``x`` [R, hidden], ``ids`` [R, k], ``weights`` float32 [R, k] and ``result`` float32
        [R, hidden], which kernels of the device may write and read; ids outside [0, experts) are not the
        CPU's."""

    def record_submit(self, layer: int) -> None:
        """The payload was written; the CPU may begin."""

    def record_collect(self, layer: int) -> object:
        """What follows on the stream finds the result."""


class DirectPayload(NamedTuple):
    x: Tensor
    ids: Tensor
    weights: Tensor
    result: Tensor


class DirectPort:
    """Computes at once and on the spot: for tests, and steps outside a graph. ``rows``: most of a step."""

    def __init__(self, experts: Sequence[CpuExperts], rows: int, device: str | torch.device = "cpu") -> None:
        self._experts = list(experts)
        spec = self._experts[0].spec
        shape = rows, spec.top_k
        self._payload = DirectPayload(
            torch.zeros(rows, spec.hidden, dtype=torch.bfloat16, device=device),
            torch.full(shape, -1, dtype=torch.int64, device=device),
            torch.zeros(shape, dtype=torch.float32, device=device),
            torch.zeros(rows, spec.hidden, dtype=torch.float32, device=device),
        )

    def payload(self, layer: int) -> DirectPayload:
        return self._payload

    def record_submit(self, layer: int) -> None:
        x, ids, weights, result = self._payload
        result.copy_(self._experts[layer].forward(x.cpu(), ids.cpu(), weights.cpu()))

    def record_collect(self, layer: int) -> None:
        pass


@dataclass(frozen=True, slots=True)
class TierCounts:
    """Experts of decode steps since the start, each once a step: found in GPU memory, read from host memory
    by the GPU, computed by the CPU; and those brought into GPU memory."""

    gpu: int
    pcie: int
    cpu: int
    moved: int

    @property
    def hit_rate(self) -> float | None:
        """Share found in GPU memory; None before the first step."""
        total = self.gpu + self.pcie + self.cpu
        return self.gpu / total if total else None


class HybridExperts:
    """The experts of one MoE layer. ``layer``: its number among MoE layers, by which ``port`` knows it.

    ``slots`` experts have room in GPU memory. ``arena``: the CPU's memory as the GPU sees it; without one the
    CPU computes everything and ``slots`` is 0. What layers have in common stands in ``shared``.

    A decode step is ``submit``, the GPU's other work, ``collect``; both can be captured.
    """

    def __init__(
        self,
        experts: CpuExperts,
        layer: int,
        port: Port,
        shared: HybridShared,
        *,
        slots: int = 0,
        arena: PinnedArena | None = None,
    ) -> None:
        self.experts, self.layer, self.port, self.shared = experts, layer, port, shared
        self.slots, self.arena = slots, arena
        self._rows = 0

    @property
    def nbytes(self) -> int:
        """Bytes of GPU memory of this layer; what layers share counts there."""
        return self.slots * self.experts.whole_bytes

    def submit(self, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        """Starts the CPU's share, and tells who computes what: x bf16 [R, hidden], ids int64 [R, k], weights
        float32 [R, k]; R at most 16. ids outside [0, experts) contribute nothing."""
        rows = x.shape[0]
        to = self.port.payload(self.layer)
        to.x[:rows].copy_(x)
        to.ids[:rows].copy_(ids)
        to.weights[:rows].copy_(weights)
        self.port.record_submit(self.layer)
        self._rows = rows

    def collect(self, extra: Tensor | None = None) -> Tensor:
        """float32 [R, hidden]: the GPU's share, then the CPU's, then ``extra`` [R, hidden] added to them."""
        self.port.record_collect(self.layer)
        result: Tensor = self.port.payload(self.layer).result[: self._rows]
        return result.clone() if extra is None else result + extra

    def prefill(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x bf16 [T, hidden], ids int64 [T, k], weights float32 [T, k], any T -> float32 [T, hidden];
        outside graphs, waits for the device."""
        return self.experts.forward(x.cpu(), ids.cpu(), weights.cpu()).to(x.device)

    def seed(self, counts: Sequence[float]) -> None:
        """Fill the slots with the experts of the highest ``counts`` [experts]."""

    def counts(self) -> TierCounts:
        """Waits for the device."""
        return TierCounts(0, 0, 0, 0)
