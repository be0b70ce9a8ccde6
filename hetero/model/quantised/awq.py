"""AWQ checkpoints in the gemm order: int32 words of eight 4-bit codes along the rows, shuffled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hetero.core import InputError
from hetero.model.quantised.base import Finder
from hetero.model.quantised.integers import IntegerMatrix, Integers
from hetero.quant.fields import unshuffled

_SIDES = (".qweight", ".qzeros", ".scales")


class AwqMatrix(IntegerMatrix):
    """``stored``: qweight [k, n / 8], qzeros [groups, n / 8], scales [groups, n]."""

    scales_at = 2

    def integers(self, index: int | None) -> Integers:
        codes, zeros = (unshuffled(self.part(number, index)) for number in range(2))
        return Integers(codes, self.part(2, index).T, zeros)


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
