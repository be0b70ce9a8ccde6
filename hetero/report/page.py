"""A report as one page that needs nothing else: styles and plots are inside, light and dark."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files

from hetero.report import plots
from hetero.report.schema import Cell, Report
from hetero.report.svg import frame, number, swatch
from hetero.report.text import SOURCES, bands, kernels, threads


def page(reports: Sequence[Report]) -> str:
    """HTML of the first report, with the others laid beside it."""
    first = reports[0]
    formats = list(dict.fromkeys(c.format for r in reports for c in r.cells))
    style = files("hetero.report").joinpath("page.css").read_text(encoding="utf-8")
    several = len(reports) > 1
    body = [
        frame(),
        f"<header><p class='kicker'>hetero profile</p><h1>{escape(first.shape.name)}</h1>"
        f"<p class='lead'>{_shape(first)}</p></header>",
        _machines(reports),
        _advice(reports),
        "<section><h2>Rooflines</h2><p>Each mark is one step: its number of tokens is beside the fastest. "
        "The slope is what plain reads allow, a flat line what an instruction can do on registers alone, "
        "both measured between the steps. A mark on a line has reached what the hardware allows.</p>",
        plots.legend(_isas(reports)),
        *(_format(reports, fmt) for fmt in formats),
        "</section>",
        _sweep(reports),
        _comparison(reports, formats) if several else "",
        *(_details(report, formats, several) for report in reports),
    ]
    title = f"hetero profile: {first.shape.name} on {first.machine.cpu}"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}</style></head>"
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


def _shape(report: Report) -> str:
    s = report.shape
    layers = f"{s.layers} layers of " if s.layers > 1 else ""
    return f"{layers}{s.experts} experts, hidden {s.hidden}, intermediate {s.intermediate}, {s.top_k} a token"


def _isas(reports: Sequence[Report]) -> list[str]:
    return [i for i in plots.SHAPES if any(i in r.settings.isas for r in reports)]


def _machines(reports: Sequence[Report]) -> str:
    return f"<div class='columns'>{''.join(map(_tiles, reports))}</div>"


def _tiles(report: Report) -> str:
    """The figures that a person asks for first."""
    fmt = report.cells[0].format
    own = plots.of_format(report, fmt)
    decode = _best(c for c in own if c.tokens == min(c.tokens for c in own))
    prefill = _best(c for c in own if c.tokens == max(c.tokens for c in own))
    reads = next(w for w in report.weights if w.format == fmt).read_gb_s
    m = report.machine
    tiles = [
        (
            f"decode, {_tokens(decode)}",
            number(report.bound(decode)),
            "tokens/s at most",
            f"{decode.isa}, {fmt}",
        ),
        (
            f"prefill, {_tokens(prefill)}",
            number(report.bound(prefill)),
            "tokens/s at most",
            f"{prefill.isa}, {fmt}",
        ),
        (
            "weights read in decode",
            number(decode.gb_s),
            "GB/s",
            f"{decode.read_share:.0%} of plain reads ({number(reads.median)})",
        ),
        ("products in prefill", number(prefill.tops), "TOPS", f"{prefill.roof_share:.0%} of the roof"),
    ]
    cards = "".join(
        f"<div class='tile'><p>{escape(what)}</p><p class='figure'>{value} <span>{unit}</span></p>"
        f"<p class='sub'>{escape(sub)}</p></div>"
        for what, value, unit, sub in tiles
    )
    return (
        f"<section><h2>{escape(m.cpu)}</h2><p class='sub'>{threads(report)} on "
        f"{m.physical_cores} cores, {m.memory_bytes / 2**30:.0f} GiB, {escape(', '.join(m.isas))}; "
        f"{escape(report.date.replace('T', ' '))}</p><div class='tiles'>{cards}</div></section>"
    )


def _tokens(cell: Cell) -> str:
    return "1 token" if cell.tokens == 1 else f"{cell.tokens} tokens"


def _best(cells: Iterable[Cell]) -> Cell:
    return min(cells, key=lambda c: c.seconds.median)


def _advice(reports: Sequence[Report]) -> str:
    columns = []
    for report in reports:
        items = "".join(f"<li>{escape(text)}</li>" for text in report.advice)
        notes = "".join(f"<li>{escape(text)}</li>" for text in report.notes)
        under = f"<h3>Note</h3><ul class='notes'>{notes}</ul>" if notes else ""
        name = f"<h3>{escape(report.machine.cpu)}</h3>" if len(reports) > 1 else ""
        columns.append(f"<div class='card'>{name}<ul>{items}</ul>{under}</div>")
    return f"<section><h2>Advice</h2><div class='columns'>{''.join(columns)}</div></section>"


def _format(reports: Sequence[Report], fmt: str) -> str:
    parts = [f"<h3>{escape(fmt)}</h3>"]
    roofs, rates = plots.rooflines(reports, fmt), plots.rates(reports, fmt)
    if len(reports) == 1:
        parts.append(
            f"<div class='columns'>{_figure(roofs[0], 'Roofline')}"
            f"{_figure(rates[0], 'Tokens a second, band: spread')}</div>"
        )
        return "".join(parts)
    for drawn, what in ((roofs, "roofline"), (rates, "tokens a second")):
        figures = (_figure(plot, f"{r.machine.cpu}: {what}") for plot, r in zip(drawn, reports, strict=True))
        parts.append(f"<div class='columns'>{''.join(figures)}</div>")
    return "".join(parts)


def _figure(plot: str, caption: str) -> str:
    return f"<figure>{plot}<figcaption>{escape(caption)}</figcaption></figure>"


def _sweep(reports: Sequence[Report]) -> str:
    drawn = [
        _figure(plot, f"{r.machine.cpu}: {r.sweep.format} on {r.sweep.isa}")
        for plot, r in zip(plots.sweeps(reports), reports, strict=True)
        if plot and r.sweep is not None
    ]
    if not drawn:
        return ""
    isas = dict.fromkeys(r.sweep.isa for r in reports if r.sweep is not None)
    marks = "".join(f"<span>{swatch(f'mark {isa}', plots.SHAPES[isa])}decode on {isa}</span>" for isa in isas)
    return (
        "<section><h2>Threads</h2><p>Where decode follows plain reads, memory is the limit; where both "
        "flatten, more threads gain nothing.</p><p class='legend'>"
        f"<span>{swatch('mark reads', 'diamond')}plain reads</span>{marks}</p>"
        f"<div class='columns'>{''.join(drawn)}</div></section>"
    )


def _comparison(reports: Sequence[Report], formats: Sequence[str]) -> str:
    head = "".join(f"<th class='num'>{escape(r.machine.cpu)}</th>" for r in reports)
    rows = []
    for fmt in formats:
        for tokens in sorted({c.tokens for r in reports for c in r.cells if c.format == fmt}):
            found = [[c for c in r.cells if (c.format, c.tokens) == (fmt, tokens)] for r in reports]
            best = [_best(cells) if cells else None for cells in found]
            shown = "".join(
                f"<td class='num'>{_bound(r, c)}</td>" for r, c in zip(reports, best, strict=True)
            )
            rows.append(f"<tr><td>{escape(fmt)}</td><td class='num'>{tokens}</td>{shown}</tr>")
    foreign = [r for r in reports[1:] if r.shape != reports[0].shape]
    warn = "".join(
        f"<p class='warn'>{escape(r.machine.cpu)} was measured on {escape(r.shape.name)}.</p>"
        for r in foreign
    )
    return (
        "<section><h2>Side by side</h2><p>Tokens a second at most, and the instruction set that reaches them."
        f"</p>{warn}<div class='scroll'><table><thead><tr><th>format</th><th class='num'>tokens</th>{head}"
        f"</tr></thead><tbody>{''.join(rows)}</tbody></table></div></section>"
    )


def _bound(report: Report, cell: Cell | None) -> str:
    if cell is None:
        return "–"
    return f"{number(report.bound(cell))} <span class='sub'>{cell.isa}</span>"


_COLUMNS = ("tokens", "set", "ms/layer", "±", "GB/s", "of reads", "TOPS", "of peak", "of roof", "tokens/s ≤")


def _details(report: Report, formats: Sequence[str], named: bool) -> str:
    of = f" of {escape(report.machine.cpu)}" if named else ""
    tables = "".join(_cells(report, fmt) for fmt in formats if plots.of_format(report, fmt))
    return (
        f"<section><h2>All results{of}</h2>{tables}{_choices(report)}{_peaks(report)}"
        f"<p class='sub'>{escape(' '.join(report.command))}<br>hetero {escape(report.versions.hetero)}, "
        f"torch {escape(report.versions.torch)}, Python {escape(report.versions.python)}, Linux "
        f"{escape(report.machine.kernel)}; {number(report.seconds)} s in all</p></section>"
    )


def _cells(report: Report, fmt: str) -> str:
    weights = next(w for w in report.weights if w.format == fmt)
    where = {True: "larger than the L3 cache", False: "within the L3 cache", None: "size of L3 unknown"}
    head = "".join(f"<th{'' if c == 'set' else ' class=num'}>{c}</th>" for c in _COLUMNS)
    rows = []
    before = 0
    for cell in plots.of_format(report, fmt):
        values = (
            str(cell.tokens) if cell.tokens != before else "",
            cell.isa,
            number(cell.seconds.median * 1e3),
            cell.seconds.shown_spread,
            number(cell.gb_s),
            f"{cell.read_share:.0%}",
            number(cell.tops),
            f"{cell.peak_share:.0%}",
            f"{cell.roof_share:.0%}",
            number(report.bound(cell)),
        )
        shown = "".join(
            f"<td{'' if i == 1 else ' class=num'}>{escape(value)}</td>" for i, value in enumerate(values)
        )
        first = " class='first'" if cell.tokens != before else ""
        rows.append(f"<tr{first}>{shown}<td class='sub'>{escape(kernels(cell))}</td></tr>")
        before = cell.tokens
    return (
        f"<h3>{escape(fmt)}</h3><p class='sub'>{weights.layers} x {weights.experts} experts, "
        f"{weights.bytes / 2**30:.2f} GiB, {where[weights.larger_than_l3]}; plain reads "
        f"{number(weights.read_gb_s.median)} GB/s</p><div class='scroll'><table><thead><tr>{head}"
        f"<th>executed kernels, calls</th></tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _choices(report: Report) -> str:
    if not report.choices:
        return ""
    rows = "".join(
        f"<tr><td>{escape(c.format)}</td><td>{c.isa}</td><td>{escape(bands(c.exact))}</td>"
        f"<td>{escape(bands(c.large))}</td><td>{SOURCES[c.source]}</td></tr>"
        for c in report.choices
    )
    return (
        "<h3>Kernels by the rows of an expert</h3><div class='scroll'><table><thead><tr><th>format</th>"
        "<th>set</th><th>steps of up to 16 tokens</th><th>larger steps</th><th>by</th></tr></thead>"
        f"<tbody>{rows}</tbody></table></div>"
    )


def _peaks(report: Report) -> str:
    rows = "".join(
        f"<tr><td>{escape(p.instruction)}</td><td>{p.isa}</td><td class='num'>{number(p.tops.median)}</td>"
        f"<td class='num'>{p.tops.shown_spread}</td><td class='num'>{p.clock_ghz.median:.2f}</td></tr>"
        for p in report.peaks
    )
    return (
        "<h3>Peak of each instruction, registers alone</h3><div class='scroll'><table><thead><tr>"
        "<th>instruction</th><th>set</th><th class='num'>TOPS</th><th class='num'>±</th>"
        f"<th class='num'>GHz after</th></tr></thead><tbody>{rows}</tbody></table></div>"
        f"<p class='sub'>clock with idle vector units: {report.idle_clock_ghz.median:.2f} GHz</p>"
    )
