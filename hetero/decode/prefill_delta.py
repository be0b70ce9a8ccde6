"""Gated delta nets over many tokens of one sequence: the recurrence a chunk of tokens at a time."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from hetero.decode import prefill_delta_kernels as kernels
from hetero.ops.gpu.delta import DeltaState, DeltaWeights

_CHUNK, _COLUMNS = 64, 32
_SMALLEST = 32
_CHUNK_OF_INTERPRETER = 16  # which takes long for each row of a chunk
_ROWS, _WIDTH = 32, 64  # of the convolution: tokens and channels of a program


def convolved(state: DeltaState, weights: DeltaWeights, qkv: Tensor, slot: int, start: int) -> Tensor:
    """float32 [T, channels]: silu of the causal convolution of qkv [T, channels], rows any distance apart,
    whose last inputs the slot's ring takes over."""
    taps, (count, channels) = state.shape.taps, qkv.shape
    ring = state.rings[slot]
    out = torch.empty(count, channels, dtype=torch.float32, device=qkv.device)
    kernels.convolve[(-(-count // _ROWS), -(-channels // _WIDTH))](
        qkv, ring, weights.conv, out, count, start, qkv.stride(0),
        CHANNELS=channels, TAPS=taps, ROWS=_ROWS, WIDTH=_WIDTH,
    )  # fmt: skip
    end = start + count
    if count >= taps:
        ring.copy_(qkv[-taps:].T.roll(end % taps, 1))
    else:
        for back in range(1, count + 1):
            ring[:, (end - back) % taps] = qkv[-back]
    return out


def delta_rule(
    state: DeltaState, weights: DeltaWeights, projected: tuple[Tensor, Tensor, Tensor], slot: int
) -> Tensor:
    """float32 [T, value_heads, value_dim] of convolved qkv float32 [T, channels], contiguous, and a, b [T,
    value_heads], rows any distance apart; the slot's state goes on."""
    acted, a, b = projected
    s, count, device = state.shape, acted.shape[0], acted.device
    twin = device.type == "cpu"
    size = _CHUNK_OF_INTERPRETER if twin else _CHUNK
    chunks, heads = -(-count // size), s.value_heads

    def made(*sizes: int) -> Tensor:
        return torch.empty(*sizes, dtype=torch.float32, device=device)

    tokens = heads, chunks * size
    parts = (
        made(*tokens, s.value_dim),
        *(made(*tokens, s.key_dim) for _ in range(3)),
        made(*tokens, size),
        made(heads, chunks),
    )
    dims = {
        "KEY_DIM": s.key_dim,
        "VALUE_DIM": s.value_dim,
        "KEYS": max(16, triton.next_power_of_2(s.key_dim)),
    }
    values = max(16, triton.next_power_of_2(s.value_dim))
    # Tensor cores' products in three parts read beyond their memory where a side is below 32 (Triton 3.6).
    plain = twin or min(dims["KEYS"], values) < _SMALLEST
    common = {"VALUE_HEADS": heads, "CHUNK": size, "PLAIN": plain, **dims}
    kernels.solve[(chunks, heads)](
        acted, a, b, weights.a_log, weights.dt_bias, *parts, count, a.stride(0), b.stride(0),
        KEY_HEADS=s.key_heads, VALUES=values, num_warps=8, **common,
    )  # fmt: skip
    out = made(count, heads, s.value_dim)
    columns = min(_COLUMNS, values)
    kernels.scan[(-(-s.value_dim // columns), heads)](
        *parts, state.states[slot], out, count, chunks, COLUMNS=columns, num_warps=4, num_stages=1, **common
    )
    return out
