"""Paged keys and values, and a decode step of attention over them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from hetero.ops.gpu import attention_kernels

_PARTS, _CHUNK = 16, 32


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


def attention_step(
    shape: AttentionShape,
    weights: AttentionWeights,
    cache: PagedKeys,
    projected: tuple[Tensor, Tensor, Tensor],
    where: tuple[Tensor, Tensor, Tensor],
) -> Tensor:
    """One token of every row: [T, q_heads * dim] in the dtype of the queries, what the output projection
    takes.

    ``projected``: queries [T, q_heads * dim] (twice as wide where gated), keys and values [T, kv_heads *
    dim], contiguous; ``where``: pages int32 [slots, most pages], slots int64 [T] (negative: the row is left
    out) and positions int64 [T].
    """
    (q, k, v), (pages, slots, positions), s = projected, where, shape
    rows, device = q.shape[0], q.device
    q_stride, width = s.dim * (2 if s.gated else 1), triton.next_power_of_2(s.dim)
    queries = torch.empty(rows, s.q_heads, s.dim, dtype=torch.float32, device=device)
    common = {"DIM": s.dim, "WIDTH": width}
    paged = {"PAGE": cache.page, "MOST_PAGES": pages.shape[1]}
    heads = {"Q_HEADS": s.q_heads, "KV_HEADS": s.kv_heads}
    normed = s.norm_offset is not None
    # What is absent is never read, but has to be a pointer.
    q_norm, k_norm = (weights.q_norm, weights.k_norm) if normed else (q, k)
    attention_kernels.append[(s.q_heads + s.kv_heads, rows)](
        q, k, v, q_norm, k_norm, weights.inverse_frequencies, pages, slots, positions, queries,
        cache.keys, cache.values, weights.eps, weights.rope_scale,
        Q_STRIDE=q_stride, ROTARY=s.rotary, HAS_NORM=normed, NORM_OFFSET=s.norm_offset or 0.0,
        **common, **paged, **heads,
    )  # fmt: skip
    sums = torch.empty(rows, s.q_heads, _PARTS, s.dim, dtype=torch.float32, device=device)
    tops = torch.empty(rows, s.q_heads, _PARTS, dtype=torch.float32, device=device)
    totals = torch.empty_like(tops)
    attention_kernels.attend[(_PARTS, s.kv_heads, rows)](
        queries, cache.keys, cache.values, pages, slots, positions, sums, tops, totals,
        s.scale or s.dim**-0.5,
        WINDOW=s.window, PARTS=_PARTS, GROUP=max(16, triton.next_power_of_2(s.q_heads // s.kv_heads)),
        CHUNK=_CHUNK, TWIN=device.type == "cpu", **common, **paged, **heads,
    )  # fmt: skip
    out = torch.empty(rows, s.q_heads * s.dim, dtype=q.dtype, device=device)
    gate, sinks = q[:, s.dim :] if s.gated else q, q if weights.sinks is None else weights.sinks
    attention_kernels.combine[(s.q_heads, rows)](
        sums, tops, totals, slots, gate, sinks, out,
        Q_HEADS=s.q_heads, PARTS=_PARTS, GATE_STRIDE=q_stride if s.gated else 0,
        HAS_SINKS=weights.sinks is not None, **common,
    )  # fmt: skip
    return out
