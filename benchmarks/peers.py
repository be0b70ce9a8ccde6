"""Compare the experts with public CPU engines: same shape, same threads, in turns, each in its own process.

Our figures and kt-kernel's are of the expert operator alone. ik_llama.cpp and llama.cpp can only run whole
models: theirs is a synthetic model of as many layers, whose dense half is tiny, divided by the layers that
ran. An engine takes part where its interpreter is given; between its turns it is stopped, so that threads
that spin disturb nobody.

    python benchmarks/peers.py --shape qwen3.8-flash-next-125b --layers 4 --threads 15 \\
        --kt PYTHON --ik PYTHON --llama PYTHON --json benchmarks/results/peers.json
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from experts import read_shapes

from hetero.hw.cpu import identity

HERE = Path(__file__).parent / "peers"
MARK = "@@"
FORMATS = {  # bits -> engine -> its name of the nearest format
    "4": {"ours": "int4 g32", "kt": "int4", "ik": "q4_0", "llama": "q4_0"},
    "8": {"ours": "int8 g32", "kt": "int8", "ik": "q8_0", "llama": "q8_0"},
    "16": {"ours": "bf16", "kt": "bf16", "ik": "bf16", "llama": "bf16"},
}
NAMES = {"ours": "hetero", "kt": "kt-kernel", "ik": "ik_llama.cpp", "llama": "llama.cpp"}
SCRIPTS = {"ours": "ours.py", "kt": "kt.py", "ik": "llama.py", "llama": "llama.py"}
KINDS = ("decode", "prefill")


class Engine:
    """The process of one engine; what it wrote last is told when it fails."""

    def __init__(self, name: str, interpreter: str, job: dict[str, Any]) -> None:
        self.name = name
        self.seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by end)
        self.process = subprocess.Popen(
            [interpreter, str(HERE / SCRIPTS[name]), json.dumps(job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            errors="replace",
        )
        try:
            self.ready = self._answer()
        except BaseException:
            self.process.kill()
            raise
        self.process.send_signal(signal.SIGSTOP)

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(MARK):
                return json.loads(line[len(MARK) :])
        self.log.seek(0)
        raise RuntimeError(f"{self.name} ended ({self.process.wait()}): {self.log.read()[-1500:]}")

    def turn(self, kind: str) -> None:
        """One turn: the median of its steps is one figure."""
        assert self.process.stdin is not None
        self.process.send_signal(signal.SIGCONT)
        self.process.stdin.write(kind + "\n")
        self.process.stdin.flush()
        self.seconds[kind].append(statistics.median(self._answer()))
        self.process.send_signal(signal.SIGSTOP)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.log.close()


def start(
    engines: dict[str, str], bits: str, job: dict[str, Any], folder: str
) -> tuple[list[Engine], dict[str, str]]:
    """The engines that start in this format, and why the others do not. Model files go to ``folder``."""
    found, failures = [], {}
    for name, interpreter in engines.items():
        fmt = FORMATS[bits][name]
        mine = {**job, "format": fmt, "model": f"{folder}/{fmt}.gguf"}
        try:
            if SCRIPTS[name] == "llama.py" and not Path(mine["model"]).exists():
                made = subprocess.run(
                    [interpreter, str(HERE / "make_gguf.py"), json.dumps(mine)],
                    check=False,
                    capture_output=True,
                    text=True,
                )
                if made.returncode:
                    raise RuntimeError(f"make_gguf.py: {made.stderr[-1500:]}")
            found.append(Engine(name, interpreter, mine))
        except (RuntimeError, OSError) as error:
            failures[name] = str(error)
            print(f"{NAMES[name]}, {bits} bits: {error}", file=sys.stderr)
    return found, failures


def compare(found: list[Engine], rounds: int, failures: dict[str, str]) -> list[float]:
    """Rounds of turns, the first engine another one each time; returns the load of the machine at each.

    An engine that dies leaves ``found``, and ``failures`` says in which kind of turn; what it measured in the
    other kind is lost with it.
    """
    loads = []
    for number in range(rounds):
        loads.append(os.getloadavg()[0])
        for kind in KINDS:
            for engine in [found[(number + i) % len(found)] for i in range(len(found))]:
                try:
                    engine.turn(kind)
                except (RuntimeError, OSError) as error:
                    failures[engine.name] = f"{kind}: {error}"
                    print(f"{NAMES[engine.name]}, {failures[engine.name]}", file=sys.stderr)
                    found.remove(engine)
                    engine.end()
    return loads


def lines(found: list[Engine], bits: str, job: dict[str, Any]) -> list[dict[str, Any]]:
    """One result an engine and kind, with its ratio to ours of each round (over 1: ours is faster)."""
    ours = next((e for e in found if e.name == "ours"), None)
    results = []
    for engine in found:
        for kind in KINDS:
            times = engine.seconds[kind]
            median = statistics.median(times)
            ratios = [t / o for t, o in zip(times, ours.seconds[kind], strict=True)] if ours else []
            result = {
                "engine": NAMES[engine.name],
                "bits": int(bits),
                "format": FORMATS[bits][engine.name],
                "layers": job["layers"],
                "kind": kind,
                "tokens": 1 if kind == "decode" else job["tokens"],
                "whole_model": engine.name in ("ik", "llama"),
                "seconds_a_layer": times,
                "median_s": median,
                "ratios_to_ours": ratios,
                **engine.ready,
            }
            if kind == "decode":
                result["gb_s"] = job["top_k"] * engine.ready["expert_bytes"] / median / 1e9
            results.append(result)
    return results


def show(results: list[dict[str, Any]]) -> None:
    for r in results:
        ratio = r["ratios_to_ours"] or [float("nan")]
        print(
            f"{r['bits']:2} bits {r['engine']:13} {r['format']:9} {r['kind']:8}{r['tokens']:5} "
            f"{r['median_s'] * 1e3:9.3f} ms  "
            f"x {statistics.median(ratio):5.2f} ({min(ratio):.2f}-{max(ratio):.2f})  "
            f"error {r['error']:.4f}"
            + (f"  {r['gb_s']:6.1f} GB/s" if "gb_s" in r else "")
            + (f" of {r['read_gb_s']:.1f}" if "read_gb_s" in r and "gb_s" in r else "")
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", default="qwen3.8-flash-next-125b", help="name in benchmarks/shapes")
    parser.add_argument("--experts", type=int, help="fewer experts than the shape has, where memory is short")
    parser.add_argument("--layers", type=int, default=4, help="in turn, at least 2; at 16 bits half as many")
    parser.add_argument("--bits", nargs="+", choices=list(FORMATS), default=list(FORMATS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=1024, help="of a prefill")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5, help="about, of one turn")
    parser.add_argument("--json", type=Path)
    for name in ("kt", "ik", "llama"):
        parser.add_argument(f"--{name}", metavar="PYTHON", help=f"an interpreter that has {NAMES[name]}")
    options = parser.parse_args()
    if options.layers < 2:
        parser.error("--layers must be at least 2: the last layer of a whole model does not run in a prefill")
    engines = {"ours": sys.executable}
    engines |= {name: given for name in ("kt", "ik", "llama") if (given := getattr(options, name))}
    ((_, spec),) = read_shapes([options.shape])
    results: list[dict[str, Any]] = []
    failures: dict[str, dict[str, str]] = {}
    loads: dict[str, list[float]] = {}
    for bits in options.bits:
        began = time.perf_counter()
        job = {
            "hidden": spec.hidden,
            "intermediate": spec.intermediate,
            "experts": options.experts or spec.num_experts,
            "top_k": spec.top_k,
            "layers": options.layers if bits != "16" else max(2, options.layers // 2),
            "threads": options.threads,
            "tokens": options.tokens,
            "seconds": options.seconds,
        }
        with tempfile.TemporaryDirectory() as folder:
            found, failures[bits] = start(engines, bits, job, folder)
            try:
                loads[bits] = compare(found, options.rounds, failures[bits])
            finally:
                for engine in found:
                    engine.end()
        results += lines(found, bits, job)
        print(
            f"{bits} bits: {time.perf_counter() - began:.0f} s, load {max(loads[bits]):.1f}", file=sys.stderr
        )
        if options.json:  # after each format: a run that is cut short keeps what it has
            document = {
                "machine": identity(),
                "threads": options.threads,
                "shape": options.shape,
                "experts": options.experts or spec.num_experts,
                "load": loads,
                "failures": failures,
                "results": results,
            }
            options.json.write_text(json.dumps(document, indent=1) + "\n")
    show(results)


if __name__ == "__main__":
    main()
