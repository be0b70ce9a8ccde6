"""Routed experts in plain torch and float32: what the extension is compared with."""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from hetero.core import ExpertSpec, InputError
from hetero.model.moe_types import evaluate


def expert_parts(spec: ExpertSpec) -> dict[str, tuple[int, ...]]:
    """Name of each part of an expert -> its shape."""
    wide, narrow = (spec.intermediate, spec.hidden), (spec.hidden, spec.intermediate)
    shapes: dict[str, tuple[int, ...]] = {"gate": wide} if spec.has_gate else {}
    shapes |= {"up": wide, "down": narrow}
    if spec.has_bias:
        shapes |= {f"{part}_bias": shape[:1] for part, shape in shapes.items()}
    return shapes


class TorchExperts:
    """The interface of ``hetero.cpu.CpuExperts`` over float32 tensors, one expert after the other."""

    format = "f32"

    def __init__(self, spec: ExpertSpec) -> None:
        self.spec = spec
        self._shapes = expert_parts(spec)
        self._weights: list[dict[str, torch.Tensor]] = [{} for _ in range(spec.num_experts)]

    @property
    def nbytes(self) -> int:
        return sum(w.nbytes for expert in self._weights for w in expert.values())

    def put(self, expert: int, part: str, tensor: torch.Tensor) -> None:
        """Take one part of one expert, once, of the shape that ``expert_parts`` says."""
        shape = self._shapes.get(part)
        if shape is None or not 0 <= expert < len(self._weights):
            raise InputError(f"no part {part!r} of expert {expert} here")
        if tuple(tensor.shape) != shape:
            raise InputError(f"{part} of expert {expert} has shape {list(tensor.shape)}, not {list(shape)}")
        if part in self._weights[expert]:
            raise InputError(f"{part} of expert {expert} arrived twice")
        self._weights[expert][part] = tensor.detach().to("cpu", torch.float32, copy=True)

    def missing(self) -> list[tuple[int, str]]:
        """The (expert, part) pairs that have not arrived."""
        return [
            (e, part) for e, have in enumerate(self._weights) for part in self._shapes if part not in have
        ]

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x [T, hidden], ids [T, k], weights [T, k] -> [T, hidden] float32, summed in the order of slots."""
        projected = self.gate_up(x, ids)
        gate, up = projected.chunk(2, dim=-1) if self.spec.has_gate else (projected, projected)
        h = evaluate(self.spec.activation, self.spec.has_gate, gate, up)
        y = self.down(h, ids)
        out = torch.zeros(x.shape[0], self.spec.hidden)
        for slot in range(ids.shape[1]):
            out += weights[:, slot, None].float() * y[:, slot]
        return out

    def gate_up(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """x [T, hidden], ids [T, k] -> [T, k, 2 * intermediate] float32, gate first; up alone if no gate."""
        x = x.float()
        width = self.spec.intermediate * (2 if self.spec.has_gate else 1)
        out = torch.zeros(*ids.shape, width)
        for expert in self._present(ids):
            w, rows = self._weights[expert], ids == expert
            parts = [
                linear(x[rows.nonzero()[:, 0]], w[part], w.get(f"{part}_bias"))
                for part in ("gate", "up")
                if part in w
            ]
            out[rows] = torch.cat(parts, dim=-1)
        return out

    def down(self, h: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """h [T, k, intermediate], ids [T, k] -> [T, k, hidden] float32, not weighted."""
        out = torch.zeros(*ids.shape, self.spec.hidden)
        for expert in self._present(ids):
            w, rows = self._weights[expert], ids == expert
            out[rows] = linear(h[rows].float(), w["down"], w.get("down_bias"))
        return out

    def _present(self, ids: torch.Tensor) -> list[int]:
        return [e for e in sorted(set(ids.flatten().tolist())) if 0 <= e < len(self._weights)]
