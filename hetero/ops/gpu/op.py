"""Routed experts on a GPU as a module of the tree."""

from __future__ import annotations

import torch
from torch import nn

from hetero.core import ExpertSpec
from hetero.formats import Format
from hetero.ops.experts import Pending
from hetero.ops.gpu.experts import GpuExperts
from hetero.ops.watch import ExpertUse


class GpuExpertsOp(nn.Module):
    """Takes the place of a transformers experts module, as ``CpuExpertsOp`` does, with the experts in the
    memory of ``device``. The tokens have to be there as well. ``layer``: index of the layer that holds it, -1
    where unknown; ``use``: which experts were chosen."""

    def __init__(
        self,
        spec: ExpertSpec,
        fmt: Format,
        device: str,
        down_format: Format | None = None,
        *,
        layer: int = -1,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.backend = GpuExperts(spec, fmt, device, down_format)
        self.layer = layer
        self.use = ExpertUse(spec.num_experts)

    # Part of the loader's ExpertSink.
    def put(self, expert: int, part: str, tensor: torch.Tensor) -> None:
        self.backend.put(expert, part, tensor)

    def missing(self) -> list[tuple[int, str]]:
        return self.backend.missing()

    # Part of the loader's CodeSink.
    def format_of(self, part: str) -> Format:
        return self.backend.format_of(part)

    def put_codes(
        self, expert: int, part: str, codes: torch.Tensor, scales: torch.Tensor, extra: torch.Tensor | None
    ) -> None:
        self.backend.put_codes(expert, part, codes, scales, extra)

    def put_ggml(self, expert: int, part: str, type_name: str, data: torch.Tensor) -> None:
        self.backend.put_ggml(expert, part, type_name, data)

    def submit(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Pending:
        """Start on x [T, hidden] with ids and weights [T, k]: the work is queued behind what the stream
        holds."""
        self.use.note(ids)
        return Pending(self.backend.forward(x, ids, weights), x)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The weighted sum [T, hidden], in the dtype of x."""
        return self.submit(x, ids, weights).collect()

    def extra_repr(self) -> str:
        s, backend = self.spec, self.backend
        return f"{s.num_experts} x ({s.hidden} -> {s.intermediate}), {backend.format} on {backend.device}"
