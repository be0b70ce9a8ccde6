"""A decode step of grouped-query attention over paged keys and values, in two Triton kernels.

``attend`` norms and rotates the queries and the token's key, stores that key and its value, and reads a part
of each sequence per program (flash-decoding); ``combine`` joins the parts and makes the rows of the output
projection. Nothing depends on the host: lengths are read on the device, so that one captured graph serves
every step. EXACT: float32 keys are multiplied in float32, not in the fewer bits of tensor cores; TWIN: run by
the interpreter, which cannot multiply bf16.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hetero.ops.gpu.expert_kernels import ACT_GROUP, coded
from hetero.ops.gpu.overlap_kernels import await_last, let_next

NEVER = tl.constexpr(-1e30)  # a score that no softmax sees, and no infinity, whose difference is no number


@triton.jit
def _turned(
    source, weight, cosine, sine, at, here, eps,
    DIM: tl.constexpr, ROTARY: tl.constexpr, HAS_NORM: tl.constexpr, NORM_OFFSET: tl.constexpr,
):  # fmt: skip
    """Heads [rows, DIM], whose first elements ``source`` [rows, 1] points to, normed and rotated; ``at`` [1,
    WIDTH] and ``here`` [rows, WIDTH]."""
    half: tl.constexpr = ROTARY // 2
    partner = tl.where(at < half, at + half, tl.where(at < ROTARY, at - half, at))
    x = tl.load(source + at, here, 0.0).to(tl.float32)
    other = tl.load(source + partner, here, 0.0).to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None]
        x = x * scale * (NORM_OFFSET + tl.load(weight + at, at < DIM, 0.0).to(tl.float32))
        other = other * scale * (NORM_OFFSET + tl.load(weight + partner, at < DIM, 0.0).to(tl.float32))
    return tl.where(at < ROTARY, x * cosine + other * sine, x)


@triton.jit
def _turn(position, inverse_frequencies, rope_scale, at, ROTARY: tl.constexpr):
    """(cosine, signed sine) like ``at``."""
    half: tl.constexpr = ROTARY // 2
    angle = position.to(tl.float32) * tl.load(inverse_frequencies + at % half, at < ROTARY, 0.0)
    sine = tl.sin(angle) * rope_scale
    return tl.cos(angle) * rope_scale, tl.where(at < half, -sine, sine)


@triton.jit
def _product(a, b, EXACT: tl.constexpr, TWIN: tl.constexpr):
    if TWIN:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    if EXACT:
        return tl.dot(a, b, input_precision="ieee")
    return tl.dot(a, b)


@triton.jit
def attend(
    q, k, v, q_norm, k_norm, inverse_frequencies, pages, slots, positions, keys, values, sums, tops, weights,
    eps, rope_scale, scale, q_stride, k_stride, v_stride,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    HEAD_STRIDE: tl.constexpr, ROTARY: tl.constexpr, PAGE: tl.constexpr, MOST_PAGES: tl.constexpr,
    HAS_NORM: tl.constexpr, NORM_OFFSET: tl.constexpr, WINDOW: tl.constexpr, PARTS: tl.constexpr,
    GROUP: tl.constexpr, CHUNK: tl.constexpr, EXACT: tl.constexpr, TWIN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (part, key and value head, row): the queries of one head's group against a part of its tokens.

    ``q`` [T, Q_HEADS, HEAD_STRIDE], of which the first DIM are the query; ``k``, ``v`` [T, KV_HEADS, DIM],
    all of whose rows may be any distance apart; norm weights [DIM], to which NORM_OFFSET is added;
    ``inverse_frequencies`` float32 [ROTARY / 2]; ``pages`` int32 [slots, MOST_PAGES]: where a sequence's
    tokens lie, PAGE each; ``slots`` int64 [T], negative: no sequence; ``positions`` int64 [T]; ``keys`` and
    ``values`` [pages, PAGE, KV_HEADS, DIM].

    A token sees those up to its own position, the last WINDOW alone where that is not 0; the first part has
    its own key and value, which are not read from memory. Written for each part [T, Q_HEADS, PARTS]:
    ``tops``, the largest score; ``weights``, the sum of exp(score - top); ``sums`` [..., DIM], the values so
    weighed, of parts that have tokens. WIDTH: DIM as a power of two; GROUP: the queries of a head as one, 16
    at least, which tensor cores need.
    """
    let_next(PDL)
    await_last(PDL)
    part, kv_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots + row)
    position = tl.load(positions + row)
    if slot >= 0:
        # Of the tokens before this one; parts are whole chunks, so that the last ones may be empty.
        begin = tl.maximum(position + 1 - WINDOW, 0) if WINDOW > 0 else position * 0
        each = tl.maximum(tl.cdiv(tl.cdiv(position - begin, PARTS), CHUNK), 1) * CHUNK
        first = begin + part * each
        last = tl.minimum(first + each, position)
        per: tl.constexpr = Q_HEADS // KV_HEADS
        member = tl.arange(0, GROUP)
        head = kv_head * per + member
        place = (row * Q_HEADS + head) * PARTS + part
        live = member < per
        if (first < last) | (part == 0):
            at = tl.arange(0, WIDTH)[None, :]
            mine = live[:, None] & (at < DIM)
            cosine, sine = _turn(position, inverse_frequencies, rope_scale, at, ROTARY)
            source = q + row * q_stride + head[:, None] * HEAD_STRIDE
            query = scale * _turned(
                source, q_norm, cosine, sine, at, mine, eps, DIM, ROTARY, HAS_NORM, NORM_OFFSET
            )
            top = tl.full((GROUP,), NEVER, tl.float32)
            total = tl.zeros((GROUP,), tl.float32)
            out = tl.zeros((GROUP, WIDTH), tl.float32)
            if part == 0:
                one = at < DIM
                key = _turned(
                    k + row * k_stride + kv_head * DIM + at * 0, k_norm, cosine, sine, at, one, eps,
                    DIM, ROTARY, HAS_NORM, NORM_OFFSET,
                ).to(keys.dtype.element_ty)  # fmt: skip
                value = tl.load(v + row * v_stride + kv_head * DIM + at, one, 0.0)
                value = value.to(values.dtype.element_ty)
                page = tl.load(pages + slot * MOST_PAGES + position // PAGE).to(tl.int64)
                to = ((page * PAGE + position % PAGE) * KV_HEADS + kv_head) * DIM + at
                tl.store(keys + to, key, one)
                tl.store(values + to, value, one)
                # As products of the others have it.
                top = tl.sum(query.to(keys.dtype.element_ty).to(tl.float32) * key.to(tl.float32), 1)
                total = tl.full((GROUP,), 1.0, tl.float32)
                out += value.to(tl.float32)
            sought = query.to(keys.dtype.element_ty)
            for start in range(first, last, CHUNK):
                token = start + tl.arange(0, CHUNK)
                here = token < last
                page = tl.load(pages + slot * MOST_PAGES + token // PAGE, here, 0).to(tl.int64)
                line = ((page * PAGE + token % PAGE) * KV_HEADS + kv_head) * DIM
                known = here[:, None] & (at < DIM)
                past = tl.load(keys + line[:, None] + at, known, 0.0)
                other = tl.load(values + line[:, None] + at, known, 0.0)
                score = tl.where(here[None, :], _product(sought, tl.trans(past), EXACT, TWIN), NEVER)
                new_top = tl.maximum(top, tl.max(score, 1))
                fade = tl.exp(top - new_top)
                weight = tl.where(here[None, :], tl.exp(score - new_top[:, None]), 0.0)
                fresh = _product(weight.to(values.dtype.element_ty), other, EXACT, TWIN)
                out = out * fade[:, None] + fresh
                total = total * fade + tl.sum(weight, 1)
                top = new_top
            tl.store(tops + place, top, live)
            tl.store(weights + place, total, live)
            tl.store(sums + place[:, None] * DIM + at, out, mine)
        else:
            tl.store(tops + place, tl.full((GROUP,), NEVER, tl.float32), live)
            tl.store(weights + place, tl.zeros((GROUP,), tl.float32), live)


@triton.jit
def combine(
    sums, tops, weights, slots, gate, sinks, out, codes, scales, gate_stride,
    Q_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, K_PAD: tl.constexpr,
    GATE_STRIDE: tl.constexpr, HAS_SINKS: tl.constexpr, QUANTISED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (WIDTH dimensions, query head or the row's padding after them, row): of ``out`` [T, Q_HEADS,
    DIM], or of its rows where QUANTISED, times sigmoid(gate) where GATE_STRIDE is not 0. Rows without a
    sequence are zeros.

    ``gate`` [T, Q_HEADS, GATE_STRIDE], of which the first DIM count; ``sinks`` [Q_HEADS]: a score without a
    value. QUANTISED: DIM is a multiple of 32.
    """
    let_next(PDL)
    await_last(PDL)
    chunk, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots + row)
    at = chunk * WIDTH + tl.arange(0, WIDTH)
    here = at < DIM
    y = tl.zeros((WIDTH,), tl.float32)
    if (slot >= 0) & (head < Q_HEADS):
        place = row * Q_HEADS + head
        part = place * PARTS + tl.arange(0, PARTS)
        top = tl.load(tops + part)
        most = tl.max(top)
        if HAS_SINKS:
            most = tl.maximum(most, tl.load(sinks + head).to(tl.float32))
        fade = tl.exp(top - most)
        total = tl.sum(tl.load(weights + part) * fade)
        if HAS_SINKS:
            total += tl.exp(tl.load(sinks + head).to(tl.float32) - most)
        known = (top > NEVER)[:, None] & here[None, :]
        value = tl.load(sums + part[:, None] * DIM + at[None, :], known, 0.0)
        y = tl.sum(value * fade[:, None], 0) / total
        if GATE_STRIDE > 0:
            open = tl.load(gate + row * gate_stride + head * GATE_STRIDE + at, here, 0.0)
            y = y * tl.sigmoid(open.to(tl.float32))
    if QUANTISED:
        groups: tl.constexpr = WIDTH // ACT_GROUP
        code, scale = coded(tl.reshape(tl.where(here, y, 0.0), [groups, ACT_GROUP]))
        begin = head * DIM + chunk * WIDTH
        group = begin // ACT_GROUP + tl.arange(0, groups)
        mine = (chunk * WIDTH + tl.arange(0, groups) * ACT_GROUP < DIM) & (group < K_PAD // ACT_GROUP)
        to = group[:, None] * ACT_GROUP + tl.arange(0, ACT_GROUP)[None, :]
        tl.store(codes + row * K_PAD + to, code, mine[:, None])
        tl.store(scales + row * (K_PAD // ACT_GROUP) + group, scale, mine)
    else:
        tl.store(out + (row * Q_HEADS + head) * DIM + at, y.to(out.dtype.element_ty), here)
