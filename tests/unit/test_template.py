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

DOUBLED = "{{% set ns = namespace(x={start}) %}}{{% for i in range(60) %}}{step}{{% endfor %}}"
SET_BLOCK = "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}"


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
        ("{{ '%1000000000d' % 1 }}", "a width"),
        ("{{ '%(x)01000000000d' % {'x': 1} }}", "a width"),
        ("{{ '%.1000000000f' % 1.5 }}", "a width"),
        ("{{ '%*d' % (10 ** 9, 1) }}", "a width"),
        ("{{ '%-*.*f' % (1, 10 ** 9, 1) }}", "a width"),
        ("{{ '%s%9999999999999999999999999999s' | format('a', 'b') }}", "a width"),
        ("{{ '{:>1000000000}'.format(1) }}", "a width"),
        ("{{ '{:{w}}'.format(1, w=10 ** 9) }}", "a width"),
        ("{{ '{:.1000000000f}'.format(1.5) }}", "a width"),
        ("{{ '{x:01000000000}'.format_map({'x': 1}) }}", "a width"),
        ("{{ 'a'.center(10 ** 9) }}", "a width"),
        ("{{ 'a'.ljust(10 ** 9) }}{{ 'a'.rjust(10 ** 9) }}", "a width"),
        ("{{ 'a'.zfill(10 ** 9) }}", "a width"),
        ("{{ '\t'.expandtabs(10 ** 9) }}", "a width"),
        ("{{ 'a' | center(10 ** 9) }}", "a width"),
        ("{{ 'a\nb' | indent(10 ** 9) }}", "a width"),
        ("{{ [1] | tojson(indent=10 ** 9) }}", "a width"),
        ("{{ strftime_now('%1000000000d') }}", "a width"),
        (DOUBLED.format(start="'ab'", step="{% set ns.x = ns.x + ns.x %}"), "text"),
        (DOUBLED.format(start="'ab'", step="{% set ns.x = ns.x ~ ns.x %}"), "text"),
        (DOUBLED.format(start="[1]", step="{% set ns.x = ns.x + ns.x %}"), "a list"),
        (DOUBLED.format(start="'ab'", step=SET_BLOCK), "text"),
        ("{% set x = 'a' * 10 ** 6 %}{{ x.replace('a', x) }}", "text"),
        ("{% set x = 'a' * 10 ** 6 %}{{ x | replace('a', x) }}", "text"),
        ("{% set x = 'a' * 10 ** 6 %}{{ ([x] * 10 ** 6) | join }}", "text"),
        ("{% set x = 'a' * 10 ** 6 %}{{ x.join(range(90000) | list) }}", "text"),
        ("{% set x = 'a' * 10 ** 6 %}{{ range(90000) | join(x) }}", "text"),
        ("{% set x = 'a' * 10 ** 6 %}{{ x.translate({97: x}) }}", "text"),
        ("{% set x = 'a' * 10 ** 6 %}{{ ('{0}' * 1000).format(x) }}", "text"),
    ],
)
def test_harm_is_refused(template: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        Tokenizer(tiny_tokenizer(template), "tiny").chat(ASK)


def test_what_real_templates_do_is_left_alone() -> None:
    template = (
        "{{ '%05.1f|%-4d|%s' % (1.25, 7, 'x') }} {{ '{:>4}|{:04d}|{}'.format('a', 7, 'b') }} "
        "{{ 'a' | center(5) }} {{ ['a', 'b'] | join(', ') }} {{ 'a-b' | replace('-', '+') }} "
        "{{ 'ab'.replace('a', 'c') }} {{ {'a': [1, 'é']} | tojson }} {{ {'a': 1} | tojson(indent=2) }} "
        "{{ 'x' ~ 1 ~ none }} {{ 'a' + 'b' }} {{ ['a'] + ['b'] }} {{ '%s: %s' | format('k', 'v') }} "
        "{{ 'a\nb' | indent(2) }} {{ 7 % 4 }} {{ 'x'.join(['1', '2']) }} "
        "{% set z %}in{{ 1 }}{% endset %}{{ z }} {{ strftime_now('%Y') | length }}"
    )
    text = Tokenizer(tiny_tokenizer(template), "tiny").render(ASK)
    assert text == (
        '001.2|7   |x    a|0007|b   a   a, b a+b cb {"a": [1, "é"]} {\n  "a": 1\n} x1None ab '
        "['a', 'b'] k: v a\n  b 3 1x2 in1 4"
    )


def test_endless_loops_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetero.model.template.time_limit.__wrapped__.__defaults__", (0.2,))
    template = "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}"
    began = time.monotonic()
    with pytest.raises(InputError, match="does not come to an end"):
        Tokenizer(tiny_tokenizer(template), "tiny").chat(ASK)
    assert time.monotonic() - began < 60  # it would take hours


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
