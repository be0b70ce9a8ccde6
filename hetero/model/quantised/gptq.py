"""GPTQ checkpoints: int32 words of codes along the columns, zero points along the rows.

In the first format (``checkpoint_format: gptq``) stored zero points are one too small, and a whole word of
them is corrected at once, as the tools that write it do; in ``gptq_v2`` they are what they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from hetero.core import InputError
from hetero.model.quantised.awq import group_of
from hetero.model.quantised.base import Finder, words
from hetero.model.quantised.integers import IntegerMatrix, Integers, order_together
from hetero.model.source import Checkpoint
from hetero.quant.fields import turned

_SIDES = (".qweight", ".qzeros", ".scales", ".g_idx")
_ONES = {4: 0x11111111, 8: 0x01010101}


class GptqMatrix(IntegerMatrix):
    """``stored``: qweight [k * bits / 32, n], qzeros [groups, n * bits / 32], scales [groups, n] and, where
    there is one, g_idx [k]."""

    scales_at = 2

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
        first: bool,
    ) -> None:
        super().__init__(raw, name, stored, shape, bits=bits, group=group, symmetric=symmetric)
        self.first = first

    def integers(self, index: int | None) -> Integers:
        codes = turned(self.part(0, index), self.bits)
        packed = self.part(1, index)
        if self.first:
            packed = packed + _ONES[self.bits]  # int32 wraps around, as it shall
        zeros = words(packed, self.bits)[:, : self.n]
        return Integers(codes, self.part(2, index).T, zeros.T.contiguous(), self.groups_of(index))

    def groups_of(self, index: int | None) -> Tensor | None:
        return self.part(3, index).long() if len(self.stored) > 3 else None


def find(found: Finder, config: Mapping[str, Any]) -> None:
    kind = str(config.get("checkpoint_format") or config.get("format") or "gptq").lower()
    if kind not in ("gptq", "gptq_v2"):
        raise InputError(
            f"{found.where}: GPTQ 'checkpoint_format' is {kind!r}; hetero reads gptq and gptq_v2"
        )
    bits = config.get("bits")
    if not isinstance(bits, int) or bits not in _ONES:
        raise InputError(f"{found.where}: GPTQ with 'bits' {bits!r}; hetero reads 4 and 8")
    fields = 32 // int(bits)
    made: list[IntegerMatrix] = []
    for name in found.ending(".qweight"):
        weight, zeros, scales, order = (f"{name}{side}" for side in _SIDES)
        info = found.companion(weight, weight, ("I32",))
        found.companion(weight, zeros, ("I32",))
        found.companion(weight, scales, ("F16", "BF16", "F32"))
        words_of_column, n = found.matrix(weight)
        k = words_of_column * fields
        group = group_of(found, weight, k, config.get("group_size", 128))
        found.expect(zeros, (k // group, -(-n // fields)), f"{weight} of {bits} bits in groups of {group}")
        found.expect(scales, (k // group, n), f"{weight} of {bits} bits in groups of {group}")
        stored = [weight, zeros, scales]
        if found.has(order):
            found.companion(weight, order, ("I32", "I64"))
            found.expect(order, (k,), weight)
            stored.append(order)
        elif config.get("desc_act"):
            raise InputError(
                f"{info.file}: tensor {weight} has no {order}, though {found.where} says 'desc_act': "
                "config and tensors disagree"
            )
        matrix = GptqMatrix(
            found.raw,
            f"{name}.weight",
            stored,
            (n, k),
            bits=int(bits),
            group=group,
            symmetric=bool(config.get("sym", True)),
            first=kind == "gptq",
        )
        found.add(matrix)
        made.append(matrix)
    if config.get("desc_act"):
        order_together(made)
    found.refuse_left(_SIDES, "GPTQ tensor")
