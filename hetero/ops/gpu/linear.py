"""Op ``linear``: a linear layer on a GPU with packed weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hetero.core import InputError
from hetero.cpu import pack_matrix
from hetero.formats import BLOCK_ROWS, Format, parse_format
from hetero.ops.gpu import linear_kernels
from hetero.ops.gpu.packed import STEPS, matrix_sizes, quantised_rows

# Up to so many rows weights are read once a row, which the caches bear; beyond it they are decoded first.
_FEW = 16
# Outputs that are decoded at a time: a buffer of some tens of megabytes.
_CHUNK = 8192
_BLOCKS, _DEPTH = 4, 64


class PackedLinear(nn.Module):
    """Takes the place of a ``torch.nn.Linear``, whose weights are packed when they have arrived.

    For few rows activations are int8 in groups of 32 and sums exact up to their order, as in experts; for
    many, products are bf16.
    """

    def __init__(self, linear: nn.Linear, fmt: Format, device: str) -> None:
        super().__init__()
        self.in_features, self.out_features, self.format = linear.in_features, linear.out_features, fmt
        # The loader fills the weights of this one; afterwards it goes.
        self.source: nn.Linear | None = linear
        self.packed: Tensor
        self.bias: Tensor | None
        self._device = torch.device(device)

    @staticmethod
    def from_module(
        module: nn.Module, *, name: str, config: Any, device: str, options: Mapping[str, Any]
    ) -> nn.Module:
        """Raises InputError for a module that is not a plain linear layer."""
        if type(module) is not nn.Linear:
            raise InputError(
                f"op 'linear' was given {name} ({type(module).__name__}), which is no torch Linear"
            )
        return PackedLinear(module, parse_format(options["format"]), device)

    def after_load(self) -> None:
        """Pack the weights, and let go of them."""
        source = self.source
        if source is None:
            return
        self.register_buffer(
            "packed", pack_matrix(self.format, source.weight.detach().cpu()).to(self._device)
        )
        bias = None if source.bias is None else source.bias.detach().float().to(self._device)
        self.register_buffer("bias", bias)
        self.source = None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> [..., out_features] in its dtype."""
        rows = x.reshape(-1, self.in_features)
        sizes = matrix_sizes(self.format, self.out_features, self.in_features)
        few = rows.shape[0] <= _FEW
        out = self._few(rows.contiguous(), sizes) if few else self._many(rows, sizes)
        return out.to(x.dtype).view(*x.shape[:-1], self.out_features)

    def _few(self, rows: Tensor, sizes: dict[str, Any]) -> Tensor:
        q, scales = quantised_rows(self.format, rows, sizes["K"])
        out = torch.empty(rows.shape[0], self.out_features, dtype=torch.float32, device=rows.device)
        linear_kernels.few_rows[(-(-self.out_features // BLOCK_ROWS), rows.shape[0])](
            self.packed, q, scales, out if self.bias is None else self.bias, out,
            HAS_BIAS=self.bias is not None, STEPS=STEPS, ASM=rows.device.type != "cpu", **sizes,
        )  # fmt: skip
        return out

    def _many(self, rows: Tensor, sizes: dict[str, Any]) -> Tensor:
        rows = rows.bfloat16()
        parts = []
        for first in range(0, self.out_features, _CHUNK):
            count = min(_CHUNK, self.out_features - first)
            weight = torch.empty(count, self.in_features, dtype=torch.bfloat16, device=rows.device)
            grid = (-(-count // (BLOCK_ROWS * _BLOCKS)), -(-self.in_features // _DEPTH))
            linear_kernels.unpacked[grid](
                self.packed, first // BLOCK_ROWS, count, weight, self.in_features,
                BLOCKS=_BLOCKS, DEPTH=_DEPTH, TWIN=rows.device.type == "cpu", **sizes,
            )  # fmt: skip
            parts.append(nn.functional.linear(rows, weight))
        out = torch.cat(parts, 1)
        return out if self.bias is None else out + self.bias

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}, {self.format} on {self._device}"
