"""What ``hetero profile --json`` writes. ``docs/profile.md`` explains how to read it.

Rates are per second: GB is 1e9 bytes, TOPS 1e12 multiplications and additions. A ``Sample`` carries every
round, so that a reader can compare results round by round instead of by their medians alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hetero.core import InputError

ENOUGH_ROUNDS = 3
"""Fewer rounds show no spread, so that nothing is compared by them."""

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]


class Model(BaseModel):
    """Strict about names, so that a file of another program is told from ours."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Sample(Model):
    """One quantity, measured once a round; rounds of samples that were taken in turns belong together."""

    rounds: Annotated[list[Positive], Field(min_length=1)]

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)

    @property
    def interval(self) -> tuple[float, float]:
        """The middle half of the rounds; all of them where there are fewer than eight."""
        return interval(self.rounds)

    @property
    def spread(self) -> float:
        """Half of the interval, relative to the median."""
        low, high = self.interval
        return (high - low) / 2 / self.median

    @property
    def shown_spread(self) -> str:
        """The spread for a table; fewer than three rounds show none."""
        return f"{self.spread:.0%}" if len(self.rounds) >= ENOUGH_ROUNDS else "?"


class Machine(Model):
    """The hardware, so that results of different machines are never taken for one another."""

    cpu: str
    logical_cpus: int
    physical_cores: int
    cpu_quota: float | None
    memory_bytes: int
    l3_bytes: int | None  # what the processor states; a virtual machine may own a share of it
    kernel: str
    isas: list[str]


class Versions(Model):
    hetero: str
    torch: str
    python: str


class Shape(Model):
    """Experts of one block, and how many such blocks the model has."""

    name: str
    hidden: Count
    intermediate: Count
    experts: Count
    top_k: Count
    layers: Count
    has_gate: bool = True
    has_bias: bool = False


class Settings(Model):
    threads: Count
    isas: list[str]
    formats: list[str]
    tokens: list[int]
    numa: str  # how experts lie over memory nodes
    memory_bytes: int  # most that weights may take
    budget_s: float
    seed: int


class Peak(Model):
    """What one instruction can do on registers alone, by all threads."""

    instruction: str
    isa: str
    kind: Literal["int8", "bf16", "f32"]
    threads: Count
    tops: Sample
    clock_ghz: Sample  # of the fastest core right after the loop


class Weights(Model):
    """What was measured on for one format."""

    format: str
    experts: Count  # of each measured layer; fewer than the model's where memory lacks
    layers: Count  # layers in turn, so that caches hold none
    bytes: Count
    expert_bytes: Count
    larger_than_l3: bool | None  # None where the size of the L3 is unknown
    read_gb_s: Sample  # plain reads of these bytes by all threads


class Cell(Model):
    """A step of ``tokens`` tokens through the experts of one layer."""

    format: str
    tokens: Count
    isa: str
    threads: Count
    seconds: Sample  # of one layer, a round's median step
    read_gb_s: Sample  # plain reads in the same rounds
    peak_tops: Sample  # of `peak_of`, in the same rounds
    peak_of: str  # instruction that the executed kernels use
    distinct_experts: Positive  # that a step touched, mean
    bytes: Positive  # of their weights
    ops: Positive  # multiplications and additions of a step
    kernels: dict[str, int]  # executed kernels -> calls

    @property
    def gb_s(self) -> float:
        return self.bytes / self.seconds.median / 1e9

    @property
    def tops(self) -> float:
        return self.ops / self.seconds.median / 1e12

    @property
    def read_share(self) -> float:
        """Bandwidth over that of plain reads, the median over rounds."""
        return self._by_round(self.read_gb_s, self.bytes / 1e9)

    @property
    def peak_share(self) -> float:
        """Rate over that of the peak loop, the median over rounds."""
        return self._by_round(self.peak_tops, self.ops / 1e12)

    def _by_round(self, limit: Sample, amount: float) -> float:
        pairs = zip(self.seconds.rounds, limit.rounds, strict=True)
        return statistics.median(amount / s / most for s, most in pairs)

    @property
    def memory_s(self) -> float:
        """Seconds that the reads alone take."""
        return self.bytes / self.read_gb_s.median / 1e9

    @property
    def compute_s(self) -> float:
        """Seconds that the products alone take."""
        return self.ops / self.peak_tops.median / 1e12

    @property
    def roof_share(self) -> float:
        """Share of the roofline: the longer of the two over the time it took."""
        return max(self.memory_s, self.compute_s) / self.seconds.median


class ThreadPoint(Model):
    """Plain reads and one step of one token and of many, by a number of threads."""

    threads: Count
    read_gb_s: Sample
    decode_s: Sample
    prefill_s: Sample


class Sweep(Model):
    """How rates grow with threads, for one format and instruction set."""

    format: str
    isa: str
    decode_bytes: Positive
    prefill_tokens: Count
    prefill_ops: Positive
    points: Annotated[list[ThreadPoint], Field(min_length=1)]


class RowsBand(Model):
    """The kernel of experts that have up to ``rows`` rows in a step; None: any number."""

    rows: Count | None
    kernel: str


class KernelChoice(Model):
    """Which kernels an instruction set uses for a format, by the rows of an expert."""

    format: str
    isa: str
    source: Literal["defaults", "measured", "kept", "file"]  # what it rests on, see HETERO_TUNE
    exact: list[RowsBand]  # in steps of up to 16 tokens
    large: list[RowsBand]  # in steps of more


class KernelTimes(Model):
    """Seconds of one call of each kernel, on weights from memory, by the rows of an expert."""

    format: str
    rows: list[Count]
    seconds: dict[str, list[Positive | None]]  # None where a kernel does not take so many rows


class Report(Model):
    """All of one profile."""

    kind: Literal["hetero.profile"] = "hetero.profile"
    version: Literal[1] = 1
    date: str  # UTC
    command: list[str]
    seconds: float  # that the whole profile took
    machine: Machine
    versions: Versions
    shape: Shape
    settings: Settings
    idle_clock_ghz: Sample
    cpu_share: Sample  # processor time of the threads during the peak loops, over what they asked for
    peaks: list[Peak]
    choices: list[KernelChoice] = []
    times: list[KernelTimes] = []  # of the formats whose choices rest on times
    weights: list[Weights]
    cells: list[Cell]
    sweep: Sweep | None
    notes: list[str]  # what a reader must know: fewer experts, what the budget left out
    advice: list[str]

    def bound(self, cell: Cell) -> float:
        """Tokens a second of the whole model if experts alone took time."""
        return cell.tokens / (cell.seconds.median * self.shape.layers)

    def find(self, fmt: str, tokens: int, isa: str) -> Cell | None:
        return next((c for c in self.cells if (c.format, c.tokens, c.isa) == (fmt, tokens, isa)), None)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The middle half; the whole range of fewer than eight values."""
    if len(values) < 8:
        return min(values), max(values)
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def read_report(path: Path) -> Report:
    """A report from a file. Raises InputError naming the file and the first field that is wrong."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise InputError(f"{path}: cannot be read: {reason}") from None
    try:
        return Report.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        at = f", field '{where}'" if where else ""
        raise InputError(f"{path}: not a result of hetero profile{at}: {first['msg']}") from None
