"""What a block of a layer gives."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Sum(NamedTuple):
    """A block's output whose parts nobody has added yet: main + sigmoid(gate) * shared. The next norm does
    it (``fused.norm_rows``), or whatever else follows."""

    main: Tensor  # [R, H], float32 or the model's dtype
    shared: Tensor | None = None  # [R, H]
    gate: Tensor | None = None  # [R, 1], a column of a wider projection; None: shared counts whole

    def rows(self, which: slice) -> Sum:
        """Of some rows alone."""
        return Sum(*(None if part is None else part[which] for part in self))  # type: ignore[arg-type]

    def value(self) -> Tensor:
        """[R, H] float32, by torch."""
        total = self.main.float()
        if self.shared is None:
            return total
        shared = self.shared.float()
        return total + (shared if self.gate is None else torch.sigmoid(self.gate.float()) * shared)
