"""Pieces of a prompt that take turns: one's experts are on the CPU while the other's mixer is on the GPU.

A layer's prefill has two halves: up to where the experts were told, and from where they are wanted. For two
pieces a and b of one chunk, the order of layer l is a's first half, b's second half of layer l - 1, b's first
half of layer l, a's second half. So a mixer meets the pieces in order, as it would one chunk after the other,
and the result is the same to the bit as that of the two chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from hetero.decode.inputs import Chunk
from hetero.decode.layer import Layer
from hetero.ops.gpu.stamps import at_layer

ALIGNED = 64
"""Tokens at whose multiples a chunk is parted: of a delta net's blocks, and of pages."""


def parted(chunk: Chunk) -> list[Chunk]:
    """Two halves of a chunk in order, or the chunk itself where it is too short for two."""
    half = -(-len(chunk.tokens) // (2 * ALIGNED)) * ALIGNED
    if half >= len(chunk.tokens):
        return [chunk]
    return [chunk.part(0, half), chunk.part(half, len(chunk.tokens))]


def prefill(layers: Sequence[Layer], streams: Sequence[Any], chunks: Sequence[Chunk]) -> list[Any]:
    """The streams after all layers, of chunks that follow each other."""
    ends: list[Callable[[], Any]] = [partial(_same, stream) for stream in streams]
    for number, layer in enumerate(layers):
        for turn, chunk in enumerate(chunks):
            at_layer(number - 1)
            stream = ends[turn]()
            at_layer(number)
            ends[turn] = layer.begin_prefill(stream, chunk)
    return [end() for end in ends]


def _same(stream: Any) -> Any:
    return stream
