"""`hetero rules` as a user meets it: output, exit codes, and what is not loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from typer.testing import CliRunner

from hetero.cli import app
from hetero.rules import find_rules_dir
from tests.unit.rules_tree import GOOD, write

SHAPE = "synthetic:mixtral-8x7b"


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def hetero(*words: str) -> Done:
    """Run the command in this process: torch takes seconds to start."""
    result = CliRunner().invoke(app, list(words))
    return Done(result.exit_code, result.stdout, result.stderr)


@pytest.fixture(scope="module")
def explained() -> dict[str, object]:
    done = hetero("rules", "explain", SHAPE, "--json", "--devices", "cpu", "--set", "experts=int4")
    assert done.returncode == 0, done.stderr
    data: dict[str, object] = json.loads(done.stdout)
    return data


def test_list_names_every_shipped_file() -> None:
    done = hetero("rules", "list", "--json")
    assert done.returncode == 0, done.stderr
    files = json.loads(done.stdout)
    assert [f["name"] for f in files] == sorted(p.stem for p in find_rules_dir().glob("*.yaml"))
    by_name = {f["name"]: f for f in files}
    assert by_name["mixtral-gpu"]["variables"] == {"gpu": "cuda:0", "experts": "auto int8", "table": "auto"}
    assert "mixtral" in by_name["mixtral-gpu"]["models"]
    assert by_name["default-cpu"]["models"] == "any"
    table = hetero("rules", "list")
    assert table.returncode == 0
    assert all(name in table.stdout for name in by_name)


def test_explain_json_adds_up(explained: dict[str, object]) -> None:
    modules = explained["modules"]
    assert isinstance(modules, list)
    assert explained["model_type"] == "mixtral"
    assert explained["totals"] == {"cpu": sum(m["bytes"] for m in modules)}
    experts = [m for m in modules if m["module"].endswith(".mlp.experts")]
    assert len(experts) == 32
    assert {(m["op"], m["device"], m["format"], m["owner"][-4:]) for m in experts} == {
        ("moe", "cpu", "int4 g32", ".mlp")
    }
    # 8 experts of three 4096 x 14336 matrices, 4.5 bits a weight, no padding at these sizes
    assert {m["bytes"] for m in experts} == {8 * 3 * 4096 * 14336 * 9 // 16}


def test_explain_prints_a_table_with_totals() -> None:
    done = hetero("rules", "explain", "mixtral-gpu", SHAPE, "--devices", "cpu,cuda:0")
    assert done.returncode == 0, done.stderr
    experts = next(line for line in done.stdout.splitlines() if "{0-31}.mlp.experts" in line)
    assert "int8 g32" in experts
    assert "cpu" in experts
    assert "total cpu: " in done.stdout
    assert "total cuda:0: " in done.stdout


def test_check_says_what_it_checked() -> None:
    done = hetero("rules", "check", "mixtral-cpu", SHAPE)
    assert done.returncode == 0, done.stderr
    assert "32 replaced" in done.stdout


@pytest.mark.parametrize(
    ("words", "want"),
    [
        (("check", "{bad}", SHAPE), "{bad}:3: rule 1 'experts': unknown key 'clas' in 'match'"),
        (("check", "{good}", "synthetic:mixtrl-8x7b"), "did you mean mixtral-8x7b"),
        (("check", "{deep}", SHAPE), "{deep}:2: rule 1 'experts': matched 0 modules"),
        (("check", "{good}", SHAPE, "--set", "experts=int8"), "has no variable 'experts'"),
        (("check", "{good}", SHAPE, "--set", "experts"), "write NAME=VALUE"),
        (("check", "{good}", SHAPE, "--devices", "gpu"), "'gpu' is no device"),
        (("check", "mixtral-gpu", SHAPE, "--devices", "cpu"), "device 'cuda:0' does not exist here"),
        (("check", "qwen-cpu", SHAPE), "and the model is 'mixtral'"),
        (("check", "nowhere.yaml", SHAPE), "nowhere.yaml: no such rule file"),
        (("explain", SHAPE, "--dtype", "float31"), "did you mean 'float32'?"),
        (("explain", "a", "b", "c"), "takes one or two words"),
        (("migrate", "{good}"), "this is a rule file of ours already"),
        (("migrate", "nowhere.yaml"), "nowhere.yaml: no such rule file"),
    ],
)
def test_bad_input_is_a_message_and_exit_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], want: str
) -> None:
    monkeypatch.chdir(tmp_path)
    files = {
        "good": write(tmp_path, GOOD, "good.yaml"),
        "bad": write(tmp_path, GOOD.replace("class", "clas"), "bad.yaml"),
        "deep": write(
            tmp_path, GOOD.replace("{class:", "{layers: 31, name: '^nothing$', class:"), "deep.yaml"
        ),
    }
    before = sorted(tmp_path.iterdir())
    done = hetero("rules", *(word.format(**files) for word in words))
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert all(line.startswith("hetero: ") for line in done.stderr.strip().splitlines())
    assert want.format(**files) in done.stderr
    assert sorted(tmp_path.iterdir()) == before


def test_all_mistakes_of_a_file_come_at_once(tmp_path: Path) -> None:
    text = GOOD.replace("class: MoeBlock", "clas: MoeBlock").replace("int4", "int5").replace("keep", "kepe")
    path = write(tmp_path, text)
    done = hetero("rules", "check", str(path), SHAPE)
    assert done.returncode == 2
    assert [line.partition(": rule")[0] for line in done.stderr.splitlines()] == [
        f"hetero: {path}:{number}" for number in (3, 4, 7)
    ]
    lost = hetero("rules", "check", str(path), "synthetic:nothing")
    assert (lost.returncode, len(lost.stderr.splitlines())) == (2, 1)


def test_a_users_operator_that_does_not_exist(tmp_path: Path) -> None:
    mine = "  - name: mine\n    match: {class: MixtralAttention}\n    replace: {class: no.such.Thing}\n"
    path = write(tmp_path, GOOD.replace("rules:\n", "rules:\n" + mine))
    done = hetero("rules", "check", str(path), SHAPE)
    assert done.returncode == 2
    assert f"{path}:4: rule 1 'mine': " in done.stderr
    assert "no.such" in done.stderr


def test_migrate_prints_what_it_can_and_exits_2_for_what_it_cannot(tmp_path: Path) -> None:
    old = "- match: {name: '^lm_head$'}\n  replace: {class: default, kwargs: {generate_device: cpu%s}}\n"
    clean = hetero("rules", "migrate", str(write(tmp_path, old % "", "a.yaml")))
    assert (clean.returncode, clean.stderr) == (0, "")
    assert "match: {name: '^lm_head$'}" in clean.stdout
    lost = write(tmp_path, old % ", turbo: 9", "b.yaml")
    target = tmp_path / "new.yaml"
    done = hetero("rules", "migrate", str(lost), "-o", str(target))
    assert done.returncode == 2
    assert f"not migrated: {lost}:2: 'turbo' has no counterpart" in done.stderr
    assert "match: {name: '^lm_head$'}" in target.read_text()


def test_help_list_migrate_and_the_rules_import_no_torch(tmp_path: Path) -> None:
    old = write(tmp_path, "- match: {name: x}\n  replace: {class: default}\n", "old.yaml")
    for words in (["rules", "--help"], ["rules", "list"], ["rules", "migrate", str(old)]):
        code = (
            "import sys; from hetero.cli import main\n"
            f"sys.argv = {['hetero', *words]!r}\n"
            "try: code = main()\n"
            "except SystemExit as end: code = end.code\n"
            "assert not code, code\n"
            "assert not {'torch', 'transformers'} & set(sys.modules)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, (words, done.stderr)
