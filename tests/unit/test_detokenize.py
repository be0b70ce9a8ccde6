"""Streaming text from tokens: whole characters only, and the pieces joined are the text."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from hetero.core import InputError
from hetero.model.detokenize import ByteDetokenizer, TextDetokenizer, unicode_bytes
from hetero.model.tokenizer import Tokenizer, load_tokenizer

ALPHABET = "ab z\n.,éüß漢字かな한국🙂👩‍👩‍👧‍👦🏳️‍🌈𝕏\u0301\u200d\u00a0Ωж"
CORPUS = ["漢字 かな 한국 🙂🙂 été größe zab ab ab", "👩‍👩‍👧‍👦 🏳️‍🌈 a b a b"] * 20


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    inner = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["<|end|>"],
        show_progress=False,
    )
    inner.train_from_iterator(CORPUS, trainer)
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>"), "here")


@pytest.fixture(scope="module")
def byte_fallback() -> Tokenizer:
    """A vocabulary as sentencepiece makes it: words with a marked space, other characters as bytes."""
    vocab = {"<unk>": 0, "</s>": 1, **{f"<0x{byte:02X}>": 2 + byte for byte in range(256)}}
    for piece in ["▁", "▁a", "a", "b", "z", ".", ",", "é", "漢", "▁ab", "ab", "\n"]:
        vocab[piece] = len(vocab)
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b")]
    inner = Inner(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", unk_token="<unk>")
    return Tokenizer(fast, "here")


def stream(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = tokenizer.detokenizer()
    return [*map(detokenizer.feed, ids), detokenizer.finish()]


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_any_text_comes_back_and_no_piece_holds_half_a_character(
    kind: str, request: pytest.FixtureRequest
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    kinds = {"byte_level": ByteDetokenizer, "byte_fallback": TextDetokenizer}
    assert isinstance(tokenizer.detokenizer(), kinds[kind])
    random_ = random.Random(3)
    for _ in range(150):
        text = "".join(random_.choice(ALPHABET) for _ in range(random_.randint(1, 30)))
        pieces = stream(tokenizer, tokenizer.encode(text))
        assert "".join(pieces) == text
        assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_cut_at_every_token_is_valid_text(kind: str, request: pytest.FixtureRequest) -> None:
    """As when max_tokens falls inside a character: what is shown is a prefix of the text, never U+FFFD."""
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    text = "a漢🙂字 한국é 👩‍👩‍👧‍👦b 𝕏."
    ids = tokenizer.encode(text)
    shown = [tokenizer.decode(ids[:count]) for count in range(len(ids) + 1)]
    for part in shown:
        assert text.startswith(part)
    assert shown[-1] == text
    assert all(len(a) <= len(b) for a, b in pairwise(shown))


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_a_meant_replacement_character_stays(kind: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    for text in ("a\ufffd", "\ufffdb", "a\ufffd\ufffdb"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_random_tokens_never_stall_the_stream(kind: str, request: pytest.FixtureRequest) -> None:
    """Garbage of an untrained model: text keeps coming, and whole characters after it are shown whole."""
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    random_ = random.Random(5)
    size = 256
    for _ in range(30):
        ids = [random_.randrange(2, size) for _ in range(120)]
        pieces = stream(tokenizer, ids)
        silent = longest = 0
        for piece in pieces[:-1]:
            silent = 0 if piece else silent + 1
            longest = max(longest, silent)
        assert longest <= 9
        "".join(pieces).encode()
        tail = stream(tokenizer, ids + tokenizer.encode("ab z"))
        assert "".join(tail).endswith("ab z")


def test_byte_level_agrees_with_the_library_on_valid_text(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("größe 漢字 🙂 été")
    assert byte_level.decode(ids) == byte_level._inner.decode(ids)


def test_special_tokens_are_not_text_and_padding_ids_are_empty(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("ab")
    assert byte_level.eos_id is not None
    assert byte_level.decode([*ids, byte_level.eos_id, *ids, 100_000]) == "abab"


def test_every_byte_has_one_character() -> None:
    table = unicode_bytes()
    assert sorted(table.values()) == list(range(256))
    assert table["Ġ"] == 0x20
    assert table["Ċ"] == 0x0A
    assert set(table) == set(pre_tokenizers.ByteLevel.alphabet())


def test_folder_without_tokenizer_is_none_and_a_broken_one_is_named(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model": 3}')
    with pytest.raises(InputError, match=r"tokenizer.json: the tokenizer cannot be read"):
        load_tokenizer(tmp_path)


def test_of_several_files_the_broken_one_is_named(tmp_path: Path, byte_level: Tokenizer) -> None:
    byte_level._inner.save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(InputError, match=r"tokenizer_config.json: the tokenizer cannot be read"):
        load_tokenizer(tmp_path)


def test_a_folder_round_trips(tmp_path: Path, byte_level: Tokenizer) -> None:
    byte_level._inner.save_pretrained(tmp_path)
    again = load_tokenizer(tmp_path)
    assert again is not None
    assert again.encode("漢字 ab") == byte_level.encode("漢字 ab")
    assert again.eos_id == byte_level.eos_id


def test_chat_template_missing_refusing_and_working(byte_level: Tokenizer) -> None:
    with pytest.raises(InputError, match=r"no chat template.*--raw"):
        byte_level.chat([{"role": "user", "content": "a"}])
    inner = byte_level._inner
    try:
        inner.chat_template = (
            "{% for m in messages %}"
            "{% if m.role == 'system' %}{{ raise_exception('no system turn') }}{% endif %}"
            "[{{ m.role }}]{{ m.content }}<|end|>{% endfor %}"
            "{% if add_generation_prompt %}[assistant]{% endif %}"
        )
        ids = byte_level.chat([{"role": "user", "content": "ab"}])
        assert inner.decode(ids) == "[user]ab<|end|>[assistant]"
        with pytest.raises(InputError, match="no system turn"):
            byte_level.chat([{"role": "system", "content": "x"}])
        # The sandbox: a template must not reach Python's internals.
        inner.chat_template = "{{ messages.__class__.__mro__ }}"
        with pytest.raises(InputError, match="unsafe"):
            byte_level.chat([{"role": "user", "content": "ab"}])
    finally:
        inner.chat_template = None


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_a_special_token_shows_only_where_it_is_asked_for(kind: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    end = tokenizer.eos_id
    assert end is not None
    name = "<|end|>" if kind == "byte_level" else "</s>"
    assert tokenizer.special([name, "ab", "nowhere"]) == {end}
    ids = [*tokenizer.encode("ab 漢"), end, *tokenizer.encode("z 🙂")]
    assert "".join(stream(tokenizer, ids)) in ("ab 漢z 🙂", "ab 漢 z 🙂")
    detokenizer = tokenizer.detokenizer({end})
    assert "".join([*map(detokenizer.feed, ids), detokenizer.finish()]) == f"ab 漢{name}z 🙂"


def test_a_request_chooses_no_template(byte_level: Tokenizer) -> None:
    inner = byte_level._inner
    inner.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools[0].name }}{{ mood }}"
    try:
        shown = byte_level.render([{"role": "user", "content": "a"}], [{"name": "f"}], {"mood": "b"})
        assert shown == "afb"
        with pytest.raises(InputError, match="'chat_template' is not a variable"):
            byte_level.render([{"role": "user", "content": "a"}], None, {"chat_template": "x"})
        assert byte_level.template == inner.chat_template
    finally:
        inner.chat_template = None
    assert byte_level.template == ""


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_bytes_of_tokens_are_those_of_the_text(kind: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    text = "ab 漢 é 🙂 a.z"
    joined = b"".join(map(tokenizer.token_bytes, tokenizer.encode(text)))
    assert joined.decode().removeprefix(" ") == text
    assert tokenizer.eos_id is not None
    assert tokenizer.token_bytes(tokenizer.eos_id) in (b"<|end|>", b"</s>")
    assert tokenizer.token_bytes(100_000) == b""
    assert tokenizer.serialized is not None
    assert Inner.from_str(tokenizer.serialized).encode("ab").ids == tokenizer.encode("ab")
