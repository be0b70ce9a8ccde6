"""Gated delta nets over many tokens of one sequence, by torch: the recurrence a chunk of tokens at a time
(Gated Delta Networks, arXiv 2412.06464, section 3.3). All arithmetic is float32."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hetero.ops.gpu.delta import DeltaState, DeltaWeights

_CHUNK = 64
_L2_EPS = 1e-6


def convolved(state: DeltaState, weights: DeltaWeights, qkv: Tensor, slot: int, start: int) -> Tensor:
    """silu of the causal convolution of qkv [T, channels], whose last inputs the slot's ring takes over."""
    taps, count = state.shape.taps, qkv.shape[0]
    ring = state.rings[slot]
    before = [ring[:, (start - back) % taps] for back in range(taps - 1, 0, -1)]
    inputs = torch.cat([torch.stack(before), qkv.float()]) if before else qkv.float()
    out = inputs[:count] * weights.conv[:, 0]
    for tap in range(1, taps):
        out = torch.addcmul(out, inputs[tap : tap + count], weights.conv[:, tap])
    end = start + count
    for back in range(1, min(taps, count) + 1):
        ring[:, (end - back) % taps] = inputs[-back]
    return nn.functional.silu(out)


def delta_rule(
    state: DeltaState, weights: DeltaWeights, projected: tuple[Tensor, Tensor, Tensor], slot: int
) -> Tensor:
    """float32 [T, value_heads, value_dim] of convolved qkv [T, channels] and a, b [T, value_heads]; the
    slot's state goes on.

    Within a chunk the changes of the state follow from a triangular system, whose solution needs no state;
    from chunk to chunk a few products carry it on.
    """
    qkv, a, b = projected
    s, count = state.shape, qkv.shape[0]
    width = s.key_heads * s.key_dim
    query, key, value = torch.split(qkv, [width, width, s.value_heads * s.value_dim], 1)
    query, key = (_unit(_chunks(part, s.key_heads)) for part in (query, key))
    value = _chunks(value, s.value_heads)
    gates = (_chunks(part.float(), s.value_heads).squeeze(-1) for part in (a, b))
    # Padding has no gate: it neither decays nor changes the state.
    inside = (torch.arange(value.shape[1] * _CHUNK, device=qkv.device) < count).view(1, -1, _CHUNK)
    time, beta = gates
    decay = -weights.a_log.exp()[:, None, None] * nn.functional.softplus(
        time + weights.dt_bias[:, None, None]
    )
    decay, beta = decay * inside, torch.sigmoid(beta) * inside

    # [value heads, chunks, ...]; several value heads share a key head
    group = s.value_heads // s.key_heads
    total = decay.cumsum(2)
    upper = torch.ones(_CHUNK, _CHUNK, dtype=torch.bool, device=qkv.device).triu(1)
    between = (total.unsqueeze(3) - total.unsqueeze(2)).masked_fill(upper, float("-inf")).exp()
    similar = (key @ key.transpose(2, 3)).repeat_interleave(group, 0)
    seen = (query @ key.transpose(2, 3)).repeat_interleave(group, 0) * (between * s.key_dim**-0.5)
    key, query = (part.repeat_interleave(group, 0) for part in (key, query))
    system = similar * between * beta.unsqueeze(3)
    begun = total.exp().unsqueeze(3)
    wanted = torch.cat([value, key * begun], 3) * beta.unsqueeze(3)
    solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    new, old = torch.split(solved, [s.value_dim, s.key_dim], 3)
    query = query * (begun * s.key_dim**-0.5)
    key = (key * (total[:, :, -1:] - total).exp().unsqueeze(3)).transpose(2, 3)
    fade = total[:, :, -1].exp()[:, :, None, None]

    memory = state.states[slot].clone()
    out = torch.empty_like(new)
    for chunk in range(value.shape[1]):
        change = torch.baddbmm(new[:, chunk], old[:, chunk], memory, alpha=-1)
        torch.baddbmm(query[:, chunk] @ memory, seen[:, chunk], change, out=out[:, chunk])
        memory = torch.baddbmm(memory * fade[:, chunk], key[:, chunk], change)
    state.states[slot] = memory
    return out.flatten(1, 2)[:, :count].transpose(0, 1)


def gated_norm(weights: DeltaWeights, y: Tensor, z: Tensor, *, silu: bool) -> Tensor:
    """float32 [T, value_heads * value_dim]: each head of y by its root mean square, times silu(z) or
    sigmoid(z)."""
    normed = nn.functional.rms_norm(y, (y.shape[-1],), weights.norm, weights.eps)
    return normed.flatten(1) * (nn.functional.silu if silu else torch.sigmoid)(z.float())


def _chunks(x: Tensor, heads: int) -> Tensor:
    """[T, heads * n] -> [heads, chunks, _CHUNK, n], zeros behind the last token."""
    count = x.shape[0]
    x = nn.functional.pad(x, (0, 0, 0, -count % _CHUNK))
    return x.view(-1, _CHUNK, heads, x.shape[1] // heads).permute(2, 0, 1, 3).contiguous()


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _L2_EPS)
