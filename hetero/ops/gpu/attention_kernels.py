"""A decode step of grouped-query attention over paged keys and values, in three Triton kernels.

``append`` norms and rotates queries and keys and stores the token's key and value; ``attend`` reads a part of
each sequence per program (flash-decoding); ``combine`` joins the parts. Nothing depends on the host: lengths
are read on the device, so that one captured graph serves every step. TWIN: run by the interpreter, which
cannot multiply bf16.
"""

from __future__ import annotations

import triton
import triton.language as tl

NEVER = tl.constexpr(-1e30)  # a score that no softmax sees, and no infinity, whose difference is no number


@triton.jit
def append(
    q, k, v, q_norm, k_norm, inverse_frequencies, pages, slots, positions, queries, keys, values, eps,
    rope_scale,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    Q_STRIDE: tl.constexpr, ROTARY: tl.constexpr, PAGE: tl.constexpr, MOST_PAGES: tl.constexpr,
    HAS_NORM: tl.constexpr, NORM_OFFSET: tl.constexpr,
):  # fmt: skip
    """Program (query head, or key and value head after them; row).

    ``q`` [T, Q_HEADS, Q_STRIDE], of which the first DIM are the query; ``k``, ``v`` [T, KV_HEADS, DIM]; norm
    weights [DIM], to which NORM_OFFSET is added; ``inverse_frequencies`` float32 [ROTARY / 2]; ``pages``
    int32 [slots, MOST_PAGES]: where a sequence's tokens lie, PAGE each; ``slots`` int64 [T], negative: no
    sequence; ``positions`` int64 [T]. Written: ``queries`` float32 [T, Q_HEADS, DIM]; of ``keys`` and
    ``values`` [pages, PAGE, KV_HEADS, DIM] the token's place. WIDTH: DIM as a power of two.
    """
    head, row = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row)
    if slot >= 0:
        position = tl.load(positions + row)
        at = tl.arange(0, WIDTH)
        here = at < DIM
        half: tl.constexpr = ROTARY // 2
        partner = tl.where(at < half, at + half, tl.where(at < ROTARY, at - half, at))
        is_query = head < Q_HEADS
        kv_head = head - Q_HEADS
        if is_query:
            source, weight = q + (row * Q_HEADS + head) * Q_STRIDE, q_norm
        else:
            source, weight = k + (row * KV_HEADS + kv_head) * DIM, k_norm
        x = tl.load(source + at, here, 0.0).to(tl.float32)
        other = tl.load(source + partner, here, 0.0).to(tl.float32)
        if HAS_NORM:
            scale = tl.rsqrt(tl.sum(x * x) / DIM + eps)
            x = x * scale * (NORM_OFFSET + tl.load(weight + at, here, 0.0).to(tl.float32))
            other = other * scale * (NORM_OFFSET + tl.load(weight + partner, here, 0.0).to(tl.float32))
        angle = position.to(tl.float32) * tl.load(inverse_frequencies + at % half, at < ROTARY, 0.0)
        sine = tl.where(at < half, -tl.sin(angle), tl.sin(angle)) * rope_scale
        x = tl.where(at < ROTARY, x * (tl.cos(angle) * rope_scale) + other * sine, x)
        if is_query:
            tl.store(queries + (row * Q_HEADS + head) * DIM + at, x, here)
        else:
            page = tl.load(pages + slot * MOST_PAGES + position // PAGE).to(tl.int64)
            place = ((page * PAGE + position % PAGE) * KV_HEADS + kv_head) * DIM + at
            tl.store(keys + place, x.to(keys.dtype.element_ty), here)
            value = tl.load(v + (row * KV_HEADS + kv_head) * DIM + at, here, 0.0)
            tl.store(values + place, value.to(values.dtype.element_ty), here)


@triton.jit
def _product(a, b, TWIN: tl.constexpr):
    if TWIN:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b)


