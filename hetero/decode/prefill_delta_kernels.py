"""Triton kernels of gated delta nets over many tokens of one sequence (arXiv 2412.06464, section 3.3).

``convolve``; then ``solve``, which for each chunk of CHUNK tokens finds what needs no state: the changes that
the tokens would make to an empty one, and how they depend on another; then ``scan``, which carries the state
from chunk to chunk. All arithmetic is float32; products are by tensor cores in three parts (tf32x3), but not
where PLAIN.
"""

from __future__ import annotations

import triton
import triton.language as tl

L2_EPS = tl.constexpr(1e-6)
NOT_SEEN = tl.constexpr(-1e30)


@triton.jit
def _dot(a, b, PLAIN: tl.constexpr):
    if PLAIN:
        return tl.dot(a, b, input_precision="ieee")
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def _unit(pointers, known):
    """Rows of float32 by their lengths."""
    x = tl.load(pointers, known, 0.0)
    return x * tl.rsqrt(tl.sum(x * x, 1) + L2_EPS)[:, None]


# Prompts of any length are read by the same kernels: none is compiled while somebody waits for a first token.
@triton.jit(do_not_specialize=("count", "start"))
def convolve(
    x, ring, weight, out, count, start, stride,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """``out`` float32 [count, CHANNELS]: silu of the causal convolution of ``x`` [count, CHANNELS], rows
    ``stride`` apart, the first of which is at position ``start``; program (ROWS tokens, WIDTH channels).

    ``ring`` float32 [CHANNELS, TAPS] has the inputs before them, each at its position mod TAPS.
    """
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    channel = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)[None, :]
    here = (token < count) & (channel < CHANNELS)
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    for back in tl.static_range(TAPS):
        source = token - back
        value = tl.load(x + source.to(tl.int64) * stride + channel, here & (source >= 0), 0.0).to(tl.float32)
        if back > 0:
            slot = (start + source + TAPS) % TAPS
            value += tl.load(ring + channel * TAPS + slot, here & (source < 0), 0.0)
        total += value * tl.load(weight + channel * TAPS + TAPS - 1 - back, channel < CHANNELS, 0.0)
    tl.store(out + token.to(tl.int64) * CHANNELS + channel, total * tl.sigmoid(total), here)


