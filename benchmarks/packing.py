"""Measure how fast experts are packed, how fast a start from a file of packed experts is, and peak memory.

    python benchmarks/packing.py --gib 2 --formats int8 int4 bf16 --json results.json
    python benchmarks/packing.py --reads 12
    python benchmarks/packing.py --gib 2 --marginal 3 --formats int8 --json results.json
    python benchmarks/packing.py --sources --formats int8 "int4 g32" bf16

A checkpoint in bfloat16 is written to --folder, and read past or out of the page cache: its pages are dropped
before each run. Each figure is of a process of its own, the best of --rounds, beside plain writes of fresh
memory. Shares of the disk are the middle ones of the rounds, each beside plain direct reads of the same file
right after it: into 16 MiB, and into memory as large as what is filled, the limit of a start (a load's is its
window for reads). Where a host copies what it reads, memory beyond its caches is the slower one by a quarter.

A virtual machine may give memory that is free for some seconds back to its host, which must find the pages
again when they are written (/sys/module/page_reporting). So there are two figures of each kind: "found", of
memory as it is after a pause, beside first writes to such memory; and "ready", of a process that has written
to as much memory before and given it back, beside writes that follow each other. Without a host both are one.

--marginal tells what a model costs whatever its size from what each GB costs: runs of the whole checkpoint
and of an eighth of it, in turns, in seconds and in processor seconds, which a busy machine changes less.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

RULES = """
rules:
  - name: experts
    match: {{class: MoeBlock}}
    replace: {{op: moe, experts: {{format: {format}}}}}
  - name: the rest
    match: {{name: '.*'}}
    replace: {{op: keep}}
"""


def drop(path: Path) -> None:
    """Take a file out of the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


WINDOW = 16 << 20
"""Bytes of memory that plain reads use again and again."""


def disk_read(path: Path, window: int = WINDOW) -> float:
    """Bytes a second of plain direct reads of a file, as many in flight as hetero has, into so many bytes of
    memory that is in use before; of all of the file: each byte has a place of its own."""
    import numpy as np

    from hetero.hw.pages import Pages
    from hetero.store.reads import IN_FLIGHT, PIECE, DirectFile, anonymous, settle, submit

    file = DirectFile(path)
    pieces = file.size // PIECE
    window = min(pieces * PIECE, window)
    memory = anonymous(window)
    Pages(np.frombuffer(memory, np.uint8).ctypes.data, window).bring(0, window)
    view = memoryview(memory)
    began = time.perf_counter()

    def stream(start: int) -> None:
        for piece in range(start, pieces, IN_FLIGHT):
            at = piece * PIECE % window
            file.read(piece * PIECE, view[at : at + PIECE])

    settle([submit(stream, start) for start in range(IN_FLIGHT)])
    seconds = time.perf_counter() - began
    file.close()
    return pieces * PIECE / seconds


