"""Every kind of bad input as a user meets it: exit code 2, one message, no traceback, nothing left behind.

A missing tokenizer or chat template, an instruction set that the machine lacks and too little memory are in
``tests/unit/test_cli.py``.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

from hetero import cli
from hetero.model.source import INDEX
from tests.model.checkpoints import edit_config, edit_tensors, write
from tests.model.quiet import quiet  # noqa: F401  an automatic fixture

EXPERT = "model.layers.0.mlp.experts.3.up_proj.weight"


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("sound")
    for model_type in ("qwen3_moe", "gpt_oss"):
        write(model_type, root / model_type)
    return {model_type: root / model_type for model_type in ("qwen3_moe", "gpt_oss")}


@pytest.fixture
def folder(originals: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A sound checkpoint that a test may damage; the working folder and the cache are empty ones."""
    for name, variable in (("here", None), ("cache", "HETERO_CACHE")):
        (tmp_path / name).mkdir()
        if variable:
            monkeypatch.setenv(variable, str(tmp_path / name))
    monkeypatch.setenv("HETERO_THREADS", "1")
    monkeypatch.chdir(tmp_path / "here")
    return Path(shutil.copytree(originals["qwen3_moe"], tmp_path / "model"))


def run(folder: Path, *more: str) -> Result:
    return CliRunner().invoke(
        cli.app, ["run", str(folder), "--prompt-ids", "5,6", "--max-tokens", "2", *more]
    )


def refused(folder: Path, *more: str) -> str:
    """The message of a run that fails, without ``hetero: `` and the end of line."""
    root = folder.parent
    files, descriptors = sorted(root.rglob("*")), len(os.listdir("/proc/self/fd"))
    result = run(folder, *more)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("hetero: ")
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.stderr
    assert sorted(root.rglob("*")) == files
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    return result.stderr.removeprefix("hetero: ").removesuffix("\n")


def test_the_sound_checkpoint_runs(folder: Path) -> None:
    result = run(folder)
    assert result.exit_code == 0, result.output
    assert len(result.stdout.split()) == 2


MOE = "  - name: experts\n    match: {class: MoeBlock}\n    replace: {op: moe, experts: {format: int4}}\n"
REST = "  - name: rest\n    match: {name: '.*'}\n    replace: {op: keep}\n"
RULES = "rules:\n" + MOE + REST

# What is wrong, the text in the sound file and what stands there instead, and the message after "FILE:".
BAD_RULES = {
    "unknown key": (
        "match: {class",
        "match: {clas",
        "3: rule 1 'experts': unknown key 'clas' in 'match'; did you mean 'class'?",
    ),
    "mis-indented key": (
        "    match: {class: MoeBlock}",
        "    class: MoeBlock\n    match: {name: mlp}",
        "3: rule 1 'experts': 'class' does not belong in a rule: "
        "indent it under 'match' (which modules) or 'replace' (which operator)",
    ),
    "bad regex": (
        "'.*'",
        "'*.'",
        "6: rule 2 'rest': '*.' is not a regular expression: nothing to repeat at position 0",
    ),
    "unknown op": ("keep", "kepe", "7: rule 2 'rest': unknown op 'kepe'; did you mean 'keep'?"),
    "unknown option": (
        "{format:",
        "{fromat:",
        "4: rule 1 'experts': unknown key 'fromat' in 'experts'; did you mean 'format'?",
    ),
    "unknown value of an option": (
        "format: int4",
        "isa: avx-512",
        "4: rule 1 'experts': experts: unknown isa 'avx-512'; did you mean 'avx512'?",
    ),
    "unknown device": (
        "{op: keep",
        "{op: keep, device: gpu",
        "7: rule 2 'rest': unknown device 'gpu'; did you mean 'cpu'?",
    ),
    "rule that matches nothing": (
        "class: MoeBlock",
        r"name: 'layers\.99\.mlp'",
        "2: rule 1 'experts': matched 0 modules; the MoE blocks are model.layers.*.mlp",
    ),
    "shadowed rule": (
        MOE,
        MOE + REST.replace("rest", "early"),
        "8: rule 3 'rest': places nothing: the {} modules that it matches are taken by earlier rules: ",
    ),
    "layers beyond the model": (
        "class: MoeBlock",
        "class: MoeBlock, layers: 0-98",
        "3: rule 1 'experts': layers 0-98 go beyond the model: the model has layers 0-",
    ),
}


@pytest.mark.parametrize("name", BAD_RULES)
def test_rule_files(name: str, folder: Path) -> None:
    old, new, want = BAD_RULES[name]
    assert RULES.count(old) == 1
    path = folder.parent / "my.yaml"
    path.write_text(RULES.replace(old, new))
    message = refused(folder, "--rules", str(path))
    head, _, tail = want.partition("{}")
    assert message.startswith(f"{path}:{head}")
    assert tail in message


