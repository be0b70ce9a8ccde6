"""Environment variables: values, mistakes, and the page that lists them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hetero.config import VARIABLES, settings
from hetero.core import InputError

ROOT = Path(__file__).parents[2]


def test_defaults_and_values() -> None:
    plain = settings({})
    assert (plain.isa, plain.threads, plain.prefill_chunk, plain.debug) == ("auto", None, 512, False)
    assert plain.cache == Path("~/.cache/hetero").expanduser()
    assert settings({"XDG_CACHE_HOME": "/x"}).cache == Path("/x/hetero")
    assert settings({"XDG_CACHE_HOME": "/x", "HETERO_CACHE": "/y"}).cache == Path("/y")
    full = settings(
        {"HETERO_ISA": "avx2", "HETERO_THREADS": "3", "HETERO_PREFILL_CHUNK": "64", "HETERO_DEBUG": "1"}
    )
    assert (full.isa, full.threads, full.prefill_chunk, full.debug) == ("avx2", 3, 64, True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HETERO_ISA", "sse"),
        ("HETERO_THREADS", "0"),
        ("HETERO_THREADS", "99999999"),
        ("HETERO_THREADS", "many"),
        ("HETERO_PREFILL_CHUNK", "-1"),
    ],
)
def test_a_wrong_value_is_named(name: str, value: str) -> None:
    with pytest.raises(InputError, match=f"{name}={value}"):
        settings({name: value})


def test_the_page_and_the_code_know_the_same_variables() -> None:
    known = {variable.name for variable in VARIABLES}
    page = (ROOT / "docs" / "env.md").read_text()
    assert set(re.findall(r"^\| `(HETERO_\w+)`", page, re.MULTILINE)) == known
    named = set()
    for source in (ROOT / "hetero").rglob("*.py"):
        named |= set(re.findall(r"HETERO_[A-Z_]+", source.read_text()))
    assert named <= known