@triton.jit
def attend(
    queries, keys, values, pages, slots, positions, sums, tops, weights, scale,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr,
    MOST_PAGES: tl.constexpr, WINDOW: tl.constexpr, PARTS: tl.constexpr, GROUP: tl.constexpr,
    CHUNK: tl.constexpr, TWIN: tl.constexpr,
):  # fmt: skip
    """Program (part, key and value head, row): the queries of one head's group against a part of its tokens.

    A token sees those up to its own position, the last WINDOW alone where that is not 0. Written for each
    part [T, Q_HEADS, PARTS]: ``tops``, the largest score; ``weights``, the sum of exp(score - top); ``sums``
    [..., DIM], the values so weighed. GROUP: the queries of a head as a power of two, 16 at least, which
    tensor cores need.
    """
    part, kv_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots + row)
    if slot >= 0:
        length = tl.load(positions + row) + 1
        begin = tl.maximum(length - WINDOW, 0) if WINDOW > 0 else length * 0
        # Parts are whole chunks, so that the last one may be empty.
        each = tl.cdiv(tl.cdiv(length - begin, PARTS), CHUNK) * CHUNK
        first = begin + part * each
        last = tl.minimum(first + each, length)
        per: tl.constexpr = Q_HEADS // KV_HEADS
        member = tl.arange(0, GROUP)
        head = kv_head * per + member
        at = tl.arange(0, WIDTH)
        wide = at < DIM
        mine = (member < per)[:, None] & wide[None, :]
        q = tl.load(queries + (row * Q_HEADS + head[:, None]) * DIM + at[None, :], mine, 0.0)
        q = (q * scale).to(keys.dtype.element_ty)
        top = tl.full((GROUP,), NEVER, tl.float32)
        total = tl.zeros((GROUP,), tl.float32)
        out = tl.zeros((GROUP, WIDTH), tl.float32)
        for start in range(first, last, CHUNK):
            token = start + tl.arange(0, CHUNK)
            here = token < last
            page = tl.load(pages + slot * MOST_PAGES + token // PAGE, here, 0).to(tl.int64)
            place = ((page * PAGE + token % PAGE) * KV_HEADS + kv_head) * DIM
            known = here[:, None] & wide[None, :]
            key = tl.load(keys + place[:, None] + at[None, :], known, 0.0)
            score = tl.where(here[None, :], _product(q, tl.trans(key), TWIN), NEVER)
            new_top = tl.maximum(top, tl.max(score, 1))
            fade = tl.exp(top - new_top)
            weight = tl.where(here[None, :], tl.exp(score - new_top[:, None]), 0.0)
            value = tl.load(values + place[:, None] + at[None, :], known, 0.0)
            out = out * fade[:, None] + _product(weight.to(values.dtype.element_ty), value, TWIN)
            total = total * fade + tl.sum(weight, 1)
            top = new_top
        place = (row * Q_HEADS + head) * PARTS + part
        tl.store(tops + place, top, member < per)
        tl.store(weights + place, total, member < per)
        tl.store(sums + place[:, None] * DIM + at[None, :], out, mine)


@triton.jit
def combine(
    sums, tops, weights, slots, gate, sinks, out,
    Q_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
    GATE_STRIDE: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Program (query head, row): out [T, Q_HEADS, DIM], times sigmoid(gate) where GATE_STRIDE is not 0.

    ``gate`` [T, Q_HEADS, GATE_STRIDE], of which the first DIM count; ``sinks`` [Q_HEADS]: a score without a
    value.
    """
    head, row = tl.program_id(0), tl.program_id(1)
    if tl.load(slots + row) >= 0:
        place = row * Q_HEADS + head
        part = place * PARTS + tl.arange(0, PARTS)
        at = tl.arange(0, WIDTH)
        here = at < DIM
        top = tl.load(tops + part)
        most = tl.max(top)
        if HAS_SINKS:
            most = tl.maximum(most, tl.load(sinks + head).to(tl.float32))
        fade = tl.exp(top - most)
        total = tl.sum(tl.load(weights + part) * fade)
        if HAS_SINKS:
            total += tl.exp(tl.load(sinks + head).to(tl.float32) - most)
        value = tl.load(sums + part[:, None] * DIM + at[None, :], here[None, :], 0.0)
        y = tl.sum(value * fade[:, None], 0) / total
        if GATE_STRIDE > 0:
            y = y * tl.sigmoid(tl.load(gate + place * GATE_STRIDE + at, here, 0.0).to(tl.float32))
        tl.store(out + place * DIM + at, y, here)
