"""A report on the terminal."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from hetero.report.schema import Cell, Report, RowsBand
from hetero.terminal import Console

SOURCES = {
    "defaults": "default",
    "measured": "times measured now",
    "kept": "times measured before",
    "file": "times of a file",
}

_WIDE = 120  # columns where the output is no terminal


def show(report: Report, console: Console | None = None) -> None:
    """Machine, peaks, a table for each format, threads, notes, advice."""
    console = console or Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, _WIDE)
    m, shape = report.machine, report.shape
    _line(console, f"{m.cpu}, {threads(report)} of {m.physical_cores} cores, {report.date}")
    _line(
        console,
        f"{shape.name}: {shape.layers} layer{'s' if shape.layers > 1 else ''} of {shape.experts} experts, "
        f"{shape.hidden} x {shape.intermediate}, {shape.top_k} a token",
    )
    console.print()
    console.print(_peaks(report))
    for fmt in dict.fromkeys(c.format for c in report.cells):
        console.print(_format(report, fmt))
    if report.choices:
        console.print(_choices(report))
    if report.sweep is not None and len(report.sweep.points) > 1:
        console.print(_sweep(report))
    for note in report.notes:
        _line(console, f"note: {note}")
    if report.notes:
        console.print()
    for sentence in report.advice:
        _line(console, f"- {sentence}")


def show_comparison(report: Report, others: list[Report], console: Console | None = None) -> None:
    """Best time of each format and number of tokens on each machine."""
    console = console or Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, _WIDE)
    table = Table(
        title="Machines side by side: ms a layer (instruction set), best of each", title_justify="left"
    )
    table.add_column("format")
    table.add_column("tokens", justify="right")
    reports = [report, *others]
    for one in reports:
        table.add_column(f"{one.machine.cpu}, {threads(one)}", justify="right")
    for fmt, tokens in dict.fromkeys((c.format, c.tokens) for r in reports for c in r.cells):
        row = []
        for one in reports:
            cells = [c for c in one.cells if (c.format, c.tokens) == (fmt, tokens)]
            best = min(cells, key=lambda c: c.seconds.median, default=None)
            row.append(f"{best.seconds.median * 1e3:.3g} ({best.isa})" if best else "-")
        table.add_row(fmt, str(tokens), *row)
    console.print(table)
    for one in others:
        if one.shape != report.shape:
            _line(
                console, f"note: {one.machine.cpu} was measured on {one.shape.name}, not {report.shape.name}"
            )


def threads(report: Report) -> str:
    count = report.settings.threads
    return "1 thread" if count == 1 else f"{count} threads"


def _line(console: Console, text: str) -> None:
    console.print(Text(text), soft_wrap=not console.is_terminal)


def _peaks(report: Report) -> Table:
    table = Table(title="Peak of each instruction, registers alone", title_justify="left")
    for name in ("instruction", "set", "TOPS", "±", "GHz after"):
        table.add_column(name, justify="left" if name in ("instruction", "set") else "right")
    for peak in report.peaks:
        table.add_row(
            peak.instruction,
            peak.isa,
            f"{peak.tops.median:.3g}",
            peak.tops.shown_spread,
            f"{peak.clock_ghz.median:.2f}",
        )
    return table


def _format(report: Report, fmt: str) -> Table:
    weights = next(w for w in report.weights if w.format == fmt)
    beyond = {True: "larger than L3", False: "within L3", None: "L3 unknown"}[weights.larger_than_l3]
    title = (
        f"{fmt}: {weights.layers} x {weights.experts} experts, {weights.bytes / 2**30:.2f} GiB ({beyond}), "
        f"plain reads {weights.read_gb_s.median:.3g} GB/s"
    )
    table = Table(title=title, title_justify="left")
    for name in (
        "tokens",
        "set",
        "ms/layer",
        "±",
        "GB/s",
        "of reads",
        "TOPS",
        "of peak",
        "of roof",
        "tok/s ≤",
    ):
        table.add_column(name, justify="left" if name == "set" else "right")
    table.add_column("kernels", overflow="fold")
    tokens = 0
    for cell in (c for c in report.cells if c.format == fmt):
        if tokens not in (0, cell.tokens):
            table.add_section()
        tokens = cell.tokens
        table.add_row(
            str(cell.tokens),
            cell.isa,
            f"{cell.seconds.median * 1e3:.3g}",
            cell.seconds.shown_spread,
            f"{cell.gb_s:.3g}",
            f"{cell.read_share:.0%}",
            f"{cell.tops:.3g}",
            f"{cell.peak_share:.0%}",
            f"{cell.roof_share:.0%}",
            f"{report.bound(cell):.3g}",
            kernels(cell),
        )
    return table


def kernels(cell: Cell) -> str:
    """Executed kernels with their calls, without the format that they share."""
    by_calls = sorted(cell.kernels.items(), key=lambda item: -item[1])
    return ", ".join(f"{name.partition('.')[2]} {calls}" for name, calls in by_calls)


def bands(chosen: list[RowsBand]) -> str:
    """Kernels by rows, without the format that they share: ``1-4 avx512_vnni.gemv, 5- amx_bf16.bulk``."""
    parts = []
    first = 1
    for band in chosen:
        last = "" if band.rows is None else str(band.rows)
        rows = last if last == str(first) else f"{first}-{last}"
        parts.append(f"{rows} {band.kernel.partition('.')[2]}")
        first = (band.rows or 0) + 1
    return ", ".join(parts)


def _choices(report: Report) -> Table:
    table = Table(title="Kernels by the rows of an expert", title_justify="left")
    for name in ("format", "set", "steps of up to 16 tokens", "larger steps", "by"):
        table.add_column(name, overflow="fold")
    for choice in report.choices:
        source = SOURCES[choice.source]
        table.add_row(choice.format, choice.isa, bands(choice.exact), bands(choice.large), source)
    return table


def _sweep(report: Report) -> Table:
    sweep = report.sweep
    assert sweep is not None
    table = Table(title=f"By threads ({sweep.format}, {sweep.isa})", title_justify="left")
    for name in ("threads", "plain reads GB/s", "decode GB/s", f"{sweep.prefill_tokens} tokens, TOPS"):
        table.add_column(name, justify="right")
    for p in sweep.points:
        table.add_row(
            str(p.threads),
            f"{p.read_gb_s.median:.3g} ±{p.read_gb_s.shown_spread}",
            f"{sweep.decode_bytes / p.decode_s.median / 1e9:.3g} ±{p.decode_s.shown_spread}",
            f"{sweep.prefill_ops / p.prefill_s.median / 1e12:.3g} ±{p.prefill_s.shown_spread}",
        )
    return table
