"""Triton kernels of hyper-connections: several residual streams that a block reads as a mix and writes back
to.

As ``Qwen4ExpTextGatedResidual`` of transformers has them, for a decode step, in two kernels: ``project`` adds
the last block's output, norms and projects each stream by itself; ``mix`` joins what it left and makes this
block's input. Arithmetic is float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hetero.ops.gpu.ahead_kernels import ask_each
from hetero.ops.gpu.expert_kernels import ACT_GROUP, coded
from hetero.ops.gpu.overlap_kernels import await_last, let_next


@triton.jit
def block_output(
    block_out, shared, gate, gate_stride, row, at, here,
    HIDDEN: tl.constexpr, HAS_SHARED: tl.constexpr, HAS_GATE: tl.constexpr,
):  # fmt: skip
    """float32: a row of ``block_out`` [T, HIDDEN], plus where HAS_SHARED one of ``shared``, which where
    HAS_GATE counts the sigmoid of ``gate`` [T], ``gate_stride`` apart."""
    y = tl.load(block_out + row * HIDDEN + at, here, 0.0).to(tl.float32)
    if HAS_SHARED:
        more = tl.load(shared + row * HIDDEN + at, here, 0.0).to(tl.float32)
        if HAS_GATE:
            more *= tl.sigmoid(tl.load(gate + row * gate_stride).to(tl.float32))
        y += more
    return y


@triton.jit
def _product(a, b, TWIN: tl.constexpr):
    """Of bf16, which the interpreter (TWIN) cannot multiply."""
    if TWIN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _stream(
    streams, block_out, shared, gate, gate_stride, amount, row, stream, at, rows,
    COUNT: tl.constexpr, HIDDEN: tl.constexpr, HAS_OUT: tl.constexpr, HAS_SHARED: tl.constexpr,
    HAS_GATE: tl.constexpr,
):  # fmt: skip
    """A part of a stream as it is to be, in its dtype; ``amount`` [ROWS, 1, 1] of the block's output."""
    here = (at < HIDDEN) & (row < rows)
    x = tl.load(streams + (row * COUNT + stream) * HIDDEN + at, here, 0.0)
    if HAS_OUT:
        y = block_output(block_out, shared, gate, gate_stride, row, at, here, HIDDEN, HAS_SHARED, HAS_GATE)
        x = (x.to(tl.float32) + y * amount).to(streams.dtype.element_ty)
    return x


