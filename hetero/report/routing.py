"""Which experts the tokens of a benchmark choose: tables that can be kept and replayed on any engine.

``uniform`` draws experts at random. ``local`` follows the published reuse of real text: each choice is with
a chance of 45% one of the last token's experts, with 35% one of those of the seven tokens before that, else
any; drawn anew until the token has k different ones, so that its measured reuse differs a little from that.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hetero.core import InputError
from hetero.plan.routing import LAST, RECENT, WINDOW

DRAWN = ("uniform", "local")
KINDS = ("router", *DRAWN)
TRACE = "trace:"

Table = NDArray[np.int32]
"""Ids of experts [layers, steps, rows, k]; rows are independent sequences."""


@dataclass(frozen=True, slots=True)
class Reuse:
    """Shares of a token's experts that earlier tokens of its row chose as well, 0 to 1."""

    last: float  # the token before
    window: float  # the eight before


def make_table(
    kind: str, *, layers: int, steps: int, rows: int, experts: int, top_k: int, seed: int = 7
) -> Table:
    """A table of ``uniform`` or ``local`` choices. Raises InputError for another kind, or more experts a
    token than there are."""
    if kind not in DRAWN:
        raise InputError(f"--routing {kind}: must be one of {', '.join(KINDS)} or {TRACE}FILE")
    if not 1 <= top_k <= experts:
        raise InputError(f"{top_k} experts a token of {experts}")
    random = np.random.default_rng(seed)
    streams = layers * rows
    out = np.empty((steps, streams, top_k), np.int32)
    # When a stream last used an expert; long ago at first.
    used = np.full((streams, experts), -WINDOW - 1, np.int64)
    for step in range(steps):
        if kind == "uniform" or step == 0:
            chosen = _any(random, streams, experts, top_k)
        else:
            chosen = _local(random, out[step - 1], used, step)
        chosen = np.take_along_axis(chosen, random.random(chosen.shape).argsort(1), 1)
        out[step] = chosen
        if kind == "local":
            np.put_along_axis(used, chosen.astype(np.int64), step, 1)
    return np.ascontiguousarray(out.reshape(steps, layers, rows, top_k).transpose(1, 0, 2, 3))


def _any(random: np.random.Generator, streams: int, experts: int, top_k: int) -> NDArray[np.int64]:
    """Different experts of each stream, all equally likely."""
    return random.random((streams, experts)).argpartition(top_k - 1, 1)[:, :top_k]


def _local(
    random: np.random.Generator, last: NDArray[np.int32], used: NDArray[np.int64], step: int
) -> NDArray[np.int64]:
    """The next choices of all streams: the first k different ones of a row of draws."""
    streams, top_k = last.shape
    experts = used.shape[1]
    # Experts that the tokens 2 to WINDOW back used and the last one did not, stream by stream.
    owner, older = ((used >= step - WINDOW) & (used < step - 1)).nonzero()
    count = np.bincount(owner, minlength=streams)
    begin = count.cumsum() - count
    draws = 2 * top_k + 4
    chosen = np.empty((streams, top_k), np.int64)
    rows = np.arange(streams)
    while len(rows):
        shape = (len(rows), draws)
        where = random.random(shape)
        drawn = random.integers(experts, size=shape)
        of_last = last[rows[:, None], random.integers(top_k, size=shape)]
        drawn = np.where(where < LAST, of_last, drawn)
        some = count[rows, None]
        if len(older):
            at = (random.random(shape) * some).astype(np.int64)
            of_older = older[np.minimum(begin[rows, None] + at, len(older) - 1)]
            drawn = np.where((where >= LAST) & (where < LAST + RECENT) & (some > 0), of_older, drawn)
        fresh = _first_of_each(drawn)
        enough = fresh.sum(1) >= top_k
        good = drawn[enough]
        # Stable: the first draws that are new come first.
        order = (~fresh[enough]).argsort(1, kind="stable")[:, :top_k]
        chosen[rows[enough]] = np.take_along_axis(good, order, 1)
        # With few experts, or nearly all of them chosen, more draws are needed. Those that fail begin anew,
        # which changes nothing but the odds of rare streams.
        rows = rows[~enough]
        draws *= 2
    return chosen


def _first_of_each(drawn: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether no earlier draw of its row is the same."""
    order = drawn.argsort(1, kind="stable")
    ordered = np.take_along_axis(drawn, order, 1)
    first = np.ones(drawn.shape, bool)
    first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    fresh = np.empty(drawn.shape, bool)
    np.put_along_axis(fresh, order, first, 1)
    return fresh


def measured_reuse(table: Table, most_layers: int = 6) -> Reuse:
    """What the table has, over at most ``most_layers`` of its layers taken evenly."""
    layers, steps = table.shape[:2]
    if steps <= WINDOW:
        return Reuse(0.0, 0.0)
    some = table[:: -(-layers // most_layers)]
    of_last = of_window = np.zeros(0, bool)
    now = some[:, WINDOW:, :, :, None]
    for back in range(1, WINDOW + 1):
        before = some[:, WINDOW - back : steps - back, :, None, :]
        same = (now == before).any(-1)
        of_window = same if back == 1 else of_window | same
        of_last = same if back == 1 else of_last
    return Reuse(float(of_last.mean()), float(of_window.mean()))


def save_table(path: Path, table: Table) -> None:
    """Keep a table as .npy."""
    with path.open("wb") as file:  # numpy would add its ending to another name
        np.save(file, table)


def load_table(path: Path, *, layers: int, experts: int, top_k: int, rows: int) -> Table:
    """A table from .npy, [layers, steps, k] or [layers, steps, rows, k] of integers; rows that it lacks
    repeat those that it has, from other steps. Raises InputError, naming the file, for anything else."""
    what = f"--routing {TRACE}{path}"
    try:
        found = np.load(path, allow_pickle=False)
    except OSError as error:
        raise InputError(f"{what}: cannot be read: {error.strerror or 'no .npy file'}") from None
    except (ValueError, EOFError):  # numpy's own words advise to unpickle
        raise InputError(f"{what}: no .npy file of numbers") from None
    if not isinstance(found, np.ndarray) or found.dtype.kind not in "iu":
        raise InputError(f"{what}: must be one .npy array of integers")
    if found.ndim == 3:
        found = found[:, :, None, :]
    if found.ndim != 4 or 0 in found.shape:
        raise InputError(f"{what}: shape {list(found.shape)}, must be [layers, steps, rows, k]")
    if found.shape[0] < layers or found.shape[3] != top_k:
        raise InputError(
            f"{what}: {found.shape[0]} layers with {found.shape[3]} experts a token; the model has {layers} "
            f"with {top_k}"
        )
    found = found[:layers]
    if found.min() < 0 or found.max() >= experts:
        raise InputError(f"{what}: ids from {found.min()} to {found.max()}; the model has {experts} experts")
    ordered = np.sort(found, axis=-1)
    if (ordered[..., 1:] == ordered[..., :-1]).any():
        raise InputError(f"{what}: a token chooses an expert twice")
    have = found.shape[2]
    if have < rows:
        shifts = [row // have * (found.shape[1] // (-(-rows // have))) for row in range(rows)]
        parts = [np.roll(found[:, :, row % have], -shift, 1) for row, shift in enumerate(shifts)]
        found = np.stack(parts, 2)
    return np.ascontiguousarray(found[:, :, :rows], dtype=np.int32)
