"""How programs of projections are cut: by rules, not by trials, which a captured graph could not wait for.

A program has many loads on its way at once: with 4 TB/s and a latency near a microsecond, a GPU of 132
multiprocessors keeps busy with some 30 KB in flight on each.
"""

from __future__ import annotations

from typing import NamedTuple

MOST_WARPS = 8

STEPS_OF_WARP = 16
"""Steps of a packed block that a warp reads at a time: 32 bytes a thread."""

DEPTH_OF_WARP = 256
"""Inputs of an output that a warp reads at a time: 16 bytes a thread."""


class Cut(NamedTuple):
    """Of a program: its warps, the tiles that are on their way at once, and for plain weights its outputs."""

    warps: int
    tiles: int
    outputs: int = 16


def cut_packed(steps: int, blocks: int) -> Cut:
    """Of ``blocks`` packed blocks of so many steps."""
    # Few blocks have to fill the GPU each with much; of many, those that wait hide each other's beginnings.
    widest = MOST_WARPS if blocks <= 400 else 4
    return Cut(*_fewest(steps, STEPS_OF_WARP, widest, 6))


def cut_plain(k: int, n: int, rows: int) -> Cut:
    """Of n outputs of k inputs, row by row; ``rows`` of activations at a time."""
    outputs = 2 if k > 4096 or n <= 400 or rows > 1 else 4
    return Cut(*_fewest(k, DEPTH_OF_WARP, MOST_WARPS, 6), outputs)


def _fewest(length: int, each: int, widest: int, most: int) -> tuple[int, int]:
    """(warps, tiles) that leave the fewest places of a length without work, then go round least often."""

    def cost(cut: tuple[int, int]) -> tuple[int, int, int]:
        warps, tiles = cut
        rounds = -(-length // (each * warps * tiles))
        return rounds * each * warps * tiles, rounds, abs(tiles - 5)

    warps = 1
    cuts = []
    while warps <= widest:
        cuts += [(warps, tiles) for tiles in range(1, most + 1)]
        warps *= 2
    return min(cuts, key=cost)
