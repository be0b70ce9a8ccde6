"""The loader against transformers' own ``from_pretrained`` and against the parameters that were saved."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3MoeConfig

from hetero.core import InputError
from hetero.model.build import assert_only_experts_on_meta, build_meta, choose_class, load_config
from hetero.model.loader import load, plan_load
from hetero.model.source import Checkpoint
from tests.model.checkpoints import (
    edit_config,
    edit_tensors,
    expected_parts,
    load_into,
    write,
    write_config,
)
from tests.model.tiny_moe import tiny_config

# Every way in which the types of transformers lay experts out in a file or in memory.
LAYOUTS = (
    "qwen3_moe",  # one tensor per expert
    "mixtral",  # w1, w3, w2, and another block name
    "phimoe",
    "kimi_linear",
    "gpt_oss",  # packed, transposed, interleaved, with biases
    "aria_text",  # packed, transposed
    "granitemoe",  # packed, renamed
    "nemotron_h",  # no gate
    "deepseek_v3",
    "qwen3_next",
    "qwen4_exp_text",  # and an embedding in parts
    "inkling_text",  # packed, interleaved in the file only
    "qwen3_vl_moe",  # packed, transposed in the file only
    "ernie4_5_vl_moe",  # one list of experts for two modules
    "jamba",
    "lfm2_moe",
    "muse_spark",
    "minimax_m2",
)


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        result = model(input_ids=ids).logits
    assert torch.isfinite(result).all()
    return result


def config_of(model_type: str, **changes: Any) -> Any:
    config = tiny_config(model_type)
    for name, value in changes.items():
        assert hasattr(config, name)
        setattr(config, name, value)
    return config


@pytest.mark.parametrize("model_type", LAYOUTS)
def test_experts_reach_their_sinks_and_the_rest_the_tree(model_type: str, tmp_path: Path) -> None:
    reference = write(model_type, tmp_path)
    model, sinks, report = load_into(tmp_path, stream=True)
    assert sinks
    modules = dict(reference.named_modules())
    for name, sink in sinks.items():
        expected = expected_parts(modules[name])
        assert sink.got.keys() == expected.keys()
        for key, value in expected.items():
            assert torch.equal(sink.got[key], value), f"{key} of {name}"
    assert_only_experts_on_meta(model, sinks)
    state = reference.state_dict()
    checked = 0
    for name, value in model.state_dict().items():
        if value.device.type != "meta":
            assert torch.equal(value, state[name]), name
            checked += 1
    assert checked > 10
    files = sum(info.nbytes for info in Checkpoint(tmp_path).tensors.values())
    assert report.nbytes == files or report.skipped


@pytest.mark.parametrize("model_type", LAYOUTS)
def test_logits_equal_when_experts_become_parameters(model_type: str, tmp_path: Path) -> None:
    reference = write(model_type, tmp_path)
    model, _, _ = load_into(tmp_path, stream=False)
    assert_only_experts_on_meta(model, ())
    ids = torch.randint(3, 90, (1, 13))
    torch.testing.assert_close(logits(model, ids), logits(reference, ids), rtol=0, atol=1e-6)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral", "gpt_oss", "qwen3_vl_moe"])
def test_packed_and_per_expert_files_hold_the_same_model(model_type: str, tmp_path: Path) -> None:
    write(model_type, tmp_path / "original")
    write(model_type, tmp_path / "packed", save_original_format=False)
    _, original, _ = load_into(tmp_path / "original", stream=True)
    _, packed, _ = load_into(tmp_path / "packed", stream=True)
    for name, sink in original.items():
        assert sink.got.keys() == packed[name].got.keys()
        assert all(torch.equal(value, packed[name].got[key]) for key, value in sink.got.items())


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral", "gpt_oss", "aria_text"])
@pytest.mark.parametrize("original", [True, False])
def test_square_gate_up_where_shapes_tell_nothing(model_type: str, original: bool, tmp_path: Path) -> None:
    """Hidden size = 2 x intermediate: a transposed or unsplit read has the right shape and wrong values."""
    config = config_of(model_type)
    width = config.hidden_size // 2
    for field in ("moe_intermediate_size", "intermediate_size"):
        if hasattr(config, field):
            setattr(config, field, width)
    reference = write_config(config, tmp_path, save_original_format=original)
    _, sinks, _ = load_into(tmp_path, stream=True)
    modules = dict(reference.named_modules())
    for name, sink in sinks.items():
        module = modules[name]
        assert module.gate_up_proj.shape[1] == module.gate_up_proj.shape[2]
        for key, value in expected_parts(module).items():
            assert torch.equal(sink.got[key], value)
    whole, _, _ = load_into(tmp_path, stream=False)
    ids = torch.randint(3, 90, (1, 9))
    assert torch.equal(logits(whole, ids), logits(reference, ids))


@pytest.mark.parametrize("layout", ["index", "no index", "one other name"])
def test_shards(layout: str, tmp_path: Path) -> None:
    reference = write("qwen3_moe", tmp_path, max_shard_size="60KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 3
    if layout != "index":
        (tmp_path / "model.safetensors.index.json").unlink()
    if layout == "one other name":
        tensors = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
        for shard in shards:
            shard.unlink()
        save_file(tensors, tmp_path / "weights.safetensors")
    model, _, _ = load_into(tmp_path, stream=False)
    ids = torch.randint(3, 90, (1, 9))
    assert torch.equal(logits(model, ids), logits(reference, ids))


@pytest.mark.parametrize("head", ["tied", "untied", "tied with an equal head", "tied with another head"])
def test_heads(head: str, tmp_path: Path) -> None:
    write_config(config_of("qwen3_moe", tie_word_embeddings=head != "untied"), tmp_path)
    if "with" in head:

        def add(tensors: dict[str, torch.Tensor]) -> None:
            embedding = tensors["model.embed_tokens.weight"]
            other = torch.randn_like(embedding)
            tensors["lm_head.weight"] = other if "another" in head else embedding.clone()

        edit_tensors(tmp_path, add)
    names = Checkpoint(tmp_path).tensors
    assert ("lm_head.weight" in names) == (head != "tied")
    model, _, report = load_into(tmp_path, stream=False)
    chosen = choose_class(load_config(tmp_path))
    reference = chosen.cls.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.randint(3, 90, (1, 9))
    assert torch.equal(logits(model, ids), logits(reference, ids))
    shared = model.lm_head.weight is model.model.embed_tokens.weight
    assert shared == (head in ("tied", "tied with an equal head"))
    assert any("tied" in line for line in report.lines()) == (head == "tied with another head")


def test_a_tied_head_under_the_heads_name_alone(tmp_path: Path) -> None:
    reference = write_config(config_of("qwen3_moe", tie_word_embeddings=True), tmp_path)
    edit_tensors(tmp_path, lambda t: t.update({"lm_head.weight": t.pop("model.embed_tokens.weight")}))
    model, _, _ = load_into(tmp_path, stream=False)
    ids = torch.randint(3, 90, (1, 9))
    assert torch.equal(logits(model, ids), logits(reference, ids))


@pytest.mark.parametrize(
    "model_type", ["qwen3_moe", "deepseek_v3", "gpt_oss", "kimi_linear", "qwen4_exp_text"]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes_are_those_of_from_pretrained(model_type: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Among them what transformers keeps in float32: correction biases, state-space parameters."""
    write(model_type, tmp_path)
    model, _, _ = load_into(tmp_path, stream=False, dtype=dtype)
    reference = choose_class(load_config(tmp_path)).cls.from_pretrained(tmp_path, dtype=dtype)
    expected = reference.state_dict()
    for name, value in model.state_dict().items():
        assert value.dtype == expected[name].dtype, name
        assert torch.equal(value, expected[name]), name


