"""What families are given to make layers of a tree's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hetero.core import InputError
from hetero.decode.experts import LayerExperts
from hetero.decode.inputs import PAGE

Routing = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(index among the MoE layers, ids int64 [T, k], weights float32 [T, k]) -> those that are used instead."""

# Kinds of rotary embeddings whose frequencies do not depend on how long a sequence has become.
_FIXED = ("default", "linear", "yarn", "llama3", "proportional")


@dataclass(slots=True)
class Build:
    """A tree and how it is to be run."""

    text: Any  # the tree's decoder: embed_tokens, layers, norm, rotary_emb
    experts: list[LayerExperts]  # of each MoE layer, in order
    slots: int
    context: int  # tokens of a sequence, at most
    device: torch.device
    kv_dtype: torch.dtype
    pages: int  # in all
    routing: Routing | None = None
    moe_layers: int = 0  # made so far

    @property
    def config(self) -> Any:
        """Of the text model."""
        return self.text.config

    @property
    def dtype(self) -> torch.dtype:
        """Of the residual stream."""
        dtype: torch.dtype = self.text.embed_tokens.weight.dtype
        return dtype

    @property
    def most_pages(self) -> int:
        """Pages of one sequence, at most."""
        return -(-self.context // PAGE)

    def tensor(self, value: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """A weight of the tree on the device, contiguous."""
        return value.detach().to(self.device, dtype).contiguous()

    def rotary(self) -> tuple[Tensor, float]:
        """(inverse frequencies float32 [rotary / 2], what sines and cosines are multiplied by).

        Raises InputError for frequencies that change with the length of a sequence.
        """
        module: nn.Module = self.text.rotary_emb
        kind = getattr(module, "rope_type", "default")
        if kind not in _FIXED:
            raise InputError(
                f"rotary embeddings of type {kind!r} change with the length of a sequence, which fused steps "
                "do not do"
            )
        scale = float(getattr(module, "attention_scaling", 1.0))
        return self.tensor(module.inv_freq, torch.float32), scale  # type: ignore[arg-type]

    def next_moe(self) -> int:
        """Index of the MoE layer that is being made. Raises ValueError where it has no experts."""
        if self.moe_layers == len(self.experts):
            raise ValueError(f"more MoE layers than the {len(self.experts)} experts given")
        self.moe_layers += 1
        return self.moe_layers - 1
