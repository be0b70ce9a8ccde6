"""Measure the thread pool: barrier, wake-up, a step like decode, idle cost, a busy neighbour on every core.

With the neighbours, quiet and busy runs take turns and the ratio of each pair counts, so that a machine that
is noisy anyway is not blamed on the pool.

    python benchmarks/pool.py --threads 2,4,8,16 --json pool.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from pathlib import Path
from typing import Any

from hetero import _cpu, cpu
from hetero.hw.cpu import identity

PHASES = 7
PAUSE_US = 1000


def microseconds(
    phases: int, chunks: int, work_us: float, *, pause_us: int = 0, repeats: int = 1000
) -> float:
    """Median time of a step of ``phases`` phases with ``chunks`` chunks of ``work_us`` each."""
    return statistics.median(_cpu.pool_time(phases, chunks, int(work_us * 1000), pause_us, repeats)) / 1000


def measure(threads: int) -> dict[str, float]:
    """Figures of one pool size, microseconds."""
    cpu.set_threads(threads)
    microseconds(2, threads, 1)  # starts the workers
    one, many = microseconds(1, threads, 0), microseconds(PHASES, threads, 0)
    start = time.process_time()
    time.sleep(1)
    idle = time.process_time() - start
    return {
        "threads": threads,
        "barrier_us": (many - one) / (PHASES - 1),
        "step_us": one,
        "wake_us": microseconds(1, threads, 50, pause_us=PAUSE_US, repeats=200) - 50,
        "decode_us": microseconds(2, threads * 6, 4),  # 48 us of work for every thread
        "idle_share": idle,
    }


def spin(core: int) -> None:
    os.sched_setaffinity(0, {core})
    while True:
        pass


def neighbour(threads: int, work_us: float, rounds: int) -> list[float]:
    """Mean time of steps beside a spinning process on every core, over that of the quiet run before it."""
    cpu.set_threads(threads)
    cores = sorted(os.sched_getaffinity(0))
    context = multiprocessing.get_context("spawn")
    repeats = max(20, int(200_000 / (12 * work_us)))
    ratios = []
    for _ in range(rounds):
        quiet = statistics.mean(_cpu.pool_time(2, threads * 6, int(work_us * 1000), 0, repeats))
        others = [context.Process(target=spin, args=(core,), daemon=True) for core in cores]
        for other in others:
            other.start()
        time.sleep(1)
        busy = statistics.mean(_cpu.pool_time(2, threads * 6, int(work_us * 1000), 0, repeats))
        for other in others:
            other.kill()
            other.join()
        ratios.append(busy / quiet)
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", default=str(cpu.threads()), help="pool sizes, separated by commas")
    parser.add_argument("--rounds", type=int, default=3, help="pairs of quiet and busy runs")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    sizes = [int(n) for n in options.threads.split(",")]
    found: dict[str, Any] = {"machine": identity(), "pools": [measure(n) for n in sizes]}
    for figures in found["pools"]:
        print("  ".join(f"{name} {value:.2f}" for name, value in figures.items()))
    for work in (10, 100):
        ratios = neighbour(max(sizes), work, options.rounds)
        found[f"busy_ratio_{work}us"] = ratios
        print(f"a busy neighbour on every core, chunks of {work} us: {statistics.median(ratios):.2f} x")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
