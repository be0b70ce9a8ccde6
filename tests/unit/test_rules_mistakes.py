"""All mistakes of a file at once: a line each, in the order of the file, none that follows from another."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero.core import InputError
from hetero.rules import load_rules
from hetero.rules.mistakes import Mistake, Mistakes, RuleError
from tests.unit.rules_tree import GOOD, MOE, REST, place, tree, write


def lines(path: Path, dense: int = 0) -> list[str]:
    with pytest.raises(InputError) as caught:
        place(path, tree(dense=dense))
    return [line.removeprefix(f"{path}:") for line in str(caught.value).splitlines()]


def test_every_mistake_of_a_file(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "descripton: x\n"
        "vars: {fmt: int5, 9a: 1}\n"
        "rules:\n"
        "  - name: experts\n"
        "    match: {clas: MoeBlock, nam: mlp}\n"
        '    replace: {op: moe, device: gpu, experts: {isa: avx, threads: 0, format: "${fmt}"}}\n'
        "    recursive: maybe\n"
        "  - name: experts\n"
        "    match: {name: '(', class: torch.nn.Linear, layers: 5-2}\n"
        "    replace: {op: kepe}\n"
        "  - keep\n"
        "  - name: deep\n"
        "    match: {layers: 0-99}\n"
        "    replace: {op: keep, kwargs: {a: 1}, experts: {}}\n"
        "  - name: none\n"
        "    match: {name: nowhere}\n"
        "    replace: {class: Mine}\n"
        "  - name: lost\n"
        '    match: {name: "${where}"}\n'
        "    replace: {op: keep, devise: cpu}\n",
    )
    found = lines(path)
    want = [
        (1, "unknown key 'descripton' in the file; did you mean 'description'?"),
        (2, "'9a' is no name for a variable"),
        (5, "unknown key 'clas' in 'match'; did you mean 'class'?"),
        (5, "unknown key 'nam' in 'match'; did you mean 'name'?"),
        (6, "unknown device 'gpu'"),
        (6, "unknown isa 'avx'"),
        (6, "'threads' must be a number"),
        (6, "unknown weight format 'int5'"),
        (7, "'recursive' must be true or false"),
        (8, "rule 1 has the same name"),
        (9, "is not a regular expression"),
        (9, "compared with bare class names"),
        (9, "layer range 5-2 runs backwards"),
        (10, "unknown op 'kepe'; did you mean 'keep'?"),
        (11, "must be a mapping with 'match' and 'replace', not 'keep'"),
        (13, "layers 0-99 go beyond the model"),
        (14, "op 'keep' takes no 'experts'"),
        (14, "op 'keep' takes no 'kwargs'"),
        (15, "matched 0 modules"),
        (17, "no dotted path of a class"),
        (19, "unknown variable '${where}'"),
        (20, "unknown key 'devise' in 'replace'; did you mean 'device'?"),
    ]
    assert [int(line.partition(":")[0]) for line in found] == [number for number, _ in want]
    for number, part in want:
        assert [line for line in found if line.startswith(f"{number}:") and part in line], (number, part)


def test_what_depends_on_all_rules_comes_when_the_rest_is_right(tmp_path: Path) -> None:
    broken = MOE.replace("class: MoeBlock", "clas: MoeBlock")
    early = "  - name: early\n    match: {class: Linear}\n    replace: {op: keep}\n"
    late = "  - name: late\n    match: {name: lm_head}\n    replace: {op: keep}\n"
    dense = "  - name: dense\n    match: {class: TinyMLP}\n    replace: {op: moe}\n"
    assert [line[:2] for line in lines(write(tmp_path, "rules:\n" + broken + early + late))] == ["3:"]
    found = lines(write(tmp_path, "rules:\n" + dense + early + late + MOE), dense=1)
    assert len(found) == 3
    assert "2: rule 1 'dense': op 'moe' replaces MoE blocks" in found[0]
    assert "8: rule 3 'late': places nothing" in found[1]
    assert " modules without a rule: " in found[2]


def test_mistakes_of_a_base_come_after_those_of_the_file(tmp_path: Path) -> None:
    base = write(tmp_path, GOOD.replace("op: keep", "op: kepe"), "base.yaml")
    path = write(tmp_path, "extends: base.yaml\nrules:\n" + MOE.replace("int4", "int5"))
    with pytest.raises(InputError) as caught:
        place(path)
    first, second = str(caught.value).splitlines()
    assert first.startswith(f"{path}:5: ")
    assert second.startswith(f"{base}:7: ")


def test_load_rules_alone_tells_what_needs_no_model(tmp_path: Path) -> None:
    text = "rules:\n" + MOE.replace("match:", "macth:") + REST.replace("name: '.*'", "name: '('")
    with pytest.raises(RuleError) as caught:
        load_rules(write(tmp_path, text))
    assert [(one.line, one.text.rpartition(": ")[0] != "") for one in caught.value.found] == [
        (3, True),
        (6, True),
    ]


def test_only_mistakes_of_rules_are_gathered() -> None:
    mistakes = Mistakes()
    with pytest.raises(ZeroDivisionError), mistakes:
        raise ZeroDivisionError
    with pytest.raises(InputError, match="other"), mistakes:
        raise InputError("other")
    mistakes.tell()
    with mistakes:
        raise RuleError([Mistake("b", 9, "b9"), Mistake("b", 2, "b2")])
    mistakes.add("b", "whole")
    with mistakes:
        raise RuleError([Mistake("a", 1, "a1"), Mistake("b", 9, "b9")])
    with pytest.raises(RuleError, match=r"^b2\nb9\nb: whole\na1$"):
        mistakes.tell()


def test_a_tree_without_mistakes_raises_nothing(tmp_path: Path) -> None:
    assert len(place(write(tmp_path, GOOD)).assignments) == len(tree())


def test_a_wrong_backend_does_not_hide_a_wrong_format(tmp_path: Path) -> None:
    found = lines(write(tmp_path, GOOD.replace("format: int4", "format: int5, backend: natve")))
    assert len(found) == 2
    assert "unknown weight format 'int5'" in "".join(found)
    assert "unknown backend 'natve'" in "".join(found)
