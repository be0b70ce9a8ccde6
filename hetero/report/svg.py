"""Plots as inline SVG: colours come from the page's style sheet, so that they follow light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

Point = tuple[float, float]

WIDTH, HEIGHT = 620, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 16, 14, 46
_LINE = 14  # pixels between two labels


@dataclass(frozen=True, slots=True)
class Axis:
    """Range of an axis and how to write its ticks."""

    low: float
    high: float
    title: str
    log: bool = True

    def place(self, value: float) -> float:
        """0 at the low end, 1 at the high end."""
        if not self.log:
            return (value - self.low) / (self.high - self.low)
        return math.log(value / self.low) / math.log(self.high / self.low)

    def ticks(self) -> list[float]:
        if not self.log:
            step = _round_step((self.high - self.low) / 5)
            return [step * i for i in range(math.ceil(self.low / step), int(self.high / step) + 1)]
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        few = math.log10(self.high / self.low) < 2.2
        marks = [m * 10.0**d for d in decades for m in ((1, 2, 5) if few else (1,))]
        return [m for m in marks if self.low * 0.999 <= m <= self.high * 1.001]


def log_axis(values: Sequence[float], title: str, room: float = 1.35) -> Axis:
    """A logarithmic axis around positive values, with some room at both ends."""
    return Axis(min(values) / room, max(values) * room, title)


def zero_axis(values: Sequence[float], title: str) -> Axis:
    """A linear axis from zero."""
    return Axis(0.0, max(values) * 1.12, title, log=False)


def _round_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)


def number(value: float) -> str:
    """Three digits, without the exponents of Python's own format."""
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


@dataclass
class Plot:
    """One plot. ``style`` of what is drawn is a class of the page's style sheet."""

    x: Axis
    y: Axis
    alt: str
    x_ticks: Sequence[int] | None = None
    _parts: list[str] = field(default_factory=list)
    _levels: list[float] = field(default_factory=list)  # heights taken at the right edge
    _labels: list[Point] = field(default_factory=list)  # places taken inside

    def _at(self, point: Point) -> Point:
        inner_w, inner_h = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM
        return (
            _LEFT + self.x.place(point[0]) * inner_w,
            HEIGHT - _BOTTOM - self.y.place(point[1]) * inner_h,
        )

    def line(self, points: Sequence[Point], style: str) -> None:
        """Straight pieces through points, cut at the frame."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(self._at, points))
        self._parts.append(f'<polyline class="{style}" points="{path}" clip-path="url(#frame)"/>')

    def band(self, points: Sequence[tuple[float, float, float]], style: str) -> None:
        """The area between (x, low, high): spread."""
        upper = [self._at((x, high)) for x, _, high in points]
        lower = [self._at((x, low)) for x, low, _ in reversed(points)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in [*upper, *lower])
        self._parts.append(f'<polygon class="{style}" points="{path}" clip-path="url(#frame)"/>')

    def marker(self, point: Point, style: str, shape: str, hint: str) -> None:
        """A mark with a text that shows when the pointer rests on it."""
        x, y = self._at(point)
        self._parts.append(
            f'<path class="{style}" d="{_shape(shape, x, y)}"><title>{escape(hint)}</title></path>'
        )

    def label(self, point: Point, text: str, style: str = "small", anchor: str = "middle") -> None:
        """A text above a point; left out where another text stands."""
        x, y = self._at(point)
        if any(abs(x - a) < 2 * _LINE and abs(y - b) < _LINE for a, b in self._labels):
            return
        self._labels.append((x, y))
        self._parts.append(
            f'<text class="{style}" x="{x:.1f}" y="{y - 9:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
        )

    def right_label(self, height: float, text: str, style: str = "small") -> None:
        """A text above a level at the right edge, moved up where another is."""
        y = self._at((self.x.high, height))[1] - 4
        while any(abs(y - other) < _LINE for other in self._levels):
            y -= 1
        self._levels.append(y)
        self._parts.append(
            f'<text class="{style}" x="{WIDTH - _RIGHT - 4}" y="{y:.1f}" text-anchor="end">'
            f"{escape(text)}</text>"
        )

    def svg(self) -> str:
        left, right, top, bottom = _LEFT, WIDTH - _RIGHT, _TOP, HEIGHT - _BOTTOM
        grid = []
        for tick in self.x.ticks() if self.x_ticks is None else self.x_ticks:
            x = self._at((tick, self.y.low))[0]
            grid.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}"/>')
            grid.append(_text(x, bottom + 17, number(tick) if self.x_ticks is None else str(tick), "middle"))
        for tick in self.y.ticks():
            y = self._at((self.x.low, tick))[1]
            grid.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
            grid.append(_text(left - 7, y + 4, number(tick), "end"))
        middle = (top + bottom) / 2
        titles = (
            f'<text class="axis" x="{(left + right) / 2}" y="{HEIGHT - 8}" text-anchor="middle">'
            f"{escape(self.x.title)}</text>"
            f'<text class="axis" transform="translate(14 {middle}) rotate(-90)" text-anchor="middle">'
            f"{escape(self.y.title)}</text>"
        )
        base = f'<line class="base" x1="{left}" x2="{right}" y1="{bottom}" y2="{bottom}"/>'
        return (
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(self.alt)}">'
            f"{''.join(grid)}{base}{titles}{''.join(self._parts)}</svg>"
        )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text class="tick" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def frame() -> str:
    """What cuts lines at the plots' frames: once a page, since all plots are of one size."""
    return (
        '<svg width="0" height="0" style="position:absolute"><clipPath id="frame">'
        f'<rect x="{_LEFT}" y="{_TOP}" width="{WIDTH - _LEFT - _RIGHT}" height="{HEIGHT - _TOP - _BOTTOM}"/>'
        "</clipPath></svg>"
    )


def swatch(style: str, shape: str) -> str:
    """A mark for a legend."""
    return f'<svg class="swatch" viewBox="0 0 16 16"><path class="{style}" d="{_shape(shape, 8, 8)}"/></svg>'


def _shape(shape: str, x: float, y: float) -> str:
    r = 5.0
    if shape == "square":
        return f"M{x - r:.1f} {y - r:.1f}h{2 * r}v{2 * r}h{-2 * r}z"
    if shape == "triangle":
        return f"M{x:.1f} {y - r - 1:.1f}l{r + 1} {2 * r + 1}h{-2 * (r + 1)}z"
    if shape == "diamond":
        return f"M{x:.1f} {y - r - 1:.1f}l{r + 1} {r + 1}l{-r - 1} {r + 1}l{-r - 1} {-r - 1}z"
    return f"M{x - r:.1f} {y:.1f}a{r} {r} 0 1 0 {2 * r} 0a{r} {r} 0 1 0 {-2 * r} 0z"
