"""Matrices of integers with a scale per group of columns: (code - zero) * scale."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hetero.core import InputError
from hetero.formats import GROUPS, Format, in_order
from hetero.model.quantised.base import REQUANTISE, InexactError, Matrix, exact_half
from hetero.model.source import Checkpoint
from hetero.quant.pack import Codes


@dataclass(slots=True)
class Integers:
    """A matrix as it is stored: value[i, j] = (codes[i, j] - zeros[i, g]) * scales[i, g] with g = order[j],
    or j // group without an order."""

    codes: Tensor  # uint8 [n, k]
    scales: Tensor  # float [n, groups]
    zeros: Tensor | None  # uint8 [n, groups]; None: half of the range
    order: Tensor | None = None  # int64 [k]


class IntegerMatrix(Matrix):
    """What the integer schemes share. ``group``: columns of a scale, k for one scale a row.

    ``scales_at``: the number of the scales among ``stored``.
    """

    scales_at = 1

    def __init__(
        self,
        raw: Checkpoint,
        name: str,
        stored: Sequence[str],
        shape: tuple[int, int],
        *,
        bits: int,
        group: int,
        symmetric: bool,
        count: int | None = None,
    ) -> None:
        super().__init__(raw, name, stored, shape, count)
        self.bits, self.group, self.symmetric = bits, group, symmetric
        fits = [g for g in reversed(GROUPS) if group == self.k or group % g == 0]
        if fits:
            self.format = Format(f"int{bits}" if symmetric else f"int{bits}z", fits[0])
        else:
            self.inexact = f"groups of {group} columns are none of a packed format"

    @property
    def middle(self) -> int:
        return 1 << (self.bits - 1)

    @abstractmethod
    def integers(self, index: int | None) -> Integers:
        """Read and unpack the matrix."""

    def groups_of(self, index: int | None) -> Tensor | None:
        """The group of each column, int64 [k]; None where they are not told: one after the other."""
        return None

    def look_at_order(self) -> bool:
        """Read the groups of the columns; whether those of a group are not all neighbours.

        Where they are as many as a group has, the format is one that has columns in an order of their own;
        else there is none.
        """
        groups = self.groups_of(None)
        if groups is None or self._neighbours(groups):
            return False
        count = self.k // self.group
        sizes = torch.bincount(groups.clamp(0, count - 1), minlength=count)
        if self.format is not None and bool((sizes == self.group).all()):
            self.format = in_order(self.format)
        else:
            self.format = None
            self.inexact = "activation order (act-order) with groups of different sizes"
        return True

    def scatter(self) -> None:
        """Take the format for columns in an order of their own, which those that stand in order have too."""
        if self.format is not None:
            self.format = in_order(self.format)

    def _neighbours(self, groups: Tensor) -> bool:
        return torch.equal(groups, torch.arange(self.k) // self.group)

    def order(self, index: int | None) -> Tensor | None:
        groups = self.groups_of(index)
        if groups is None or self._neighbours(groups):
            return None
        return torch.argsort(groups, stable=True).int()

    def _read(self, index: int | None) -> Integers:
        """``integers``, and that its order names groups that there are."""
        read = self.integers(index)
        groups = self.k // self.group
        if read.order is not None and not bool(((read.order >= 0) & (read.order < groups)).all()):
            raise InputError(
                f"{self.file}: tensor {self.name}: its g_idx names groups other than 0 to {groups - 1}"
            )
        return read

    def floats(self, index: int | None) -> Tensor:
        read = self._read(index)
        scales = read.scales.float()
        zeros = torch.full_like(scales, self.middle) if read.zeros is None else read.zeros.float()
        if read.order is not None:
            return (read.codes.float() - zeros[:, read.order]) * scales[:, read.order]
        values = read.codes.float().view(self.n, -1, self.group)
        return values.sub_(zeros[..., None]).mul_(scales[..., None]).view(self.n, self.k)

    def check(self, index: int | None) -> None:
        if self.raw.tensors[self.stored[self.scales_at]].dtype != "F16":
            exact_half(self, self.part(self.scales_at, index))

    def codes(self, index: int | None) -> Codes:
        read = self._read(index)
        assert self.format is not None
        codes = read.codes
        if read.order is not None and not self._neighbours(read.order):
            if not self.format.ordered:
                raise InexactError(
                    f"{self.file}: tensor {self.name}: activation order (act-order) scatters its groups over "
                    f"the columns; {REQUANTISE}"
                )
            columns = torch.argsort(read.order, stable=True)
            codes = codes.gather(1, columns.expand(self.n, -1))  # three times as fast as an index
        zeros = read.zeros
        if self.symmetric and zeros is not None:
            if bool((zeros != self.middle).any()):
                raise InputError(
                    f"{self.file}: tensor {self.name}: has a zero point other than {self.middle}, though the "
                    "configuration says symmetric: config and tensors disagree"
                )
            zeros = None
        scales = self._spread(exact_half(self, read.scales))
        return Codes(codes, scales, None if zeros is None else self._spread(zeros))

    def _spread(self, values: Tensor) -> Tensor:
        """One of each group of the checkpoint -> one of each group of the format, [n, ceil(k / g)]."""
        assert self.format is not None
        groups = -(-self.k // self.format.group)
        if values.shape[1] == 1:
            return values.expand(self.n, groups).contiguous()
        return values.repeat_interleave(self.group // self.format.group, 1)[:, :groups].contiguous()


def order_together(matrices: Sequence[IntegerMatrix]) -> None:
    """Look at the order of the columns of matrices. Where some are in one of their own, all formats say so:
    those of an expert must agree."""
    scattered = [matrix for matrix in matrices if matrix.look_at_order()]
    for matrix in matrices if scattered else ():
        matrix.scatter()
