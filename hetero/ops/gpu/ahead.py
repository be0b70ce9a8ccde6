"""Weights of the next kernels, brought into the GPU's L2 cache while it would only wait."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hetero.ops.gpu import ahead_kernels
from hetero.ops.gpu.packed import capability

ENABLED = True
"""Read when a graph is captured."""

MOST = 24 << 20
"""Bytes that are asked for at once: half of an H200's L2, of which what is used meanwhile needs a part."""

_CHUNK = 16 << 10
_PIECES = 4


def fetch_ahead(weights: Sequence[Tensor], most: int = MOST) -> None:
    """Ask for the first ``most`` bytes of some contiguous tensors, of the first ones first; one kernel, which
    waits for nothing. Bytes that are no multiple of 16 at a tensor's end are left out. Does nothing unless
    ENABLED, nor on a CPU or a GPU that has no instruction for it."""
    pieces: list[tuple[Tensor, int]] = []
    for weight in weights[:_PIECES]:
        size = min(weight.nbytes, most) // 16 * 16
        if size > 0 and weight.data_ptr() % 16 == 0:
            pieces.append((weight, size))
            most -= size
    if not (ENABLED and pieces and pieces[0][0].is_cuda):
        return
    if capability(pieces[0][0].device) < ahead_kernels.ASKS.value:
        return
    programs = sum(-(-size // _CHUNK) for _, size in pieces)
    pieces += [(pieces[0][0], 0)] * (_PIECES - len(pieces))
    ahead_kernels.fetch[(programs,)](
        *(weight for weight, _ in pieces), *(size for _, size in pieces),
        CHUNK=_CHUNK, num_warps=1,
    )  # fmt: skip
