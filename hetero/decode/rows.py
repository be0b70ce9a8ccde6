"""Rows of packed matrices in another order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hetero.formats import BLOCK_ROWS, FP8, Format
from hetero.ops.gpu.fused import PackedMatrix
from hetero.quant.pack import dequantise


def gathered(matrices: Sequence[PackedMatrix], orders: Sequence[Tensor | None]) -> PackedMatrix:
    """One matrix of the rows of several of one format and k, of each those that its order names (None: all);
    in a quantised format padded with zeros to whole blocks.

    Blocks of fp8 cannot be taken apart, since their rows share scales: where the order does, the matrix is in
    f32.
    """
    first = matrices[0]
    device = first.packed.device
    rows = [
        torch.arange(matrix.n, device=device) if order is None else order.to(device)
        for matrix, order in zip(matrices, orders, strict=True)
    ]
    count = sum(len(order) for order in rows)
    if first.format.name in FP8:
        return _of_fp8(matrices, rows)
    padding = -count % BLOCK_ROWS if first.format.quantised else 0
    if first.format.quantised:
        packed = _blocks(matrices, rows, padding)
    else:
        packed = torch.cat([matrix.packed[order] for matrix, order in zip(matrices, rows, strict=True)])
    return PackedMatrix(packed, first.format, count + padding, first.k, _bias(matrices, rows, padding))


def _bias(matrices: Sequence[PackedMatrix], rows: Sequence[Tensor], padding: int) -> Tensor | None:
    if all(matrix.bias is None for matrix in matrices):
        return None
    biases = [
        torch.zeros(len(order), device=order.device) if matrix.bias is None else matrix.bias[order]
        for matrix, order in zip(matrices, rows, strict=True)
    ]
    return torch.cat([*biases, biases[0].new_zeros(padding)])


def _of_fp8(matrices: Sequence[PackedMatrix], rows: Sequence[Tensor]) -> PackedMatrix:
    first, count = matrices[0], sum(len(order) for order in rows)
    within = torch.arange(BLOCK_ROWS, device=rows[0].device)
    if all(len(order) % BLOCK_ROWS == 0 for order in rows):
        begins = [order[::BLOCK_ROWS] for order in rows]
        if all(
            bool((begin % BLOCK_ROWS == 0).all())
            and torch.equal(order.view(-1, BLOCK_ROWS), begin[:, None] + within)
            for order, begin in zip(rows, begins, strict=True)
        ):
            size = first.sizes["BLOCK_BYTES"]
            blocks = [
                matrix.packed.view(-1, size)[begin // BLOCK_ROWS]
                for matrix, begin in zip(matrices, begins, strict=True)
            ]
            packed = torch.cat(blocks).flatten()
            return PackedMatrix(packed, first.format, count, first.k, _bias(matrices, rows, 0))
    values = [
        dequantise(matrix.format, matrix.packed.cpu(), matrix.n, matrix.k).to(order.device)[order]
        for matrix, order in zip(matrices, rows, strict=True)
    ]
    return PackedMatrix(torch.cat(values), Format("f32"), count, first.k, _bias(matrices, rows, 0))


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