def test_experts_keep_the_precision_of_the_file(tmp_path: Path) -> None:
    write("qwen3_moe", tmp_path, dtype=torch.bfloat16)
    _, sinks, _ = load_into(tmp_path, stream=True, dtype=torch.float32)
    assert {t.dtype for sink in sinks.values() for t in sink.got.values()} == {torch.bfloat16}
    write("qwen3_moe", tmp_path)
    _, sinks, _ = load_into(tmp_path, stream=True, dtype=torch.bfloat16)
    assert {t.dtype for sink in sinks.values() for t in sink.got.values()} == {torch.float32}


def test_towers_and_draft_layers_are_skipped_in_one_line(tmp_path: Path) -> None:
    write("qwen3_vl_moe", tmp_path / "vision")
    _, _, report = load_into(tmp_path / "vision", stream=True)
    assert len(report.lines()) == 1
    assert report.lines()[0].startswith("not loaded: visual (")

    write("deepseek_v3", tmp_path / "draft")
    edit_config(tmp_path / "draft", lambda c: c.update(num_nextn_predict_layers=1))
    layers = json.loads((tmp_path / "draft" / "config.json").read_text())["num_hidden_layers"]
    extra = {f"model.layers.{layers}.eh_proj.weight": torch.zeros(2, 2), "mtp.norm.weight": torch.ones(2)}
    edit_tensors(tmp_path / "draft", lambda t: t.update(extra))
    _, _, report = load_into(tmp_path / "draft", stream=True)
    assert report.lines() == ["not loaded: mtp (2 tensors)"]


