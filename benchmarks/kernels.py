#!/usr/bin/env python3
"""Rates of single kernels on this machine.

GEMV: GB/s of packed weights, against a plain read of the same bytes in the same run. GEMM: GOP/s (a multiply
and an add are two).

On a machine that others use, `--clock cpu` counts processor time of the slowest thread instead of the wall
clock; GEMM is always measured so, with one thread.

`python benchmarks/kernels.py [--gib 1.5] [--threads 1 2] [--clock cpu] [--json FILE]`
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from hetero._cpu import kernels
from hetero.formats import BLOCK_ROWS, Format, block_bytes, parse_format
from hetero.hw.cpu import identity
from hetero.quant.pack import quantise

GEMV_FORMATS = ("int4", "int4a", "int8", "int8 g128", "fp8", "mxfp4", "nvfp4", "bf16", "f32")
GEMM_FORMATS = ("int4", "int4a", "int8", "fp8", "mxfp4", "nvfp4", "bf16", "f32")
GEMM_ROWS = (4, 8, 16, 20, 32, 64, 128, 160)
ROW_CLASSES = {"gemv": 0, "gemm": 1, "bulk": 2}
ROUNDS = 5
K = 2560


class Weights:
    """As many blocks of one random matrix [., K], over and over, as fit the buffer."""

    def __init__(self, fmt: Format, buffer: np.ndarray, blocks: int | None = None) -> None:
        self.format = fmt
        generator = torch.Generator().manual_seed(0)
        block = quantise(fmt, torch.randn(64 * BLOCK_ROWS, K, generator=generator)).numpy()
        size = block_bytes(fmt, K)
        self.blocks = blocks or buffer.size // size
        self.bytes = buffer[: self.blocks * size]
        for start in range(0, self.bytes.size, block.size):
            part = self.bytes[start : start + block.size]
            part[:] = block[: part.size]

    def share(self, index: int, of: int) -> tuple[np.ndarray, int]:
        """Bytes and output rows of one thread's part."""
        size = block_bytes(self.format, K)
        first, last = self.blocks * index // of, self.blocks * (index + 1) // of
        return self.bytes[first * size : last * size], (last - first) * BLOCK_ROWS


def round_seconds(work: Callable[[int], float], threads: int, clock: str) -> float:
    """Seconds of one round in which every thread does its part; `work` returns its processor seconds."""
    start = time.perf_counter()
    if threads == 1:
        slowest = work(0)
    else:
        with ThreadPoolExecutor(threads) as pool:
            slowest = max(pool.map(work, range(threads)))
    return slowest if clock == "cpu" else time.perf_counter() - start


def kernel_work(weights: Weights, kernel: tuple[str, str], rows: int, threads: int) -> Callable[[int], float]:
    """One thread's part of a kernel (table, class of rows)."""
    fmt, code = weights.format, ROW_CLASSES[kernel[1]]
    x = np.random.default_rng(1).standard_normal((rows, K)).astype(np.float32)
    shares = [weights.share(i, threads) for i in range(threads)]
    outputs = [np.zeros((rows, n), np.float32) for _, n in shares]

    def work(i: int) -> float:
        data, n = shares[i]
        call = (kernel[0], code, fmt.code, fmt.group, n, K, data, x, outputs[i])
        return float(kernels.run_kernel(*call)[1])

    return work


def name_of(table: str, fmt: Format, row_class: str) -> str:
    """What runs for a table, a format and a class of rows here."""
    features = dict(kernels.features())
    if table == "avx512_plain":
        features["avx512_vnni"] = features["avx512_bf16"] = False
    isa = "avx512" if table.startswith("avx512") else table
    return str(kernels.select(features)["kernels"][isa][f"{fmt.name}.{row_class}"])


