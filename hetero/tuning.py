"""Which kernel serves an expert by its rows: chosen by times that are measured on the machine, and kept.

A plan has bands of rows for small steps, whose kernels all give the same bits, and for larger ones, where any
kernel of the format may serve. Without times the plan is that of the instruction set: GEMV for up to 4 rows,
above them the exact kernel (small steps) or the bulk kernel (larger ones). The extension is not used here:
``hetero.cpu`` measures.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

from hetero import jsonfile
from hetero.core import InputError

log = logging.getLogger("hetero.tuning")

ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 17, 24, 32, 64, 128)
"""Rows of an expert that are measured; 128 stands for all above it."""

GEMV_ROWS = 4
EXACT_ROWS = 16  # tokens of a step up to which every kernel gives the same bits

MARGIN = 1.05
"""How much faster than the default a kernel must be to take its place: noise is no reason to change."""

SWITCH = 1.1
"""How much a change of kernels must gain, taken together over the measured numbers of rows."""

SECONDS = 0.3
"""Processor time that the times of one format take, about."""

_KIND = "hetero.kernel-times"
_VERSION = 1

RowClass = Literal["gemv", "gemm", "bulk"]
CLASSES: tuple[RowClass, ...] = ("gemv", "gemm", "bulk")  # in the order of cpu_ext/kernels.h
Times = Mapping[str, tuple[float, ...]]
"""Seconds of a call of each kernel by ``ROWS``; infinite where it does not take so many."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel of one format: by instruction set and class, and by the name of what it really uses."""

    isa: str
    row_class: RowClass
    name: str


@dataclass(frozen=True, slots=True)
class Band:
    """The kernel of experts with up to ``rows`` rows; None: with any number."""

    rows: int | None
    kernel: Kernel


