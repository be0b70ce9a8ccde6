"""Op ``keep``: the module stays as transformers builds it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from hetero.registry import register_op


@register_op("keep")
class Keep:
    """Leaves a module alone; its device is where the loader brings its weights."""

    @staticmethod
    def from_module(
        module: nn.Module, *, name: str, config: Any, device: str, options: Mapping[str, Any]
    ) -> nn.Module:
        return module
