"""Embeddings, gathered from where their table lies."""

from __future__ import annotations

import torch
from torch import Tensor

from hetero.decode import embedding_kernels

_WIDTH = 512


class Embedding:
    """``table`` [V, H], on ``device`` or in memory of the host, which is pinned: a step reads rows of it in
    place."""

    def __init__(self, table: Tensor, device: torch.device) -> None:
        self._device = device
        table = table.detach().contiguous()
        on_host = table.device.type == "cpu" and device.type == "cuda"
        self.table = table.pin_memory() if on_host and not table.is_pinned() else table
        if not on_host:
            self.table = self.table.to(device)

    def __call__(self, tokens: Tensor) -> Tensor:
        """int64 [T] on the device -> [T, H] in the table's dtype."""
        hidden = self.table.shape[1]
        out = torch.empty(len(tokens), hidden, dtype=self.table.dtype, device=self._device)
        embedding_kernels.gather[(-(-hidden // _WIDTH), len(tokens))](
            tokens, self.table, out, HIDDEN=hidden, WIDTH=_WIDTH
        )
        return out
