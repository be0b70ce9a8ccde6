"""Which tier computes which experts of a chunk of a prompt: what it would take on each, and the best split.

Experts in GPU memory are computed there. Of the others, the CPU takes those with the fewest rows, since its
time grows with rows, and the rest crosses PCIe once each: as many as let both sides end together. Everything
on one side is a case of this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Strategy = Literal["auto", "cpu", "stream", "split"]
STRATEGIES: tuple[Strategy, ...] = ("auto", "cpu", "stream", "split")

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Rates:
    """What the machine does in a second. Defaults are of one H200 beside 15 cores with AMX.

    ``cpu``: (rows of an expert, bytes of its weights that the CPU gets through), by ascending rows, between
    which it is interpolated. ``pcie``: bytes to the GPU. ``gpu``: multiplications and additions of many rows.
    ``lead``: seconds that the CPU's side takes besides, ``crossing`` those of a token's activations there and
    back.
    """

    cpu: tuple[tuple[float, float], ...] = ((1, 80e9), (16, 75e9), (64, 50e9), (256, 16e9), (1024, 4.5e9))
    pcie: float = 50e9
    gpu: float = 100e12
    lead: float = 3e-4
    crossing: float = 3e-7

    def cpu_seconds(self, rows: Ints, expert_bytes: int) -> npt.NDArray[np.float64]:
        """Of each expert with so many rows."""
        at, speeds = (np.log(np.array(column)) for column in zip(*self.cpu, strict=True))
        beyond = np.maximum(rows / self.cpu[-1][0], 1.0)  # there time grows with rows
        speed = np.exp(np.interp(np.log(np.maximum(rows, 1)), at, speeds)) / beyond
        return np.where(rows > 0, expert_bytes / speed, 0.0)


@dataclass(frozen=True, slots=True)
class Split:
    """Experts of a chunk by tier, and the seconds that each side is expected to take.

    ``gpu``: in GPU memory; ``pcie``: brought to it, ascending; ``cpu``: computed by the CPU, ascending.
    """

    strategy: str  # "gpu" (nothing is missing), "cpu", "touched" or "stream" (by PCIe), "split"
    gpu: Ints
    pcie: Ints
    cpu: Ints
    work_s: float  # of the CPU's pool
    cpu_s: float  # the same with what its side takes besides
    pcie_s: float
    gpu_s: float

    @property
    def seconds(self) -> float:
        """Until the last side ends."""
        return max(self.cpu_s, self.pcie_s, self.gpu_s)


_NONE = np.array([], dtype=np.int64)
CPU_ALONE = Split("cpu", _NONE, _NONE, _NONE, 0.0, 0.0, 0.0, 0.0)
"""Of experts that no GPU can read: nobody counts them."""


@dataclass(frozen=True, slots=True)
class PrefillRecord:
    """How the experts of one layer and chunk were computed: experts by tier, what was expected, what it took.

    ``cpu_s``: of the CPU's pool; ``seconds``: of the host, from the layer's start to its sum's last launch.
    Of these: ``route_s`` until the choices were there, ``plan_s`` from there until the CPU was told,
    ``launch_s`` until all else was launched; then other work of the caller, and ``wait_s`` for the CPU, 0
    where a stream does.
    """

    layer: int
    tokens: int
    strategy: str
    gpu: int
    pcie: int
    cpu: int
    expected_cpu_s: float
    expected_pcie_s: float
    expected_s: float
    cpu_s: float
    seconds: float
    route_s: float = 0.0
    plan_s: float = 0.0
    launch_s: float = 0.0
    wait_s: float = 0.0


def split_chunk(
    rows: Ints,
    here: npt.NDArray[np.bool_],
    sent: Ints,
    *,
    tokens: int,
    expert_bytes: int,
    ops: int,
    rates: Rates,
    strategy: Strategy = "auto",
) -> Split:
    """``rows`` [experts] of the chunk; ``here``: those in GPU memory; ``sent``: those on their way already,
    which cost nothing more; ``ops``: multiplications and additions of an expert and row. ``strategy`` other
    than "auto" has all that is missing computed by one side, or by both even where one alone is faster."""
    touched = rows > 0
    missing = touched & ~here
    on_way = np.zeros_like(here)
    on_way[sent] = True
    open_ = np.flatnonzero(missing & ~on_way)
    open_ = open_[np.argsort(rows[open_], kind="stable")]
    each = rates.cpu_seconds(rows[open_], expert_bytes)
    lead = rates.lead + tokens * rates.crossing
    cpu = np.concatenate([[0.0], lead + np.cumsum(each)])
    left = len(open_) - np.arange(len(open_) + 1)
    pcie = left * expert_bytes / rates.pcie
    own = int(rows[touched].sum()) - np.concatenate([[0], np.cumsum(rows[open_])])
    gpu = own * ops / rates.gpu
    ends = np.maximum(np.maximum(cpu, pcie), gpu)
    if strategy == "cpu":
        count = len(open_)
    elif strategy == "stream":
        count = 0
    elif strategy == "split" and len(open_) > 1:
        count = 1 + int(np.argmin(ends[1:-1]))
    else:
        count = int(np.argmin(ends))
    by_pcie = np.zeros_like(here)
    by_pcie[open_[count:]] = True
    by_pcie |= on_way & missing
    crossing, rest = np.flatnonzero(by_pcie), np.sort(open_[:count])
    if len(rest):
        name = "split" if len(crossing) else "cpu"
    elif len(crossing):
        name = "stream" if len(sent) or touched.all() else "touched"
    else:
        name = "gpu"
    resident = np.flatnonzero(touched & here)
    work = float(each[:count].sum())
    seconds = float(cpu[count]), float(pcie[count]), float(gpu[count])
    return Split(name, resident, crossing, rest, work, *seconds)
