"""A decode step of a gated delta net in one Triton kernel (Gated Delta Networks, arXiv 2412.06464).

Convolution, gates and delta rule of some columns of one head's state a program; the projections before it are
linear layers, the gated norm after it is the prologue of the output's. All arithmetic is float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hetero.ops.gpu.overlap_kernels import await_last, let_next

# Added to the squares' sum of queries and keys, as transformers' modules do.
L2_EPS = tl.constexpr(1e-6)


@triton.jit
def _convolved(x, ring, weight, channel, position, here, TAPS: tl.constexpr):
    """(silu of the causal convolution of some channels, its newest inputs), which are in ``x``.

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
    return total * tl.sigmoid(total), newest


@triton.jit
def delta_step(
    qkv, a, b, rings, states, slots, positions, conv_weight, a_log, dt_bias, out, qkv_stride, a_stride,
    b_stride,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    TAPS: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token of every row; program (COLUMNS of the values, value head, row). Several value heads share a
    key head, in order.

    ``qkv`` [T, (2 * KEY_HEADS * KEY_DIM) + VALUE_HEADS * VALUE_DIM]: queries, keys, values before the
    convolution; ``a``, ``b`` [T, VALUE_HEADS]: before their activations; ``rings`` float32 [slots, channels,
    TAPS] and ``states`` float32 [slots, VALUE_HEADS, KEY_DIM, VALUE_DIM]: changed in place, at the slot of
    each row (``slots`` int64 [T]; negative: the row is left out, and its ``out`` zero); ``positions`` int64
    [T] of the tokens; ``out`` [T, VALUE_HEADS, VALUE_DIM], contiguous. KEYS: the keys' dimension as a power
    of two.
    """
    let_next(PDL)
    chunk, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots + row)
    position = tl.load(positions + row)
    to = chunk * COLUMNS + tl.arange(0, COLUMNS)
    values = to < VALUE_DIM
    out_at = out + (row * VALUE_HEADS + head) * VALUE_DIM + to
    if slot < 0:
        await_last(PDL)
        tl.store(out_at, tl.zeros((COLUMNS,), out.dtype.element_ty), values)
    else:
        group: tl.constexpr = VALUE_HEADS // KEY_HEADS
        channels: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
        key_head = head // group
        x, ring = qkv + row * qkv_stride, rings + slot * (channels * TAPS)
        at = tl.arange(0, KEYS)
        keys = at < KEY_DIM
        inside = keys[:, None] & values[None, :]
        matrix = at[:, None] * VALUE_DIM + to[None, :]
        state_at = states + (slot * VALUE_HEADS + head) * (KEY_DIM * VALUE_DIM) + matrix
        # It was written in an earlier step, which no kernel of this one overtakes.
        state = tl.load(state_at, inside, 0.0)
        await_last(PDL)

        key_channel = key_head * KEY_DIM + at
        query, new_query = _convolved(x, ring, conv_weight, key_channel, position, keys, TAPS)
        after = KEY_HEADS * KEY_DIM + key_channel
        key, new_key = _convolved(x, ring, conv_weight, after, position, keys, TAPS)
        channel = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + to
        value, new_value = _convolved(x, ring, conv_weight, channel, position, values, TAPS)
        tl.store(ring + channel * TAPS + position % TAPS, new_value, values)
        # Of the programs that share queries and keys one keeps them.
        first = keys & (at * 0 + head % group + chunk == 0)
        tl.store(ring + key_channel * TAPS + position % TAPS, new_query, first)
        tl.store(ring + after * TAPS + position % TAPS, new_key, first)

        time = tl.load(a + row * a_stride + head).to(tl.float32) + tl.load(dt_bias + head).to(tl.float32)
        # softplus, without overflow
        time = tl.maximum(time, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(time)))
        decay = tl.exp(-tl.exp(tl.load(a_log + head).to(tl.float32)) * time)
        beta = tl.sigmoid(tl.load(b + row * b_stride + head).to(tl.float32))

        # Every sum over the keys at once: of the state before its change, whose change is known by then.
        query_size = tl.rsqrt(tl.sum(query * query) + L2_EPS) * (KEY_DIM**-0.5)
        key_size = tl.rsqrt(tl.sum(key * key) + L2_EPS)
        both = tl.sum(query * key) * (query_size * key_size)
        remembered = tl.sum(state * key[:, None], 0) * (key_size * decay)
        y = tl.sum(state * query[:, None], 0) * (query_size * decay)
        change = (value - remembered) * beta
        y += both * change
        tl.store(out_at, y.to(out.dtype.element_ty), values)
        state = state * decay + (key * key_size)[:, None] * change[None, :]
        tl.store(state_at, state, inside)
