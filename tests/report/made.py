"""Made-up reports, whose advice is known."""

from __future__ import annotations

from collections.abc import Sequence

from hetero.report.schema import (
    Cell,
    Machine,
    Peak,
    Report,
    Sample,
    Settings,
    Shape,
    Sweep,
    ThreadPoint,
    Versions,
    Weights,
)

SHAPE = Shape(name="made", hidden=2560, intermediate=640, experts=512, top_k=10, layers=48)
EXPERT_BYTES = 2_764_800
PEAK_OF = {"avx2": "vpmaddubsw ymm", "avx512": "vpdpbusd zmm", "amx": "tdpbusd tmm"}


def around(value: float, noise: float = 0.01, rounds: int = 9) -> Sample:
    """Rounds that go up and down evenly about a value."""
    return Sample(rounds=[value * (1 + noise * ((i % 3) - 1)) for i in range(rounds)])


def cell(
    isa: str,
    tokens: int,
    seconds: Sample | float,
    *,
    fmt: str = "int4 g32",
    read: float = 100.0,
    peak: float = 1.0,
    kernels: dict[str, int] | None = None,
) -> Cell:
    """A step at ``read`` GB/s of plain reads and ``peak`` TOPS."""
    sample = around(seconds) if isinstance(seconds, float) else seconds
    rounds = len(sample.rounds)
    distinct = 512 * (1 - (1 - 10 / 512) ** tokens)
    return Cell(
        format=fmt,
        tokens=tokens,
        isa=isa,
        threads=8,
        seconds=sample,
        read_gb_s=around(read, 0.0, rounds),
        peak_tops=around(peak, 0.0, rounds),
        peak_of=PEAK_OF[isa],
        distinct_experts=distinct,
        bytes=distinct * EXPERT_BYTES,
        ops=6.0 * tokens * 10 * 2560 * 640,
        kernels=kernels or {f"int4.{isa}.gemv": 20},
    )


def sweep(decode: dict[int, float], noise: float = 0.01) -> Sweep:
    """Decode and prefill seconds by threads, plain reads at 100 GB/s whatever their number."""
    return Sweep(
        format="int4 g32",
        isa="amx",
        decode_bytes=10 * EXPERT_BYTES,
        prefill_tokens=64,
        prefill_ops=1e9,
        points=[
            ThreadPoint(
                threads=n,
                read_gb_s=around(100.0),
                decode_s=around(seconds, noise),
                prefill_s=around(seconds, noise),
            )
            for n, seconds in decode.items()
        ],
    )


def report(
    cells: Sequence[Cell],
    *,
    threads: Sweep | None = None,
    idle_ghz: float = 3.0,
    amx_ghz: float = 3.0,
    beyond_l3: bool | None = True,
    cpu_share: float = 0.99,
    cpu: str = "Made-up CPU",
) -> Report:
    formats = list(dict.fromkeys(c.format for c in cells))
    isas = [isa for isa in PEAK_OF if any(c.isa == isa for c in cells)]
    return Report(
        date="2026-11-30T00:00:00+00:00",
        command=["hetero", "profile"],
        seconds=1.0,
        machine=Machine(
            cpu=cpu,
            logical_cpus=8,
            physical_cores=8,
            cpu_quota=None,
            memory_bytes=2**36,
            l3_bytes=2**25,
            kernel="6.1",
            isas=isas,
        ),
        versions=Versions(hetero="0", torch="2", python="3.11"),
        shape=SHAPE,
        settings=Settings(
            threads=8,
            isas=isas,
            formats=formats,
            tokens=sorted({c.tokens for c in cells}),
            numa="split",
            memory_bytes=2**32,
            budget_s=10,
            seed=0,
        ),
        idle_clock_ghz=around(idle_ghz),
        cpu_share=around(cpu_share),
        peaks=[
            Peak(
                instruction=PEAK_OF[isa],
                isa=isa,
                kind="int8",
                threads=8,
                tops=around(1.0),
                clock_ghz=around(amx_ghz if isa == "amx" else 3.0),
            )
            for isa in isas
        ],
        weights=[
            Weights(
                format=fmt,
                experts=512,
                layers=1,
                bytes=512 * EXPERT_BYTES,
                expert_bytes=EXPERT_BYTES,
                larger_than_l3=beyond_l3,
                read_gb_s=around(100.0),
            )
            for fmt in formats
        ],
        cells=list(cells),
        sweep=threads,
        notes=[],
        advice=[],
    )
