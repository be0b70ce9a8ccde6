"""Chat templates that never end, or would fill the memory."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest

from hetero.core import InputError
from hetero.model.template import MOST_BITS, MOST_ITEMS, OverdueError, power, time_limit, times
from hetero.model.tokenizer import Tokenizer
from tests.model.tiny import tiny_tokenizer

ASK = [{"role": "user", "content": "the sea"}]


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% include '/etc/passwd' %}", "loader"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ 'a' * 10 ** 10 }}", "items"),
        ("{{ 10 ** 10 * [1] }}", "items"),
        ("{{ 7 ** (7 ** 12) }}", "bits"),
        ("{{ messages.append(1) }}", "unsafe"),
    ],
)
def test_harm_is_refused(template: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        Tokenizer(tiny_tokenizer(template), "tiny").chat(ASK)


def test_endless_loops_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetero.model.template.time_limit.__wrapped__.__defaults__", (0.2,))
    template = "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}"
    began = time.monotonic()
    with pytest.raises(InputError, match="does not come to an end"):
        Tokenizer(tiny_tokenizer(template), "tiny").chat(ASK)
    assert time.monotonic() - began < 5


def test_what_is_in_time_is_left_alone() -> None:
    for _ in range(50):
        # On a busy machine a millisecond can pass within the block, and is told there.
        with contextlib.suppress(OverdueError), time_limit(0.001):
            pass
        # One that comes late would hit here.
        sum(range(2000))
    with pytest.raises(OverdueError):
        endless()


def endless() -> None:
    with time_limit(0.01):
        while True:
            pass


def test_products_and_powers() -> None:
    cases: list[tuple[Any, Any]] = [(3, 4), ("ab", 3), (3, "ab"), (2.5, 4), ([1], 5), (2**100, 7)]
    for left, right in cases:
        assert times(left, right) == left * right
    assert power(2, 10) == 1024
    assert power(2.0, 0.5) == 2.0**0.5
    assert power(2, -1) == 0.5
    assert len(times("a", MOST_ITEMS)) == MOST_ITEMS
    for operation, left, right in (
        (times, "a", MOST_ITEMS + 1),
        (times, MOST_ITEMS, [1, 2]),
        (times, 1 << MOST_BITS, 2),
        (power, 2, MOST_BITS),
    ):
        with pytest.raises(Exception, match="more than"):
            operation(left, right)
