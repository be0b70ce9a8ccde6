"""Matrices of small floats: E4M3 with scales by tile, E2M1 with scales by group."""

from __future__ import annotations

import torch
from torch import Tensor

from hetero.formats import FP8_TILE, Format
from hetero.model.quantised.base import Matrix
from hetero.model.source import Checkpoint
from hetero.quant.fields import nibbles
from hetero.quant.pack import Codes
from hetero.quant.small_floats import from_e2m1, from_e4m3, from_e8m0, spread


class Fp8Matrix(Matrix):
    """E4M3 codes and a scale per ``tile`` (rows, columns): value = code * scale.

    ``stored``: codes F8_E4M3 [n, k], or [k, n] where ``transposed``; scales [ceil(n / rows),
    ceil(k / columns)], or of one element.
    """

    def __init__(
        self,
        raw: Checkpoint,
        name: str,
        stored: tuple[str, str],
        shape: tuple[int, int],
        *,
        tile: tuple[int, int],
        count: int | None = None,
        transposed: bool = False,
    ) -> None:
        super().__init__(raw, name, stored, shape, count)
        self.tile, self.transposed = tile, transposed
        if all(size % FP8_TILE == 0 or size >= full for size, full in zip(tile, shape, strict=True)):
            self.format = Format("fp8", FP8_TILE)
        elif tile == (1, shape[1]):
            self.format = Format("fp8_row", FP8_TILE)
        else:
            self.inexact = f"fp8 has a scale per {FP8_TILE} x {FP8_TILE} and not per {tile[0]} x {tile[1]}"

    def _scales(self, index: int | None) -> Tensor:
        rows, columns = (-(-size // step) for size, step in zip((self.n, self.k), self.tile, strict=True))
        return self.part(1, index).float().reshape(rows, columns)

    def floats(self, index: int | None) -> Tensor:
        return self._codes(index).float() * self._over(self._scales(index), (1, 1))

    def codes(self, index: int | None) -> Codes:
        assert self.format is not None
        rows = self.format.name == "fp8_row"
        tiles = self._scales(index) if rows else self._over(self._scales(index), (FP8_TILE, FP8_TILE))
        return Codes(self._codes(index).view(torch.uint8), tiles.contiguous(), None)

    def _codes(self, index: int | None) -> Tensor:
        codes = self.part(0, index)
        return codes.T.contiguous() if self.transposed else codes

    def _over(self, scales: Tensor, unit: tuple[int, int]) -> Tensor:
        """A scale per ``unit`` of the matrix from one per tile."""
        for dim, (size, step, part) in enumerate(zip((self.n, self.k), self.tile, unit, strict=True)):
            wanted = -(-size // part)
            if scales.shape[dim] == 1:
                scales = scales.expand(wanted, -1) if dim == 0 else scales.expand(-1, wanted)
            else:
                scales = scales.repeat_interleave(step // part, dim).narrow(dim, 0, wanted)
        return scales


class Mxfp4Matrix(Matrix):
    """E2M1 codes, two in a byte, and an E8M0 scale per 32: ``stored`` is packed codes and scales.

    The codes may be [n, k / 2] or in blocks [n, k / 32, 16].
    """

    def __init__(
        self,
        raw: Checkpoint,
        name: str,
        stored: tuple[str, str],
        shape: tuple[int, int],
        count: int | None = None,
        *,
        transposed: bool = False,
    ) -> None:
        super().__init__(raw, name, stored, shape, count)
        self.transposed = transposed
        self.format = Format("mxfp4", 32)

    def floats(self, index: int | None) -> Tensor:
        codes, scales, _ = self.codes(index)
        return from_e2m1(codes) * spread(from_e8m0(scales), 32, self.k)

    def codes(self, index: int | None) -> Codes:
        scales = self.part(1, index)
        return Codes(
            nibbles(self.part(0, index).reshape(self.n, self.k // 2)), scales.view(torch.uint8), None
        )


class Nvfp4Matrix(Matrix):
    """E2M1 codes, two in a byte, an E4M3 scale per 16 and a float32 scale of the matrix.

    ``divides``: the matrix's scale is stored as its reciprocal, which is taken in float32.
    """

    def __init__(
        self,
        raw: Checkpoint,
        name: str,
        stored: tuple[str, str, str],
        shape: tuple[int, int],
        *,
        divides: bool = False,
    ) -> None:
        super().__init__(raw, name, stored, shape)
        self.divides = divides
        self.format = Format("nvfp4", 16)

    def floats(self, index: int | None) -> Tensor:
        codes, scales, matrix = self.codes(index)
        assert matrix is not None
        return from_e2m1(codes) * spread(from_e4m3(scales) * matrix, 16, self.k)

    def codes(self, index: int | None) -> Codes:
        matrix = self.part(2, index).float().reshape(1)
        if self.divides:
            matrix = 1.0 / matrix
        scales = self.part(1, index)
        return Codes(nibbles(self.part(0, index)), scales.view(torch.uint8), matrix)
