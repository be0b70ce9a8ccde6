"""The tables of plans in the documentation are those that the code makes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_tables_are_current(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("plan_tables", ROOT / "scripts" / "plan_tables.py")
    assert spec is not None
    assert spec.loader is not None
    tables = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, tables)  # dataclasses look their module up
    spec.loader.exec_module(tables)
    text = (ROOT / "docs" / "perf.md").read_text(encoding="utf-8")
    assert tables.filled(text) == text, "run: python scripts/plan_tables.py --write"