@triton.jit
def project(
    streams, block_out, shared, gate, gate_stride, inject, norm_weight, weight, new_streams, sizes, parts,
    rows, eps,
    COUNT: tl.constexpr, HIDDEN: tl.constexpr, OUTPUTS: tl.constexpr, HAS_OUT: tl.constexpr,
    HAS_SHARED: tl.constexpr, HAS_GATE: tl.constexpr, LINES: tl.constexpr, DEPTH: tl.constexpr,
    ROWS: tl.constexpr, PRODUCTS: tl.constexpr, STAGES: tl.constexpr, TWIN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (LINES outputs, stream, ROWS rows): ``parts`` float32 [COUNT, T, OUTPUTS], which summed over
    the streams are the projections by ``weight`` [OUTPUTS, COUNT * HIDDEN] of the streams, each by its own
    root mean square, times 1 + ``norm_weight`` [COUNT * HIDDEN].

    ``streams`` [T, COUNT, HIDDEN]; where HAS_OUT the last block's output (``block_output``) times ``inject``
    float32 [T, COUNT] is added first, and the sum goes to ``new_streams``, since other programs still read
    the old one. ``sizes`` float32 [T, COUNT]: what each stream is multiplied by. PRODUCTS: by tensor cores,
    of streams and weights in bf16; 8 rows at least and 16 lines.
    """
    let_next(PDL)
    chunk, stream = tl.program_id(0), tl.program_id(1)
    row = (tl.program_id(2) * ROWS + tl.arange(0, ROWS))[:, None, None]
    line = chunk * LINES + tl.arange(0, LINES)
    start = weight + line.to(tl.int64)[None, :, None] * (COUNT * HIDDEN) + stream * HIDDEN
    pieces: tl.constexpr = DEPTH // 64 if PRODUCTS else 1
    if PRODUCTS:
        total = tl.zeros((pieces, LINES, ROWS), tl.float32)
    else:
        total = tl.zeros((ROWS, LINES, DEPTH), tl.float32)
    squares = tl.zeros((ROWS, 1, DEPTH), tl.float32)
    if PRODUCTS:
        if PDL:  # so many rows leave no registers for weights before
            known = (line < OUTPUTS) & (HIDDEN % 8 == 0)
            begin = weight + line.to(tl.int64) * (COUNT * HIDDEN) + stream * HIDDEN
            ask_each(begin.to(tl.int64), tl.where(known, 2 * HIDDEN, 0))
        await_last(PDL)
        amount = tl.load(inject + row * COUNT + stream, row < rows, 0.0) if HAS_OUT else eps
        for first in tl.range(0, HIDDEN, DEPTH, num_stages=STAGES):
            at = (first + tl.arange(0, DEPTH))[None, None, :]
            w = tl.load(start + at, (at < HIDDEN) & (line < OUTPUTS)[None, :, None], 0.0)
            norm = tl.load(norm_weight + stream * HIDDEN + at, at < HIDDEN, 0.0)
            x = _stream(
                streams, block_out, shared, gate, gate_stride, amount, row, stream, at, rows,
                COUNT, HIDDEN, HAS_OUT, HAS_SHARED, HAS_GATE,
            )  # fmt: skip
            if HAS_OUT:
                place = (row * COUNT + stream) * HIDDEN + at
                tl.store(new_streams + place, x, (at < HIDDEN) & (row < rows) & (chunk + at * 0 == 0))
            x = x.to(tl.float32)
            squares += x * x
            x = (x * (1.0 + norm.to(tl.float32))).to(weight.dtype.element_ty)
            # Every warp has inputs of its own.
            w = tl.permute(tl.reshape(w, [LINES, pieces, 64]), (1, 0, 2))
            total += _product(w, tl.permute(tl.reshape(x, [ROWS, pieces, 64]), (1, 2, 0)), TWIN)
    else:
        # Everything is on its way before anything waits.
        ws, xs, norms = (), (), ()
        for first in tl.static_range(0, HIDDEN, DEPTH):
            at = (first + tl.arange(0, DEPTH))[None, None, :]
            ws = ws + (tl.load(start + at, (at < HIDDEN) & (line < OUTPUTS)[None, :, None], 0.0),)
            norms = norms + (tl.load(norm_weight + stream * HIDDEN + at, at < HIDDEN, 0.0),)
        await_last(PDL)
        # Without an output it is of no use.
        amount = tl.load(inject + row * COUNT + stream, row < rows, 0.0) if HAS_OUT else eps
        for first in tl.static_range(0, HIDDEN, DEPTH):
            at = (first + tl.arange(0, DEPTH))[None, None, :]
            x = _stream(
                streams, block_out, shared, gate, gate_stride, amount, row, stream, at, rows,
                COUNT, HIDDEN, HAS_OUT, HAS_SHARED, HAS_GATE,
            )  # fmt: skip
            xs = xs + (x,)
        # Loads are not put off beyond it.
        tl.debug_barrier()
        for first in tl.static_range(0, HIDDEN, DEPTH):
            at = (first + tl.arange(0, DEPTH))[None, None, :]
            x = xs[first // DEPTH]
            if HAS_OUT:
                place = (row * COUNT + stream) * HIDDEN + at
                tl.store(new_streams + place, x, (at < HIDDEN) & (row < rows) & (chunk + at * 0 == 0))
            x = x.to(tl.float32)
            squares += x * x
            total += ws[first // DEPTH].to(tl.float32) * (x * (1.0 + norms[first // DEPTH].to(tl.float32)))
    size = tl.rsqrt(tl.sum(squares, 2) / HIDDEN + eps)  # [ROWS, 1]
    row = (tl.program_id(2) * ROWS + tl.arange(0, ROWS))[:, None]
    tl.store(sizes + row * COUNT + stream, size, (row < rows) & (chunk + row * 0 == 0))
    to = parts + (stream * rows + row) * OUTPUTS + line[None, :]
    y = tl.trans(tl.sum(total, 0)) if PRODUCTS else tl.sum(total, 2)
    tl.store(to, y * size, (row < rows) & (line < OUTPUTS)[None, :])


@triton.jit
def _joined(parts, row, rows, at, here, COUNT: tl.constexpr, OUTPUTS: tl.constexpr):
    """The sums over the streams of some of ``parts``, over their number."""
    y = tl.load(parts + row * OUTPUTS + at, here, 0.0)
    for stream in tl.static_range(1, COUNT):
        y += tl.load(parts + (stream * rows + row) * OUTPUTS + at, here, 0.0)
    return y / COUNT


@triton.jit
def mix(
    new_streams, sizes, norm_weight, parts, weight, streams, out, inject, codes, scales, rows,
    COUNT: tl.constexpr, STREAMS: tl.constexpr, HIDDEN: tl.constexpr, RANK: tl.constexpr,
    OUTPUTS: tl.constexpr, K_PAD: tl.constexpr, HAS_OUT: tl.constexpr, QUANTISED: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr, PRODUCTS: tl.constexpr,
    TWIN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (COLUMNS outputs, ROWS rows): ``out`` [T, HIDDEN], the mean of the normed streams, each weighed
    by the sigmoid of the projection by ``weight`` [COUNT * HIDDEN, RANK] of the silu of what ``project`` left
    first; QUANTISED: its rows, too. ``inject`` float32 [T, COUNT]: twice the sigmoid of what it left last.

    ``new_streams`` is kept in ``streams`` where HAS_OUT. STREAMS: COUNT as a power of two.
    """
    let_next(PDL)
    begin = tl.program_id(0) * COLUMNS
    first_row = tl.program_id(1) * ROWS
    each = tl.arange(0, STREAMS * COLUMNS)
    column, stream = begin + each % COLUMNS, each // COLUMNS
    known = (column < HIDDEN) & (stream < COUNT)
    line = stream * HIDDEN + column
    start = weight + line.to(tl.int64)[None, :, None] * RANK
    row = (first_row + tl.arange(0, ROWS))[:, None, None]
    if PRODUCTS:
        total = tl.zeros((STREAMS * COLUMNS, ROWS), tl.float32)
    else:
        total = tl.zeros((ROWS, STREAMS * COLUMNS, DEPTH), tl.float32)
    ws = ()
    for first in tl.static_range(0, RANK, DEPTH):
        at = (first + tl.arange(0, DEPTH))[None, None, :]
        ws = ws + (tl.load(start + at, known[None, :, None] & (at < RANK), 0.0),)
    await_last(PDL)
    lows = ()
    if PRODUCTS:  # all on their way before a product waits
        for first in tl.static_range(0, RANK, DEPTH):
            at = (first + tl.arange(0, DEPTH))[None, None, :]
            lows = lows + (_joined(parts, row, rows, at, (row < rows) & (at < RANK), COUNT, OUTPUTS),)
    for first in tl.static_range(0, RANK, DEPTH):
        at = (first + tl.arange(0, DEPTH))[None, None, :]
        if PRODUCTS:
            low = lows[first // DEPTH]
            low = low * tl.sigmoid(low)
            w = tl.reshape(ws[first // DEPTH], [STREAMS * COLUMNS, DEPTH])
            total += _product(w, tl.trans(tl.reshape(low.to(weight.dtype.element_ty), [ROWS, DEPTH])), TWIN)
        else:
            low = _joined(parts, row, rows, at, (row < rows) & (at < RANK), COUNT, OUTPUTS)
            total += ws[first // DEPTH].to(tl.float32) * (low * tl.sigmoid(low))
    row = (first_row + tl.arange(0, ROWS))[:, None]
    here = (row < rows) & known[None, :]
    place = row * (COUNT * HIDDEN) + line[None, :]
    x = tl.load(new_streams + place, here, 0.0)
    if HAS_OUT:
        tl.store(streams + place, x, here)
    size = tl.load(sizes + row * COUNT + stream[None, :], here, 0.0)
    value = x.to(tl.float32) * size * (1.0 + tl.load(norm_weight + line, known, 0.0).to(tl.float32))[None, :]
    y = tl.trans(total) if PRODUCTS else tl.sum(total, 2)
    y = tl.where(known[None, :], tl.sigmoid(y) * value, 0.0)
    y = tl.sum(tl.reshape(y, [ROWS, STREAMS, COLUMNS]), 1) / COUNT  # [ROWS, COLUMNS]
    at = (begin + tl.arange(0, COLUMNS))[None, :]
    here = (row < rows) & (at < HIDDEN)
    y = y.to(out.dtype.element_ty)
    tl.store(out + row * HIDDEN + at, y, here)
    if QUANTISED:
        groups: tl.constexpr = COLUMNS // ACT_GROUP
        code, scale = coded(tl.reshape(y.to(tl.float32), [ROWS * groups, ACT_GROUP]))
        number = tl.arange(0, ROWS * groups)
        of, group = first_row + number // groups, begin // ACT_GROUP + number % groups
        mine = (of < rows) & (group < K_PAD // ACT_GROUP)
        place = (of * K_PAD + group * ACT_GROUP)[:, None] + tl.arange(0, ACT_GROUP)[None, :]
        tl.store(codes + place, code, mine[:, None])
        tl.store(scales + of * (K_PAD // ACT_GROUP) + group, scale, mine)
    if begin == 0:
        to = tl.arange(0, STREAMS)[None, :]
        live = (row < rows) & (to < COUNT) & (RANK + to < OUTPUTS)
        amount = 2.0 * tl.sigmoid(_joined(parts, row, rows, RANK + to, live, COUNT, OUTPUTS))
        tl.store(inject + row * COUNT + to, amount, live)