@dataclass(frozen=True, slots=True)
class Plan:
    """Bands by ascending rows. ``exact``: steps of up to 16 tokens; ``large``: those of more."""

    exact: tuple[Band, ...]
    large: tuple[Band, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """A plan, and what it rests on: the default ("off", or nothing better), times measured now, times kept by
    an earlier run, or those of a file that the user named."""

    plan: Plan
    times: Times | None  # None: the plan is the default one
    source: Literal["defaults", "measured", "kept", "file"]


def choose(
    fmt: str,
    own: Sequence[Kernel],
    others: Sequence[Kernel],
    *,
    tune: str,
    folder: Path,
    identity: Callable[[], Mapping[str, Any]],
    measure: Callable[[Sequence[Kernel]], Times],
) -> Choice:
    """The kernels of a format by rows, by the rule ``tune`` (HETERO_TUNE: auto, off, force or a file).

    ``measure`` times kernels here; its times are kept in ``folder`` as those of ``identity``. ``own`` and
    ``others`` as ``make_plan`` has them. Raises InputError where the file is none of measured times.
    """
    if tune == "off":
        return Choice(make_plan(own, others, None), None, "defaults")
    if tune not in ("auto", "force"):
        given = _read_given(Path(tune).expanduser()).get(fmt, {})
        if all(kernel.name in given for kernel in own):
            return Choice(make_plan(own, others, given), given, "file")
        log.warning("%s lacks times of %s on %s: the default kernels are used", tune, fmt, own[0].isa)
        return Choice(make_plan(own, others, None), None, "defaults")
    kernels = {kernel.name: kernel for kernel in (*own, *others)}
    table = Table.of_machine(folder, identity())
    kept = table.read(fmt) if tune == "auto" else None
    if kept is not None and kernels.keys() <= kept.keys():
        return Choice(make_plan(own, others, kept), kept, "kept")
    log.info("timing the kernels of %s, about %.1f s", fmt, SECONDS)
    times = measure(list(kernels.values()))
    table.write(fmt, times)
    return Choice(make_plan(own, others, times), times, "measured")


def make_plan(own: Sequence[Kernel], others: Sequence[Kernel], times: Times | None) -> Plan:
    """The plan of an instruction set whose own kernels are ``own``, one of every class, and which may use
    ``others`` too. ``times`` has at least the own ones; None: the default plan."""
    by_class = {kernel.row_class: kernel for kernel in own}
    small, large = (
        (Band(GEMV_ROWS, by_class["gemv"]), Band(None, above))
        for above in (by_class["gemm"], by_class["bulk"])
    )
    if times is None:
        return Plan(small, large)
    known = [kernel for kernel in (*own, *others) if kernel.name in times]
    exact = [kernel for kernel in known if kernel.row_class != "bulk"]
    return Plan(_bands(small, exact, times, EXACT_ROWS), _bands(large, known, times, ROWS[-1]))


def kernel_of(bands: Sequence[Band], rows: int) -> Kernel:
    """The kernel of experts with so many rows."""
    return next(band.kernel for band in bands if band.rows is None or rows <= band.rows)


def _bands(usual: Sequence[Band], candidates: Sequence[Kernel], times: Times, most: int) -> tuple[Band, ...]:
    """A band ends at the last measured number of rows where its kernel is chosen. What lies between two
    measured numbers with different kernels goes to the default one if it is one of them, else to that of the
    larger number."""
    measured = [rows for rows in ROWS if rows <= most]
    defaults = [kernel_of(usual, rows) for rows in measured]
    found: list[tuple[int, Kernel]] = []
    for rows, default, chosen in zip(measured, defaults, _chosen(defaults, candidates, times), strict=True):
        if found and found[-1][1] == default != chosen:
            found[-1] = (rows - 1, default)
        if found and found[-1][1] == chosen:
            found.pop()
        found.append((rows, chosen))
    return tuple(
        Band(None if number == len(found) - 1 else rows, kernel)
        for number, (rows, kernel) in enumerate(found)
    )


def _chosen(defaults: Sequence[Kernel], candidates: Sequence[Kernel], times: Times) -> Sequence[Kernel]:
    """The kernel of each measured number of rows: those of the least time over all.

    Another kernel than the default counts as slower by ``MARGIN``. A change of kernels, but from default to
    default, counts as slower by ``SWITCH``, once.
    More rows cannot take less time, so a time counts as at most that of any larger number of rows: what a
    busy machine adds to a single one is left out.
    """
    seconds = {kernel: list(accumulate(reversed(times[kernel.name]), min))[::-1] for kernel in candidates}
    ways: dict[Kernel, tuple[float, tuple[Kernel, ...]]] = {}  # by last kernel: cost, all kernels
    for at, default in enumerate(defaults):
        able = [kernel for kernel in candidates if math.isfinite(seconds[kernel][at])]
        before, ways = ways, {}
        for kernel in able:
            cost = math.log(seconds[kernel][at] / seconds[default][at])
            cost += 0.0 if kernel == default else math.log(MARGIN)
            come = (
                [(0.0, ())]
                if at == 0
                else [
                    (
                        so_far + _change(way[-1], kernel, defaults[at - 1] == way[-1] and kernel == default),
                        way,
                    )
                    for so_far, way in before.values()
                ]
            )
            so_far, way = min(come, key=lambda one: one[0])
            ways[kernel] = so_far + cost, (*way, kernel)
    return min(ways.values(), key=lambda one: one[0])[1]


def _change(before: Kernel, after: Kernel, usual: bool) -> float:
    return 0.0 if usual or before == after else math.log(SWITCH)


class Table:
    """Times of a machine's kernels in a file: by format, written by one run and read by all later ones.

    ``identity`` says what the times are of; a file of another processor or extension counts as none, like one
    that is torn. A file that cannot be written costs one note and a measurement in every run.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        self.path = path
        self.identity = dict(identity)

    @classmethod
    def of_machine(cls, folder: Path, identity: Mapping[str, Any]) -> Table:
        """The table of a machine in the cache folder, which machines may share."""
        text = json.dumps(identity, sort_keys=True)
        return cls(folder / f"kernels-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json", identity)

    def read(self, fmt: str) -> Times | None:
        """Times of a format, None where there are none."""
        try:
            return _parse(self.path, self.identity).get(fmt)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            log.info("%s: %s; measuring again", self.path, error)
            return None

    def write(self, fmt: str, times: Times) -> None:
        """Adds the times of a format, in one step: a reader sees the file before or after. Of two writers at
        once one may lose its format, which its next run measures again."""
        try:
            formats = dict(_parse(self.path, self.identity))
        except (OSError, ValueError):
            formats = {}
        formats[fmt] = {**formats.get(fmt, {}), **times}
        record = {
            "kind": _KIND,
            "version": _VERSION,
            "identity": self.identity,
            "rows": list(ROWS),
            "formats": {name: _as_json(one) for name, one in formats.items()},
        }
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                "w", dir=self.path.parent, prefix=self.path.stem, suffix=".part", delete=False
            ) as part:
                try:
                    json.dump(record, part, indent=1)
                    os.fchmod(part.fileno(), 0o644)  # a cache folder may be shared
                    part.close()
                    os.replace(part.name, self.path)
                except BaseException:
                    Path(part.name).unlink(missing_ok=True)
                    raise
        except OSError as error:
            _tell_unwritable(self.path.parent, error.strerror or str(error))


def _read_given(path: Path) -> dict[str, Times]:
    """Times by format in a file that the user names, of whatever machine."""
    try:
        return _parse(path, None)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InputError(
            f"HETERO_TUNE={path}: {reason}; must be auto, off, force, or a file of measured times"
        ) from None


def _as_json(times: Times) -> dict[str, list[float | None]]:
    return {name: [t if math.isfinite(t) else None for t in row] for name, row in times.items()}


def _parse(path: Path, identity: Mapping[str, Any] | None) -> dict[str, Times]:
    """Times by format. Raises OSError, or ValueError saying what is wrong, above all another identity."""
    try:
        record = jsonfile.parse(path.read_bytes())
    except ValueError:  # of JSON or of UTF-8
        raise ValueError("not a file of measured times") from None
    if not isinstance(record, dict) or (record.get("kind"), record.get("version")) != (_KIND, _VERSION):
        raise ValueError("not a file of measured times")
    if identity is not None and record.get("identity") != identity:
        raise ValueError("times of another machine or extension")
    if record.get("rows") != list(ROWS) or not isinstance(record.get("formats"), dict):
        raise ValueError("times of other numbers of rows")
    return {fmt: _times(fmt, kernels) for fmt, kernels in record["formats"].items()}


def _times(fmt: str, kernels: object) -> Times:
    if not isinstance(kernels, dict):
        raise ValueError(f"{fmt}: no kernels")
    found: dict[str, tuple[float, ...]] = {}
    for name, row in kernels.items():
        if not isinstance(row, list) or len(row) != len(ROWS) or not all(map(_is_time, row)):
            raise ValueError(f"{fmt}, {name}: not {len(ROWS)} times")
        found[name] = tuple(math.inf if t is None else float(t) for t in row)
    return found


def _is_time(value: object) -> bool:
    if value is None:
        return True
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


@cache
def _tell_unwritable(folder: Path, reason: str) -> None:
    log.warning(
        "%s cannot be written (%s): kernels are timed again in every run; HETERO_CACHE names another folder",
        folder,
        reason,
    )
