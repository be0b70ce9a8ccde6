"""How programs of projections are cut: by rules, not by trials, which a captured graph could not wait for.

A program has many loads on its way at once: with 4 TB/s and a latency near a microsecond, a GPU of 132
multiprocessors keeps busy with some 30 KB in flight on each.
"""

from __future__ import annotations

from typing import NamedTuple

from hetero.ops.gpu.codings import UNIT

MOST_WARPS = 8

STEPS_OF_WARP = 16
"""Steps of a packed block that a warp reads at a time: 32 bytes a thread."""

UNITS_OF_WARP = 8
"""Units of 32 inputs of a block that a warp reads at a time: for each bit of a code 16 bytes a thread."""

DEPTH_OF_WARP = 256
"""Inputs of an output that a warp reads at a time: 16 bytes a thread."""

_ROUND = 16  # places of units that another round is worth


class Cut(NamedTuple):
    """Of a program: its warps; the tiles that are on their way at once; its outputs; with ``stages``, of
    products on tensor cores, how many steps are on their way, ``tiles`` groups of 32 (plain: parts of 64)
    each."""

    warps: int
    tiles: int
    outputs: int = 16
    stages: int = 0


def cut_of(n: int, k: int, bits: int, *, rows: int, products: bool, roomy: bool = True) -> Cut:
    """Of n outputs of k inputs with weights of so many bits, 16: not packed. ``products``: whether tensor
    cores can multiply them; ``roomy``: whether a program can have more than 100 KB of shared memory."""
    if rows > 1 and products:
        if bits >= 16:
            return Cut(4, 4, stages=5)
        if n > 6400:  # so that all have room at the same time
            return Cut(4, 16, stages=3)
        if k % 1024 == 0:
            return Cut(8, 32, stages=4 if roomy else 3)
        return Cut(4, 16, stages=5)
    if bits >= 16:
        outputs = 2 if k > 4096 or n <= 400 or rows > 1 else 4
        return Cut(*_fewest(k, DEPTH_OF_WARP, MOST_WARPS, 6), outputs)
    # Few blocks have to fill the GPU each with much; of many there is to be room for all at the same time.
    widest, most = (MOST_WARPS, 6) if n <= 6400 else (4, 2)
    return Cut(*_fewest(k * bits // 32, STEPS_OF_WARP, widest, most))


def cut_up(k: int, bits: int, unit: int) -> Cut:
    """Of the first matrices of experts, k inputs with padding, ``unit`` of them read at once: many programs,
    of 16 outputs of a pair."""
    if unit == UNIT:
        return Cut(*_fewest(k // unit, UNITS_OF_WARP, 4, _most_units(bits), _ROUND))
    return Cut(*_fewest(k // unit, STEPS_OF_WARP, 4, 5))


def cut_down(k: int, bits: int, unit: int, slots: int) -> Cut:
    """Of the last one: a program has all pairs of a token."""
    steps = slots * k // unit
    if unit == UNIT:
        return Cut(*_fewest(steps, UNITS_OF_WARP, MOST_WARPS, _most_units(bits), _ROUND))
    # More tiles would leave room for one program alone on a multiprocessor.
    return Cut(MOST_WARPS, 4) if steps > 512 else Cut(*_fewest(steps, STEPS_OF_WARP, MOST_WARPS, 4))


def _most_units(bits: int) -> int:
    """Tiles of units, each of 4 registers a bit and a few for scales, that leave room for more programs."""
    return max(80 // (4 * bits + 8), 1)


def _fewest(length: int, each: int, widest: int, most: int, round_cost: int = 0) -> tuple[int, int]:
    """(warps, tiles) that leave the fewest places of a length without work, each round counting as some, then
    go round least often."""

    def cost(cut: tuple[int, int]) -> tuple[int, int, int]:
        warps, tiles = cut
        rounds = -(-length // (each * warps * tiles))
        return rounds * (each * warps * tiles + round_cost), rounds, abs(tiles - 5)

    warps = 1
    cuts = []
    while warps <= widest:
        cuts += [(warps, tiles) for tiles in range(1, most + 1)]
        warps *= 2
    return min(cuts, key=cost)
