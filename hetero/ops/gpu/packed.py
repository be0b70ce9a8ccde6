"""What kernels are told of a packed matrix, and the rows that they take."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from hetero.formats import ACT_GROUP, BLOCK_ROWS, Format, block_bytes, padded_k
from hetero.ops.gpu import expert_kernels
from hetero.ops.gpu.overlap import overlap

_SMALL = (86, 89, 120, 121)  # 99 KB; data centres' have 163 and more


def matrix_sizes(fmt: Format, n: int, k: int) -> dict[str, Any]:
    """Constants of the kernels for a packed matrix of n outputs and k inputs."""
    k_pad = padded_k(fmt, k)
    return {
        "K": k_pad,
        "N": n,
        "BLOCK_BYTES": block_bytes(fmt, k),
        "GROUP": fmt.group or ACT_GROUP,
        "SCALES_AT": k_pad * BLOCK_ROWS * fmt.code_bits // 8,
        "FORMAT": fmt.code,
    }


def capability(device: torch.device) -> int:
    """Of kernels' ASM: 0 where the interpreter runs them, else ten times the compute capability."""
    if device.type == "cpu":
        return 0
    return _capability(device) if device.type == "cuda" else 90


def is_roomy(asm: int) -> bool:
    """Whether a program may have more than 100 KB of shared memory, by what ``capability`` says."""
    return asm not in _SMALL


@cache
def _capability(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def padded_rows(x: Tensor, k_pad: int) -> Tensor:
    """float32 [T, k_pad] of rows [T, k], zeros beyond k; itself where it is so."""
    rows, k = x.shape
    if k == k_pad and x.dtype == torch.float32 and x.is_contiguous():
        return x
    padded = torch.zeros(rows, k_pad, dtype=torch.float32, device=x.device)
    padded[:, :k] = x
    return padded


def quantised_rows(fmt: Format, x: Tensor, k_pad: int) -> tuple[Tensor, Tensor]:
    """Rows [T, k] as kernels for few rows read them: words of int8 codes, and scales; for a format that
    takes values these, padded."""
    rows, k = x.shape
    if not fmt.rounds_activations:
        q = padded_rows(x, k_pad)
        return q, q
    q = torch.empty(rows, k_pad, dtype=torch.int8, device=x.device)
    scales = torch.empty(rows, k_pad // ACT_GROUP, dtype=torch.float32, device=x.device)
    expert_kernels.quantise_rows[(rows, -(-k_pad // ACT_GROUP // 4))](
        x, q, scales, k, k_pad, x.stride(0), GROUPS=4, **overlap(x.device)
    )
    return q.view(torch.int32), scales
