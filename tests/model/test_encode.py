"""Texts as ids: the library's call that lets other threads run gives what its plain call gives."""

from __future__ import annotations

import threading

import pytest

from hetero.model.demo import TEST_MODEL
from hetero.model.tokenizer import Tokenizer, load_tokenizer

TEXTS = ["", " ", "the whale", "The sea!\n\n  1234 \t", "naïve 🐋 Ωμέγα", "a" * 3000, "<|endoftext|> x"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = load_tokenizer(TEST_MODEL)
    assert found is not None
    return found


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_those_of_the_plain_call(tokenizer: Tokenizer, text: str) -> None:
    inner = tokenizer._inner
    assert tokenizer.encode(text) == list(inner.encode(text, add_special_tokens=True))
    assert tokenizer.encode_rendered(text) == list(inner.encode(text, add_special_tokens=False))


def test_a_file_that_cuts_or_fills_up_does_neither(tokenizer: Tokenizer) -> None:
    wanted = tokenizer.encode_rendered("the whale " * 50)
    inner = tokenizer._inner
    inner.backend_tokenizer.enable_truncation(4)
    inner.backend_tokenizer.enable_padding(length=500)
    again = Tokenizer(inner, "here")
    assert again.encode_rendered("the whale " * 50) == wanted


def test_from_several_threads(tokenizer: Tokenizer) -> None:
    texts = [f"{text} {i}" for i in range(20) for text in TEXTS]
    wanted = [tokenizer.encode_rendered(text) for text in texts]
    found: dict[int, list[list[int]]] = {}
    threads = [
        threading.Thread(target=lambda n=n: found.update({n: [tokenizer.encode_rendered(t) for t in texts]}))
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(found[n] == wanted for n in range(4))
