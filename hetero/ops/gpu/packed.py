"""What kernels are told of a packed matrix, and the rows that they take."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hetero.formats import ACT_GROUP, BLOCK_ROWS, Format, block_bytes, padded_k
from hetero.ops.gpu import expert_kernels
from hetero.ops.gpu.overlap import overlap

_CODE_BITS = {"bf16": 16, "int8": 8, "int4": 4}


def matrix_sizes(fmt: Format, n: int, k: int) -> dict[str, Any]:
    """Constants of the kernels for a packed matrix of n outputs and k inputs."""
    k_pad = padded_k(fmt, k)
    return {
        "K": k_pad,
        "N": n,
        "BLOCK_BYTES": block_bytes(fmt, k),
        "GROUP": fmt.group or ACT_GROUP,
        "SCALES_AT": k_pad * BLOCK_ROWS * _CODE_BITS[fmt.name] // 8,
        "FORMAT": fmt.code,
    }


def quantised_rows(fmt: Format, x: Tensor, k_pad: int) -> tuple[Tensor, Tensor]:
    """Rows [T, k] as kernels for few rows read them: words of int8 codes, and scales; for a
    format that is not quantised the values, padded."""
    rows, k = x.shape
    if not fmt.quantised:
        q = torch.zeros(rows, k_pad, dtype=torch.float32, device=x.device)
        q[:, :k] = x
        return q, q
    q = torch.empty(rows, k_pad, dtype=torch.int8, device=x.device)
    scales = torch.empty(rows, k_pad // ACT_GROUP, dtype=torch.float32, device=x.device)
    expert_kernels.quantise_rows[(rows, -(-k_pad // ACT_GROUP // 4))](
        x, q, scales, k, k_pad, x.stride(0), GROUPS=4, **overlap(x.device)
    )
    return q.view(torch.int32), scales
