"""Attention that reads chosen blocks of tokens alone: index keys in pages, the choice, and the reading."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from hetero.formats import Format
from hetero.ops.gpu import indexer_kernels
from hetero.ops.gpu.attention import AttentionShape, AttentionWeights, PagedKeys, head_width, joined_rows
from hetero.ops.gpu.fused import Rows

# Programs that share a row's tokens, and its blocks; the interpreter runs them one by one.
_PARTS, _CHUNK = (64, 2), 32
_SCORE_PARTS, _SCORE_CHUNK = (256, 2), 32
_SELECT_CHUNK = 2048


@dataclass(frozen=True, slots=True)
class IndexerShape:
    """Sizes of one layer's indexer; as many dimensions of its heads are rotated as of the attention's."""

    heads: int
    dim: int
    ratio: int  # tokens of a block
    top: int  # blocks that a token sees, besides those of the last, incomplete one

    @property
    def dense(self) -> int:
        """The most tokens of which every one is visible."""
        return self.top * self.ratio + self.ratio - 1


@dataclass(frozen=True, slots=True)
class IndexerWeights:
    """Norms of its queries and keys [dim], to which 1 is added, on the device."""

    q_norm: Tensor
    k_norm: Tensor
    eps: float


class IndexKeys:
    """Index keys of one layer: of complete blocks in pages, each in its first token's, and single ones of
    the last ``ratio`` tokens of each of ``slots`` sequences, at their positions modulo ``ratio``."""

    def __init__(
        self,
        shape: IndexerShape,
        slots: int,
        pages: tuple[int, int],
        dtype: torch.dtype,
        device: str | torch.device,
    ) -> None:
        """``pages``: how many, and the tokens of one."""
        count, page = pages
        self.page, self.per_page = page, -(-page // shape.ratio)
        self.ring = torch.zeros(slots, shape.ratio, shape.dim, dtype=dtype, device=device)
        self.blocks = torch.zeros(count, self.per_page, shape.dim, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        return self.ring.nbytes + self.blocks.nbytes

    def places(self, ratio: int, blocks: Tensor, pages: Tensor) -> Tensor:
        """Indices of a sequence's ``blocks`` int64 [n] in ``self.blocks`` with its first two sizes as one;
        ``pages`` [most pages] are the sequence's."""
        first = blocks * ratio
        return pages[first // self.page].long() * self.per_page + first % self.page // ratio


def select(shape: IndexerShape, scores: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
    """The best ``top`` blocks of every row, int32 [T, top], ascending; nothing is written for a row of no
    more complete blocks.

    ``scores`` float32 [T, n], not negative, in order of the blocks; ``slots`` and ``positions`` int64 [T], as
    in ``attention_rows``: a row sees the tokens up to its own. Of equal scores the first ones are taken.
    """
    chosen = torch.empty(scores.shape[0], shape.top, dtype=torch.int32, device=scores.device)
    # At least one score for every thread.
    chunk = min(_SELECT_CHUNK, triton.next_power_of_2(max(scores.shape[1], 256)))
    indexer_kernels.select[(scores.shape[0],)](
        scores, slots, positions, chosen, scores.stride(0),
        RATIO=shape.ratio, TOP=shape.top, CHUNK=chunk, num_warps=8,
    )  # fmt: skip
    return chosen


def choose(
    shape: IndexerShape, keys: IndexKeys, queries: Tensor, where: tuple[Tensor, Tensor, Tensor]
) -> Tensor:
    """The blocks of every row, int32 [T, top], as ``select`` gives them; ``queries`` [T, heads, dim], normed
    and rotated, ``where`` as in ``attention_rows``."""
    (pages, slots, positions), s = where, shape
    rows, device = queries.shape[0], queries.device
    most = pages.shape[1] * keys.page // s.ratio
    if most <= s.top:  # no sequence will ever have a choice
        return torch.empty(rows, s.top, dtype=torch.int32, device=device)
    scores = torch.empty(rows, most, dtype=torch.float32, device=device)
    parts = _SCORE_PARTS[device.type == "cpu"]
    indexer_kernels.score[(parts, rows)](
        queries, keys.blocks, pages, slots, positions, scores, s.dim**-0.5,
        HEADS=s.heads, DIM=s.dim, WIDTH=head_width(s.dim), RATIO=s.ratio, TOP=s.top, PAGE=keys.page,
        PER_PAGE=keys.per_page, MOST_PAGES=pages.shape[1], MOST_BLOCKS=most, PARTS=parts, CHUNK=_SCORE_CHUNK,
    )  # fmt: skip
    return select(s, scores, slots, positions)


def attend(  # noqa: PLR0917
    fmt: Format,
    attention: AttentionShape,
    indexer: IndexerShape,
    cache: PagedKeys,
    asked: tuple[Tensor, Tensor],
    where: tuple[Tensor, Tensor, Tensor],
    *,
    dtype: torch.dtype,
    gate: Tensor | None = None,
    parts: int = 0,
) -> Rows:
    """Every row's queries over its chosen blocks and what is behind its last complete one: rows [T, q_heads *
    dim] for ``fmt``, of values of ``dtype``.

    ``asked``: queries float32 [T, q_heads, dim], normed and rotated, and the blocks; ``gate`` [T, q_heads,
    2 * dim], of which the second half counts. ``parts``: into how many programs a row's tokens are divided;
    0: what suits few rows.
    """
    (queries, chosen), (pages, slots, positions), s = asked, where, attention
    rows, device = queries.shape[0], queries.device
    parts = parts or _PARTS[device.type == "cpu"]
    sums = torch.empty(rows, s.q_heads, parts, s.dim, dtype=torch.float32, device=device)
    tops = torch.empty(rows, s.q_heads, parts, dtype=torch.float32, device=device)
    totals = torch.empty_like(tops)
    sizes = {"Q_HEADS": s.q_heads, "DIM": s.dim, "WIDTH": head_width(s.dim), "PARTS": parts}
    indexer_kernels.attend[(parts, s.kv_heads, rows)](
        queries, cache.keys, cache.values, chosen, pages, slots, positions, sums, tops, totals,
        s.scale or s.dim**-0.5,
        KV_HEADS=s.kv_heads, PAGE=cache.page, MOST_PAGES=pages.shape[1], RATIO=indexer.ratio, TOP=indexer.top,
        GROUP=max(16, triton.next_power_of_2(s.q_heads // s.kv_heads)), CHUNK=_CHUNK,
        TWIN=device.type == "cpu", **sizes,
    )  # fmt: skip
    opened = None if gate is None else gate[..., s.dim :]
    return joined_rows(fmt, (sums, tops, totals), slots, opened, dtype=dtype)


def indexed_attention_rows(
    fmt: Format,
    attention: tuple[AttentionShape, AttentionWeights, PagedKeys],
    indexer: tuple[IndexerShape, IndexerWeights, IndexKeys],
    projected: tuple[Tensor, Tensor, Tensor, Tensor],
    where: tuple[Tensor, Tensor, Tensor],
) -> Rows:
    """As ``attention_rows``, of layers with an indexer; ``projected`` has the indexer's queries and key [T,
    (heads + 1) * dim] at its end."""
    (shape, weights, cache), (index, index_weights, keys) = attention, indexer
    (q, k, v, qk), (pages, slots, positions) = projected, where
    rows, device, normed = q.shape[0], q.device, shape.norm_offset is not None
    head_stride = shape.dim * (2 if shape.gated else 1)
    queries = torch.empty(rows, shape.q_heads, shape.dim, dtype=torch.float32, device=device)
    asked = torch.empty(rows, index.heads, index.dim, dtype=keys.blocks.dtype, device=device)
    q_norm, k_norm = (weights.q_norm, weights.k_norm) if normed else (q, k)
    indexer_kernels.begin[(shape.q_heads + shape.kv_heads + index.heads + 1, rows)](
        q, k, v, qk, q_norm, k_norm, index_weights.q_norm, index_weights.k_norm,
        weights.inverse_frequencies, pages, slots, positions, queries, cache.keys, cache.values, asked,
        keys.ring, keys.blocks, weights.eps, index_weights.eps, weights.rope_scale, q.stride(0), k.stride(0),
        v.stride(0), qk.stride(0),
        Q_HEADS=shape.q_heads, KV_HEADS=shape.kv_heads, DIM=shape.dim, WIDTH=head_width(shape.dim),
        HEAD_STRIDE=head_stride, HAS_NORM=normed, NORM_OFFSET=shape.norm_offset or 0.0,
        INDEX_HEADS=index.heads, INDEX_DIM=index.dim, INDEX_WIDTH=head_width(index.dim), ROTARY=shape.rotary,
        RATIO=index.ratio, PAGE=cache.page, PER_PAGE=keys.per_page, MOST_PAGES=pages.shape[1],
    )  # fmt: skip
    chosen = choose(index, keys, asked, where)
    gate = torch.unflatten(q, 1, (shape.q_heads, head_stride)) if shape.gated else None
    return attend(fmt, shape, index, cache, (queries, chosen), where, dtype=q.dtype, gate=gate)