def test_module_with_no_rule(folder: Path) -> None:
    path = folder.parent / "my.yaml"
    path.write_text(RULES.replace("'.*'", r"'layers\.'"))
    assert refused(folder, "--rules", str(path)) == (
        f"{path}: 4 modules without a rule: model.embed_tokens, model.norm, model.rotary_emb, lm_head; "
        "end the file with a rule for name '.*'"
    )


def shard(folder: Path) -> list[Path]:
    """Split a checkpoint in two files with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    index = {}
    files = [folder / f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for number, file in enumerate(files):
        part = dict(sorted(tensors.items())[number::2])
        save_file(part, file)
        index |= dict.fromkeys(part, file.name)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return files


def test_missing_shard(folder: Path) -> None:
    lost = shard(folder)[1]
    lost.unlink()
    assert refused(folder) == f"{folder / INDEX} names 2 shards, of which 1 are missing: {lost.name}"


def test_index_that_names_an_absent_tensor(folder: Path) -> None:
    first = shard(folder)[0].name
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.ghost"] = first
    (folder / INDEX).write_text(json.dumps(index))
    assert refused(folder) == f"{folder / INDEX}: tensor model.ghost is not in {first}, as it says"


def test_truncated_file(folder: Path) -> None:
    file = folder / "model.safetensors"
    size = file.stat().st_size
    os.truncate(file, size - 1)
    assert refused(folder) == (
        f"{file}: truncated: its header makes it {size} bytes, but the file has {size - 1}"
    )


def test_unconsumed_tensor(folder: Path) -> None:
    edit_tensors(folder, lambda t: t.update({"model.layers.0.mlp.bonus": torch.ones(2)}))
    message = refused(folder)
    assert message.startswith(f"{folder}: ")
    assert "model.layers.0.mlp.bonus" in message


def test_what_the_class_ignores_and_towers_are_named_in_one_line(folder: Path) -> None:
    more = ("model.visual.patch.weight", "mtp.layers.0.norm.weight", "mtp.norm.weight")
    edit_tensors(folder, lambda t: t.update({name: torch.ones(2) for name in more}))
    edit_tensors(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}))
    result = run(folder)
    assert result.exit_code == 0, result.output
    notes = [line for line in result.stderr.splitlines() if line.startswith("note: ")]
    assert notes == [
        "note: not loaded: mtp (2 tensors), visual (1 tensors), what the model class ignores (1 tensors)"
    ]


def test_absent_tensor(folder: Path) -> None:
    edit_tensors(folder, lambda t: t.pop(EXPERT))
    assert EXPERT in refused(folder)


def test_wrong_shape(folder: Path) -> None:
    edit_tensors(folder, lambda t: t.update({EXPERT: t[EXPERT][:-1]}))
    message = refused(folder)
    assert str(folder / "model.safetensors") in message
    assert EXPERT in message


def transpose(pattern: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        names = [name for name in tensors if pattern in name]
        assert names
        tensors.update({name: tensors[name].mT.contiguous() for name in names})

    return change


def test_transposed_experts(folder: Path) -> None:
    edit_tensors(folder, transpose(".down_proj.weight"))
    message = refused(folder)
    assert "down_proj" in message
    assert "it looks transposed" in message


def test_transposed_packed_experts(folder: Path, originals: dict[str, Path]) -> None:
    shutil.rmtree(folder)
    shutil.copytree(originals["gpt_oss"], folder)
    assert run(folder).exit_code == 0
    name = "model.layers.1.mlp.experts.gate_up_proj"
    edit_tensors(folder, lambda t: t.update({name: t[name].mT.contiguous()}))
    message = refused(folder)
    assert name in message
    assert "it looks transposed" in message


@pytest.mark.parametrize(
    ("change", "want"),
    [
        (lambda c: c.update(model_type="qwen3_mo"), "unknown model_type 'qwen3_mo'; did you mean qwen3_moe"),
        (lambda c: c.pop("model_type"), "field 'model_type' is absent"),
        (lambda c: c.pop("hidden_size"), "field 'hidden_size' is absent; qwen3_moe needs it"),
        (lambda c: c.update(model_type="switch_transformers"), "encoder-decoder"),
    ],
    ids=["unknown type", "no type", "absent field", "refused type"],
)
def test_configuration(change: Callable[[dict[str, Any]], Any], want: str, folder: Path) -> None:
    edit_config(folder, change)
    message = refused(folder)
    assert want in message


def test_a_dense_model_is_refused_as_one(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **sizes, **heads}))
    assert "llama has no routed experts" in refused(tmp_path)
