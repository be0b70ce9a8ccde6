"""What the server costs: one stream against ``hetero run``'s engine, and eight streams against one.

    python benchmarks/serve_overhead.py --rounds 7 --json overhead.json [MODEL]

The same request goes to ``hetero run --json`` and to a running ``hetero serve`` in turns, so that what else
the machine does meets both. Of tokens per second and of the time to first token the medians are compared; the
server's are those that a client sees on its socket, the run's those of the engine itself.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

READY = re.compile(rb"serving \S+ on (http://\S+) ")
PROMPT = "Once upon a time there was a whale that"


def run_once(model: list[str], tokens: int, options: list[str]) -> tuple[float, float]:
    """(tokens per second, time to first token in seconds) of ``hetero run``."""
    words = [
        sys.executable,
        "-m",
        "hetero.cli",
        "run",
        *model,
        "-p",
        PROMPT,
        "--raw",
        "--json",
        "--ignore-eos",
    ]
    words += ["--max-tokens", str(tokens), *options]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    times = json.loads(done.stdout)["timings"]
    return times["decode_tok_s"], times["ttft_s"]


def stream_once(url: str, tokens: int, number: int = 0) -> tuple[float, float]:
    """The same of one stream, by the clock of a client; ``number`` makes prompts differ."""
    body = {"prompt": PROMPT + " " * number, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    began = time.perf_counter()
    first = last = 0.0
    with (
        httpx.Client(base_url=url, timeout=600) as client,
        client.stream("POST", "/v1/completions", json=body | {"stream": True, "logprobs": 0}) as answer,
    ):
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            choices = json.loads(line[6:])["choices"]
            if choices and choices[0]["text"]:
                last = time.perf_counter()
                first = first or last
    return (tokens - 1) / (last - first), first - began


def streams(url: str, tokens: int, count: int) -> float:
    """Tokens per second of ``count`` streams together."""
    began = time.perf_counter()
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(lambda number: stream_once(url, tokens, number), range(count)))
    return count * tokens / (time.perf_counter() - began)


def measure(url: str, model: list[str], options: list[str], rounds: int, tokens: int) -> dict[str, Any]:
    """All figures, in turns."""
    stream_once(url, tokens)  # warm
    alone: list[tuple[float, float]] = []
    served: list[tuple[float, float]] = []
    for _ in range(rounds):
        alone.append(run_once(model, tokens, options))
        served.append(stream_once(url, tokens))
    one, eight = [], []
    for _ in range(rounds):
        one.append(streams(url, tokens, 1))
        eight.append(streams(url, tokens, 8))
    median = statistics.median
    return {
        "rounds": rounds,
        "tokens": tokens,
        "run_tok_s": median(rate for rate, _ in alone),
        "serve_tok_s": median(rate for rate, _ in served),
        "rate_ratio": median(rate for rate, _ in served) / median(rate for rate, _ in alone),
        "run_ttft_ms": median(first for _, first in alone) * 1e3,
        "serve_ttft_ms": median(first for _, first in served) * 1e3,
        "one_stream_tok_s": median(one),
        "eight_streams_tok_s": median(eight),
        "eight_by_one": median(eight) / median(one),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--set", dest="sets", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    model = [args.model] if args.model else []
    options = [word for value in args.sets for word in ("--set", value)]
    with tempfile.TemporaryFile() as heard:
        # Without reuse of prefixes: `hetero run` has none, and both must read the same prompt.
        words = [
            sys.executable,
            "-m",
            "hetero.cli",
            "serve",
            *model,
            "--port",
            "0",
            "--no-prefix-cache",
            *options,
        ]
        server = subprocess.Popen(words, stderr=heard)
        try:
            found = None
            while found is None:
                if server.poll() is not None:
                    heard.seek(0)
                    print(heard.read().decode())
                    return 1
                heard.seek(0)
                found = READY.search(heard.read())
                time.sleep(0.1)
            result = measure(found[1].decode(), model, options, min(args.rounds, 50), min(args.tokens, 1000))
        finally:
            server.terminate()
            server.wait(60)
    rates = f"run {result['run_tok_s']:.1f}  serve {result['serve_tok_s']:.1f}"
    print(f"tok/s    {rates}  ratio {result['rate_ratio']:.3f}")
    extra = result["serve_ttft_ms"] - result["run_ttft_ms"]
    print(f"TTFT ms  run {result['run_ttft_ms']:.1f}  serve {result['serve_ttft_ms']:.1f}  more {extra:.1f}")
    print(
        f"streams  one {result['one_stream_tok_s']:.1f}  eight {result['eight_streams_tok_s']:.1f} tok/s  "
        f"ratio {result['eight_by_one']:.2f}"
    )
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
