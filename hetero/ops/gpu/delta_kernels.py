"""A decode step of a gated delta net in one Triton kernel (Gated Delta Networks, arXiv 2412.06464).

Convolution, gates, delta rule and gated norm, of one head a program; the projections before and after it are
linear layers. All arithmetic is float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Added to the squares' sum of queries and keys, as transformers' modules do.
L2_EPS = tl.constexpr(1e-6)


@triton.jit
def _convolved(x, ring, weight, channel, position, here, TAPS: tl.constexpr, STORE: tl.constexpr):
    """silu of the causal convolution of some channels, whose newest input is in ``x``.

    ``ring`` [channels, TAPS] holds inputs by their position mod TAPS. The newest one takes the place of the
    one TAPS steps before it, which the sum does not need: programs that share channels may read while another
    one stores.
    """
    newest = tl.load(x + channel, here, 0.0).to(tl.float32)
    total = newest * tl.load(weight + channel * TAPS + TAPS - 1, here, 0.0).to(tl.float32)
    for back in tl.static_range(1, TAPS):
        slot = (position + TAPS - back) % TAPS
        past = tl.load(ring + channel * TAPS + slot, here, 0.0)
        total += past * tl.load(weight + channel * TAPS + TAPS - 1 - back, here, 0.0).to(tl.float32)
    if STORE:
        tl.store(ring + channel * TAPS + position % TAPS, newest, here)
    return total * tl.sigmoid(total)


@triton.jit
def delta_step(
    qkv, z, a, b, rings, states, slots, positions, conv_weight, a_log, dt_bias, norm_weight, out, eps,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    TAPS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """One token of every row; program (value head, row). Several value heads share a key head, in order.

    ``qkv`` [T, (2 * KEY_HEADS * KEY_DIM) + VALUE_HEADS * VALUE_DIM]: queries, keys, values before the
    convolution; ``z`` [T, VALUE_HEADS, VALUE_DIM] and ``a``, ``b`` [T, VALUE_HEADS]: before their
    activations; ``rings`` float32 [slots, channels, TAPS] and ``states`` float32 [slots, VALUE_HEADS,
    KEY_DIM, VALUE_DIM]: changed in place, at the slot of each row (``slots`` int64 [T]; negative: the row is
    left out); ``positions`` int64 [T] of the tokens; ``out`` [T, VALUE_HEADS, VALUE_DIM]. KEYS and VALUES:
    the dimensions rounded up to powers of two.
    """
    head, row = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row)
    if slot >= 0:
        position = tl.load(positions + row)
        group: tl.constexpr = VALUE_HEADS // KEY_HEADS
        channels: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
        key_head = head // group
        first = head % group == 0  # of the heads that share queries and keys, it keeps them
        x, ring = qkv + row * channels, rings + slot * (channels * TAPS)
        at, to = tl.arange(0, KEYS), tl.arange(0, VALUES)
        keys, values = at < KEY_DIM, to < VALUE_DIM

        channel = key_head * KEY_DIM + at
        query = _convolved(x, ring, conv_weight, channel, position, keys, TAPS, False)
        key = _convolved(x, ring, conv_weight, KEY_HEADS * KEY_DIM + channel, position, keys, TAPS, False)
        if first:
            for part in tl.static_range(2):
                mine = part * KEY_HEADS * KEY_DIM + channel
                newest = tl.load(x + mine, keys, 0.0).to(tl.float32)
                tl.store(ring + mine * TAPS + position % TAPS, newest, keys)
        channel = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + to
        value = _convolved(x, ring, conv_weight, channel, position, values, TAPS, True)

        query = query * tl.rsqrt(tl.sum(query * query) + L2_EPS) * (KEY_DIM**-0.5)
        key = key * tl.rsqrt(tl.sum(key * key) + L2_EPS)
        time = tl.load(a + row * VALUE_HEADS + head).to(tl.float32) + tl.load(dt_bias + head).to(tl.float32)
        # softplus, without overflow
        time = tl.maximum(time, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(time)))
        decay = tl.exp(-tl.exp(tl.load(a_log + head).to(tl.float32)) * time)
        beta = tl.sigmoid(tl.load(b + row * VALUE_HEADS + head).to(tl.float32))

        matrix = at[:, None] * VALUE_DIM + to[None, :]
        inside = keys[:, None] & values[None, :]
        state_at = states + (slot * VALUE_HEADS + head) * (KEY_DIM * VALUE_DIM) + matrix
        state = tl.load(state_at, inside, 0.0) * decay
        remembered = tl.sum(state * key[:, None], 0)
        state += key[:, None] * ((value - remembered) * beta)[None, :]
        tl.store(state_at, state, inside)
        y = tl.sum(state * query[:, None], 0)

        weight = tl.load(norm_weight + to, values, 0.0).to(tl.float32)
        y = y * tl.rsqrt(tl.sum(y * y) / VALUE_DIM + eps) * weight
        place = (row * VALUE_HEADS + head) * VALUE_DIM + to
        gate = tl.load(z + place, values, 0.0).to(tl.float32)
        tl.store(out + place, y * gate * tl.sigmoid(gate), values)
