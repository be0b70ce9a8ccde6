"""How far the GPU's experts may be from the CPU's, where both quantise what is between their projections.

The CPU and the GPU compute the same codes of a token, to the bit, but activated values in float32 sums of
different order. A value that lies on the border between two codes may get either, and that moves the output
by a whole step of that value's column of down. So what is allowed is the float32 error, and one step for each
value that is on a border.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hetero.cpu import CpuExperts
from tests.cpu.reference import Weights, activate, decoded, quantised_rows

BORDER = 1e-3
"""In steps of a code. Values have up to 127 of them, so this is 8e-6 of the largest: some hundred roundings
of float32."""

EXACT = 1e-5
"""Contract of the float32 sums: relative norm."""


def excess(got: Tensor, wanted: Tensor, allowed: Tensor) -> float:
    """Relative norm of the difference beyond ``allowed``, all [T, hidden]."""
    off = ((got.double().cpu() - wanted.double()).abs() - allowed).clamp(min=0)
    return float(off.norm() / wanted.double().norm())


def beyond(
    experts: CpuExperts, weights: Weights, got: Tensor, wanted: Tensor, given: tuple[Tensor, Tensor, Tensor]
) -> float:
    """``excess`` of what ``borders`` allows for given (x, ids, w), which is looked at where there is need: it
    takes longer than the step."""
    off = excess(got, wanted, torch.zeros(()))
    return off if off < EXACT else excess(got, wanted, borders(experts, weights, *given))


def borders(experts: CpuExperts, weights: Weights, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    """float64 [T, hidden]: what values on borders may add. ``weights``: of ``decoded``."""
    spec = experts.spec
    out = torch.zeros(len(x), spec.hidden, dtype=torch.float64)
    if not experts.down_format.rounds_activations:
        return out
    rows = quantised_rows(x) if experts.format.rounds_activations else x.double()
    for e in set(ids.flatten().tolist()) & set(range(spec.num_experts)):
        token, slot = (ids == e).nonzero(as_tuple=True)
        parts = ["gate", "up"] if spec.has_gate else ["up"]
        both = [rows[token] @ weights[e, part].T for part in parts]
        if spec.has_bias:
            both = [y + weights[e, f"{part}_bias"] for y, part in zip(both, parts, strict=True)]
        h = activate(spec.activation, both[0], both[-1], spec.has_gate)
        padded = torch.nn.functional.pad(h, (0, -spec.intermediate % 32)).unflatten(-1, (-1, 32))
        step = padded.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
        near = ((padded / step).frac().abs() - 0.5).abs() < BORDER
        moves = (near * step).flatten(-2)[:, : spec.intermediate]
        out.index_add_(0, token, moves @ weights[e, "down"].abs().T * w[token, slot, None].double().abs())
    return out


__all__ = ["BORDER", "EXACT", "beyond", "borders", "decoded", "excess"]
