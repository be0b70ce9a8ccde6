"""Codes out of words, against shifts one by one."""

from __future__ import annotations

import pytest
import torch

from hetero.quant.fields import nibbles, turned, unshuffled

ROW_OF = (0, 2, 4, 6, 1, 3, 5, 7)


def random_words(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, shape, generator=generator).to(torch.int32)


@pytest.mark.parametrize("shape", [(1,), (15,), (16,), (3, 33), (2, 5, 64)])
def test_halves_of_bytes(shape: tuple[int, ...], generator: torch.Generator) -> None:
    packed = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    want = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
    assert torch.equal(nibbles(packed), want)
    assert torch.equal(
        nibbles(packed.flip(-1)), torch.stack([packed & 15, packed >> 4], -1).flip(-2).flatten(-2)
    )


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("m", "n"), [(1, 1), (3, 4), (8, 7), (17, 18), (64, 33)])
def test_words_along_the_columns(bits: int, m: int, n: int, generator: torch.Generator) -> None:
    words = random_words((m, n), generator)
    fields = [words >> bits * f & (1 << bits) - 1 for f in range(32 // bits)]
    want = torch.stack(fields, 1).reshape(-1, n).T.to(torch.uint8)
    assert torch.equal(turned(words, bits), want)
    assert torch.equal(turned(words.T.contiguous().T, bits), want)


@pytest.mark.parametrize(("k", "n"), [(1, 8), (16, 16), (33, 24), (80, 40), (64, 128)])
def test_words_of_shuffled_rows(k: int, n: int, generator: torch.Generator) -> None:
    words = random_words((k, n // 8), generator)
    want = torch.empty(n, k, dtype=torch.uint8)
    for field, row in enumerate(ROW_OF):
        want[row::8] = (words >> 4 * field & 15).T.to(torch.uint8)
    assert torch.equal(unshuffled(words), want)
