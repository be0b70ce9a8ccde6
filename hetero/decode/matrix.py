"""Linear layers of one input as few matrices as their formats allow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hetero.decode.rows import gathered
from hetero.formats import BLOCK_ROWS, Format
from hetero.ops.gpu import linear_kernels
from hetero.ops.gpu.fused import Normed, PackedMatrix, Rows, plain_rows, project
from hetero.ops.gpu.linear import PackedLinear

VALUES = Format("bf16")
"""Of rows that are values, of whatever dtype, not codes."""

# Weights are decoded for products of many rows so many bytes at a time.
_BUFFER = 64 << 20
_BLOCKS, _DEPTH = 4, 64


@dataclass(frozen=True, slots=True)
class Part:
    """A linear layer, or a bare weight [n, k], of which outputs of some sizes are taken.

    ``order``: which of its rows make them, one after the other; None: all, as they are.
    """

    source: nn.Module | Tensor
    sizes: tuple[int, ...]
    order: Tensor | None = None


class Projection:
    """Several linear layers of one input.

    Its matrices use the memory of the tree's layers, or these use its; a layer whose rows are put into
    another order is empty afterwards.
    """

    def __init__(self, *parts: Part) -> None:
        self.matrices: list[PackedMatrix] = []
        self._sizes: list[tuple[int, ...]] = []
        waiting: list[tuple[Part, PackedMatrix]] = []
        for part in parts:
            matrix = _matrix(part.source)
            if waiting and waiting[0][1].format != matrix.format:
                self._add(waiting)
                waiting = []
            waiting.append((part, matrix))
        self._add(waiting)

    def _add(self, parts: list[tuple[Part, PackedMatrix]]) -> None:
        self._sizes.append(tuple(size for part, _ in parts for size in part.sizes))
        matrices = [matrix for _, matrix in parts]
        quantised = matrices[0].format.quantised
        if all(part.order is None for part, _ in parts) and not (
            quantised and any(matrix.n % BLOCK_ROWS for matrix in matrices[:-1])
        ):
            whole = matrices[0] if len(matrices) == 1 else PackedMatrix.concat(matrices)
            for part, matrix in parts:
                if isinstance(part.source, nn.Parameter) and matrix.owners:
                    part.source.data = matrix.owners[0][0].weight.data  # type: ignore[assignment]
        else:
            whole = gathered(matrices, [part.order for part, _ in parts])
            for part, _ in parts:
                _release(part.source)
        self.matrices.append(whole)

    @property
    def format(self) -> Format:
        """Of the rows that ``few`` takes."""
        return self.matrices[0].format

    def few(self, x: Normed, dtype: torch.dtype) -> list[Tensor]:
        """The outputs [R, size] of up to 16 rows in ``dtype``, views of one tensor for each format."""
        outputs: list[Tensor] = []
        for matrix, sizes in zip(self.matrices, self._sizes, strict=True):
            codes = matrix.format.rounds_activations
            same = codes == self.format.rounds_activations and (
                not codes or matrix.sizes["K"] == x.rows.q.shape[1]
            )
            rows = x.rows if same else plain_rows(matrix.format, x.x)
            outputs += _split(project(rows, matrix, dtype), sizes)
        return outputs

    def whole(self, rows: Rows, dtype: torch.dtype) -> Tensor:
        """The outputs [R, n] side by side, of a projection whose parts have one format."""
        (matrix,) = self.matrices
        return project(rows, matrix, dtype)

    def many(self, x: Tensor) -> list[Tensor]:
        """The outputs [T, size] of any number of rows x [T, k], in their dtype."""
        outputs: list[Tensor] = []
        for matrix, sizes in zip(self.matrices, self._sizes, strict=True):
            outputs += _split(product(x, matrix), sizes)
        return outputs


def product(x: Tensor, matrix: PackedMatrix) -> Tensor:
    """x [T, k] times a matrix, for any T: [T, n] in the dtype of x. Quantised weights are decoded to bf16."""
    bias = None if matrix.bias is None else matrix.bias.to(x.dtype)
    if not matrix.format.quantised:
        return nn.functional.linear(x, matrix.packed.to(x.dtype), bias)
    each = max(_BUFFER // (2 * matrix.k) // BLOCK_ROWS, 1) * BLOCK_ROWS
    parts = []
    for first in range(0, matrix.n, each):
        weight = decoded(matrix, first, min(each, matrix.n - first))
        parts.append(nn.functional.linear(x, weight.to(x.dtype)))
    out = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    return out if bias is None else out + bias


def decoded(matrix: PackedMatrix, first: int, count: int) -> Tensor:
    """``count`` outputs of a quantised matrix from ``first`` on, a multiple of 16: bfloat16 [count, k]."""
    weight = torch.empty(count, matrix.k, dtype=torch.bfloat16, device=matrix.packed.device)
    grid = (-(-count // (BLOCK_ROWS * _BLOCKS)), -(-matrix.k // _DEPTH))
    linear_kernels.unpacked[grid](
        matrix.packed, first // BLOCK_ROWS, count, weight, matrix.k,
        BLOCKS=_BLOCKS, DEPTH=_DEPTH, TWIN=not weight.is_cuda, **matrix.sizes,
    )  # fmt: skip
    return weight


def _split(out: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Without the padding at the end."""
    return torch.split(out[:, : sum(sizes)], list(sizes), 1)


def _matrix(source: nn.Module | Tensor) -> PackedMatrix:
    if isinstance(source, Tensor):
        weight = source.detach()
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        linear.weight = nn.Parameter(weight, requires_grad=False)
        source = linear
    return PackedMatrix.from_linear(source)


def _release(source: Any) -> None:
    if isinstance(source, PackedLinear):
        source.packed = torch.empty_like(source.packed[:0])
    elif isinstance(source, nn.Linear):
        _release(source.weight)
    elif isinstance(source, nn.Parameter):
        source.data = torch.empty_like(source.data[:0])
