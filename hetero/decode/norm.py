"""Root mean square norms, of a step fused with the sums before them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hetero.decode.build import Build
from hetero.decode.stream import Sum
from hetero.formats import Format
from hetero.ops.gpu.fused import Normed, norm_rows


@dataclass(frozen=True, slots=True)
class Norm:
    """``x / rms(x) * (offset + weight)``."""

    weight: Tensor  # [H]
    eps: float
    offset: float  # 1 where weights are kept around zero

    @staticmethod
    def of(module: Any, build: Build, offset: float) -> Norm:
        """Of a norm of the tree."""
        eps = getattr(module, "variance_epsilon", None)
        return Norm(build.tensor(module.weight), module.eps if eps is None else eps, offset)

    def step(self, fmt: Format, residual: Tensor, added: Sum | None = None) -> Normed:
        """Of residual + added [R, H], for any R, whose sum is the new residual; rows for ``fmt``."""
        main, shared, gate = (None, None, None) if added is None else added
        return norm_rows(fmt, residual, self.weight, self.eps, self.offset, main, shared=shared, gate=gate)
