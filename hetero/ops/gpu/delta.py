"""State of gated delta nets in slots, and their decode step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from hetero.formats import Format
from hetero.ops.gpu import delta_kernels
from hetero.ops.gpu.fused import gated_norm_rows
from hetero.ops.gpu.overlap import overlap

_COLUMNS, _WARPS = 32, 4
_VALUES = Format("bf16")


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """Sizes of one gated delta net."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int  # of the convolution

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys, values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """What a step needs besides the projections, float32 on the device."""

    conv: Tensor  # [channels, taps]
    a_log: Tensor  # [value_heads]
    dt_bias: Tensor  # [value_heads]
    norm: Tensor  # [value_dim]
    eps: float


class DeltaState:
    """What a layer remembers of each sequence, in ``count`` slots."""

    def __init__(self, shape: DeltaShape, count: int, device: str | torch.device) -> None:
        self.shape = shape
        # Past inputs of the convolution, each at its position mod taps.
        self.rings = torch.zeros(count, shape.channels, shape.taps, dtype=torch.float32, device=device)
        size = (count, shape.value_heads, shape.key_dim, shape.value_dim)
        self.states = torch.zeros(size, dtype=torch.float32, device=device)

    @property
    def nbytes(self) -> int:
        return self.rings.nbytes + self.states.nbytes

    def clear(self, slot: int) -> None:
        """Begin a new sequence in a slot."""
        self.rings[slot] = 0
        self.states[slot] = 0

    def fill(self, slot: int, inputs: Tensor, state: Tensor, position: int) -> None:
        """Take over a sequence after a prefill of ``position`` tokens: the convolution's last inputs
        [channels, n], the newest last, and the state [value_heads, key_dim, value_dim]."""
        self.clear(slot)
        for back in range(1, min(inputs.shape[1], self.shape.taps, position) + 1):
            self.rings[slot, :, (position - back) % self.shape.taps] = inputs[:, -back].float()
        self.states[slot] = state


def delta_core(
    state: DeltaState,
    weights: DeltaWeights,
    projected: tuple[Tensor, Tensor, Tensor],
    slots: Tensor,
    positions: Tensor,
) -> Tensor:
    """One token of every row: float32 [T, value_heads, value_dim], which ``gated_norm_rows`` takes.

    ``projected``: qkv [T, channels], a and b [T, value_heads], of any float dtype; rows may be any distance
    apart; ``slots`` and ``positions`` int64 [T]. Rows of one slot must not meet in a step; a negative slot
    leaves its row out, whose result is zero.
    """
    qkv, a, b = projected
    s, rows = state.shape, qkv.shape[0]
    out = torch.empty(rows, s.value_heads, s.value_dim, dtype=torch.float32, device=qkv.device)
    columns = min(_COLUMNS, triton.next_power_of_2(s.value_dim))
    delta_kernels.delta_step[(-(-s.value_dim // columns), s.value_heads, rows)](
        qkv, a, b, state.rings, state.states, slots, positions, weights.conv, weights.a_log, weights.dt_bias,
        out, qkv.stride(0), a.stride(0), b.stride(0), KEY_HEADS=s.key_heads, VALUE_HEADS=s.value_heads,
        KEY_DIM=s.key_dim, VALUE_DIM=s.value_dim, TAPS=s.taps, KEYS=triton.next_power_of_2(s.key_dim),
        COLUMNS=columns, num_warps=_WARPS, **overlap(qkv.device),
    )  # fmt: skip
    return out


def delta_step(
    state: DeltaState,
    weights: DeltaWeights,
    projected: tuple[Tensor, Tensor, Tensor, Tensor],
    slots: Tensor,
    positions: Tensor,
) -> Tensor:
    """``delta_core`` of (qkv, z, a, b) and the gated norm by silu(z), z [T, value_heads * value_dim]: [T,
    value_heads * value_dim] in the dtype of qkv, what the output projection takes."""
    qkv, z, a, b = projected
    y = delta_core(state, weights, (qkv, a, b), slots, positions)
    return gated_norm_rows(_VALUES, y.to(qkv.dtype), z, weights.norm, weights.eps).q
