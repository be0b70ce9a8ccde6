"""Shipped rule files are found in a checkout and in an installed package."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero.core import HeteroError, InputError
from hetero.rules import find, load_rules


def test_a_checkout_before_an_installed_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "hetero"
    monkeypatch.setattr(find, "_PACKAGE", package)
    with pytest.raises(HeteroError, match="the shipped rule files are missing"):
        find.find_rules_dir()
    (tmp_path / "rules").mkdir()  # site-packages may hold somebody else's package of that name
    (package / "data" / "rules").mkdir(parents=True)
    assert find.find_rules_dir() == package / "data" / "rules"
    (tmp_path / "pyproject.toml").touch()
    assert find.find_rules_dir() == tmp_path / "rules"


def test_this_one() -> None:
    names = [path.stem for path in find.shipped_files()]
    families = ("default", "qwen", "deepseek", "gpt_oss", "mixtral")
    assert {f"{family}-{kind}" for family in families for kind in ("cpu", "gpu")} <= set(names)


def test_a_folder_and_a_family_are_no_rule_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"is a folder; a rule file ends in \.yaml"):
        load_rules(tmp_path)
    with pytest.raises(InputError, match="this family has mixtral-cpu and mixtral-gpu"):
        load_rules("mixtral")
