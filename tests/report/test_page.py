"""The page: well-formed, needs nothing from elsewhere, shows what was measured."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from hetero.report.page import page
from hetero.report.plots import rooflines
from hetero.report.schema import Report, Sample
from hetero.report.svg import Axis, Plot, log_axis, number, zero_axis
from tests.report.made import cell, report, sweep

VOID = {"meta", "br"}


class Balance(HTMLParser):
    """Fails at the first tag that does not close as it should; gathers attributes that load something."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.loads: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in {"script", "link", "img", "iframe", "object", "use", "image"}:
            self.loads.append(tag)
        self.loads += [f"{k}={v}" for k, v in attrs if k in {"src", "href", "srcset", "data"}]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1:] == [tag], f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def made(name: str = "Made-up <CPU> & Co") -> Report:
    cells = [
        cell(isa, tokens, tokens * seconds)
        for tokens in (1, 16, 256)
        for isa, seconds in (("avx2", 2e-3), ("avx512", 1e-3), ("amx", 0.8e-3))
    ]
    full = report(cells, threads=sweep({1: 4e-3, 4: 1e-3}), cpu=name)
    return full.model_copy(update={"advice": ["Use <this> & that."], "notes": ["A note."]})


def parsed(html: str) -> Balance:
    parser = Balance()
    parser.feed(html)
    parser.close()
    assert parser.open == []
    return parser


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_page_is_well_formed_and_self_contained(count: int) -> None:
    html = page([made(f"CPU {i} <x>") for i in range(count)])
    found = parsed(html)
    assert found.loads == []
    assert not re.search(r"https?:|@import|url\((?!#frame\))", html)
    assert html.count('id="frame"') == 1
    svgs = re.findall(r"<svg.*?</svg>", html, re.S)
    assert len(svgs) >= 3 * count
    for svg in svgs:
        ElementTree.fromstring(svg)


def test_text_is_escaped_and_shown() -> None:
    text = "".join(parsed(page([made()])).text)
    assert "Made-up <CPU> & Co" in text
    assert "Use <this> & that." in text
    assert "A note." in text


def test_light_and_dark_define_the_same_colours() -> None:
    style = re.search(r"<style>(.*?)</style>", page([made()]), re.S)
    assert style is not None
    light, dark = re.findall(r":root \{(.*?)\}", style[1], re.S)
    names = [set(re.findall(r"(--[a-z0-9]+):", part)) for part in (light, dark)]
    assert names[0] == names[1]
    used = set(re.findall(r"var\((--[a-z0-9]+)\)", style[1]))
    assert used <= names[0]


def test_every_class_of_a_plot_has_a_style() -> None:
    html = page([made()])
    style = html[html.index("<style>") : html.index("</style>")]
    for name in {
        c
        for text in re.findall(r'<(?:path|polyline|polygon|line)[^>]*class="([^"]+)"', html)
        for c in text.split()
    }:
        assert f".{name}" in style, name


def test_reports_side_by_side_share_their_axes() -> None:
    fast = made("fast")
    slow = report([cell("avx2", n, n * 20e-3) for n in (1, 16, 256)], cpu="slow")
    drawn = rooflines([fast, slow], "int4 g32")
    ticks = [re.findall(r'<text class="tick"[^>]*>[^<]*</text>', svg) for svg in drawn]
    assert ticks[0] == ticks[1]
    html = page([fast, slow])
    assert "Side by side" in html
    assert "All results of slow" in html


def test_another_shape_is_pointed_out() -> None:
    other = made("other")
    other = other.model_copy(update={"shape": other.shape.model_copy(update={"name": "another"})})
    assert "other was measured on another" in page([made(), other])


def test_a_format_that_one_machine_lacks_is_left_open() -> None:
    extra = report([cell("avx2", 1, 1e-3), cell("avx2", 1, 2e-3, fmt="int8 g32")], cpu="extra")
    parsed(page([report([cell("avx2", 1, 1e-3)]), extra]))


def test_one_round_and_one_token_are_enough_for_a_page() -> None:
    parsed(page([report([cell("avx2", 1, Sample(rounds=[1e-3]))])]))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (1, "1"),
        (0.0123456, "0.0123"),
        (99.96, "100"),
        (1234.5, "1,234"),
        (12.30, "12.3"),
        (100, "100"),
    ],
)
def test_numbers_have_three_digits(value: float, text: str) -> None:
    assert number(value) == text


def test_marks_lie_where_their_values_say() -> None:
    plot = Plot(Axis(1, 100, "x"), Axis(0, 10, "y", log=False), "plot")
    plot.marker((10, 5), "mark", "circle", "ten and five")
    drawn = re.search(r'd="M([\d.]+) ([\d.]+)a', plot.svg())
    assert drawn is not None
    x, y = float(drawn[1]) + 5, float(drawn[2])
    assert (x, y) == pytest.approx((58 + (620 - 58 - 16) / 2, 14 + (360 - 14 - 46) / 2), abs=0.1)


def test_axes_hold_their_values() -> None:
    axis = log_axis([0.01, 50], "x")
    assert axis.low < 0.01
    assert axis.high > 50
    assert all(axis.low * 0.99 <= tick <= axis.high * 1.01 for tick in axis.ticks())
    assert zero_axis([3, 8], "x").ticks() == [0, 2, 4, 6, 8]
