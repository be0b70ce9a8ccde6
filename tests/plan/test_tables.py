"""The tables of plans in the documentation are those that the code makes."""

from __future__ import annotations

from pathlib import Path

from tests.scripts import script as load

ROOT = Path(__file__).parents[2]


def test_the_tables_are_current() -> None:
    tables = load("scripts/plan_tables.py")
    text = (ROOT / "docs" / "perf.md").read_text(encoding="utf-8")
    assert tables.filled(text) == text, "run: python scripts/plan_tables.py --write"
