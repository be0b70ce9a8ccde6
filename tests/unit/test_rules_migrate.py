"""KTransformers' rule files become ours, and what has no counterpart is named with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero.core import InputError
from hetero.rules import load_rules
from hetero.rules.migrate import migrate
from tests.unit.rules_tree import place, tree, write

OLD = r"""- match:
    name: "^model.embed_tokens"
  replace:
    class: "default"
    kwargs: {generate_device: "cpu", prefill_device: "cpu"}
- match:
    class: ktransformers.models.modeling_tiny.TinyRMSNorm
  replace:
    class: ktransformers.operators.layernorm.RMSNorm
    kwargs: {generate_device: "cuda", prefill_device: "cuda"}
- match:
    name: "^model\\.layers\\..*$"
    class: torch.nn.Linear
  replace:
    class: ktransformers.operators.linear.KTransformersLinear
    kwargs:
      generate_device: "cuda:1"
      prefill_device: "cuda:1"
      generate_op: "KLinearMarlin"
      prefill_op: "KLinearTorch"
- match:
    name: "^model\\.layers\\..*\\.mlp$"
    class: ktransformers.models.modeling_tiny.TinySparseMoeBlock
  replace:
    class: ktransformers.operators.experts.KQwen3NextSparseMoeBlockV2
    kwargs: {generate_device: "cuda", prefill_device: "cuda"}
- match:
    name: "^model\\.layers\\..*\\.mlp\\.experts$"
  replace:
    class: ktransformers.operators.experts.KTransformersExpertsV2
    kwargs:
      prefill_device: "cuda"
      prefill_op: "KExpertsTorch"
      generate_device: "cpu"
      generate_op: "KExpertsCPU"
      out_device: "cuda"
      backend: "AMXInt8"
  recursive: False
- match:
    class: ktransformers.models.modeling_tiny.TinyGate
  replace:
    class: ktransformers.operators.gate.KMoEGate
    kwargs: {generate_device: "cuda", prefill_device: "cuda"}
- match:
    name: "^model$"
  replace:
    class: ktransformers.operators.models.KQwen2MoeModel
    kwargs:
      per_layer_prefill_intput_threshold: 0
      transfer_map: {10: "cuda:1"}
"""


def test_what_is_migrated_and_what_is_lost(tmp_path: Path) -> None:
    old = write(tmp_path, OLD, "old.yaml")
    result = migrate(old)
    assert [text.replace(f"{old}:", "") for text in result.lost] == [
        "19: generate_op 'KLinearMarlin': dense layers are not quantised; the layer is kept",
        "32: prefill of the experts on 'cuda': ours prefill on the device of decode",
        "50: 'transfer_map' has no counterpart",
    ]
    lines = OLD.splitlines()
    starts = [lines[int(text.removeprefix(f"{old}:").split(":")[0])] for text in result.notes]
    assert [start.strip() for start in starts] == [
        "class: ktransformers.models.modeling_tiny.TinyRMSNorm",
        "class: ktransformers.models.modeling_tiny.TinyGate",
        'name: "^model$"',
    ]


def test_the_new_file_places_the_model_as_the_old_one_did(tmp_path: Path) -> None:
    new = write(tmp_path, migrate(write(tmp_path, OLD, "old.yaml")).text)
    placement = place(new, tree(dense=1), devices=("cpu", "cuda:0", "cuda:1"))
    device = placement.device_of
    assert device("model.embed_tokens") == "cpu"
    assert device("model.norm") == "cuda:0"
    assert device("model.layers.0.self_attn.q_proj") == "cuda:1"
    assert device("lm_head") == "cuda:0"
    assert device("model.layers.1.mlp.gate") == "cuda:0"
    assert device("model.layers.1.mlp.experts") == "cpu"
    blocks = list(placement.replacements())
    assert [b.module for b in blocks] == [f"model.layers.{i}.mlp" for i in range(1, 12)]
    assert {(b.op, b.device, b.options["experts"]["format"]) for b in blocks} == {("moe", "cuda:0", "int8")}


def test_the_golden_file(tmp_path: Path) -> None:
    text = migrate(write(tmp_path, OLD, "old.yaml")).text
    assert (
        text
        == r"""# Migrated from old.yaml.
# Without a counterpart:
#   line 19: generate_op 'KLinearMarlin': dense layers are not quantised; the layer is kept
#   line 32: prefill of the experts on 'cuda': ours prefill on the device of decode
#   line 50: 'transfer_map' has no counterpart
vars: {gpu: cuda:0}
rules:
  - name: embed_tokens
    match: {name: '^model.embed_tokens'}
    replace: {op: keep, device: cpu}
  - name: TinyRMSNorm
    match: {class: TinyRMSNorm}
    replace: {op: keep, device: '${gpu}'}
    optional: true
  - name: Linear
    match: {name: '^model\.layers\..*$', class: Linear}
    replace: {op: keep, device: cuda:1}
    optional: true
  - name: routed experts
    match: {name: '^model\.layers\..*\.mlp$', class: MoeBlock}
    replace: {op: moe, device: '${gpu}', experts: {device: cpu, format: int8}}
  - name: everything else
    match: {name: '.*'}
    replace: {op: keep, device: '${gpu}'}
