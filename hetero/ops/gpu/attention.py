"""Paged keys and values, and a decode step of attention over them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from hetero.formats import ACT_GROUP, Format
from hetero.ops.gpu import attention_kernels
from hetero.ops.gpu.fused import Rows, empty_rows, plain_rows
from hetero.ops.gpu.overlap import overlap

# Parts of a sequence at most, tokens of a step of one; dimensions of a head that a program joins.
_PARTS, _CHUNK, _WARPS, _WIDE = 64, 32, 4, 64
_VALUES = Format("bf16")


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Sizes and kinds of one attention layer."""

    q_heads: int
    kv_heads: int
    dim: int
    rotary: int  # leading dimensions of a head that are rotated
    scale: float | None = None  # of the scores; None: dim^-0.5
    window: int = 0  # tokens that a token sees, itself among them; 0: all
    gated: bool = False  # the query projection gives [query, gate] for every head
    norm_offset: float | None = None  # queries and keys are normed, by weights to which this is added


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """What a step needs besides the projections, on the device; absent parts are None."""

    inverse_frequencies: Tensor  # float32 [rotary / 2]
    rope_scale: float = 1.0
    q_norm: Tensor | None = None  # [dim]
    k_norm: Tensor | None = None
    eps: float = 1e-6
    sinks: Tensor | None = None  # [q_heads]


class PagedKeys:
    """Keys and values of one layer in pages, which sequences own by ``pages`` int32 [slots, most pages]."""

    def __init__(self, shape: AttentionShape, count: int, page: int, dtype: torch.dtype, device: str) -> None:
        self.page = page
        size = (count, page, shape.kv_heads, shape.dim)
        self.keys = torch.zeros(size, dtype=dtype, device=device)
        self.values = torch.zeros(size, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


def attention_rows(  # noqa: PLR0917
    fmt: Format,
    shape: AttentionShape,
    weights: AttentionWeights,
    cache: PagedKeys,
    projected: tuple[Tensor, Tensor, Tensor],
    where: tuple[Tensor, Tensor, Tensor],
) -> Rows:
    """One token of every row: rows [T, q_heads * dim] of the output projection, in two kernels.

    ``projected``: queries [T, q_heads * dim] (twice as wide where gated), keys and values [T, kv_heads *
    dim], rows any distance apart; ``where``: pages int32 [slots, most pages], slots int64 [T] (negative: the
    row is left out, and zero) and positions int64 [T].
    """
    (q, k, v), (pages, slots, positions), s = projected, where, shape
    rows, device, normed = q.shape[0], q.device, s.norm_offset is not None
    head_stride, width = s.dim * (2 if s.gated else 1), head_width(s.dim)
    twin = device.type == "cpu"
    parts = 4 if twin else _PARTS  # the interpreter takes long for each program
    sums = torch.empty(rows, s.q_heads, parts, s.dim, dtype=torch.float32, device=device)
    tops = torch.empty(rows, s.q_heads, parts, dtype=torch.float32, device=device)
    totals = torch.empty_like(tops)
    # What is absent is never read, but has to be a pointer.
    q_norm, k_norm = (weights.q_norm, weights.k_norm) if normed else (q, k)
    attention_kernels.attend[(parts, s.kv_heads, rows)](
        q, k, v, q_norm, k_norm, weights.inverse_frequencies, pages, slots, positions, cache.keys,
        cache.values, sums, tops, totals, weights.eps, weights.rope_scale, s.scale or s.dim**-0.5,
        q.stride(0), k.stride(0), v.stride(0),
        Q_HEADS=s.q_heads, KV_HEADS=s.kv_heads, DIM=s.dim, WIDTH=width, HEAD_STRIDE=head_stride,
        ROTARY=s.rotary, PAGE=cache.page, MOST_PAGES=pages.shape[1], HAS_NORM=normed,
        NORM_OFFSET=s.norm_offset or 0.0, WINDOW=s.window, PARTS=parts,
        GROUP=max(16, triton.next_power_of_2(s.q_heads // s.kv_heads)), CHUNK=_CHUNK,
        EXACT=cache.keys.dtype == torch.float32, TWIN=twin, num_warps=_WARPS, **overlap(device),
    )  # fmt: skip
    gate = torch.unflatten(q, 1, (s.q_heads, head_stride))[..., s.dim :] if s.gated else None
    return joined_rows(fmt, (sums, tops, totals), slots, gate, weights.sinks, dtype=q.dtype)


def joined_rows(
    fmt: Format,
    parts: tuple[Tensor, Tensor, Tensor],
    slots: Tensor,
    gate: Tensor | None,
    sinks: Tensor | None = None,
    *,
    dtype: torch.dtype,
) -> Rows:
    """Rows [T, heads * dim] of what ``attention_kernels.attend`` left: sums [T, heads, parts, dim], tops and
    totals [T, heads, parts], float32, contiguous; times sigmoid(gate), gate [T, heads, dim] with any strides
    of rows and heads. Values are of ``dtype``."""
    sums, tops, totals = parts
    rows, heads, count, dim = sums.shape
    # Where a head does not end with a group its rows are quantised in another kernel.
    whole = fmt.rounds_activations and dim % ACT_GROUP == 0
    made, k_pad = empty_rows(fmt if whole else _VALUES, rows, heads * dim, dtype, sums.device)
    extra = -(-(k_pad - heads * dim) // dim) if whole else 0
    wide = min(triton.next_power_of_2(dim), _WIDE)
    opened = sums if gate is None else gate
    attention_kernels.combine[(-(-dim // wide), heads + extra, rows)](
        sums, tops, totals, slots, opened, sums if sinks is None else sinks, made.q, *made, opened.stride(0),
        Q_HEADS=heads, DIM=dim, WIDTH=wide, PARTS=count, K_PAD=k_pad,
        GATE_STRIDE=0 if gate is None else gate.stride(1), HAS_SINKS=sinks is not None, QUANTISED=whole,
        **overlap(sums.device),
    )  # fmt: skip
    return made if whole or not fmt.rounds_activations else plain_rows(fmt, made.q)


def head_width(dim: int) -> int:
    """Columns of a head in kernels that multiply matrices: a power of two, of which they take 16 at least."""
    return max(16, int(triton.next_power_of_2(dim)))
