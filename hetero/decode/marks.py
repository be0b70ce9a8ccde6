"""Pieces of a prompt that end where the state of a sequence is told.

Only what carries a state is computed piece by piece: the experts of a layer, whose weights cost far more to
read, take all tokens at once.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hetero.decode.inputs import Chunk, Mark
from hetero.decode.mixer import Mixer


def pieces(chunk: Chunk) -> Iterator[tuple[slice, Chunk, list[Mark]]]:
    """(rows of the chunk, these as a chunk, the marks at their end), in order."""
    count, first = len(chunk.tokens), 0
    while first < count:
        end = min([mark.at - chunk.start for mark in chunk.marks if mark.at > chunk.start + first] + [count])
        marks = [mark for mark in chunk.marks if mark.at == chunk.start + end]
        yield slice(first, end), chunk.part(first, end), marks
        first = end


def prefilled(mixer: Mixer, x: Tensor, chunk: Chunk) -> Tensor:
    """``mixer.prefill`` of x [T, H], which tells the mixer's state at the chunk's marks."""
    states = mixer.states(chunk.slot) if chunk.marks else []
    if not states:
        return mixer.prefill(x, chunk)
    outputs = []
    for rows, piece, marks in pieces(chunk):
        outputs.append(mixer.prefill(x[rows], piece))
        for mark in marks:
            mark.save(states)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
