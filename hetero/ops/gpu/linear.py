"""Op ``linear``: a linear layer on a GPU with packed weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hetero.core import InputError
from hetero.cpu import pack_matrix, pack_quantised
from hetero.formats import BLOCK_ROWS, FP8, Format, parse_format
from hetero.ops.gpu import linear_kernels
from hetero.ops.gpu.packed import matrix_sizes
from hetero.quant.pack import Codes

# Up to so many rows weights are used as they are; beyond it they are decoded first.
_FEW = 16
# Outputs that are decoded at a time: a buffer of some tens of megabytes.
_CHUNK = 8192
_BLOCKS, _DEPTH = 4, 64


class PackedLinear(nn.Module):
    """Takes the place of a ``torch.nn.Linear``, whose weights are packed when they have arrived.

    ``packed``: uint8, the blocks of experts, for few rows of which activations are int8 in groups of 32 and
    sums exact up to their order, but for fp8, which takes values; for bf16, which is not quantised, the
    weight [n, k] as torch has it. Many rows are multiplied in bf16.

    Weights that a checkpoint has in this format already keep their values (``keeps``, ``take_codes``).
    """

    def __init__(self, linear: nn.Linear, fmt: Format, device: str) -> None:
        super().__init__()
        self.in_features, self.out_features, self.format = linear.in_features, linear.out_features, fmt
        # The loader fills the weights of this one; afterwards it goes.
        self.source: nn.Linear | None = linear
        self.packed: Tensor
        self.bias: Tensor | None
        self.device = torch.device(device)
        self._codes: Tensor | None = None  # packed, from a checkpoint

    @property
    def loads_on(self) -> str:
        """The device to bring the weights to: quantised ones are packed by the CPU."""
        return "cpu" if self.format.quantised else str(self.device)

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

    # Part of the loader's LinearSink.
    def keeps(self, fmt: Format) -> bool:
        """Whether weights in this format stay as they are: in the layer's own; of fp8 with either scales."""
        return fmt == self.format or (fmt.name in FP8 and self.format.name in FP8)

    def take_codes(self, fmt: Format, codes: Codes) -> Callable[[], None]:
        """Pack the whole weight's codes in a format that it ``keeps``, on any thread; the call puts them in
        the place of the weights. Raises InputError for codes that are no numbers."""
        packed = pack_quantised(fmt, codes)

        def put() -> None:
            assert self.source is not None
            self.format, self._codes = fmt, packed
            self.source.weight = nn.Parameter(torch.empty(0), requires_grad=False)

        return put

    def after_load(self) -> None:
        """Pack the weights, and let go of them."""
        source = self.source
        if source is None:
            return
        if self._codes is not None:
            self.take(self._codes, source.bias)
            self._codes = None
            return
        weight = source.weight.detach()
        packed = pack_matrix(self.format, weight.cpu()) if self.format.quantised else weight.bfloat16()
        self.take(packed, source.bias)

    def take(self, packed: Tensor, bias: Tensor | None) -> None:
        """Use packed weights, uint8 as ``cpu.pack_matrix`` makes them (without quantisation bfloat16 [n, k]),
        and a bias [out_features]."""
        self.register_buffer("packed", packed.to(self.device).contiguous())
        self.register_buffer("bias", None if bias is None else bias.detach().float().to(self.device))
        self.source = None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> [..., out_features] in its dtype."""
        from hetero.ops.gpu.fused import PackedMatrix, plain_rows, project  # which build on this module

        rows = x.reshape(-1, self.in_features)
        if rows.shape[0] <= _FEW:
            out = project(plain_rows(self.format, rows), PackedMatrix.from_linear(self), torch.float32)
        elif self.format.quantised:
            out = self._many(rows, matrix_sizes(self.format, self.out_features, self.in_features))
        else:
            out = nn.functional.linear(rows.bfloat16(), self.packed).float()
            out = out if self.bias is None else out + self.bias
        return out.to(x.dtype).view(*x.shape[:-1], self.out_features)

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
        return f"{self.in_features} -> {self.out_features}, {self.format} on {self.device}"
