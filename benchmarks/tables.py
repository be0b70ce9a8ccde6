"""Measure how long rows of a table on disk take, and how many of them a cache finds again in real text.

    python benchmarks/tables.py --gib 4 --tokenizer tokenizer.json --text moby_dick.txt --json out.json

A table of random rows is written to --folder. "Cold" is with the file taken out of the page cache before,
"page cache" right after, through a cache of rows that is empty, "row cache" once more: each the median of
--rounds. Beside them ways to read that are not used: one row after the other, and by threads. With texts,
n-grams of texts (two and three tokens, eight rows each, as qwen4_exp has them) are looked up in caches of
several sizes, a token at a time from an empty cache, and a prompt of 4096 tokens is read from the file.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from hetero.store.rowcache import RowCache
from hetero.store.rows import CachedRows, RowFiles, Run

ROW, HEADS = 320, 8
START = 24  # of the table in its file, so that rows lie across blocks
CACHES = (16, 64, 256)  # MiB


def write(path: Path, gib: float) -> RowFiles:
    some = np.random.default_rng(0).integers(0, 256, 64 << 20, dtype=np.uint8)
    with path.open("wb", buffering=0) as file:
        for _ in range(max(1, round(gib * 16))):
            file.write(some.data)
        os.fsync(file.fileno())
    return RowFiles([Run(path, "table", START, (path.stat().st_size - START) // ROW)], ROW)


def drop(path: Path) -> None:
    """Take a file out of the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def filled(files: RowFiles, mib: int) -> CachedRows:
    """An empty cache whose memory is there."""
    made = CachedRows(files, mib << 20)
    made._cache.rows.fill(0)
    return made


def timed(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1e3


def by_rows(files: RowFiles, rounds: int, rng: np.random.Generator) -> list[dict[str, float]]:
    """Milliseconds for so many rows, by way."""
    path, found = files.files[0], []
    pool = ThreadPoolExecutor(16)
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    def one_by_one(ids: np.ndarray) -> None:
        for row in ids.tolist():
            os.pread(descriptor, ROW, START + row * ROW)

    def threads(ids: np.ndarray) -> None:
        list(pool.map(one_by_one, np.array_split(ids, min(len(ids), 16))))

    for rows in (16, 128, 4096):
        times: dict[str, list[float]] = {}
        for _ in range(rounds):
            ids = np.unique(rng.integers(0, files.rows, rows))
            into = np.empty((len(ids), ROW), dtype=np.uint8)
            cached, none = filled(files, 64), CachedRows(files, 0)
            ways: dict[str, tuple[bool, Callable[[], Any]]] = {
                "one by one": (True, lambda ids=ids: one_by_one(ids)),
                "threads": (True, lambda ids=ids: threads(ids)),
                "reads alone": (True, lambda ids=ids, into=into: files.read(ids, into)),
                "cold": (True, lambda ids=ids, none=none: none.gather(ids)),
                "page cache": (False, lambda ids=ids, cached=cached: cached.gather(ids)),
                "row cache": (False, lambda ids=ids, cached=cached: cached.gather(ids)),
            }
            for way, (is_cold, call) in ways.items():
                if is_cold:
                    drop(path)
                times.setdefault(way, []).append(timed(call))
        found.append({"rows": rows, **{way: median(each) for way, each in times.items()}})
    os.close(descriptor)
    return found


def ngrams(tokens: list[int], total: int) -> np.ndarray:
    """Rows [n, 16] of a table of ``total``, as qwen4_exp finds them: a part of it for each head."""
    ids, rng = np.array(tokens, dtype=np.int64), np.random.default_rng(5)
    factors = rng.integers(1, 2**44, 3) | 1
    part = total // (2 * HEADS)
    sizes = part - 2 * np.arange(2 * HEADS) - 1
    out = np.empty((len(ids) - 2, 2 * HEADS), dtype=np.int64)
    mixed = ids[2:] * factors[0]
    for back in (1, 2):
        mixed = mixed ^ (ids[2 - back : len(ids) - back] * factors[back])
        heads = slice((back - 1) * HEADS, back * HEADS)
        out[:, heads] = mixed[:, None] % sizes[heads] + np.arange(2 * HEADS)[heads] * part
    return out


def hit_rate(rows: np.ndarray, total: int, mib: int) -> float:
    cache = RowCache(total, ROW, mib << 20)
    for one in rows:
        wanted = np.unique(one)
        absent = wanted[cache.use(wanted) < 0]
        cache.admit(absent, np.zeros((len(absent), ROW), dtype=np.uint8))
    return cache.stats.hit_rate or 0.0


def of_text(files: RowFiles, tokens: list[int], count: int) -> dict[str, Any]:
    rows = ngrams(tokens[: count + 2], 320_001_536)
    prompt = ngrams(tokens[:4098], files.rows).ravel()
    cached = filled(files, 64)
    drop(files.files[0])
    return {
        "tokens": len(rows),
        "found again": {f"{mib} MiB": hit_rate(rows, 320_001_536, mib) for mib in CACHES},
        "prompt rows": len(np.unique(prompt)),
        "prompt cold ms": timed(lambda: cached.gather(prompt)),
        "prompt again ms": timed(lambda: cached.gather(prompt)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--text", type=Path, nargs="*", default=[])
    parser.add_argument("--tokens", type=int, default=100_000, help="of each text")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        files = write(Path(folder) / "table.bin", given.gib)
        times = by_rows(files, given.rounds, np.random.default_rng())
        found: dict[str, Any] = {"gib": given.gib, "ms": times}
        for line in times:
            print(", ".join(f"{way} {value:.3f}" for way, value in line.items()))
        if given.tokenizer is not None:
            from tokenizers import Tokenizer

            tokenizer = Tokenizer.from_file(str(given.tokenizer))
            for text in given.text:
                tokens = tokenizer.encode(text.read_text(encoding="utf-8")).ids
                found[text.name] = of_text(files, tokens, given.tokens)
                print(text.name, found[text.name])
    if given.json is not None:
        found["load"] = os.getloadavg()
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
