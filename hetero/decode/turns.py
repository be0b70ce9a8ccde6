"""Pieces of a prompt, or halves of a step's rows, that take turns: one's experts are on the CPU while the
other's mixer is on the GPU.

A layer's work has two halves: up to where the experts were told, and from where they are wanted. For two
pieces a and b of one chunk, the order of layer l is a's first half, b's second half of layer l - 1, b's first
half of layer l, a's second half. So a mixer meets the pieces in order, as it would one chunk after the other,
and the result is the same to the bit as that of the two chunks; rows of a step are of different sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hetero.decode.inputs import Chunk, StepInputs, half_of
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
    return _in_turns(layers, streams, chunks, lambda layer, *given: layer.begin_prefill(*given))


def step(layers: Sequence[Layer], streams: Sequence[Any], parts: Sequence[StepInputs]) -> list[Any]:
    """The streams after all layers, of parts of a step's rows."""
    return _in_turns(layers, streams, parts, lambda layer, *given: layer.begin_step(*given))


def halves(inputs: StepInputs) -> list[StepInputs]:
    """The rows of a step in two parts, the first one the longer if any; one row alone is one."""
    rows = len(inputs.tokens)
    half = half_of(rows)
    if half == rows:
        return [inputs]
    return [
        replace(
            inputs,
            tokens=inputs.tokens[part],
            slots=inputs.slots[part],
            positions=inputs.positions[part],
            ple=None if inputs.ple is None else inputs.ple[part],
        )
        for part in (slice(0, half), slice(half, rows))
    ]


def joined(streams: Sequence[Any]) -> Any:
    """The rows of streams, one after the other, as one stream: tensors [R, ...] in tuples of any kind."""
    first = streams[0]
    if len(streams) == 1 or first is None:
        return first
    if isinstance(first, Tensor):
        return torch.cat(list(streams))
    return type(first)(*(joined(parts) for parts in zip(*streams, strict=True)))


def _in_turns(
    layers: Sequence[Layer], streams: Sequence[Any], parts: Sequence[Any], begin: Callable[..., Any]
) -> list[Any]:
    ends: list[Callable[[], Any]] = [partial(_same, stream) for stream in streams]
    for number, layer in enumerate(layers):
        for turn, part in enumerate(parts):
            at_layer(number - 1)
            stream = ends[turn]()
            at_layer(number)
            ends[turn] = begin(layer, stream, part)
    return [end() for end in ends]


def _same(stream: Any) -> Any:
    return stream
