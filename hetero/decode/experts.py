"""What a decoder asks of routed experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Pending(Protocol):
    """Experts at work for a piece of a prompt."""

    def collect(self) -> Tensor:
        """The weighted sum float32 [T, H] on the device. Once."""
        ...


@dataclass(slots=True)
class Done:
    """A ``Pending`` with nothing left to do."""

    sum: Tensor

    def collect(self) -> Tensor:
        return self.sum


class LayerExperts(Protocol):
    """The routed experts of one MoE layer, over all tiers. ids outside [0, experts) contribute zero."""

    def submit(self, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        """Start on x [R, H], ids int64 [R, k] and weights float32 [R, k], all on the device and contiguous.
        They stay unchanged until ``collect``."""
        ...

    def collect(self) -> Tensor:
        """The weighted sum float32 [R, H] of what was submitted last."""
        ...

    def prefill(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum float32 [T, H] of any number of tokens, eagerly."""
        ...

    def prefill_submit(self, x: Tensor, ids: Tensor, weights: Tensor) -> Pending:
        """Begin that, so that the caller may go on with other work of the device. Several may be pending;
        they are collected in order."""
        ...

    def takes_turns(self, rows: int) -> bool:
        """Whether a chunk of so many rows is better computed in two halves, one of them on the CPU while the
        device works on the other."""
        ...


class CpuBackend(Protocol):
    """``hetero.cpu.CpuExperts``, as far as it is used here."""

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor: ...


class DirectExperts:
    """All experts on the CPU, computed when they are submitted. Not capturable: it waits for the device."""

    def __init__(self, backend: CpuBackend) -> None:
        self._backend = backend
        self._sum: Tensor | None = None

    def submit(self, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        self._sum = self.prefill(x, ids, weights)

    def collect(self) -> Tensor:
        if self._sum is None:
            raise RuntimeError("nothing was submitted")
        result, self._sum = self._sum, None
        return result

    def prefill(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        given = (part.to("cpu").contiguous() for part in (x, ids, weights))
        return self._backend.forward(*given).to(x.device, torch.float32)

    def prefill_submit(self, x: Tensor, ids: Tensor, weights: Tensor) -> Done:
        return Done(self.prefill(x, ids, weights))

    def takes_turns(self, rows: int) -> bool:
        return False
