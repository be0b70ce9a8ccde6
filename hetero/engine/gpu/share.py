"""How the experts that are not in GPU memory are best split: in the proportion of two measured bandwidths."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from hetero.cpu import CpuExperts
from hetero.ops.gpu.pinned import PinnedArena

_LAYERS, _ROUNDS = 12, 3
_COPIES = 24  # experts of a timed copy
IN_PLACE = 0.88
"""What kernels that read host memory in place reach of the copy engine's bandwidth (measured: 47 to 50 of
54.6 GB/s)."""


class Rates(NamedTuple):
    """Bytes of experts a second: by the CPU's own kernels, and over the bus by the GPU's."""

    cpu: float
    bus: float

    @property
    def share(self) -> float:
        """Of the experts, that the GPU takes if both begin and end together."""
        return self.bus / (self.bus + self.cpu)


def measure(experts: Sequence[CpuExperts], arenas: Sequence[PinnedArena], device: torch.device) -> Rates:
    """A few milliseconds of each, on weights of many layers, so that caches hold none of them."""
    return Rates(_cpu_rate(experts), _bus_rate(arenas, device))


def _cpu_rate(experts: Sequence[CpuExperts]) -> float:
    rates = []
    every = max(1, len(experts) // _LAYERS)
    for _ in range(_ROUNDS):
        for one in experts[::every]:
            spec = one.spec
            x = torch.randn(1, spec.hidden).bfloat16()
            ids = torch.randperm(spec.num_experts)[: spec.top_k].view(1, -1)
            weights = torch.full((1, ids.numel()), 1.0 / ids.numel())
            began = time.perf_counter()
            one.forward(x, ids, weights)
            rates.append(ids.numel() * one.whole_bytes / (time.perf_counter() - began))
    return statistics.median(rates)


def _bus_rate(arenas: Sequence[PinnedArena], device: torch.device) -> float:
    best = 0.0
    for arena in arenas[:_ROUNDS]:
        some = arena.view[: min(_COPIES, arena.pieces)]
        here = torch.empty_like(some, device=device)
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        here.copy_(some, non_blocking=True)
        torch.cuda.synchronize(device)
        best = max(best, some.numel() / (time.perf_counter() - began))
    return IN_PLACE * best