def test_a_model_inside_a_larger_one(tmp_path: Path) -> None:
    """The thinker of an omni model: its tensors carry a prefix, the parts beside it are not run."""
    config = tiny_config("qwen3_omni_moe")
    reference = write_config(config, tmp_path)

    def add(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[f"thinker.{name}"] = tensors.pop(name)
        tensors["talker.model.norm.weight"] = torch.ones(2)
        tensors["code2wav.decoder.0.weight"] = torch.ones(2)

    edit_tensors(tmp_path, add)
    config.save_pretrained(tmp_path)
    model, _, report = load_into(tmp_path, stream=False)
    ids = torch.randint(3, 90, (1, 9))
    assert torch.equal(logits(model, ids), logits(reference, ids))
    (line,) = report.lines()
    assert "talker (1 tensors)" in line
    assert "code2wav (1 tensors)" in line


def test_tensors_of_older_releases_are_ignored(tmp_path: Path) -> None:
    """Rotary frequencies used to be stored with every layer."""
    write("qwen3_moe", tmp_path)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(tmp_path, lambda t: t.update({name: torch.ones(8)}))
    _, _, report = load_into(tmp_path, stream=True)
    assert report.lines() == ["not loaded: what the model class ignores (1 tensors)"]


def test_planning_reads_no_weight_and_loading_reads_each_byte_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("qwen4_exp_text", tmp_path)
    model = build_meta(load_config(tmp_path))
    checkpoint = Checkpoint(tmp_path)

    def refuse(*args: Any) -> None:
        raise AssertionError("a weight was read")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", refuse)
        plan = plan_load(model, checkpoint)
    calls: list[tuple[int, int]] = []
    report = load(model, checkpoint, plan=plan, progress=lambda done, total: calls.append((done, total)))
    assert calls[-1] == (checkpoint.nbytes, checkpoint.nbytes)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert report.nbytes == checkpoint.nbytes
    assert report.tensors == len(checkpoint.tensors)


def test_a_read_slice_is_that_slice(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(5, 3, 2),
        "b": torch.arange(7, dtype=torch.int64),
        "c": torch.randn(4, 6).to(torch.bfloat16),
        "d": torch.randn(3, 3).to(torch.float16),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(2.5),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path) as checkpoint:
        for name, value in tensors.items():
            read = checkpoint.read(name)
            assert read.dtype == value.dtype
            assert torch.equal(read, value)
            for index in range(value.shape[0] if value.ndim else 0):
                assert torch.equal(checkpoint.read_slice(name, index), value[index : index + 1])
        for name, index in (("a", 5), ("a", -1), ("scalar", 0), ("absent", 0)):
            with pytest.raises(InputError):
                checkpoint.read_slice(name, index)


_MEASURE = """
import sys, torch
from pathlib import Path
from hetero.model.build import build_meta, is_experts, load_config
from hetero.model.loader import load
from hetero.model.source import Checkpoint

class Arena:
    # packed weights of the file's own size, touched as a real arena would be
    def __init__(self, module):
        e, h, i = module.down_proj.shape
        self.parts = {"gate": torch.empty(e, i, h, dtype=torch.bfloat16),
                      "up": torch.empty(e, i, h, dtype=torch.bfloat16),
                      "down": torch.empty(e, h, i, dtype=torch.bfloat16)}
    def put(self, expert, part, tensor):
        self.parts[part][expert].copy_(tensor)
    def missing(self):
        return []

def status(field):
    # not ru_maxrss, which starts at the size of the process that started this one
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

torch.set_num_threads(1)
folder = Path(sys.argv[1])
model = build_meta(load_config(folder), torch.bfloat16)
checkpoint = Checkpoint(folder)
sinks = {n: Arena(m) for n, m in model.named_modules() if is_experts(m)}
before = status("VmRSS")
load(model, checkpoint, sinks, dtype=torch.bfloat16)
after = status("VmHWM")
print(after - before, checkpoint.nbytes, max(i.nbytes for i in checkpoint.tensors.values()))
"""


@pytest.mark.parametrize("original", [True, False], ids=["one tensor per expert", "packed"])
def test_peak_memory(original: bool, tmp_path: Path) -> None:
    config = Qwen3MoeConfig(
        vocab_size=256, hidden_size=1024, moe_intermediate_size=512, num_hidden_layers=3, head_dim=64,
        num_attention_heads=4, num_key_value_heads=2, num_experts=32, num_experts_per_tok=2,
        intermediate_size=512, mlp_only_layers=[], dtype="bfloat16",
    )  # fmt: skip
    with torch.device("meta"):
        model = choose_class(config).cls._from_config(config, dtype=torch.bfloat16)
    model = model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.fill_(0.5)
    model.save_pretrained(tmp_path, save_original_format=original)
    del model
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(tmp_path)],
        capture_output=True, text=True, check=False, cwd=root, env={**os.environ, "PYTHONPATH": str(root)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    grown, packed, largest = map(int, done.stdout.split()[-3:])
    assert packed > 300e6
    assert grown > 0.9 * packed, "the measurement does not see the weights"
    # One tensor is one expert's: a packed tensor must be read in slices.
    tensor = largest if original else largest // 32
    assert grown <= 1.15 * packed + tensor
