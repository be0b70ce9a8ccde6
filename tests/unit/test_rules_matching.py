"""Which module gets which rule, and the loud end of every rule that does nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero.core import InputError
from hetero.rules.gpu_options import CacheSize
from tests.unit.rules_tree import GOOD, MOE, REST, SPEC, place, tree, write

CUDA = ("cpu", "cuda:0", "cuda:1")


def fails(path: Path, *args: object, **kwargs: object) -> str:
    with pytest.raises(InputError) as caught:
        place(path, *args, **kwargs)  # type: ignore[arg-type]
    return str(caught.value)


def keep(name: str, condition: str, device: str, more: str = "") -> str:
    rule = f"  - name: {name}\n    match: {{{condition}}}\n    replace: {{op: keep, device: {device}}}\n"
    return rule + (f"    {more}\n" if more else "")


def rules(*parts: str) -> str:
    return "rules:\n" + "".join(parts)


def test_every_module_has_one_assignment_in_tree_order(tmp_path: Path) -> None:
    modules = tree(dense=2)
    placement = place(write(tmp_path, GOOD), modules)
    assert [a.module for a in placement.assignments] == [m.name for m in modules]
    assert [a.module for a in placement.replacements()] == [f"model.layers.{i}.mlp" for i in range(2, 12)]
    assert placement.by_module["model.layers.0.mlp"].op == "keep"


def test_children_of_a_replaced_block_follow_its_rule(tmp_path: Path) -> None:
    text = GOOD.replace("{op: moe,", "{op: moe, device: cuda:0,").replace(
        "{op: keep}", "{op: keep, device: cuda:1}"
    )
    placement = place(write(tmp_path, text), devices=CUDA)
    block = placement.by_module["model.layers.3.mlp"]
    assert (block.op, block.device, block.owner) == ("moe", "cuda:0", None)
    for child, device in {
        "gate": "cuda:0",
        "shared_expert": "cuda:0",
        "shared_expert.up_proj": "cuda:0",
        "experts": "cpu",
        "experts.act_fn": "cpu",
    }.items():
        found = placement.by_module[f"model.layers.3.mlp.{child}"]
        assert (found.op, found.cls, found.owner) == (None, None, "model.layers.3.mlp")
        assert found.device == device, child
        assert found.rule.name == "experts"
    assert placement.device_of("model.layers.3.self_attn.q_proj") == "cuda:1"


def test_options_come_complete(tmp_path: Path) -> None:
    block = next(place(write(tmp_path, GOOD)).replacements())
    assert block.options == {
        "experts": {
            "device": "cpu",
            "format": "int4",
            "isa": "auto",
            "numa": "split",
            "threads": None,
            "backend": "native",
            "tier": "ram",
            "ram": None,
            "cache": CacheSize(),
            "share": None,
            "defer": 0,
        },
        "format": None,
    }


def test_swapping_two_rules_swaps_the_placement(tmp_path: Path) -> None:
    one, two = keep("attention", "name: self_attn", "cuda:0"), keep("linear", "class: Linear", "cuda:1")
    first = place(write(tmp_path, rules(one, two, MOE, REST)), devices=CUDA)
    second = place(write(tmp_path, rules(two, one, MOE, REST)), devices=CUDA)
    both = "model.layers.0.self_attn.q_proj"
    assert (first.device_of(both), second.device_of(both)) == ("cuda:0", "cuda:1")
    for placement in (first, second):  # where only one of them matches, the order means nothing
        assert placement.device_of("model.layers.0.self_attn") == "cuda:0"
        assert placement.device_of("lm_head") == "cuda:1"


def test_layer_1_is_not_layer_10(tmp_path: Path) -> None:
    path = write(tmp_path, rules(keep("one", r"name: 'layers\.1\.'", "cuda:0"), MOE, REST))
    placement = place(path)
    assert placement.device_of("model.layers.1.self_attn") == "cuda:0"
    for other in (0, 10, 11):
        assert placement.device_of(f"model.layers.{other}.self_attn") == "cpu"


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("0-3", {0, 1, 2, 3}),
        ("'0-1,8'", {0, 1, 8}),
        ("5", {5}),
        ("'5'", {5}),
        ("[0-1, 11]", {0, 1, 11}),
        ("'0 - 1'", {0, 1}),
    ],
)
def test_layer_ranges(tmp_path: Path, text: str, want: set[int]) -> None:
    path = write(tmp_path, rules(keep("some", f"layers: {text}", "cuda:0"), MOE, REST))
    modules = tree()
    placement = place(path, modules)
    on_gpu = {m.layer for m in modules if placement.by_module[m.name].device == "cuda:0"}
    assert on_gpu == want


def test_a_list_of_ranges_outside_a_flow_mapping_needs_no_quotes(tmp_path: Path) -> None:
    some = "  - name: some\n    match:\n      layers: 0-1,8\n    replace: {op: keep, device: cuda:0}\n"
    placement = place(write(tmp_path, rules(some, MOE, REST)))
    assert placement.device_of("model.layers.8.self_attn") == "cuda:0"
    message = fails(write(tmp_path, rules(keep("some", "layers: 0-1,8", "cuda:0"), MOE, REST)))
    assert "inside {...} a comma ends a value: quote the ranges, layers: '0-3,8'" in message


def test_class_matches_bases_and_globs(tmp_path: Path) -> None:
    path = write(tmp_path, rules(keep("any", "class: PreTrained*", "cuda:0"), MOE, REST))
    placement = place(path)
    assert {a.module for a in placement.assignments if a.device == "cuda:0"} == {"", "model"}


def test_recursive_false_takes_everything_below(tmp_path: Path) -> None:
    attention = keep("attention", r"name: 'self_attn$'", "cuda:0", "recursive: false")
    placement = place(write(tmp_path, rules(attention, MOE, REST)))
    assert placement.device_of("model.layers.4.self_attn.q_proj") == "cuda:0"
    assert placement.by_module["model.layers.4.self_attn.q_proj"].op == "keep"
    plain = place(write(tmp_path, rules(attention.replace("recursive: false", ""), MOE, REST)))
    assert plain.device_of("model.layers.4.self_attn.q_proj") == "cpu"


def test_a_users_operator_owns_its_subtree_unless_told_otherwise(tmp_path: Path) -> None:
    mine = (
        "  - name: mine\n    match: {class: TinyAttention}\n"
        "    replace: {class: my.ops.Attention, device: cuda:0, kwargs: {window: 8, modes: [a, 1.5]}}\n"
    )
    placement = place(write(tmp_path, rules(mine, MOE, REST)))
    found = placement.by_module["model.layers.0.self_attn"]
    assert (found.op, found.cls) == (None, "my.ops.Attention")
    assert found.options == {"window": 8, "modes": ["a", 1.5]}
    assert placement.by_module["model.layers.0.self_attn.q_proj"].owner == "model.layers.0.self_attn"
    deeper = place(write(tmp_path, rules(mine, "    recursive: true\n", MOE, REST)))
    assert deeper.by_module["model.layers.0.self_attn.q_proj"].op == "keep"


def test_a_pattern_that_hits_nothing(tmp_path: Path) -> None:
    path = write(tmp_path, rules(MOE, keep("deep", r"name: 'layers\.99\.'", "cpu"), REST))
    message = fails(path)
    assert message.startswith(f"{path}:5: rule 2 'deep': matched 0 modules")
    notes = place(path, strict=False).notes
    assert len(notes) == 1
    assert "matched 0 modules" in notes[0]


def test_a_pattern_that_hits_nothing_names_what_is_close(tmp_path: Path) -> None:
    wrong = rules(keep("norms", "class: TinyRMSnorm", "cpu"), MOE, REST)
    assert "the closest in the model is 'TinyRMSNorm'" in fails(write(tmp_path, wrong))
    wrong = rules(keep("norms", r"name: '^model\.layers\.\d+\.input_norm$'", "cpu"), MOE, REST)
    assert "the closest in the model is 'model.layers.*.input_layernorm'" in fails(write(tmp_path, wrong))
    both = GOOD.replace("class: MoeBlock", "name: 'attn$', class: MoeBlock")
    message = fails(write(tmp_path, both))
    assert (
        "'name' alone matches 12, 'class' alone matches 12; the MoE blocks are model.layers.*.mlp" in message
    )
    no_block = fails(write(tmp_path, GOOD), tree(dense=12))
    assert "matched 0 modules; the model has no MoE block" in no_block


@pytest.mark.parametrize("block", ["mlp", "block_sparse_moe"])
def test_both_spellings_of_a_mixtral_block_fare_the_same_or_fail(tmp_path: Path, block: str) -> None:
    modules = tree(block=block)
    for match in ("class: MoeBlock", r"name: '\.(mlp|block_sparse_moe)$'", "class: '*SparseMoeBlock'"):
        placement = place(write(tmp_path, GOOD.replace("class: MoeBlock", match)), modules)
        assert [a.module for a in placement.replacements()] == [
            f"model.layers.{i}.{block}" for i in range(12)
        ]
    other = {"mlp": "block_sparse_moe", "block_sparse_moe": "mlp"}[block]
    message = fails(write(tmp_path, GOOD.replace("class: MoeBlock", rf"name: '\.{other}$'")), modules)
    assert "rule 1 'experts': matched 0 modules" in message
    if block == "mlp":
        named = GOOD.replace("class: MoeBlock", r"name: '^model\.layers\.\d+\.block_sparse_moe$'")
        assert "the MoE blocks are model.layers.*.mlp" in fails(write(tmp_path, named), modules)


def test_a_shadowed_rule_names_those_before_it(tmp_path: Path) -> None:
    early = keep("linears", "class: Linear", "cuda:0") + keep("norms", "class: '*Norm'", "cuda:0")
    late = keep("late", r"name: '(q_proj|input_layernorm)$'", "cpu")
    message = fails(write(tmp_path, rules(early, late, MOE, REST)))
    assert message.endswith(
        ":8: rule 3 'late': places nothing: the 24 modules that it matches are taken by earlier rules: "
        "rule 1 'linears' (12), rule 2 'norms' (12); move it up or remove it"
    )


def test_a_rule_for_parts_of_a_replaced_block_is_refused(tmp_path: Path) -> None:
    text = rules(keep("routers", "class: TinyTopKRouter", "cuda:0"), MOE, REST)
    message = fails(write(tmp_path, text))
    assert "rule 1 'routers': places nothing: the 12 modules" in message
    assert "inside modules that another rule replaces whole: rule 2 'experts' (12)" in message


def test_an_optional_rule_may_place_nothing(tmp_path: Path) -> None:
    text = rules(keep("table", "name: ngram", "cuda:0", "optional: true"), MOE, REST)
    placement = place(write(tmp_path, text))
    assert [note.split(": ", 1)[1] for note in placement.notes] == ["rule 1 'table': matched 0 modules"]


def test_a_module_without_a_rule(tmp_path: Path) -> None:
    path = write(tmp_path, rules(MOE, keep("layers", r"name: 'layers\.'", "cpu")))
    message = fails(path)
    assert message == (
        f"{path}: 3 modules without a rule: model.embed_tokens, model.norm, lm_head; "
        "end the file with a rule for name '.*'"
    )


def test_containers_need_no_rule(tmp_path: Path) -> None:
    path = write(tmp_path, rules(MOE, keep("leaves", "name: 'layers\\.|embed|norm|head'", "cpu")))
    placement = place(path)
    assert placement.device_of("model") is None
    assert placement.device_of("lm_head") == "cpu"


def test_layers_beyond_the_model(tmp_path: Path) -> None:
    path = write(tmp_path, rules(keep("some", "layers: 0-47", "cpu"), MOE, REST))
    assert (
        fails(path) == f"{path}:3: rule 1 'some': layers 0-47 go beyond the model: the model has layers 0-11"
    )
    place(
        write(
            tmp_path, rules(keep("some", "layers: 0-11", "cpu"), MOE.replace("class", "name: x, class"), REST)
        ),
        strict=False,
    )


def test_a_device_that_is_not_there(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD.replace("{op: keep}", "{op: keep, device: cuda:7}"))
    assert fails(path, devices=CUDA) == (
        f"{path}:7: rule 2 'rest': device 'cuda:7' does not exist here; the devices are: cpu, cuda:0, cuda:1"
    )
    assert "the devices are: cpu" in fails(path, devices=("cpu",))


def test_cuda_is_the_first_gpu(tmp_path: Path) -> None:
    placement = place(write(tmp_path, GOOD.replace("{op: keep}", "{op: keep, device: cuda}")))
    assert placement.device_of("lm_head") == "cuda:0"


def test_op_moe_takes_blocks_only(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD.replace("class: MoeBlock", r"name: '\.mlp$'"))
    place(path)
    message = fails(path, tree(dense=1))
    assert "rule 1 'experts': op 'moe' replaces MoE blocks, and model.layers.0.mlp is a TinyMLP" in message
    assert "'class: MoeBlock'" in message


def test_op_moe_is_never_recursive(tmp_path: Path) -> None:
    text = GOOD.replace(MOE, MOE + "    recursive: true\n")
    assert "'recursive: true' is not possible" in fails(write(tmp_path, text))


def test_the_file_says_which_models_it_is_for(tmp_path: Path) -> None:
    from hetero.rules import load_rules, match

    path = write(tmp_path, "models: [mixtral]\n" + GOOD)
    match(load_rules(path), tree(), model_type="mixtral")
    with pytest.raises(InputError, match="the file is for mixtral, and the model is 'qwen3_moe'"):
        match(load_rules(path), tree(), model_type="qwen3_moe")


def test_parameters_of_the_test_tree_add_up() -> None:
    modules = tree(dense=1)
    assert modules[0].params == sum(m.own_params for m in modules)
    assert SPEC.params == 4 * 3 * 64 * 32
