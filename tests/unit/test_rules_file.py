"""What a rule file may say, and the one message that each mistake gets."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hetero.core import InputError
from hetero.formats import parse_format, valid_formats
from hetero.rules import load_rules
from hetero.rules.options import BACKENDS, ISAS, schemas_for
from tests.unit.rules_tree import GOOD, MOE, REST, place, tree, write

EXPERTS = "{op: moe, experts: {format: int4}}"


def error(path: Path, **overrides: str) -> str:
    with pytest.raises(InputError) as caught:
        place(path, overrides=overrides)
    return str(caught.value)


# What is wrong, the text in the good file and what stands there instead, and the message after "FILE:".
MISTAKES = {
    "unknown key of a rule": (
        "    match: {class: MoeBlock}",
        "    macth: {class: MoeBlock}",
        "3: rule 1 'experts': unknown key 'macth' in a rule; did you mean 'match'?",
    ),
    "unknown key of match": (
        "{class: MoeBlock}",
        "{clas: MoeBlock}",
        "3: rule 1 'experts': unknown key 'clas' in 'match'; did you mean 'class'?",
    ),
    "unknown key far from all": (
        "{class: MoeBlock}",
        "{zzz: MoeBlock}",
        "3: rule 1 'experts': unknown key 'zzz' in 'match'; 'match' has name, class, layers",
    ),
    "unknown option": (
        "{format: int4}",
        "{fromat: int4}",
        "4: rule 1 'experts': unknown key 'fromat' in 'experts'; did you mean 'format'?",
    ),
    "unknown key of the file": (
        "rules:",
        "variables: {a: 1}\nrules:",
        "1: unknown key 'variables' in the file; did you mean 'vars'?",
    ),
    "class under the rule": (
        "    match: {class: MoeBlock}",
        "    match: {name: mlp}\n    class: MoeBlock",
        "4: rule 1 'experts': 'class' does not belong in a rule: "
        "indent it under 'match' (which modules) or 'replace' (which operator)",
    ),
    "device under the rule": (
        f"    replace: {EXPERTS}",
        f"    replace: {EXPERTS}\n    device: cpu",
        "5: rule 1 'experts': 'device' does not belong in a rule: indent it under 'replace'",
    ),
    "format under replace": (
        EXPERTS,
        "{op: moe, format: int4}",
        "4: rule 1 'experts': 'format' does not belong in 'replace': indent it under 'experts'",
    ),
    "recursive under replace": (
        EXPERTS,
        "{op: moe, recursive: false}",
        "4: rule 1 'experts': 'recursive' does not belong in 'replace': "
        "it is a key of the rule, one level up",
    ),
    "a word of KTransformers": (
        EXPERTS,
        "{op: moe, generate_device: cpu}",
        "4: rule 1 'experts': 'generate_device' does not belong in 'replace': write 'device: ...'",
    ),
    "a rule at the top": (
        "rules:",
        "match: {name: x}\nrules:",
        "1: 'match' does not belong in the file: it is a key of a rule, under 'rules'",
    ),
    "duplicate key": (
        "    match: {class: MoeBlock}",
        "    match: {class: MoeBlock}\n    match: {name: x}",
        "4: key 'match' stands twice here; the first is in line 3",
    ),
    "bad regular expression": (
        "name: '.*'",
        "name: 'layers\\.(\\d+'",
        "6: rule 2 'rest': 'layers\\.(\\d+' is not a regular expression: "
        "missing ), unterminated subpattern at position 8",
    ),
    "wrong type of name": (
        "name: '.*'",
        "name: 12",
        "6: rule 2 'rest': 'match: name' must be a string, not 12",
    ),
    "wrong type of match": (
        "{class: MoeBlock}",
        "MoeBlock",
        "3: rule 1 'experts': 'match' must be a mapping of keys to values, not 'MoeBlock'",
    ),
    "wrong type of recursive": (
        f"    replace: {EXPERTS}",
        f"    replace: {EXPERTS}\n    recursive: off",
        "5: rule 1 'experts': 'recursive' must be true or false, not 'off'",
    ),
    "empty match": (
        "{class: MoeBlock}",
        "{}",
        "3: rule 1 'experts': 'match' is empty; give one of name, class, layers",
    ),
    "no replace": (
        f"    replace: {EXPERTS}\n",
        "",
        "2: rule 1 'experts': the rule has no 'replace'",
    ),
    "neither op nor class": (
        EXPERTS,
        "{device: cpu}",
        "4: rule 1 'experts': 'replace' needs 'op' or 'class' (a user's operator), and has neither",
    ),
    "op and class": (
        EXPERTS,
        "{op: moe, class: a.B}",
        "4: rule 1 'experts': 'replace' needs 'op' or 'class' (a user's operator), and has both",
    ),
    "class without a package": (
        EXPERTS,
        "{class: Mine}",
        "4: rule 1 'experts': 'class: Mine' is no dotted path of a class, such as package.module.Class",
    ),
    "dotted class to match": (
        "{class: MoeBlock}",
        "{class: torch.nn.Linear}",
        "3: rule 1 'experts': 'class' is compared with bare class names: "
        "write 'Linear', not 'torch.nn.Linear'",
    ),
    "unknown op": (
        "{op: keep}",
        "{op: kepe}",
        "7: rule 2 'rest': unknown op 'kepe'; did you mean 'keep'?",
    ),
    "unknown op far from all": (
        "{op: keep}",
        "{op: attention}",
        "7: rule 2 'rest': unknown op 'attention'; the operators are: embedding, fused, keep, linear, moe",
    ),
    "unknown isa": (
        "{format: int4}",
        "{isa: avx-512}",
        "4: rule 1 'experts': experts: unknown isa 'avx-512'; did you mean 'avx512'?",
    ),
    "unknown numa": (
        "{format: int4}",
        "{numa: true}",
        "4: rule 1 'experts': experts: unknown numa 'true'; it is one of split, replicate, off, node N",
    ),
    "threads": (
        "{format: int4}",
        "{threads: 0}",
        "4: rule 1 'experts': experts: 'threads' must be a number from 1 to 4096, not 0",
    ),
    "options of keep": (
        "{op: keep}",
        "{op: keep, kwargs: {a: 1}}",
        "7: rule 2 'rest': op 'keep' takes no 'kwargs': it leaves the module as it is",
    ),
    "unknown device": (
        "{op: keep}",
        "{op: keep, device: gpu}",
        "7: rule 2 'rest': unknown device 'gpu'; did you mean 'cpu'?",
    ),
    "packed linear layers on the CPU": (
        "{op: keep}",
        "{op: linear}",
        "7: rule 2 'rest': op 'linear' runs on a GPU: write 'device: cuda:0', or 'op: keep' for the CPU",
    ),
    "linear layers in a format of the CPU": (
        "{op: keep}",
        "{op: linear, device: cuda:0, kwargs: {format: mxfp4}}",
        "7: rule 2 'rest': linear layers on 'cuda:0': no kernels for mxfp4; it is one of bf16, int8, int4, "
        "fp8",
    ),
    "experts on a GPU, block elsewhere": (
        "{format: int4}",
        "{device: cuda:0}",
        "4: rule 1 'experts': experts on 'cuda:0' need their block there, which is on 'cpu'",
    ),
    "experts on a GPU, format of the CPU": (
        "experts: {format: int4}",
        "device: cuda:0, experts: {device: cuda:0, format: f32}",
        "4: rule 1 'experts': experts on 'cuda:0': no kernels for f32; it is one of bf16, int8, int4, int4a, "
        "fp8, mxfp4, nvfp4",
    ),
    "experts on a GPU, options of the CPU": (
        "experts: {format: int4}",
        "device: cuda:0, experts: {device: cuda:0, numa: split}",
        "4: rule 1 'experts': experts: 'numa' is about the CPU, and these experts are on 'cuda:0'",
    ),
    "layers backwards": (
        "{class: MoeBlock}",
        "{layers: 7-3}",
        "3: rule 1 'experts': layer range 7-3 runs backwards",
    ),
    "no layer range": (
        "{class: MoeBlock}",
        "{layers: all}",
        "3: rule 1 'experts': 'all' is no layer range; write 5, 0-47 or 0-3,8",
    ),
    "two rules of one name": (
        "name: rest",
        "name: experts",
        "5: rule 2 'experts': rule 1 has the same name",
    ),
    "unknown variable": (
        "format: int4",
        'format: "${expert}"',
        "4: rule 1 'experts': unknown variable '${expert}'; the file has no 'vars'",
    ),
    "open variable": (
        "format: int4",
        'format: "a${expert"',
        "4: rule 1 'experts': '${expert' has no closing brace",
    ),
    "unused variable": (
        "rules:",
        "vars:\n  gpu: cuda:0\nrules:",
        "2: variable 'gpu' is not used by any rule",
    ),
    "anchor": (
        "{class: MoeBlock}",
        "&a {class: MoeBlock}",
        "3: anchors and aliases ('a') are not part of the grammar: use 'vars' and ${name}",
    ),
    "tag": (
        "{class: MoeBlock}",
        "{class: !x MoeBlock}",
        "3: tags (!x) are not part of the grammar",
    ),
    "broken YAML": (
        "{class: MoeBlock}",
        "{class: MoeBlock",
        "4: not valid YAML: expected ',' or '}', but got ':'",
    ),
    "tab": (
        "    match: {class",
        "\tmatch: {class",
        "3: not valid YAML: found character '\\t' that cannot start any token",
    ),
    "a bare list": (
        GOOD,
        "- match: {name: x}\n",
        "1: the file is a bare list, as KTransformers writes its rules; "
        "'hetero rules migrate' turns it into 'rules: ...'",
    ),
    "no rules": (GOOD, "vars: {}\n", "1: the file has no 'rules' and extends none"),
    "empty rules": (GOOD, "rules: []\n", "1: the file has no rules"),
    "empty file": (GOOD, "# nothing\n", "1: the file is empty; it needs 'rules'"),
    "rules as a mapping": (GOOD, "rules: {a: 1}\n", "1: 'rules' must be a list, not a mapping"),
    "rule as a word": (
        GOOD,
        "rules: [keep]\n",
        "1: rule 1 must be a mapping with 'match' and 'replace', not 'keep'",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_each_mistake_has_its_message(tmp_path: Path, name: str) -> None:
    old, new, want = MISTAKES[name]
    assert old in GOOD
    path = write(tmp_path, GOOD.replace(old, new, 1))
    assert error(path) == f"{path}:{want}"


def test_the_good_file_is_good(tmp_path: Path) -> None:
    assert len(load_rules(write(tmp_path, GOOD)).rules) == 2
    place(write(tmp_path, GOOD))


def test_an_unknown_format_lists_the_valid_ones(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD.replace("int4", "int5"))
    message = error(path)
    assert message.startswith(f"{path}:4: rule 1 'experts': experts: unknown weight format 'int5'")
    assert all(valid in message for valid in valid_formats())


@pytest.mark.parametrize("text", [*valid_formats(), "int8_g64", "int4a"])
def test_every_format_is_accepted(tmp_path: Path, text: str) -> None:
    block = next(place(write(tmp_path, GOOD.replace("int4", text))).replacements())
    assert parse_format(block.options["experts"]["format"]) == parse_format(text)


@pytest.mark.parametrize(
    ("key", "word"),
    [("isa", w) for w in ISAS]
    + [("numa", w) for w in ("split", "replicate", "off", "node 0", "node 12")]
    + [("backend", w) for w in BACKENDS],
)
def test_every_word_is_accepted(tmp_path: Path, key: str, word: str) -> None:
    block = next(place(write(tmp_path, GOOD.replace("format: int4", f"{key}: {word}"))).replacements())
    assert block.options["experts"][key] == word


def test_the_torch_backend_is_for_f32(tmp_path: Path) -> None:
    block = next(place(write(tmp_path, GOOD.replace("format: int4", "backend: torch"))).replacements())
    assert block.options["experts"]["format"] == "f32"
    path = write(tmp_path, GOOD.replace("format: int4", "format: int4, backend: torch"))
    assert "backend 'torch' computes in float32: write 'format: f32', not 'int4'" in error(path)


def test_a_registered_operator_takes_kwargs(tmp_path: Path) -> None:
    from hetero.rules import match

    theirs = (
        "  - name: theirs\n    match: {class: TinyAttention}\n    replace: {op: theirs, kwargs: {depth: 3}}\n"
    )
    ruleset = load_rules(write(tmp_path, f"rules:\n{theirs}{MOE}{REST}"))
    placement = match(ruleset, tree(), ops=schemas_for(["theirs", "moe"]))
    assert placement.by_module["model.layers.0.self_attn"].options == {"depth": 3}


class TestVariables:
    TEXT = 'vars: {where: "cuda:0", fmt: int4, n: 2}\n' + GOOD.replace(
        "{format: int4}", '{format: "${fmt} g64", threads: "${n}"}'
    ).replace("{op: keep}", '{op: keep, device: "${where}"}')

    def test_values(self, tmp_path: Path) -> None:
        placement = place(write(tmp_path, self.TEXT))
        experts = next(placement.replacements()).options["experts"]
        assert (experts["format"], experts["threads"]) == ("int4 g64", 2)
        assert placement.device_of("lm_head") == "cuda:0"
        assert placement.ruleset.variables == {"where": "cuda:0", "fmt": "int4", "n": 2}

    def test_overrides(self, tmp_path: Path) -> None:
        overrides = {"fmt": "int8", "where": "cpu", "n": "3"}
        placement = place(write(tmp_path, self.TEXT), overrides=overrides)
        experts = next(placement.replacements()).options["experts"]
        assert (experts["format"], experts["threads"]) == ("int8 g64", 3)
        assert placement.device_of("lm_head") == "cpu"

    def test_an_unknown_override(self, tmp_path: Path) -> None:
        path = write(tmp_path, self.TEXT)
        assert error(path, fnt="int8") == (
            f"--set fnt=int8: {path} has no variable 'fnt'; did you mean 'fmt'?"
        )
        plain = write(tmp_path, GOOD)
        assert error(plain, x="1") == f"--set x=1: {plain} has no variable 'x'; it has none"

    def test_a_bad_value_is_told_where_it_is_used(self, tmp_path: Path) -> None:
        path = write(tmp_path, self.TEXT)
        assert f"{path}:5: rule 1 'experts': experts: unknown weight format 'int5 g64'" in error(
            path, fmt="int5"
        )

    @pytest.mark.parametrize(
        ("text", "want"),
        [
            ("vars: {a: [1]}\n", "variable 'a' must be a word, a number or true/false, not a list"),
            ("vars: {a: }\n", "variable 'a' must be a word, a number or true/false, not empty"),
            ("vars: {a-b: 1}\n", "'a-b' is no name for a variable: letters, digits and _ only"),
            ("vars: {a: '${b}'}\n", "variable 'a' refers to another one; write its value"),
            ("vars: 3\n", "'vars' must be a mapping of keys to values, not 3"),
        ],
    )
    def test_bad_declarations(self, tmp_path: Path, text: str, want: str) -> None:
        path = write(tmp_path, text + GOOD)
        assert error(path) == f"{path}:1: {want}"


class TestExtends:
    def test_own_rules_come_first_and_variables_override(self, tmp_path: Path) -> None:
        base = "vars: {fmt: int4}\n" + GOOD.replace("format: int4", 'format: "${fmt}"')
        write(tmp_path, base, "base.yaml")
        own = "  - name: head\n    match: {name: lm_head}\n    replace: {op: keep, device: cuda:0}\n"
        path = write(tmp_path, f"extends: base\nvars: {{fmt: int8}}\nrules:\n{own}")
        placement = place(path)
        assert [r.name for r in placement.ruleset.rules] == ["head", "experts", "rest"]
        assert placement.device_of("lm_head") == "cuda:0"
        assert next(placement.replacements()).options["experts"]["format"] == "int8"

    def test_a_shipped_file_by_name(self, tmp_path: Path) -> None:
        path = write(tmp_path, "extends: default\nvars: {experts: bf16}\n")
        placement = place(path)
        assert next(placement.replacements()).options["experts"]["format"] == "bf16"

    def test_inherited_rules_may_be_shadowed_or_absent(self, tmp_path: Path) -> None:
        text = "vars: {gpu: cuda:0, experts: int4}\nextends: default\n" + GOOD.replace(
            "format: int4", 'format: "${experts}"'
        ).replace("{op: keep}", '{op: keep, device: "${gpu}"}')
        placement = place(write(tmp_path, text))
        assert {a.rule.inherited for a in placement.assignments} == {False}
        assert placement.notes == ()
        write(tmp_path, GOOD.replace("class: MoeBlock", "class: Else"), "base.yaml")
        absent = place(write(tmp_path, f"extends: base\nrules:\n{MOE}{REST.replace('rest', 'all')}"))
        assert ["matched 0 modules" in note for note in absent.notes] == [True]

    def test_an_inherited_device_counts_only_where_it_is_used(self, tmp_path: Path) -> None:
        write(tmp_path, GOOD.replace("{op: keep}", "{op: keep, device: cuda:5}"), "base.yaml")
        place(write(tmp_path, f"extends: base\nrules:\n{REST}"))
        assert "device 'cuda:5' does not exist here" in error(
            write(tmp_path, f"extends: base\nrules:\n{MOE}")
        )

    def test_a_circle(self, tmp_path: Path) -> None:
        write(tmp_path, "extends: b\n" + GOOD, "a.yaml")
        write(tmp_path, "extends: c\n" + GOOD, "b.yaml")
        write(tmp_path, "extends: a\n" + GOOD, "c.yaml")
        message = error(tmp_path / "a.yaml")
        assert message.startswith(f"{tmp_path / 'c.yaml'}:1: extends runs in a circle: ")
        assert message.endswith(" -> ".join(str(tmp_path / f"{n}.yaml") for n in "abca"))

    def test_itself(self, tmp_path: Path) -> None:
        path = write(tmp_path, "extends: my\n" + GOOD)
        assert f"{path}:1: extends runs in a circle" in error(path)

    def test_an_unknown_base(self, tmp_path: Path) -> None:
        path = write(tmp_path, "extends: defualt\n" + GOOD)
        assert error(path) == (
            f"{path}:1: extends defualt: no such rule file, and none is shipped under that name; "
            "did you mean 'default'?"
        )


@pytest.mark.parametrize(
    ("content", "want"),
    [(b"rules:\n- \xff\n", ":2: not UTF-8 text"), (b"a: \x00\n", ":1: not valid YAML: character")],
)
def test_bytes_that_are_no_text(tmp_path: Path, content: bytes, want: str) -> None:
    path = tmp_path / "my.yaml"
    path.write_bytes(content)
    assert want in error(path)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    assert "no such rule file" in error(tmp_path / "none.yaml")
    assert "is a folder" in error(tmp_path)


WORDS = """rules: - name match: replace: class layers op moe keep
experts format vars: extends: default my ${x} ${
{ } [ ] : , ' " &a *a !!int --- ... ? # 0-3 \\x <<: 1e999 %YAML"""
FRAGMENTS = st.sampled_from([*WORDS.split(), "\n", "\n  ", "\n    ", "\t", "\x85", "\U0001f600"])


def told(path: Path) -> str:
    """The error message of a file, or nothing; any other exception passes through."""
    try:
        place(path)
    except InputError as error:
        return str(error)
    return ""


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.one_of(st.text(max_size=60), st.lists(FRAGMENTS, max_size=30).map(" ".join)))
@example(text="[" * 500)
@example(text="[" * 500 + "]" * 500)
@example(text='a: "\\U00FFFFFF"')
@example(text="%YAML 99999999999999999999.1\n---\na: 1")
@example(text="? [a]\n: b")
@example(text="rules: !!python/object:os.system {}")
@example(text="rules:\n- {match: {layers: 99999999999999999999}, replace: {op: keep}}")
@example(text="rules:\n- {match: {name: '" + "(" * 500 + "'}, replace: {op: keep}}")
def test_no_text_gives_anything_but_an_input_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(text, encoding="utf-8", errors="replace")
    message = told(path)
    assert not message or str(path) in message


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, len(GOOD)), cut=st.integers(0, 6), insert=FRAGMENTS)
def test_damaged_files_give_one_message(tmp_path: Path, position: int, cut: int, insert: str) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(GOOD[:position] + insert + GOOD[position + cut :], encoding="utf-8")
    message = told(path)
    assert not message or message.startswith(str(path))
