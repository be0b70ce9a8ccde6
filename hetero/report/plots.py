"""The plots of a report. Reports that are laid side by side share their axes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hetero.report.schema import Cell, Report
from hetero.report.svg import Plot, Point, log_axis, number, swatch, zero_axis

SHAPES = {"scalar": "diamond", "avx2": "circle", "avx512": "square", "amx": "triangle"}


def of_format(report: Report, fmt: str) -> list[Cell]:
    return [c for c in report.cells if c.format == fmt]


def intensity(cell: Cell) -> float:
    """Operations for each byte of weights that must be read."""
    return cell.ops / cell.bytes


def legend(isas: Sequence[str]) -> str:
    marks = (f"<span>{swatch(f'mark {isa}', SHAPES[isa])}{isa}</span>" for isa in isas)
    return f'<p class="legend">{"".join(marks)}</p>'


def rooflines(reports: Sequence[Report], fmt: str) -> list[str]:
    """Attained TOPS over operations a byte, under the roofs of memory and of each used instruction."""
    cells = [c for r in reports for c in of_format(r, fmt)]
    # The plot ends beyond the corner of the highest roof, so that every roof is seen.
    corners = [
        max(c.peak_tops.median for c in own) / max(c.read_gb_s.median for c in own) * 1e3
        for own in (of_format(r, fmt) for r in reports)
        if own
    ]
    x = log_axis([*map(intensity, cells), *corners], "operations for each byte of weights", 1.9)
    floor = min(c.tops for c in cells) / 1.8
    tops = max(c.peak_tops.median for c in cells)
    y = log_axis([floor * 1.35, tops], "TOPS", 1.35)
    plots = []
    for report in reports:
        own = of_format(report, fmt)
        plot = Plot(x, y, f"Roofline of {fmt} on {report.machine.cpu}")
        peaks: dict[str, float] = {}
        for cell in own:
            peaks[cell.peak_of] = max(peaks.get(cell.peak_of, 0.0), cell.peak_tops.median)
        if own:
            read = max(c.read_gb_s.median for c in own) / 1e3  # TB/s
            top = max(peaks.values())
            corner = top / read
            plot.line([(x.low, x.low * read), (corner, top)], "roof memory")
            at = math.sqrt(max(x.low, y.low / read) * corner)  # the middle of what is seen of the slope
            plot.label((at, at * read), f"{number(read * 1e3)} GB/s", "small roof-label", "end")
            for name, peak in sorted(peaks.items(), key=lambda p: p[1]):
                plot.line([(peak / read, peak), (x.high, peak)], "roof")
                plot.right_label(peak, f"{name} {number(peak)}", "small roof-label")
        for isa in report.settings.isas:
            points = [(intensity(c), c.tops) for c in own if c.isa == isa]
            plot.line(points, f"series {isa}")
        for isa in report.settings.isas:
            for cell in (c for c in own if c.isa == isa):
                plot.marker((intensity(cell), cell.tops), f"mark {isa}", SHAPES[isa], hint(report, cell))
        for cell in _best(own):
            plot.label((intensity(cell), cell.tops), str(cell.tokens))
        plots.append(plot.svg())
    return plots


def rates(reports: Sequence[Report], fmt: str) -> list[str]:
    """Tokens a second of the whole model's experts over the tokens of a step."""
    cells = [(r, c) for r in reports for c in of_format(r, fmt)]
    counts = sorted({c.tokens for _, c in cells})
    x = log_axis(counts, "tokens of a step", 1.4)
    y = log_axis([r.bound(c) for r, c in cells], "tokens/s, experts alone", 1.5)
    plots = []
    for report in reports:
        plot = Plot(x, y, f"Tokens a second in {fmt} on {report.machine.cpu}", x_ticks=counts)
        for isa in report.settings.isas:
            own = [c for c in of_format(report, fmt) if c.isa == isa]
            points = [(float(c.tokens), report.bound(c)) for c in own]
            bands = []
            for cell in own:
                low, high = cell.seconds.interval
                whole = cell.tokens / report.shape.layers
                bands.append((float(cell.tokens), whole / high, whole / low))
            plot.band(bands, f"band {isa}")
            plot.line(points, f"series {isa}")
            for cell, point in zip(own, points, strict=True):
                plot.marker(point, f"mark {isa}", SHAPES[isa], hint(report, cell))
        plots.append(plot.svg())
    return plots


def sweeps(reports: Sequence[Report]) -> list[str]:
    """Plain reads and decode by threads; an empty text for a report without a sweep."""
    values = [
        v
        for r in reports
        if r.sweep is not None
        for p in r.sweep.points
        for v in (p.read_gb_s.median, r.sweep.decode_bytes / p.decode_s.median / 1e9)
    ]
    plots = []
    for report in reports:
        sweep = report.sweep
        if sweep is None or len(sweep.points) < 2:
            plots.append("")
            continue
        counts = [p.threads for p in sweep.points]
        plot = Plot(
            zero_axis(counts, "threads"),
            zero_axis(values, "GB/s"),
            f"GB/s by threads on {report.machine.cpu}",
            x_ticks=counts,
        )
        reads: list[Point] = [(p.threads, p.read_gb_s.median) for p in sweep.points]
        decode: list[Point] = [
            (p.threads, sweep.decode_bytes / p.decode_s.median / 1e9) for p in sweep.points
        ]
        plot.line(reads, "series reads")
        plot.line(decode, f"series {sweep.isa}")
        for point in reads:
            plot.marker(
                point, "mark reads", "diamond", f"{point[0]} threads: plain reads {number(point[1])} GB/s"
            )
        for point in decode:
            plot.marker(
                point,
                f"mark {sweep.isa}",
                SHAPES[sweep.isa],
                f"{point[0]} threads: decode {number(point[1])} GB/s",
            )
        plots.append(plot.svg())
    return plots


def hint(report: Report, cell: Cell) -> str:
    """All about one result, for the pointer."""
    return (
        f"{cell.isa}, {cell.tokens} tokens: {number(cell.seconds.median * 1e3)} ms a layer "
        f"±{cell.seconds.shown_spread}, {number(cell.gb_s)} GB/s ({cell.read_share:.0%} of reads), "
        f"{number(cell.tops)} TOPS ({cell.peak_share:.0%} of {cell.peak_of}), "
        f"at most {number(report.bound(cell))} tokens/s"
    )


def _best(cells: Sequence[Cell]) -> list[Cell]:
    best: dict[int, Cell] = {}
    for cell in cells:
        if cell.tokens not in best or cell.seconds.median < best[cell.tokens].seconds.median:
            best[cell.tokens] = cell
    return list(best.values())
