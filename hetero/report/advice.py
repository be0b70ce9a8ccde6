"""Advice in words, computed from a report's measurements and never beyond their spread."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from hetero.report.schema import ENOUGH_ROUNDS, Cell, Report, Sample, Sweep, ThreadPoint, interval

_WORTH = 0.02  # differences below this share are not worth a sentence, however sure
_MEMORY_BOUND = 0.8  # share of plain reads from which decode waits for memory
_OWN = 0.9  # share of their cores that threads get on a quiet machine
_NOISY = 0.15  # spread of a result from which the machine was busy with something else
_NEAR_BEST = 0.97  # threads are enough when they reach this share of the best count


@dataclass(frozen=True, slots=True)
class Ratio:
    """How much longer one sample takes than another, round by round."""

    median: float
    low: float
    high: float
    rounds: int

    @property
    def sure(self) -> bool:
        """Whether the difference is larger than its spread and worth telling."""
        away = abs(self.median - 1)
        outside = self.rounds >= ENOUGH_ROUNDS and (self.low > 1 or self.high < 1)
        return outside and away > (self.high - self.low) / 2 and away >= _WORTH

    def __str__(self) -> str:
        return f"{self.median:.2f} x ({self.low:.2f} to {self.high:.2f})"


def ratio(longer: Sample, shorter: Sample) -> Ratio:
    """Of samples taken in turns, round by round; of others, of their medians with their intervals."""
    if len(longer.rounds) == len(shorter.rounds):
        values = [a / b for a, b in zip(longer.rounds, shorter.rounds, strict=True)]
        return Ratio(statistics.median(values), *interval(values), len(values))
    (a_low, a_high), (b_low, b_high) = longer.interval, shorter.interval
    return Ratio(
        longer.median / shorter.median,
        a_low / b_high,
        a_high / b_low,
        min(len(longer.rounds), len(shorter.rounds)),
    )


def advise(report: Report) -> list[str]:
    """Sentences for the person at the machine, the most useful first."""
    cells = report.cells
    first = cells[0].format
    least, most = min(c.tokens for c in cells), max(c.tokens for c in cells)
    told = [*_noise(report)]
    decode = [c for c in cells if c.format == first and c.tokens == least]
    told += [_isa_sentence(report, "Decode", decode), _decode_limit(report, _fastest(decode))]
    if most > least:
        prefill = [c for c in cells if c.format == first and c.tokens == most]
        if prefill:
            told += [_isa_sentence(report, "Prefill", prefill), _prefill_limit(_fastest(prefill))]
        told += _crossover(report, first)
        told += _batch(report, first, _fastest(decode).isa)
    if report.sweep is not None:
        told += [_threads(report.sweep)]
    told += _formats(report, least)
    told += _clock(report)
    return told


def _rate(report: Report, cell: Cell) -> str:
    layers = report.shape.layers
    of = f"{layers} layers" if layers > 1 else "1 layer"
    return f"at most {report.bound(cell):,.3g} tokens/s from the experts of {of}"


def _fastest(cells: Sequence[Cell]) -> Cell:
    return min(cells, key=lambda c: c.seconds.median)


def _tokens(count: int) -> str:
    return "1 token" if count == 1 else f"{count} tokens"


def _noise(report: Report) -> list[str]:
    spread = statistics.median(c.seconds.spread for c in report.cells)
    rounds = min(len(c.seconds.rounds) for c in report.cells)
    told = []
    share = report.cpu_share.median
    if share < _OWN:
        told.append(
            f"The {report.settings.threads} threads got {share:.0%} of their cores: other work, a quota or "
            "the host took the rest. Shares of reads and peaks hold better than absolute figures."
        )
    elif spread > _NOISY:
        told.append(
            f"The machine was busy: results vary by {spread:.0%} either way from round to round. Shares and "
            "comparisons are of the same rounds and hold better than absolute figures; repeat when it is "
            "quiet."
        )
    if rounds < ENOUGH_ROUNDS:
        told.append(
            "Some results have fewer than three rounds, too few to compare them: take a longer --budget."
        )
    return told


def _isa_sentence(report: Report, what: str, cells: Sequence[Cell]) -> str:
    best = _fastest(cells)
    text = (
        f"{what} ({_tokens(best.tokens)}, {best.format}): {best.isa} takes "
        f"{best.seconds.median * 1e3:.3g} ms a layer, {_rate(report, best)}."
    )
    ties = []
    for other in sorted(cells, key=lambda c: c.seconds.median):
        if other is best:
            continue
        difference = ratio(other.seconds, best.seconds)
        if difference.sure and difference.median > 1:
            text += f" {other.isa} takes {difference} as long."
        elif set(other.kernels) == set(best.kernels):
            ties.append(f"{other.isa} runs the same kernels")
        elif difference.rounds < ENOUGH_ROUNDS:
            ties.append(f"{other.isa} ({difference.median:.2f} x) has too few rounds to be compared")
        else:
            ties.append(f"{other.isa} does not differ by more than the spread ({difference})")
    if ties:
        text += f" {'; '.join(ties)}."
    return text


def _decode_limit(report: Report, cell: Cell) -> str:
    share, products = round(cell.read_share, 2), cell.compute_s / cell.seconds.median
    read = f"{cell.gb_s:.3g} GB/s of weights, {share:.0%} of plain reads in the same rounds"
    cached = [w for w in report.weights if w.format == cell.format and w.larger_than_l3 is False]
    if cached:
        return (
            f"The weights fit the L3 cache, so decode was not measured against memory ({read}); a larger "
            "model than the cache will be slower."
        )
    if share >= _MEMORY_BOUND:
        return (
            f"Memory limits decode: {read}. Faster memory, more channels or smaller weights raise it; a "
            "wider instruction set or more cores do not."
        )
    growth = _growth(report.sweep) if report.sweep is not None else None
    if products >= 0.5 or (growth is not None and growth >= 1.6):
        grows = f", and decode grew {growth:.2f} x with twice the threads" if growth is not None else ""
        return f"The cores limit decode: {read}{grows}. More cores or a better instruction set raise it."
    return (
        f"Neither memory nor the products fill decode's time ({read}; products {products:.0%}): the rest is "
        "unpacking of weights, waiting and the start of each step."
    )


def _growth(sweep: Sweep) -> float | None:
    """Decode's gain from half of the threads to all."""
    by_count = {p.threads: p for p in sweep.points}
    most = max(by_count)
    half = by_count.get(most // 2)
    return ratio(half.decode_s, by_count[most].decode_s).median if half is not None else None


def _prefill_limit(cell: Cell) -> str:
    memory, products = cell.memory_s, cell.compute_s
    if memory >= products:
        limit, other = "memory", "its products"
        longer, shorter = memory, products
    else:
        limit, other = f"the peak of {cell.peak_of}", "reading its weights"
        longer, shorter = products, memory
    text = (
        f"At {_tokens(cell.tokens)} the roof is {limit}: {longer * 1e3:.3g} ms against "
        f"{shorter * 1e3:.3g} ms for {other}; the step reaches {cell.roof_share:.0%} of that roof."
    )
    if cell.roof_share < 0.5:
        text += " The kernels, not the hardware, are the limit here."
    return text


def _crossover(report: Report, fmt: str) -> list[str]:
    """From how many tokens the widest instruction set pays."""
    isas = [i for i in report.settings.isas if any(c.isa == i and c.format == fmt for c in report.cells)]
    if len(isas) < 2:
        return []
    widest, before = isas[-1], isas[-2]
    for tokens in sorted({c.tokens for c in report.cells if c.format == fmt}):
        a, b = report.find(fmt, tokens, before), report.find(fmt, tokens, widest)
        if a is None or b is None:
            continue
        gain = ratio(a.seconds, b.seconds)
        if gain.sure and gain.median > 1:
            return [f"{widest} is faster than {before} from {_tokens(tokens)} a step on ({gain}, {fmt})."]
    return [f"{widest} is not faster than {before} by more than the spread at any number of tokens ({fmt})."]


def _batch(report: Report, fmt: str, isa: str) -> list[str]:
    """What a small batch costs, as drafts to verify or several users do."""
    one, four = report.find(fmt, 1, isa), report.find(fmt, 4, isa)
    if one is None or four is None:
        return []
    cost = ratio(four.seconds, one.seconds)
    return [
        f"4 tokens at once take {cost} the time of one and read {four.bytes / one.bytes:.2f} x "
        f"the experts ({isa}, {fmt}, every expert equally likely)."
    ]


def _threads(sweep: Sweep) -> str:
    """The least threads that come near the best, for decode and for prefill."""
    decode = _enough(sweep.points, [p.decode_s for p in sweep.points])
    prefill = _enough(sweep.points, [p.prefill_s for p in sweep.points])
    spread = max(s.spread for p in sweep.points for s in (p.decode_s, p.prefill_s))
    most = max(p.threads for p in sweep.points)
    if len(sweep.points) == 1:
        return f"Threads: only {most} can be used here."
    text = f"Threads: {decode} for decode, {prefill} for prefill ({sweep.prefill_tokens} tokens)"
    if spread > _NOISY:
        return f"{text} were the best of {most}, but a spread of {spread:.0%} hides smaller gains."
    if max(decode, prefill) < most:
        return f"{text}: more, up to {most}, gain nothing measurable. Set `threads: {max(decode, prefill)}`."
    return f"{text}, of {most} tried."


def _enough(points: Sequence[ThreadPoint], samples: Sequence[Sample]) -> int:
    best = min(range(len(points)), key=lambda i: samples[i].median)
    for point, sample in sorted(zip(points, samples, strict=True), key=lambda pair: pair[0].threads):
        if ratio(sample, samples[best]).median <= 1 / _NEAR_BEST:
            return point.threads
    return points[best].threads


def _formats(report: Report, tokens: int) -> list[str]:
    best: dict[str, Cell] = {}
    for cell in report.cells:
        if cell.tokens == tokens and (
            cell.format not in best or cell.seconds.median < best[cell.format].seconds.median
        ):
            best[cell.format] = cell
    if len(best) < 2:
        return []
    parts = [
        f"{cell.format} {report.bound(cell):.3g} tokens/s"
        for cell in sorted(best.values(), key=lambda c: c.seconds.median)
    ]
    return [f"By format, {_tokens(tokens)} a step: {', '.join(parts)}."]


def _clock(report: Report) -> list[str]:
    """Whether wide vectors slow the clock."""
    slowed = []
    for peak in report.peaks:
        slower = ratio(report.idle_clock_ghz, peak.clock_ghz)
        if slower.sure and slower.median > 1:
            slowed.append(f"{peak.instruction} {peak.clock_ghz.median:.2f} GHz")
    idle = report.idle_clock_ghz.median
    if not slowed:
        return [f"Wide vectors do not slow the clock beyond the spread ({idle:.2f} GHz)."]
    return [f"Wide vectors slow the clock: {idle:.2f} GHz idle, after {', '.join(slowed)}."]
