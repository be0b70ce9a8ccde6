"""A bound on how much text a token stands for: never too low, and none where none can be known."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from hetero.model.longest import longest_token
from hetero.model.tokenizer import Tokenizer as OurTokenizer
from tests.model.tiny import tiny_tokenizer

TEXT = "the whale and the sea 🙂 漢字 the the    ᾂ café\n\n"


def trained(**changes: Any) -> Tokenizer:
    """A byte-level tokenizer, with parts of it replaced."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    inner.train_from_iterator([TEXT] * 5, trainer)
    for name, part in changes.items():
        setattr(inner, name, part)
    return inner


def pieces(inner: Tokenizer) -> Tokenizer:
    """One in the manner of SentencePiece: spaces as a mark, bytes where there is no character."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"\u2581": 256, "t": 257, "\u2581t": 258}
    model = models.BPE(vocabulary, [("\u2581", "t")], byte_fallback=True)
    found = Tokenizer(model)
    found.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    return found


@pytest.mark.parametrize(
    "inner",
    [
        trained(),
        trained(normalizer=normalizers.NFC()),
        trained(pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel()])),
        pieces(trained()),
    ],
    ids=["byte level", "NFC", "sequence", "byte fallback"],
)
def test_never_more_tokens_than_there_are(inner: Tokenizer) -> None:
    longest = longest_token(inner.to_str())
    assert longest is not None
    alphabet = [*TEXT, "α\u0313\u0300\u0345", "the", " the", "a" * 40, " " * 40, "\u1100\u1161\u11a8"]
    for _ in range(200):
        text = "".join(random.choices(alphabet, k=random.randint(0, 40)))
        tokens = len(inner.encode(text, add_special_tokens=False).ids)
        assert -(-len(text) // longest) <= tokens, text


@pytest.mark.parametrize(
    "inner",
    [
        trained(normalizer=normalizers.Strip()),
        trained(normalizer=normalizers.Replace(Regex(" +"), " ")),
        trained(normalizer=normalizers.Replace("  ", " ")),
        trained(normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.StripAccents()])),
        trained(pre_tokenizer=pre_tokenizers.Whitespace()),
        trained(pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed")])),
        trained(model=models.BPE({"a": 0}, [])),
        Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]")),
        Tokenizer(models.Unigram([("a", 0.0)], unk_id=0)),
    ],
    ids=str,
)
def test_no_bound_where_text_may_vanish(inner: Tokenizer) -> None:
    assert longest_token(inner.to_str()) is None


def test_special_tokens_count() -> None:
    inner = trained()
    before = longest_token(inner.to_str())
    assert before is not None
    inner.add_special_tokens([AddedToken("<" + "x" * 80 + ">")])
    assert longest_token(inner.to_str()) == 82
    inner.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    assert longest_token(inner.to_str()) is None


def test_the_tokenizers_bound() -> None:
    tokenizer = OurTokenizer(tiny_tokenizer(), "tiny")
    assert tokenizer.least_tokens("") == 0
    text = TEXT * 20
    assert 0 < tokenizer.least_tokens(text) <= len(tokenizer.encode(text))
