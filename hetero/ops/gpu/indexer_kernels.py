"""A decode step of attention that reads chosen blocks of tokens alone: Triton kernels of the indexer of
qwen4_exp and of attention over a list of blocks.

RATIO tokens in a row share an index key, the mean of theirs. ``begin`` stores the token's key and value,
makes the index queries and, at the end of a block, its index key; ``score`` compares them, ``select`` keeps
the best TOP blocks, ``attend`` reads their tokens and those behind the last complete block. While a sequence
has no more than TOP complete blocks every token is visible: ``score`` and ``select`` return at once, and
``attend`` reads no list. Nothing depends on the host: lengths are read on the device.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hetero.ops.gpu.attention_kernels import NEVER, _turn, _turned


@triton.jit
def begin(
    q, k, v, qk, q_norm, k_norm, index_q_norm, index_k_norm, inverse_frequencies, pages, slots, positions,
    queries, keys, values, index_queries, ring, blocks, eps, index_eps, rope_scale, q_stride, k_stride,
    v_stride, qk_stride,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    HEAD_STRIDE: tl.constexpr, HAS_NORM: tl.constexpr, NORM_OFFSET: tl.constexpr, INDEX_HEADS: tl.constexpr,
    INDEX_DIM: tl.constexpr, INDEX_WIDTH: tl.constexpr, ROTARY: tl.constexpr, RATIO: tl.constexpr,
    PAGE: tl.constexpr, PER_PAGE: tl.constexpr, MOST_PAGES: tl.constexpr,
):  # fmt: skip
    """Program (query head, key and value head, index head, or the index key, in this order; row).

    The first ones are as those of ``attention_kernels.attend``, and so are their arguments; written:
    ``queries`` float32 [T, Q_HEADS, DIM], and the token's place of ``keys`` and ``values``. ``qk`` [T,
    (INDEX_HEADS + 1) * INDEX_DIM]: index queries, and the key; their norms have weights around zero. Written:
    ``index_queries`` [T, INDEX_HEADS, INDEX_DIM]; of ``ring`` [slots, RATIO, INDEX_DIM] the token's key as it
    is; at the end of a block its key into ``blocks`` [pages, PER_PAGE, INDEX_DIM], in the page of its first
    token.
    """
    head, row = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row)
    if slot >= 0:
        position = tl.load(positions + row)
        if head < Q_HEADS + KV_HEADS:
            at = tl.arange(0, WIDTH)[None, :]
            here = at < DIM
            cosine, sine = _turn(position, inverse_frequencies, rope_scale, at, ROTARY)
            if head < Q_HEADS:
                source = q + row * q_stride + head * HEAD_STRIDE + at * 0
                x = _turned(source, q_norm, cosine, sine, at, here, eps, DIM, ROTARY, HAS_NORM, NORM_OFFSET)
                tl.store(queries + (row * Q_HEADS + head) * DIM + at, x, here)
            else:
                kv_head = head - Q_HEADS
                source = k + row * k_stride + kv_head * DIM + at * 0
                x = _turned(source, k_norm, cosine, sine, at, here, eps, DIM, ROTARY, HAS_NORM, NORM_OFFSET)
                page = tl.load(pages + slot * MOST_PAGES + position // PAGE).to(tl.int64)
                place = ((page * PAGE + position % PAGE) * KV_HEADS + kv_head) * DIM + at
                tl.store(keys + place, x.to(keys.dtype.element_ty), here)
                value = tl.load(v + row * v_stride + kv_head * DIM + at, here, 0.0)
                tl.store(values + place, value.to(values.dtype.element_ty), here)
        else:
            index = head - Q_HEADS - KV_HEADS
            lane = tl.arange(0, INDEX_WIDTH)[None, :]
            wide = lane < INDEX_DIM
            start = qk + row * qk_stride + index * INDEX_DIM + lane * 0
            if index < INDEX_HEADS:
                cosines, sines = _turn(position, inverse_frequencies, rope_scale, lane, ROTARY)
                asked = _turned(
                    start, index_q_norm, cosines, sines, lane, wide, index_eps, INDEX_DIM, ROTARY, True,
                    1.0,
                )  # fmt: skip
                target = (row * INDEX_HEADS + index) * INDEX_DIM + lane
                tl.store(index_queries + target, asked.to(index_queries.dtype.element_ty), wide)
            else:
                half: tl.constexpr = ROTARY // 2
                partner = tl.where(lane < ROTARY, lane - half, lane)
                partner = tl.where(lane < half, lane + half, partner)
                kept = ring.dtype.element_ty
                raw = tl.load(start + lane, wide, 0.0).to(kept)
                mine = ring + slot * (RATIO * INDEX_DIM)
                tl.store(mine + (position % RATIO) * INDEX_DIM + lane, raw, wide)
                if (position + 1) % RATIO == 0:
                    # This token's key is the last of the block; it is not read back.
                    other = tl.load(start + partner, wide, 0.0).to(kept).to(tl.float32)
                    total, total_other = tl.zeros_like(other), tl.zeros_like(other)
                    for member in tl.static_range(RATIO - 1):
                        total += tl.load(mine + member * INDEX_DIM + lane, wide, 0.0).to(tl.float32)
                        total_other += tl.load(mine + member * INDEX_DIM + partner, wide, 0.0).to(tl.float32)
                    mean = ((total + raw.to(tl.float32)) / RATIO).to(kept).to(tl.float32)
                    other = ((total_other + other) / RATIO).to(kept).to(tl.float32)
                    scale = tl.rsqrt(tl.sum(mean * mean) / INDEX_DIM + index_eps)
                    mean = mean * scale * (1.0 + tl.load(index_k_norm + lane, wide, 0.0).to(tl.float32))
                    other = other * scale * (1.0 + tl.load(index_k_norm + partner, wide, 0.0).to(tl.float32))
                    first = position + 1 - RATIO
                    turn, turn_sine = _turn(first, inverse_frequencies, rope_scale, lane, ROTARY)
                    mean = tl.where(lane < ROTARY, mean * turn + other * turn_sine, mean)
                    home = tl.load(pages + slot * MOST_PAGES + first // PAGE).to(tl.int64)
                    spot = (home * PER_PAGE + first % PAGE // RATIO) * INDEX_DIM + lane
                    tl.store(blocks + spot, mean.to(blocks.dtype.element_ty), wide)


@triton.jit
def score(
    queries, blocks, pages, slots, positions, scores, scale,
    HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, RATIO: tl.constexpr, TOP: tl.constexpr,
    PAGE: tl.constexpr, PER_PAGE: tl.constexpr, MOST_PAGES: tl.constexpr, MOST_BLOCKS: tl.constexpr,
    PARTS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Program (part, row): ``scores`` float32 [T, MOST_BLOCKS] of the complete blocks, where they are more
    than TOP: the sum over heads of relu(query . key), times ``scale``."""
    part, row = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row)
    complete = (tl.load(positions + row) + 1) // RATIO
    if (slot >= 0) & (complete > TOP):
        at = tl.arange(0, WIDTH)
        wide = at < DIM
        for start in range(part * CHUNK, complete, PARTS * CHUNK):
            block = start + tl.arange(0, CHUNK)
            here = block < complete
            first = block * RATIO
            page = tl.load(pages + slot * MOST_PAGES + first // PAGE, here, 0).to(tl.int64)
            place = (page * PER_PAGE + first % PAGE // RATIO) * DIM
            key = tl.load(blocks + place[:, None] + at[None, :], here[:, None] & wide[None, :], 0.0)
            key = key.to(tl.float32)
            total = tl.zeros((CHUNK,), tl.float32)
            for head in tl.static_range(HEADS):
                q = tl.load(queries + (row * HEADS + head) * DIM + at, wide, 0.0).to(tl.float32)
                total += tl.maximum(tl.sum(key * q[None, :], 1), 0.0)
            tl.store(scores + row * MOST_BLOCKS + block, total * scale, here)


@triton.jit
def _next_digit(scores, count, known, need, SHIFT: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    """``known`` with the digit that follows it, of WIDTH values and SHIFT bits from the lowest; and of the
    ``need`` greatest scores that begin by ``known`` those that begin by the result."""
    counts = tl.zeros((WIDTH,), tl.int32)
    for start in range(0, count, CHUNK):
        at = start + tl.arange(0, CHUNK)
        bits = tl.load(scores + at, at < count, 0.0).to(tl.int32, bitcast=True) & 0x7FFFFFFF
        rest = bits >> SHIFT
        alike = (at < count) & (rest // WIDTH == known)
        counts += tl.histogram(rest % WIDTH, WIDTH, mask=alike)
    from_here = tl.cumsum(counts, 0, reverse=True)
    digit = tl.sum((from_here >= need).to(tl.int32)) - 1
    bigger = tl.sum(tl.where(tl.arange(0, WIDTH) > digit, counts, 0))
    return known * WIDTH + digit, need - bigger


@triton.jit
def select(
    scores, slots, positions, chosen, stride,
    RATIO: tl.constexpr, TOP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Program (row): ``chosen`` int32 [T, TOP], the best TOP of the complete blocks, ascending by index,
    where there are more; of equal scores the first ones.

    ``scores`` float32 [T, stride], none negative, so that their bits are in their order. The score of place
    TOP is found from its highest bits down, by counting.
    """
    row = tl.program_id(0)
    count = (tl.load(positions + row) + 1) // RATIO
    if (tl.load(slots + row) >= 0) & (count > TOP):
        mine = scores + row.to(tl.int64) * stride
        # Bits of the score sought, as far as they are known, and how many of those that share them to take.
        known, need = tl.program_id(0) * 0, tl.program_id(0) * 0 + TOP
        known, need = _next_digit(mine, count, known, need, 23, 256, CHUNK)
        known, need = _next_digit(mine, count, known, need, 15, 256, CHUNK)
        known, need = _next_digit(mine, count, known, need, 7, 256, CHUNK)
        known, need = _next_digit(mine, count, known, need, 0, 128, CHUNK)
        taken, alike_before = 0, 0
        for start in range(0, count, CHUNK):
            at = start + tl.arange(0, CHUNK)
            bits = tl.load(mine + at, at < count, 0.0).to(tl.int32, bitcast=True) & 0x7FFFFFFF
            same = ((at < count) & (bits == known)).to(tl.int32)
            rank = alike_before + tl.cumsum(same, 0)
            take = ((at < count) & (bits > known)) | ((same > 0) & (rank <= need))
            ones = take.to(tl.int32)
            tl.store(chosen + row * TOP + taken + tl.cumsum(ones, 0) - 1, at, take)
            taken += tl.sum(ones)
            alike_before += tl.sum(same)


@triton.jit
def _product(a, b, TWIN: tl.constexpr):
    if TWIN:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    # Not the shortened float32 of tensor cores.
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def attend(
    queries, keys, values, chosen, pages, slots, positions, sums, tops, weights, scale,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr,
    MOST_PAGES: tl.constexpr, RATIO: tl.constexpr, TOP: tl.constexpr, PARTS: tl.constexpr,
    GROUP: tl.constexpr, CHUNK: tl.constexpr, TWIN: tl.constexpr,
):  # fmt: skip
    """Program (part, key and value head, row): as ``attention_kernels.attend``, over the tokens of the
    ``chosen`` int32 [T, TOP] blocks and those behind the last complete block, or over all where no more than
    TOP blocks are complete. TWIN as there."""
    part, kv_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots + row)
    if slot >= 0:
        length = tl.load(positions + row) + 1
        complete = length // RATIO
        # How many tokens are listed, and left out behind them.
        listed = tl.where(complete > TOP, TOP * RATIO, 0)
        passed = tl.where(complete > TOP, (complete - TOP) * RATIO, 0)
        count = length - passed
        # Parts are whole chunks, so that the last one may be empty.
        each = tl.cdiv(tl.cdiv(count, PARTS), CHUNK) * CHUNK
        begin = part * each
        last = tl.minimum(begin + each, count)
        per: tl.constexpr = Q_HEADS // KV_HEADS
        member = tl.arange(0, GROUP)
        head = kv_head * per + member
        spot = (row * Q_HEADS + head) * PARTS + part
        if begin < last:
            at = tl.arange(0, WIDTH)
            wide = at < DIM
            mine = (member < per)[:, None] & wide[None, :]
            q = tl.load(queries + (row * Q_HEADS + head[:, None]) * DIM + at[None, :], mine, 0.0)
            q = (q * scale).to(keys.dtype.element_ty)
            top = tl.full((GROUP,), NEVER, tl.float32)
            total = tl.zeros((GROUP,), tl.float32)
            out = tl.zeros((GROUP, WIDTH), tl.float32)
            for start in range(begin, last, CHUNK):
                index = start + tl.arange(0, CHUNK)
                here = index < last
                block = tl.load(chosen + row * TOP + index // RATIO, here & (index < listed), 0)
                token = tl.where(index < listed, block * RATIO + index % RATIO, index + passed)
                page = tl.load(pages + slot * MOST_PAGES + token // PAGE, here, 0).to(tl.int64)
                place = ((page * PAGE + token % PAGE) * KV_HEADS + kv_head) * DIM
                known = here[:, None] & wide[None, :]
                key = tl.load(keys + place[:, None] + at[None, :], known, 0.0)
                value = tl.load(values + place[:, None] + at[None, :], known, 0.0)
                found = tl.where(here[None, :], _product(q, tl.trans(key), TWIN), NEVER)
                new_top = tl.maximum(top, tl.max(found, 1))
                fade = tl.exp(top - new_top)
                weight = tl.where(here[None, :], tl.exp(found - new_top[:, None]), 0.0)
                out = out * fade[:, None] + _product(weight.to(values.dtype.element_ty), value, TWIN)
                total = total * fade + tl.sum(weight, 1)
                top = new_top
            tl.store(tops + spot, top, member < per)
            tl.store(weights + spot, total, member < per)
            tl.store(sums + spot[:, None] * DIM + at[None, :], out, mine)
        else:
            tl.store(tops + spot, tl.full((GROUP,), NEVER, tl.float32), member < per)
            tl.store(weights + spot, tl.zeros((GROUP,), tl.float32), member < per)
