"""Kernels that begin while those before them end (CUDA's programmatic dependent launch, from Hopper on).

A kernel that is launched so may read what no kernel of a step writes, its weights, as soon as there is room
for it. Before anything else it waits until the one before it is done (``overlap_kernels.await_last``), in
every program, so that what holds for that one holds for all before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch

ENABLED = True
"""Read when a kernel is launched, and so when a graph is captured."""

_IN_TURN = ContextVar("_IN_TURN", default=False)


def enabled() -> bool:
    """Whether kernels that this thread launches may begin while those before them end."""
    return ENABLED and not _IN_TURN.get()


@cache
def _able(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def overlap(device: torch.device) -> dict[str, Any]:
    """Arguments of a launch of a kernel that has ``PDL``."""
    on = enabled() and _able(device)
    return {"PDL": True, "launch_pdl": True} if on else {"PDL": False}


@contextmanager
def in_turn() -> Iterator[None]:
    """What is launched within waits as any kernel does: for work that stands right behind a copy, which is no
    kernel that could let another one begin. Other threads' launches are as they were."""
    token = _IN_TURN.set(True)
    try:
        yield
    finally:
        _IN_TURN.reset(token)
