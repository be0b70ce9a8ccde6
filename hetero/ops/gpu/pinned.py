"""The CPU's experts as a GPU sees them: one view over their memory, pinned and mapped on CUDA."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hetero.core import InputError
from hetero.cpu import CpuExperts


class PinnedArena:
    """``view``: uint8 [experts, stride] over the memory of ``experts``, each whole expert contiguous.

    Raises InputError where a placement cuts experts over memory nodes.
    """

    def __init__(self, experts: CpuExperts, device: str | torch.device) -> None:
        self.experts, self.device = experts, torch.device(device)
        memory = experts.view(0, experts.spec.num_experts)
        if memory is None:
            raise InputError(
                "experts that are cut over memory nodes cannot be read by a GPU; 'numa: off' or 'numa: node "
                "N' keeps them whole"
            )
        self.view: Tensor = torch.from_numpy(np.frombuffer(memory, dtype=np.uint8)).view(
            experts.spec.num_experts, -1
        )

    def close(self) -> None:
        """Undo the pinning. Nothing on the device may use the memory any more."""