def memory_write(nbytes: int) -> float:
    """Bytes a second of first writes to fresh memory by torch's threads."""
    import torch

    began = time.perf_counter()
    torch.full((nbytes // 8,), 1, dtype=torch.int64)
    return nbytes / (time.perf_counter() - began)


STATES = ("found", "ready")
PAUSE = 5.0
"""Seconds in which a virtual machine gives its free memory back."""


def touch(nbytes: int) -> None:
    """Have the host find so much memory, which is free again after it."""
    import numpy as np

    from hetero.hw.pages import Pages
    from hetero.store.reads import anonymous

    memory = np.frombuffer(anonymous(nbytes), np.uint8)
    Pages(memory.ctypes.data, nbytes).bring(0, nbytes)


def child(kind: str, folder: Path, rules: Path, cache: Path, ready: int = 0) -> dict[str, Any]:
    """One load or pack in this process: seconds, and the peak of its memory beside what it began with.

    ``ready``: bytes of memory that the host shall have found before."""
    os.environ["HETERO_CACHE"] = str(cache)
    os.environ["HETERO_TUNE"] = "off"
    from hetero.engine.experts import StoreOptions
    from hetero.engine.load import load_model, pack_model
    from hetero.hw.memory import _status
    from hetero.model import hf

    hf.quiet()
    if ready:
        touch(ready)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status(Path("/"), "VmRSS:")
    began, cpu = time.perf_counter(), time.process_time()
    notes: tuple[str, ...] = ()
    weights = 0
    if kind == "pack":
        packed = pack_model(folder, cache / "packed", rules=rules, force=True)
        weights = packed.nbytes
    else:
        loaded = load_model(
            folder, rules=rules, dtype="bfloat16", store=StoreOptions("auto" if kind == "cache" else "off")
        )
        weights = loaded.expert_bytes + sum(w.nbytes for w in loaded.runnable.model.parameters())
        notes = loaded.notes
        assert (kind == "cache") == any("were read from" in note for note in notes), notes
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    peak = _status(Path("/"), "VmHWM:") - before
    return {"seconds": seconds, "cpu": cpu, "weights": weights, "peak": peak}


def measured(
    kind: str, folder: Path, rules: Path, cache: Path, rounds: int, *, ready: int = 0
) -> dict[str, Any]:
    """The fastest of the rounds; and the middle one of the shares of what plain reads beside each reach: of
    "disk", into little memory, and of "into", into as much as a start fills or a load reads ahead."""
    from hetero.model.ahead import AHEAD

    best: dict[str, Any] = {}
    shares: dict[str, list[float]] = {"disk": [], "into": []}
    for _ in range(rounds):
        packed = list(cache.glob("packed/*.hpack"))
        source = packed[0] if kind == "cache" else folder / "model.safetensors"
        if not ready:
            time.sleep(PAUSE)
        for path in [*folder.glob("*.safetensors"), *packed]:
            drop(path)
        where = [str(folder), str(rules), str(cache), str(ready)]
        command = [sys.executable, __file__, "--child", kind, *where]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr)
        found = json.loads(done.stdout.splitlines()[-1])
        if kind != "pack":
            found["disk"] = disk_read(source)
            found["into"] = disk_read(source, 1 << 60 if kind == "cache" else AHEAD)
            for name, each in shares.items():
                each.append(source.stat().st_size / found["seconds"] / found[name])
        if not best or found["seconds"] < best["seconds"]:
            best = found
    middle = {f"{name}_share": sorted(each)[len(each) // 2] for name, each in shares.items() if each}
    return best | middle


def sources(formats: list[str]) -> list[dict[str, Any]]:
    """GB of plain weights that one core packs in a second of its time, into an arena in use before."""
    import torch

    from hetero import cpu
    from hetero.core import ExpertSpec
    from hetero.formats import parse_format

    cpu.set_threads(1)
    torch.set_num_threads(1)
    shapes = {"gate": (1024, 2048), "up": (1024, 2048), "down": (2048, 1024)}
    rows = []
    for fmt in formats:
        experts = cpu.CpuExperts(ExpertSpec(8, 2048, 1024, 2), parse_format(fmt))
        row: dict[str, Any] = {"format": fmt}
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            weights = {part: (torch.randn(shape) * 0.02).to(dtype) for part, shape in shapes.items()}
            best = float("inf")
            for _ in range(5):
                began = time.process_time()
                for expert in range(8):
                    experts.vacate(expert)
                    for part, weight in weights.items():
                        experts.put(expert, part, weight)  # type: ignore[arg-type]
                best = min(best, time.process_time() - began)
            row[str(dtype).removeprefix("torch.")] = 8 * sum(w.nbytes for w in weights.values()) / best / 1e9
        print(json.dumps(row), flush=True)
        rows.append(row)
    return rows


def marginal(base: Path, gib: float, fmt: str, rounds: int) -> dict[str, Any]:
    """Fixed cost and cost of each GB: of the checkpoint where it is loaded, of the packed weights where a run
    starts from their file. Of each kind of run the least processor seconds and the least seconds."""
    rules = base / "rules.yaml"
    base.mkdir(parents=True, exist_ok=True)
    rules.write_text(RULES.format(format=fmt))
    parts = {"whole": _checkpoint(base / "whole", gib), "part": _checkpoint(base / "part", gib / 8)}
    file = base / "whole" / "model.safetensors"
    for part in parts:
        measured("pack", base / part, rules, base / f"cache-{part}", 1)
    found: dict[str, Any] = {"format": fmt, "rounds": []}
    for _ in range(rounds):
        drop(file)
        cpu = time.process_time()
        disk = disk_read(file)
        one: dict[str, Any] = {
            "disk_gb_s": disk / 1e9,
            "disk_cpu_s_per_gb": (time.process_time() - cpu) / parts["whole"] * 1e9,
        }
        cpu = time.process_time()
        one["fresh_gb_s"] = memory_write(1 << 30) / 1e9
        one["fresh_cpu_s_per_gb"] = (time.process_time() - cpu) / 2**30 * 1e9
        for kind in ("load", "cache"):
            for part in parts:
                one[f"{kind}_{part}"] = measured(kind, base / part, rules, base / f"cache-{part}", 1)
        print(json.dumps(one), flush=True)
        found["rounds"].append(one)
    for kind in ("load", "cache"):
        sizes = parts if kind == "load" else {p: found["rounds"][0][f"cache_{p}"]["weights"] for p in parts}
        for unit in ("cpu", "seconds"):
            whole, part = (
                min(one[f"{kind}_{p}"][unit] for one in found["rounds"]) for p in ("whole", "part")
            )
            each = (whole - part) / (sizes["whole"] - sizes["part"]) * 1e9
            found[f"{kind}_{unit}_per_gb"], found[f"{kind}_{unit}_fixed"] = (
                each,
                part - each * sizes["part"] / 1e9,
            )
        found[f"{kind}_peak"] = max(
            one[f"{kind}_whole"]["peak"] / one[f"{kind}_whole"]["weights"] for one in found["rounds"]
        )
    for unit in ("disk_gb_s", "fresh_gb_s"):
        found[unit] = max(one[unit] for one in found["rounds"])
    for unit in ("disk_cpu_s_per_gb", "fresh_cpu_s_per_gb"):
        found[unit] = min(one[unit] for one in found["rounds"])
    found["load_disk_share"] = 1 / found["load_seconds_per_gb"] / found["disk_gb_s"]
    found["cache_disk_share"] = 1 / found["cache_seconds_per_gb"] / found["disk_gb_s"]
    print(json.dumps({key: value for key, value in found.items() if key != "rounds"}, indent=1))
    return found


def _checkpoint(folder: Path, gib: float) -> int:
    """Write one of so many GiB of experts; returns their bytes."""
    from tests.store.large import large

    shutil.rmtree(folder, ignore_errors=True)
    layers = 4
    experts = max(4, round(gib * 2**30 / (layers * 3 * 2048 * 1024 * 2)))
    return large(folder, 1, layers=layers, experts=experts, hidden=2048, intermediate=1024)


def reads(folder: Path, rounds: int) -> dict[str, Any]:
    """Plain direct reads of a file of packed experts and reads into fresh arenas, in turns."""
    import torch

    from hetero.core import ExpertSpec
    from hetero.cpu import CpuExperts, checksum
    from hetero.formats import parse_format
    from tests.store.made import empty, read_block, written

    spec = ExpertSpec(64, 2048, 1024, 4)
    experts = CpuExperts(spec, parse_format("int8"))
    for part, shape in (("gate", (1024, 2048)), ("up", (1024, 2048)), ("down", (2048, 1024))):
        experts.put(0, part, torch.randn(shape) * 0.02)  # type: ignore[arg-type]
    for expert in range(1, spec.num_experts):
        experts.copy_expert(0, expert)
    shutil.rmtree(folder, ignore_errors=True)
    path = folder / "x.hpack"
    file = written(path, [experts])
    nbytes, view = file.manifest.nbytes, experts.view(0, spec.num_experts)
    assert view is not None
    cpu = time.process_time()
    checksum(view)
    sums = nbytes / (time.process_time() - cpu)
    found = []
    for _ in range(rounds):
        drop(path)
        disk, fresh = disk_read(path), empty(experts)
        drop(path)
        began, cpu = time.perf_counter(), time.process_time()
        read_block(file, 0, fresh)
        start, cpu = nbytes / (time.perf_counter() - began), nbytes / (time.process_time() - cpu)
        print(
            f"disk {disk / 1e9:.2f} GB/s, start {start / 1e9:.2f} GB/s ({start / disk:.0%}), "
            f"{cpu / 1e9:.1f} GB a second of processor time"
        )
        found.append({"disk": disk, "start": start, "share": start / disk, "cpu": cpu})
    shutil.rmtree(folder)
    shares = sorted(one["share"] for one in found)
    print(f"median {shares[len(shares) // 2]:.0%}; checksums {sums / 1e9:.1f} GB a second of processor time")
    return {"bytes": nbytes, "checksum_cpu": sums, "rounds": found}


def runs(args: argparse.Namespace) -> None:
    """Loads, starts and packs of each format: a table, and a file of all figures."""
    shutil.rmtree(args.folder, ignore_errors=True)
    folder, cache = args.folder / "model", args.folder / "cache"
    source = _checkpoint(folder, args.gib)
    rows = []
    for fmt in args.formats:
        rules = args.folder / f"{fmt}.yaml".replace(" ", "")
        rules.write_text(RULES.format(format=fmt))
        measured("pack", folder, rules, cache, 1)
        for state in STATES:
            time.sleep(PAUSE)
            memory = memory_write(1 << 30)
            if state == "ready":
                memory = max(memory_write(1 << 30) for _ in range(3))
            ready = source * 3 // 2 if state == "ready" else 0
            load = measured("load", folder, rules, cache, args.rounds, ready=ready)
            start = measured("cache", folder, rules, cache, args.rounds, ready=ready)
            pack = measured("pack", folder, rules, cache, args.rounds, ready=ready)
            disk = max(each["disk"] for each in (load, start))
            rows.append(
                {
                    "format": fmt,
                    "memory": state,
                    "disk_read_gb_s": disk / 1e9,
                    "memory_write_gb_s": memory / 1e9,
                    "load_gb_s": source / load["seconds"] / 1e9,
                    "load_share": max(load["disk_share"], source / load["seconds"] / memory),
                    "load_limit_share": load["into_share"],
                    "load_cpu_s": load["cpu"],
                    "load_peak": load["peak"] / load["weights"],
                    "pack_gb_s": source / pack["seconds"] / 1e9,
                    "pack_peak_mib": pack["peak"] / 2**20,
                    "start_gb_s": start["weights"] / start["seconds"] / 1e9,
                    "start_share": start["disk_share"],
                    "start_limit_share": start["into_share"],
                    "disk_into_gb_s": start["into"] / 1e9,
                    "start_cpu_s": start["cpu"],
                    "start_peak": start["peak"] / start["weights"],
                    "source_bytes": source,
                    "packed_bytes": start["weights"],
                }
            )
        shutil.rmtree(cache, ignore_errors=True)
    columns = ("format", "memory", "disk read", "into all", "memory write")
    columns += ("load", "of the slower", "of the limit", "peak/weights", "hetero pack")
    columns += ("start from file", "of the disk", "of the limit", "peak/weights")
    print(f"| {' | '.join(columns)} |")
    print("| --- " * len(columns) + "|")
    for r in rows:
        print(
            f"| {r['format']} | {r['memory']} | {r['disk_read_gb_s']:.2f} | {r['disk_into_gb_s']:.2f} "
            f"| {r['memory_write_gb_s']:.2f} | {r['load_gb_s']:.2f} | {r['load_share']:.0%} "
            f"| {r['load_limit_share']:.0%} | {r['load_peak']:.2f} | {r['pack_gb_s']:.2f} "
            f"| {r['start_gb_s']:.2f} | {r['start_share']:.0%} | {r['start_limit_share']:.0%} "
            f"| {r['start_peak']:.2f} |"
        )
    shutil.rmtree(args.folder, ignore_errors=True)
    if args.json:
        args.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--child", nargs=5, metavar="X", help=argparse.SUPPRESS)
    parser.add_argument("--gib", type=float, default=2.0, help="of the checkpoint's experts")
    parser.add_argument("--formats", nargs="+", default=["int8", "int4", "bf16"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("/tmp"), help="files go to a folder within it")
    parser.add_argument("--reads", type=int, default=0, metavar="ROUNDS", help="reads of a packed file alone")
    parser.add_argument("--sources", action="store_true", help="packing alone, of one core")
    parser.add_argument("--marginal", type=int, default=0, metavar="ROUNDS", help="fixed cost and each GB's")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.folder /= "hetero-packing"  # removed before and after
    if args.child:
        kind, folder, rules, cache, ready = args.child
        print(json.dumps(child(kind, Path(folder), Path(rules), Path(cache), int(ready))))
        return
    alone: dict[str, Any] = {}
    if args.sources:
        alone = {"sources": sources(args.formats)}
    elif args.reads:
        alone = reads(args.folder, args.reads)
    elif args.marginal:
        shutil.rmtree(args.folder, ignore_errors=True)
        alone = {"marginal": [marginal(args.folder, args.gib, fmt, args.marginal) for fmt in args.formats]}
        shutil.rmtree(args.folder)
    if alone:
        if args.json:
            args.json.write_text(json.dumps(alone, indent=1) + "\n")
        return
    runs(args)


if __name__ == "__main__":
    main()