"""
    )


def test_old_names_of_a_block_become_those_of_transformers(tmp_path: Path) -> None:
    old = OLD.replace(r"\\.mlp", r"\\.block_sparse_moe")
    new = write(tmp_path, migrate(write(tmp_path, old, "old.yaml")).text)
    assert len(list(place(new, devices=("cpu", "cuda:0", "cuda:1")).replacements())) == 12


def test_experts_without_a_rule_for_their_block(tmp_path: Path) -> None:
    old = r"""- match: {name: "\\.mlp\\.experts$"}
  replace:
    class: ktransformers.operators.experts.KTransformersExperts
    kwargs: {generate_device: cpu, generate_op: KExpertsCPU, out_device: cuda}
"""
    result = migrate(write(tmp_path, old, "old.yaml"))
    assert result.lost == []
    assert "the experts' format came from the GGUF file" in result.notes[0]
    placement = place(write(tmp_path, result.text))
    assert {b.device for b in placement.replacements()} == {"cuda:0"}
    assert {b.options["experts"]["format"] for b in placement.replacements()} == {"int4"}


@pytest.mark.parametrize(
    ("old", "new", "want"),
    [
        ('generate_op: "KExpertsCPU"', "generate_op: KExpertsMarlin", "generate_op 'KExpertsMarlin' has no"),
        ("AMXInt8", "Magic", "backend 'Magic' has no counterpart"),
        ("recursive: False", "recursive: False\n  pieces: 3", "key 'pieces' means nothing to KTransformers"),
        ("operators.layernorm.RMSNorm", "operators.new.Thing", "operators.new.Thing has no counterpart"),
        ("ktransformers.operators.layernorm.RMSNorm", "my.own.Norm", "our operators follow another protocol"),
        (
            '{generate_device: "cpu", prefill_device: "cpu"}',
            '{generate_device: "cpu", prefill_device: "cuda"}',
            "prefill on another device than decode",
        ),
        ('generate_device: "cuda:1"', 'generate_device: "npu:0"', "device 'npu:0' has no counterpart"),
        ("per_layer_prefill_intput_threshold: 0", "per_layer_prefill_intput_threshold: 9", "'per_layer"),
        ('out_device: "cuda"', 'out_device: "cuda:1"', "out_device differs from the block's device"),
    ],
)
def test_each_line_without_a_counterpart_is_named(tmp_path: Path, old: str, new: str, want: str) -> None:
    assert old in OLD
    path = write(tmp_path, OLD.replace(old, new, 1), "old.yaml")
    before = len(migrate(write(tmp_path, OLD, "same.yaml")).lost)
    result = migrate(path)
    assert len(result.lost) >= before
    assert any(want in text for text in result.lost)
    assert all(text.startswith(f"{path}:") for text in result.lost)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("rules: []\n", ":1: this is a rule file of ours already"),
        ("a: 1\n", ":1: a KTransformers rule file must be a list, not a mapping"),
        ("- {match: {name: x}}\n", ":1: a rule of KTransformers has 'match' and 'replace'"),
        ("- {match: {}, replace: {class: default}}\n", ":1: 'match' has neither 'name' nor 'class'"),
        ("- [\n", "not valid YAML"),
    ],
)
def test_files_that_are_no_rule_files(tmp_path: Path, text: str, want: str) -> None:
    path = write(tmp_path, text, "old.yaml")
    with pytest.raises(InputError) as caught:
        migrate(path)
    assert want in str(caught.value)


def test_odd_words_of_the_old_file_do_no_harm(tmp_path: Path) -> None:
    old = (
        "- match: {name: '^true$'}\n"
        "  replace: {class: default, kwargs: {generate_device: cpu, generate_op: [a]}}\n"
        "- match: {name: 'lm_head'}\n"
        "  replace:\n"
        "    class: ktransformers.operators.linear.KTransformersLinear\n"
        '    kwargs: {generate_device: cpu, generate_op: [a], "two\\nlines": 1}\n'
        "- match: {name: '\\.mlp\\.experts$'}\n"
        "  replace:\n"
        "    class: ktransformers.operators.experts.KTransformersExperts\n"
        "    kwargs: {generate_device: cpu, out_device: cpu, generate_op: {b: 1}}\n"
    )
    result = migrate(write(tmp_path, old, "old.yaml"))
    assert any("generate_op 'a list'" in text for text in result.lost)
    assert any("generate_op 'a mapping'" in text for text in result.lost)
    assert any("'two lines' has no counterpart" in text for text in result.lost)
    assert "name: 'true'" in result.text
    assert load_rules(write(tmp_path, result.text)).rules[0].name == "true"
