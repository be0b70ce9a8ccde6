"""AWQ checkpoints in the gemm order: int32 words of eight 4-bit codes along the rows, shuffled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hetero.core import InputError
from hetero.model.quantised.base import Finder, words
from hetero.model.quantised.integers import IntegerMatrix, Integers

_SIDES = (".qweight", ".qzeros", ".scales")


class AwqMatrix(IntegerMatrix):
    """``stored``: qweight [k, n / 8], qzeros [groups, n / 8], scales [groups, n]."""

    scales_at = 2

    def integers(self, index: int | None) -> Integers:
        codes, zeros = _ordered(self.part(0, index)), _ordered(self.part(1, index))
        return Integers(codes.T.contiguous(), self.part(2, index).T, zeros.T.contiguous())


def _ordered(packed: Tensor) -> Tensor:
    """A word has the rows 0, 2, 4, 6, 1, 3, 5, 7 of its eight, in this order."""
    return words(packed, 4).reshape(*packed.shape, 2, 4).transpose(-1, -2).flatten(-3)


def find(found: Finder, config: Mapping[str, Any]) -> None:
    version = str(config.get("version") or config.get("format") or "gemm").lower()
    if version != "gemm":
        raise InputError(f"{found.where}: AWQ 'version' is {version!r}; hetero reads gemm")
    bits = config.get("bits", config.get("w_bit", 4))
    if bits != 4:
        raise InputError(f"{found.where}: AWQ with 'bits' {bits!r}; hetero reads 4")
    size = config.get("group_size", config.get("q_group_size", 128))
    for name in found.ending(".qweight"):
        weight, zeros, scales = (f"{name}{side}" for side in _SIDES)
        found.companion(weight, weight, ("I32",))
        found.companion(weight, zeros, ("I32",))
        found.companion(weight, scales, ("F16", "BF16", "F32"))
        k, words_of_row = found.matrix(weight)
        n = words_of_row * 8
        group = group_of(found, weight, k, size)
        found.expect(zeros, (k // group, n // 8), f"{weight} in groups of {group}")
        found.expect(scales, (k // group, n), f"{weight} in groups of {group}")
        stored = (weight, zeros, scales)
        found.add(
            AwqMatrix(found.raw, f"{name}.weight", stored, (n, k), bits=4, group=group, symmetric=False)
        )
    found.refuse_left(_SIDES, "AWQ tensor")


def group_of(found: Finder, name: str, k: int, size: Any) -> int:
    """Columns of a group by the configuration, all of k for -1. Raises InputError where k is no multiple."""
    if not isinstance(size, int) or isinstance(size, bool) or (size < 1 and size != -1):
        raise InputError(f"{found.where}: 'group_size' is {size!r}; expected a number of columns, or -1")
    group = k if size == -1 else size
    if k % group:
        raise InputError(
            f"{found.info(name).file}: tensor {name} has {k} columns, "
            f"which 'group_size' {size} of {found.where} does not divide"
        )
    return group
