"""Experts of a layer whose sum is added one layer later, so that the CPU computes them while the GPU is at
the next layer's attention. It changes the model's output, so it is off unless asked for.

Of each token's experts that the CPU computes, the ``count`` with the lowest weights are put off; what the GPU
computes itself never is. A put-off id e stands in the hand-off's payload as e + experts: the CPU side
computes it once the layer's result is out, and adds it to the next layer's result. The last layer puts off
nothing, so every chosen expert counts within its step.
"""

from __future__ import annotations

import torch
from torch import Tensor


def put_off(cpu_ids: Tensor, weights: Tensor, count: int, experts: int) -> Tensor:
    """ids [R, k] of the CPU's experts, others outside [0, experts), with those put off + ``experts``.

    Of equal weights the later one is put off first. The reference of the kernel that hands over.
    """
    mine = (cpu_ids >= 0) & (cpu_ids < experts)
    place = torch.arange(cpu_ids.shape[1], device=cpu_ids.device)
    this, other = weights.unsqueeze(2), weights.unsqueeze(1)
    lower = (other < this) | ((other == this) & (place > place.unsqueeze(1)))
    rank = (lower & mine.unsqueeze(1)).sum(dim=2)
    return torch.where(mine & (rank < count), cpu_ids + experts, cpu_ids)


def parted(ids: Tensor, experts: int, *, last: bool) -> tuple[Tensor, Tensor]:
    """(ids to compute now, ids to compute later), both like ``ids`` with -1 for the others, as the CPU side
    of the hand-off takes ids of a payload. ``last``: at the last layer all are computed now."""
    later = (ids >= experts) & (ids < 2 * experts)
    own = torch.where(later, ids - experts, -1)
    nothing = torch.full_like(ids, -1)
    return (torch.where(later, own, ids), nothing) if last else (torch.where(later, nothing, ids), own)
