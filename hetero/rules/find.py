"""Where the shipped rule files are."""

from __future__ import annotations

from pathlib import Path

from hetero.core import HeteroError

_PACKAGE = Path(__file__).resolve().parent.parent


def find_rules_dir() -> Path:
    """The folder of the shipped rule files: ``rules/`` of a checkout (an editable install), else
    ``hetero/data/rules`` of an installed wheel. Raises HeteroError where neither is there."""
    checkout = _PACKAGE.parent / "rules"
    # A folder called rules beside an installed package would be somebody else's.
    if checkout.is_dir() and (_PACKAGE.parent / "pyproject.toml").is_file():
        return checkout
    installed = _PACKAGE / "data" / "rules"
    if installed.is_dir():
        return installed
    raise HeteroError(f"the shipped rule files are missing: neither {installed} nor {checkout} exists")


def shipped_files() -> list[Path]:
    """Every shipped rule file, by name."""
    return sorted(find_rules_dir().glob("*.yaml"), key=lambda path: path.stem)
