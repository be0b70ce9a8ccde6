"""Op ``fused``: a decoder layer as few kernels of our own, in a graph of the whole step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from hetero.registry import register_op


@register_op("fused")
class Fused:
    """Leaves the layer in the tree, which gives its names and weights; ``hetero.engine.gpu`` builds the
    decoder over all of them once the weights are there."""

    @staticmethod
    def from_module(
        module: nn.Module, *, name: str, config: Any, device: str, options: Mapping[str, Any]
    ) -> nn.Module:
        return module
