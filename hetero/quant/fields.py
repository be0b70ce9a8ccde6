"""Codes that checkpoints keep several in a word, as uint8 matrices: on the calling thread, without a lock."""

from __future__ import annotations

import torch
from torch import Tensor

from hetero import _cpu


def nibbles(packed: Tensor) -> Tensor:
    """Bytes uint8 [..., m] as their halves [..., 2 m], the low one first."""
    packed = packed.contiguous()
    out = torch.empty(*packed.shape[:-1], 2 * packed.shape[-1], dtype=torch.uint8)
    _cpu.fields.split_bytes(packed.data_ptr(), packed.numel(), out.data_ptr())
    return out


def turned(words: Tensor, bits: int) -> Tensor:
    """Fields of 4 or 8 ``bits``, lowest first, of words int32 [m, n] that stand along the columns of a
    matrix: uint8 [n, m * 32 / bits]."""
    words, (m, n) = words.contiguous(), words.shape
    out = torch.empty(n, m * 32 // bits, dtype=torch.uint8)
    _cpu.fields.turn_words(bits, words.data_ptr(), m, n, out.data_ptr())
    return out


def unshuffled(words: Tensor) -> Tensor:
    """Words int32 [k, n / 8] whose eight fields are of the rows 0, 2, 4, 6, 1, 3, 5, 7: uint8 [n, k]."""
    words, (k, per_k) = words.contiguous(), words.shape
    out = torch.empty(8 * per_k, k, dtype=torch.uint8)
    _cpu.fields.turn_shuffled(words.data_ptr(), k, 8 * per_k, out.data_ptr())
    return out
