"""Plain reads by a GPU, of its own memory or of pinned memory in place."""

from __future__ import annotations

import torch
from torch import Tensor

from hetero.ops.gpu import read_kernels

_WORDS, _TURNS = 1024, 16


def plain_read(memory: Tensor, device: torch.device | str) -> Tensor:
    """Read a contiguous tensor once with a kernel of ``device``, of which it is memory or by which it can be
    read (pinned); its bytes must be a multiple of 8. Returns int64 sums, by programs; not waited for."""
    words = memory.nbytes // 8
    programs = -(-words // (_WORDS * _TURNS))
    out = torch.empty(programs, dtype=torch.int64, device=device)
    read_kernels.read[(programs,)](memory.data_ptr(), words, out, WORDS=_WORDS, TURNS=_TURNS)
    return out
