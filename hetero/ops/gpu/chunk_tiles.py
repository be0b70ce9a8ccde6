"""A chunk's experts as the GPU's kernels for many rows take them: batches of sorted rows, and their tiles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from hetero.ops.gpu.tiers import Ints


class Batch(NamedTuple):
    """Sorted rows that are computed at once and their tiles, first and last + 1."""

    rows: tuple[int, int]
    tiles: tuple[int, int]


def runs(experts: Sequence[int], border: int) -> Iterator[tuple[int, int, int]]:
    """(place, first expert, number) of neighbours that one copy brings; none crosses a multiple of
    ``border``."""
    begin = 0
    for at in range(1, len(experts) + 1):
        if at == len(experts) or experts[at] != experts[at - 1] + 1 or experts[at] % border == 0:
            yield begin, experts[begin], at - begin
            begin = at


def batches(
    order: Ints, addresses: Ints, rows: Ints, height: int, ends: Sequence[int], *, most: int
) -> tuple[list[list[Batch]], Ints, Ints]:
    """Batches of each group of experts, where group i ends before ``order[ends[i]]``; the edges of all tiles
    [tiles, 2] (first and last + 1 of their sorted rows), and their addresses. A batch has at most ``most``
    rows: as many as an expert may have."""
    mine = rows[order]
    last = np.cumsum(mine)
    count = (mine + height - 1) // height
    tile_last = np.cumsum(count)
    within = np.arange(int(count.sum())) - np.repeat(tile_last - count, count)
    top = np.repeat(last - mine, count) + within * height
    tiles = np.stack([top, np.minimum(top + height, np.repeat(last, count))], 1)
    at_row, at_tile = np.concatenate([[0], last]), np.concatenate([[0], tile_last])
    groups: list[list[Batch]] = []
    begin = 0
    for end in ends:
        groups.append([])
        while begin < end:
            fits = int(np.searchsorted(at_row, at_row[begin] + most, side="right")) - 1
            until = min(end, fits)
            if at_row[until] > at_row[begin]:
                edges = (at_row[begin], at_row[until]), (at_tile[begin], at_tile[until])
                groups[-1].append(Batch(*((int(a), int(b)) for a, b in edges)))
            begin = until
    return groups, tiles, np.repeat(addresses, count)
