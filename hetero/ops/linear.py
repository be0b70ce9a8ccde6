"""Op ``linear``: packed weights for a linear layer on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from hetero.core import InputError
from hetero.registry import register_op


@register_op("linear")
class Linear:
    """Gives way to ``hetero.ops.gpu.linear``, which needs Triton, when a rule asks for it."""

    @staticmethod
    def from_module(
        module: nn.Module, *, name: str, config: Any, device: str, options: Mapping[str, Any]
    ) -> nn.Module:
        """Raises InputError for a module that is no plain linear layer, or where Triton is missing."""
        try:
            from hetero.ops.gpu.linear import PackedLinear
        except ModuleNotFoundError as error:
            raise InputError(
                f"op 'linear' needs the package {error.name}: pip install {error.name}"
            ) from None
        return PackedLinear.from_module(module, name=name, config=config, device=device, options=options)
