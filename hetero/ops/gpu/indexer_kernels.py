"""A decode step of attention that reads chosen blocks of tokens alone: Triton kernels of the indexer of
qwen4_exp and of attention over a list of blocks.

RATIO tokens in a row share an index key, the mean of theirs. ``add_token`` makes the index queries and, at
the end of a block, its key; ``score`` compares them, ``select`` keeps the best TOP blocks, ``attend`` reads
their tokens and those behind the last complete block. While a sequence has no more than TOP complete blocks
every token is visible: ``score`` and ``select`` return at once, and ``attend`` reads no list. Nothing depends
on the host: lengths are read on the device.
"""

from __future__ import annotations

import triton
import triton.language as tl

NEVER = tl.constexpr(-1e30)  # a score that no softmax sees, and no infinity, whose difference is no number


@triton.jit
def _normed(x, other, weight, at, partner, here, eps, DIM: tl.constexpr, NORM_OFFSET: tl.constexpr):
    scale = tl.rsqrt(tl.sum(x * x) / DIM + eps)
    x = x * scale * (NORM_OFFSET + tl.load(weight + at, here, 0.0).to(tl.float32))
    return x, other * scale * (NORM_OFFSET + tl.load(weight + partner, here, 0.0).to(tl.float32))


@triton.jit
def add_token(
    qk, q_norm, k_norm, inverse_frequencies, pages, slots, positions, queries, ring, blocks, eps, rope_scale,
    HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr, ROTARY: tl.constexpr,
    NORM_OFFSET: tl.constexpr, RATIO: tl.constexpr, PAGE: tl.constexpr, PER_PAGE: tl.constexpr,
    MOST_PAGES: tl.constexpr,
):  # fmt: skip
    """Program (index head, or the key after them; row).

    ``qk`` [T, STRIDE], of which the first (HEADS + 1) * DIM are queries and the key; norm weights [DIM], to
    which NORM_OFFSET is added; ``inverse_frequencies`` float32 [ROTARY / 2]; ``pages`` int32 [slots,
    MOST_PAGES] of PAGE tokens; ``slots`` and ``positions`` int64 [T], slots negative: no sequence. Written:
    ``queries`` [T, HEADS, DIM]; of ``ring`` [slots, RATIO, DIM] the token's key as it is; at the end of a
    block its key into ``blocks`` [pages, PER_PAGE, DIM], in the page of its first token.
    """
    head, row = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row)
    if slot >= 0:
        position = tl.load(positions + row)
        at = tl.arange(0, WIDTH)
        here = at < DIM
        half: tl.constexpr = ROTARY // 2
        partner = tl.where(at < half, at + half, tl.where(at < ROTARY, at - half, at))
        source = qk + row * STRIDE + head * DIM
        x = tl.load(source + at, here, 0.0).to(tl.float32)
        other = tl.load(source + partner, here, 0.0).to(tl.float32)
        rate = tl.load(inverse_frequencies + at % half, at < ROTARY, 0.0)
        sign = tl.where(at < half, -rope_scale, rope_scale)
        if head < HEADS:
            x, other = _normed(x, other, q_norm, at, partner, here, eps, DIM, NORM_OFFSET)
            angle = position.to(tl.float32) * rate
            turned = x * (tl.cos(angle) * rope_scale) + other * tl.sin(angle) * sign
            x = tl.where(at < ROTARY, turned, x)
            place = (row * HEADS + head) * DIM + at
            tl.store(queries + place, x.to(queries.dtype.element_ty), here)
        else:
            mine = ring + slot * (RATIO * DIM)
            tl.store(mine + (position % RATIO) * DIM + at, x.to(ring.dtype.element_ty), here)
            if (position + 1) % RATIO == 0:
                # This token's key is the last of the block; it is not read back.
                total, total_other = tl.zeros_like(x), tl.zeros_like(x)
                for member in tl.static_range(RATIO - 1):
                    total += tl.load(mine + member * DIM + at, here, 0.0).to(tl.float32)
                    total_other += tl.load(mine + member * DIM + partner, here, 0.0).to(tl.float32)
                kept = ring.dtype.element_ty
                x = ((total + x.to(kept).to(tl.float32)) / RATIO).to(kept).to(tl.float32)
                other = ((total_other + other.to(kept).to(tl.float32)) / RATIO).to(kept).to(tl.float32)
                x, other = _normed(x, other, k_norm, at, partner, here, eps, DIM, NORM_OFFSET)
                first = position + 1 - RATIO
                angle = first.to(tl.float32) * rate
                turned = x * (tl.cos(angle) * rope_scale) + other * tl.sin(angle) * sign
                x = tl.where(at < ROTARY, turned, x)
                page = tl.load(pages + slot * MOST_PAGES + first // PAGE).to(tl.int64)
                place = (page * PER_PAGE + first % PAGE // RATIO) * DIM + at
                tl.store(blocks + place, x.to(blocks.dtype.element_ty), here)


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
            found = tl.where(here[None, :], _product(q, tl.trans(key), TWIN), NEVER)
            new_top = tl.maximum(top, tl.max(found, 1))
            fade = tl.exp(top - new_top)
            weight = tl.where(here[None, :], tl.exp(found - new_top[:, None]), 0.0)
            value = tl.load(values + place[:, None] + at[None, :], known, 0.0)
            out = out * fade[:, None] + _product(weight.to(values.dtype.element_ty), value, TWIN)
            total = total * fade + tl.sum(weight, 1)
            top = new_top
        place = (row * Q_HEADS + head) * PARTS + part
        tl.store(tops + place, top, member < per)
        tl.store(weights + place, total, member < per)
        tl.store(sums + place[:, None] * DIM + at[None, :], out, mine)
