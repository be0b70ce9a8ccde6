"""The weights of a projection as kernels for few rows read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hetero.core import InputError
from hetero.cpu import pack_matrix
from hetero.formats import BLOCK_ROWS, GPU_LINEAR_FORMATS, Format, packed_bytes
from hetero.ops.gpu.linear import PackedLinear
from hetero.ops.gpu.packed import matrix_sizes

_KINDS = {torch.bfloat16: Format("bf16"), torch.float32: Format("f32")}


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """n outputs of k inputs on a device.

    Quantised (int8, int4, fp8): ``packed`` uint8, blocks of 16 outputs in the layout of experts. Else (bf16,
    f32): ``packed`` is the weight [n, k] as torch has it, so that a large step may use it as well.
    """

    packed: Tensor
    format: Format
    n: int
    k: int
    bias: Tensor | None = None  # float32 [n]
    # Modules that use the same memory, each from an output on.
    owners: tuple[tuple[nn.Module, int], ...] = field(default=(), repr=False)

    @property
    def sizes(self) -> dict[str, Any]:
        """Constants of the kernels; of a matrix that is not quantised K and N alone."""
        if not self.format.quantised:
            return {"K": self.k, "N": self.n}
        return matrix_sizes(self.format, self.n, self.k)

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + (0 if self.bias is None else self.bias.nbytes)

    @staticmethod
    def from_linear(linear: nn.Module, fmt: Format | None = None) -> PackedMatrix:
        """The weights of a ``torch.nn.Linear`` or of a ``PackedLinear``, on its device.

        Memory is shared with the module where it has that format (``fmt`` None: the module's own; of a
        float16 module bf16). Raises InputError for any other module, or a format that kernels do not read.
        """
        if isinstance(linear, PackedLinear):
            linear.after_load()
            own, bias = linear.format, linear.bias
            if fmt not in (None, own):
                raise InputError(f"a linear layer in {own} cannot be put into {fmt}")
            return PackedMatrix(
                linear.packed, own, linear.out_features, linear.in_features, bias, ((linear, 0),)
            )
        if not isinstance(linear, nn.Linear):
            raise InputError(f"{type(linear).__name__} is no linear layer that can be packed")
        n, k = linear.weight.shape
        weight = linear.weight.detach()
        bias = None if linear.bias is None else linear.bias.detach().float()
        fmt = _KINDS.get(weight.dtype, Format("bf16")) if fmt is None else fmt
        if fmt.name not in ("f32", *GPU_LINEAR_FORMATS):
            raise InputError(
                f"format {fmt} is not read on a GPU; valid: f32, {', '.join(GPU_LINEAR_FORMATS)}"
            )
        if fmt.quantised:
            return PackedMatrix(pack_matrix(fmt, weight.cpu()).to(weight.device), fmt, n, k, bias)
        dtype = torch.float32 if fmt.name == "f32" else torch.bfloat16
        owners = ((linear, 0),) if weight.dtype == dtype else ()
        return PackedMatrix(weight.to(dtype).contiguous(), fmt, n, k, bias, owners)

    @staticmethod
    def concat(parts: Sequence[PackedMatrix]) -> PackedMatrix:
        """One matrix whose outputs are those of all parts in turn, for one kernel instead of many.

        Modules that the parts came from use the memory of the whole from then on. Raises ValueError where
        formats or inputs differ, or a quantised part but the last one has not a multiple of 16 outputs.
        """
        first = parts[0]
        kinds = {(part.format, part.k, part.packed.device) for part in parts}
        if len(kinds) > 1:
            raise ValueError(f"matrices that differ cannot be one: {kinds}")
        if first.format.quantised and any(part.n % BLOCK_ROWS for part in parts[:-1]):
            raise ValueError(f"parts of {[part.n for part in parts]} outputs: blocks are of {BLOCK_ROWS}")
        packed = torch.cat([part.packed for part in parts])
        bias = None
        if any(part.bias is not None for part in parts):
            zeros = [torch.zeros(part.n, device=packed.device) for part in parts]
            bias = torch.cat([z if p.bias is None else p.bias for p, z in zip(parts, zeros, strict=True)])
        starts = [sum(part.n for part in parts[:i]) for i in range(len(parts))]
        owners = tuple(
            (module, start + at)
            for part, start in zip(parts, starts, strict=True)
            for module, at in part.owners
        )
        whole = PackedMatrix(packed, first.format, sum(part.n for part in parts), first.k, bias, owners)
        for module, at in owners:
            whole._lend(module, at)
        return whole

    def _lend(self, module: nn.Module, at: int) -> None:
        """Let a module use our memory from output ``at`` on."""
        if isinstance(module, PackedLinear):
            begin, size = (packed_bytes(self.format, n, self.k) for n in (at, module.out_features))
            if not self.format.quantised:
                begin, size = at, module.out_features
            module.packed = self.packed[begin : begin + size]
        else:
            assert isinstance(module, nn.Linear)
            module.weight.data = self.packed[at : at + module.out_features]
