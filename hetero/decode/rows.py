"""Rows of packed matrices in another order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hetero.formats import BLOCK_ROWS
from hetero.ops.gpu.fused import PackedMatrix


def gathered(matrices: Sequence[PackedMatrix], orders: Sequence[Tensor | None]) -> PackedMatrix:
    """One matrix of the rows of several of one format and k, of each those that its order names (None: all);
    in a quantised format padded with zeros to whole blocks."""
    first = matrices[0]
    device = first.packed.device
    rows = [
        torch.arange(matrix.n, device=device) if order is None else order.to(device)
        for matrix, order in zip(matrices, orders, strict=True)
    ]
    count = sum(len(order) for order in rows)
    padding = -count % BLOCK_ROWS if first.format.quantised else 0
    if first.format.quantised:
        packed = _blocks(matrices, rows, padding)
    else:
        packed = torch.cat([matrix.packed[order] for matrix, order in zip(matrices, rows, strict=True)])
    bias = None
    if any(matrix.bias is not None for matrix in matrices):
        biases = [
            torch.zeros(len(order), device=device) if matrix.bias is None else matrix.bias[order]
            for matrix, order in zip(matrices, rows, strict=True)
        ]
        bias = torch.cat([*biases, torch.zeros(padding, device=device)])
    return PackedMatrix(packed, first.format, count + padding, first.k, bias)


def _blocks(matrices: Sequence[PackedMatrix], rows: Sequence[Tensor], padding: int) -> Tensor:
    """A block is codes, of which 4 bytes in turn are of each of its 16 rows, and scales, of which 2 are."""
    sizes, fmt = matrices[0].sizes, matrices[0].format
    codes, size = sizes["SCALES_AT"], sizes["BLOCK_BYTES"]
    scales = codes + sizes["K"] // fmt.group * BLOCK_ROWS * 2
    areas = []
    for begin, end, width in ((0, codes, 4), (codes, scales, 2)):
        parts = [
            _by_rows(matrix.packed.view(-1, size)[:, begin:end], width)[order]
            for matrix, order in zip(matrices, rows, strict=True)
        ]
        parts.append(parts[0].new_zeros(padding, *parts[0].shape[1:]))
        whole = torch.cat(parts)
        whole = whole.view(-1, BLOCK_ROWS, *whole.shape[1:]).transpose(1, 2)
        areas.append(whole.flatten(1))
    areas.append(areas[0].new_zeros(len(areas[0]), size - scales))
    return torch.cat(areas, 1).flatten()


def _by_rows(area: Tensor, width: int) -> Tensor:
    """An area of every block [blocks, bytes] as [rows, bytes of a row / width, width]."""
    return area.reshape(len(area), -1, BLOCK_ROWS, width).transpose(1, 2).flatten(0, 1)
