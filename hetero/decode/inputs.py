"""What a step and a piece of a prompt are given."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

PAGE = 16
"""Tokens of a page of keys and values."""


@dataclass(slots=True)
class StepInputs:
    """Static tensors on the device, one set per captured number of rows R."""

    tokens: Tensor  # int64 [R]
    slots: Tensor  # int64 [R], sequence slots; negative: an idle row. No two rows share a slot.
    positions: Tensor  # int64 [R] of the tokens in their sequences
    pages: Tensor  # int32 [slots, most pages]: where a sequence's tokens lie, PAGE each
    ple: Tensor | None = None  # [R, ple_embed_dim] in the model's dtype: n-gram embeddings from the host


@dataclass(slots=True)
class Chunk:
    """Consecutive tokens of one sequence, whose state holds all before them."""

    tokens: Tensor  # int64 [T] on the device
    slot: int
    start: int  # position of the first
    pages: Tensor  # as in StepInputs