@triton.jit(do_not_specialize=("count",))
def solve(
    acted, a, b, a_log, dt_bias, changes, reads, queries, keys, seen, fades, count, a_stride, b_stride,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, CHUNK: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Program (chunk, value head). ``acted`` float32 [count, channels]: convolved queries, keys, values;
    ``a`` and ``b`` [count, VALUE_HEADS], before their activations, rows so far apart.

    Written, float32, of each token of [VALUE_HEADS, chunks * CHUNK], zeros beyond count: ``changes`` [...,
    VALUE_DIM], what it would add to the value of its key if the state were empty when the chunk began;
    ``reads`` [..., KEY_DIM], how much less for each part of the state; ``queries`` and ``keys`` [...,
    KEY_DIM], as far as they have faded since the chunk began and until it ends; ``seen`` [..., CHUNK]: its
    query with the chunk's keys up to its own. ``fades`` [VALUE_HEADS, chunks]: what is left of the state.
    """
    chunk, head = tl.program_id(0), tl.program_id(1)
    channels: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    row = tl.arange(0, CHUNK)
    token = chunk * CHUNK + row
    here = token < count
    at, to = tl.arange(0, KEYS), tl.arange(0, VALUES)
    line = acted + token.to(tl.int64)[:, None] * channels
    known = here[:, None] & (at < KEY_DIM)[None, :]
    wide = (at < KEY_DIM)[None, :]
    place = (head * tl.num_programs(0) + chunk).to(tl.int64) * CHUNK + row[:, None]

    time = tl.load(a + token * a_stride + head, here, 0.0).to(tl.float32) + tl.load(dt_bias + head)
    time = tl.maximum(time, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(time)))
    # A token that is not there neither fades nor changes anything.
    decay = tl.where(here, -tl.exp(tl.load(a_log + head)) * time, 0.0)
    beta = tl.where(here, tl.sigmoid(tl.load(b + token * b_stride + head, here, 0.0).to(tl.float32)), 0.0)
    total = tl.cumsum(decay, 0)
    whole = tl.sum(decay, 0)
    past = row[:, None] > row[None, :]
    between = tl.exp(tl.where(row[:, None] >= row[None, :], total[:, None] - total[None, :], NOT_SEEN))

    begun = tl.exp(total)[:, None]

    key = _unit(line + (KEY_HEADS + key_head) * KEY_DIM + at[None, :], known)
    turned = tl.trans(key)
    system = tl.trans(tl.where(past, _dot(key, turned, PLAIN) * between * beta[:, None], 0.0))
    tl.store(keys + place * KEY_DIM + at[None, :], key * tl.exp(whole - total)[:, None], wide)
    query = _unit(line + key_head * KEY_DIM + at[None, :], known) * (KEY_DIM**-0.5)
    tl.store(queries + place * KEY_DIM + at[None, :], query * begun, wide)
    tl.store(seen + place * CHUNK + row[None, :], _dot(query, turned, PLAIN) * between)
    tl.store(fades + head * tl.num_programs(0) + chunk, tl.exp(whole))

    # (I + system)^-1, row by row: each is its own unit vector less what it takes of those above it. As a
    # product of powers it would be faster, but these may be huge.
    inverse = tl.where(row[:, None] == row[None, :], 1.0, 0.0)
    for step in range(1, CHUNK):
        takes = tl.sum(tl.where(row[None, :] == step, system, 0.0), 1)
        less = tl.sum(takes[:, None] * inverse, 0)
        inverse = tl.where(row[:, None] == step, inverse - less[None, :], inverse)

    # Read again, so that it need not be kept meanwhile.
    key = _unit(line + (KEY_HEADS + key_head) * KEY_DIM + at[None, :], known)
    read = _dot(inverse, key * (begun * beta[:, None]), PLAIN)
    tl.store(reads + place * KEY_DIM + at[None, :], read, wide)
    column = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + to[None, :]
    inside = (to < VALUE_DIM)[None, :]
    value = tl.load(line + column, here[:, None] & inside, 0.0)
    tl.store(changes + place * VALUE_DIM + to[None, :], _dot(inverse, value * beta[:, None], PLAIN), inside)


@triton.jit(do_not_specialize=("count", "chunks"))
def scan(
    changes, reads, queries, keys, seen, fades, states, out, count, chunks,
    VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEYS: tl.constexpr,
    COLUMNS: tl.constexpr, CHUNK: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Program (COLUMNS of the values, value head): ``out`` float32 [count, VALUE_HEADS, VALUE_DIM] of what
    ``solve`` wrote; ``states`` float32 [VALUE_HEADS, KEY_DIM, VALUE_DIM], of one sequence, goes on."""
    head = tl.program_id(1)
    row, at = tl.arange(0, CHUNK), tl.arange(0, KEYS)
    to = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    wide, inside = (at < KEY_DIM)[None, :], (to < VALUE_DIM)[None, :]
    corner = (at < KEY_DIM)[:, None] & inside
    memory_at = states + (head * KEY_DIM + at[:, None]) * VALUE_DIM + to[None, :]
    memory = tl.load(memory_at, corner, 0.0)
    for chunk in range(chunks):
        place = (head * chunks + chunk).to(tl.int64) * CHUNK + row[:, None]
        change = tl.load(changes + place * VALUE_DIM + to[None, :], inside, 0.0)
        change -= _dot(tl.load(reads + place * KEY_DIM + at[None, :], wide, 0.0), memory, PLAIN)
        y = _dot(tl.load(queries + place * KEY_DIM + at[None, :], wide, 0.0), memory, PLAIN)
        y += _dot(tl.load(seen + place * CHUNK + row[None, :]), change, PLAIN)
        token = (chunk * CHUNK + row)[:, None]
        target = out + (token.to(tl.int64) * VALUE_HEADS + head) * VALUE_DIM + to[None, :]
        tl.store(target, y, (token < count) & inside)
        key = tl.load(keys + place * KEY_DIM + at[None, :], wide, 0.0)
        memory = memory * tl.load(fades + head * chunks + chunk) + _dot(tl.trans(key), change, PLAIN)
    tl.store(memory_at, memory, corner)