def gemv(tables: list[str], buffer: np.ndarray, threads: int, clock: str) -> list[dict[str, object]]:
    """GB/s of one and of four rows; kernels and plain reads take turns."""
    results: list[dict[str, object]] = []
    for text in GEMV_FORMATS:
        weights = Weights(parse_format(text), buffer)

        def read(i: int, weights: Weights = weights) -> float:
            return float(kernels.read_seconds(weights.share(i, threads)[0]))

        work: dict[tuple[str, int], Callable[[int], float]] = {("plain read", 0): read}
        for table in tables:
            name = name_of(table, weights.format, "gemv")
            for rows in (1, 4):
                if (name, rows) not in work:
                    work[name, rows] = kernel_work(weights, (table, "gemv"), rows, threads)
        best = dict.fromkeys(work, float("inf"))
        for _ in range(ROUNDS):
            for key, part in work.items():
                best[key] = min(best[key], round_seconds(part, threads, clock))
        rates = {key: weights.bytes.size / seconds / 1e9 for key, seconds in best.items()}
        plain = rates.pop(("plain read", 0))
        for (name, rows), rate in rates.items():
            results.append({"format": text, "kernel": name, "rows": rows, "threads": threads, "clock": clock})
            results[-1] |= {"gb_s": rate, "plain_read_gb_s": plain}
    return results


def gemm(tables: list[str], buffer: np.ndarray) -> list[dict[str, object]]:
    """GOP/s of one thread, by processor time, on weights that stay in the cache."""
    results: list[dict[str, object]] = []
    for text in GEMM_FORMATS:
        fmt = parse_format(text)
        weights = Weights(fmt, buffer, blocks=20)
        done = set()  # tables share kernels
        for table in tables:
            for row_class in ("gemm", "bulk"):
                name = name_of(table, fmt, row_class)
                if name in done:
                    continue
                done.add(name)
                for rows in GEMM_ROWS:
                    work = kernel_work(weights, (table, row_class), rows, 1)
                    seconds = min(work(0) for _ in range(20))
                    rate = 2 * rows * K * weights.blocks * BLOCK_ROWS / seconds / 1e9
                    results.append({"format": text, "kernel": name, "rows": rows, "gop_s": rate})
    return results


def show(results: dict[str, list[dict[str, object]]]) -> None:
    print(f"{'GEMV':28} rows threads   GB/s  of a plain read")
    for r in results["gemv"]:
        share = float(str(r["gb_s"])) / float(str(r["plain_read_gb_s"]))
        kernel, of = f"{r['format']} {r['kernel']}", f"{share:6.0%} of {r['plain_read_gb_s']:.1f}"
        print(f"{kernel:34} {r['rows']:>2} {r['threads']:>3} {r['gb_s']:7.1f}  {of}")
    print(f"\n{'GEMM, GOP/s a thread, by rows':32}" + "".join(f"{rows:>7}" for rows in GEMM_ROWS))
    by_kernel: dict[str, list[float]] = {}
    for r in results["gemm"]:
        by_kernel.setdefault(str(r["kernel"]), []).append(float(str(r["gop_s"])))
    for kernel, rates in by_kernel.items():
        print(f"{kernel:32}" + "".join(f"{rate:7.0f}" for rate in rates))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=1.5, help="weights of the GEMV, larger than any cache")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, len(os.sched_getaffinity(0))])
    parser.add_argument("--isa", nargs="+", help="tables to measure (default: all but scalar)")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--json", type=Path, help="write the results there")
    options = parser.parse_args()
    known = [name for name in kernels.table_names() if name not in {"amx_twin", "avx512_vnni"}]
    tables = options.isa or [name for name in known if name != "scalar"]
    for table in tables:
        if table not in known:
            parser.error(f"no table '{table}' here; there are {', '.join(known)}")
    buffer = np.empty(int(options.gib * 2**30) + 64, np.uint8)
    buffer = buffer[-buffer.ctypes.data % 64 :]
    streaming = [table for table in tables if table != "amx"]  # its GEMV is that of AVX-512
    results = {
        "gemv": [
            r
            for threads in sorted(set(options.threads))
            for r in gemv(streaming, buffer, threads, options.clock)
        ],
        "gemm": gemm(tables, buffer),
    }
    show(results)
    if options.json:
        record = {"machine": identity(), **results}
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
