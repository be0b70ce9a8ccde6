"""Hardware profiles: what a machine can do, each figure with where it comes from.

A profile is a JSON file; ``hetero doctor --write-profile`` writes one from measurements, and several are
shipped. Rates: GB/s are 1e9 bytes, TOPS and TFLOPS 1e12 multiplications and additions, us microseconds.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hetero import jsonfile
from hetero.core import InputError

_FOLDER = Path(__file__).resolve().parent.parent / "data" / "hardware"

Isa = Literal["scalar", "avx2", "avx512", "amx"]
Basis = Literal["measured", "sheet", "estimate"]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Bytes = Annotated[int, Field(gt=0, le=1 << 60)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Figure(_Model):
    """One rate: ``measured``; or the vendor's ``peak`` and the ``efficiency`` that programs typically reach;
    or an ``estimate``."""

    measured: Positive | None = None
    peak: Positive | None = None
    efficiency: Annotated[float, Field(gt=0, le=1)] | None = None
    estimate: Positive | None = None
    source: Annotated[str, Field(min_length=1)]

    @model_validator(mode="after")
    def _one_of(self) -> Figure:
        given = [self.measured is not None, self.peak is not None, self.estimate is not None]
        if sum(given) != 1:
            raise ValueError("give one of 'measured', 'peak' with 'efficiency', 'estimate'")
        if (self.peak is None) != (self.efficiency is None):
            raise ValueError("'peak' and 'efficiency' belong together")
        return self

    @property
    def value(self) -> float:
        if self.measured is not None:
            return self.measured
        if self.peak is not None and self.efficiency is not None:
            return self.peak * self.efficiency
        assert self.estimate is not None
        return self.estimate

    @property
    def basis(self) -> Basis:
        if self.measured is not None:
            return "measured"
        return "sheet" if self.peak is not None else "estimate"


class Cpu(_Model):
    """The processor that computes experts."""

    name: str
    cores: Annotated[int, Field(ge=1)]
    isa: Isa
    expert_share: Figure  # of plain reads that the expert operator reaches with one token, 0 to 1
    prefill_tops: Figure  # of the expert operator with many rows
    dense_tflops: Figure  # of torch's matrix products in float32, where there is no GPU
    op_us: Figure  # one operation of torch in transformers' modules, run eagerly
    # Of plain reads, what torch's product of one row by a matrix reaches, 0 to 1; None: by ``plan.products``.
    dense_share: Figure | None = None  # in float32
    dense16_share: Figure | None = None  # in bfloat16
    dense16_tflops: Figure | None = None  # of products of many rows in bfloat16


class Ram(_Model):
    bytes: Bytes
    read_gb_s: Figure  # all cores, of all nodes together
    nodes: Annotated[int, Field(ge=1)] = 1


class Gpu(_Model):
    name: str
    bytes: Bytes
    read_gb_s: Figure
    bf16_tflops: Figure
    launch_us: Figure  # a small kernel inside a CUDA graph, its own time included
    count: Annotated[int, Field(ge=1)] = 1


class Both(_Model):
    """CPU and PCIe reading main memory at once."""

    cpu_gb_s: Positive
    pcie_gb_s: Positive
    source: Annotated[str, Field(min_length=1)]


class Pcie(_Model):
    copy_gb_s: Figure  # pinned copies to the GPU
    read_gb_s: Figure  # a kernel that reads pinned memory in place
    both: Both | None = None  # None: the sum of both, at most ``ram_limit`` of what memory has
    ram_limit_gb_s: Positive | None = None


class Disk(_Model):
    read_gb_s: Figure
    latency_us: Figure | None = None


class Hardware(_Model):
    """A machine as the plan sees it."""

    kind: Literal["hetero-hardware"] = "hetero-hardware"
    version: Literal[1] = 1
    name: Annotated[str, Field(min_length=1)]
    description: str = ""
    cpu: Cpu
    ram: Ram
    gpu: Gpu | None = None
    pcie: Pcie | None = None
    handoff_us: Figure | None = None  # a layer's way to the CPU and back, without the work
    disk: Disk | None = None

    @model_validator(mode="after")
    def _gpu_is_whole(self) -> Hardware:
        if self.gpu is not None and (self.pcie is None or self.handoff_us is None):
            raise ValueError("a profile with 'gpu' needs 'pcie' and 'handoff_us' too")
        return self

    def figures(self) -> Iterator[tuple[str, Figure]]:
        """Every figure with its dotted name."""
        yield from _figures("", self)


def _figures(prefix: str, model: BaseModel) -> Iterator[tuple[str, Figure]]:
    for name in type(model).model_fields:
        value = getattr(model, name)
        if isinstance(value, Figure):
            yield f"{prefix}{name}", value
        elif isinstance(value, BaseModel):
            yield from _figures(f"{prefix}{name}.", value)


def hardware_names() -> list[str]:
    """Names of the shipped profiles."""
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


def load_hardware(text: str, option: str = "--hardware") -> Hardware:
    """A shipped profile by name, or a file, that ``option`` names. Raises InputError naming the field that
    is wrong."""
    names = hardware_names()
    path = Path(text)
    if text in names or text.removesuffix(".json") in names:
        path = path if path.is_file() else _FOLDER / f"{text.removesuffix('.json')}.json"
    elif not path.is_file():
        close = difflib.get_close_matches(text.lower(), names, n=2, cutoff=0.4)
        hint = f" (did you mean {' or '.join(close)}?)" if close else ""
        raise InputError(
            f"{option} {text}: neither a file nor a shipped profile{hint}; shipped: {', '.join(names)}"
        )
    try:
        data = jsonfile.parse(path.read_bytes())
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"{path}: not valid JSON: {error}") from None
    return parse_hardware(data, str(path))


def parse_hardware(data: Any, where: str) -> Hardware:
    """Check a profile. Raises InputError with every field that is wrong."""
    if not isinstance(data, dict) or data.get("kind") != "hetero-hardware":
        raise InputError(f"{where}: not a hardware profile: 'kind' must be 'hetero-hardware'")
    try:
        return Hardware.model_validate(data)
    except ValidationError as error:
        wrong = "; ".join(
            f"{'.'.join(map(str, e['loc'])) or 'the profile'}: {e['msg'].removeprefix('Value error, ')}"
            for e in error.errors()[:5]
        )
        raise InputError(f"{where}: not a hardware profile of this version: {wrong}") from None
