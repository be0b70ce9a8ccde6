"""What the hybrid experts of all layers on one device have in common."""

from __future__ import annotations

import torch

MOVES = 1
"""Experts that a layer may bring into GPU memory in a decode step."""


class HybridShared:
    """``share`` of the experts that are not in GPU memory are read over PCIe, the CPU computes the others;
    at most ``moves`` experts a layer and step are brought in, beside the step."""

    def __init__(self, device: str | torch.device, *, share: float = 0.0, moves: int = MOVES) -> None:
        self.device = torch.device(device)
        self.moves = moves
        self.set_share(share)

    @property
    def nbytes(self) -> int:
        """Bytes of GPU memory."""
        return 0

    def set_share(self, share: float) -> None:
        """0 to 1; captured graphs follow. Between steps only."""
        if not 0.0 <= share <= 1.0:
            raise ValueError(f"a share of {share}, must be within 0 and 1")
        self.share = share

    def join(self) -> None:
        """The current stream waits for the moves of this step: at the end of every captured step."""
