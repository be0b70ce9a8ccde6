"""What the server costs: one stream against ``hetero run``'s engine, and eight streams against one.

    python benchmarks/serve_overhead.py --rounds 20 --json overhead.json [MODEL]

The same request goes to the engine of ``hetero run`` and to a running ``hetero serve`` in turns, so that what
else the machine does meets both. The server's times are those that a client sees on its socket, the run's
those of the engine itself.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from served import serving

PROMPT = "Once upon a time there was a whale that"


class Alone:
    """The engine of ``hetero run`` in a process of its own, loaded once, so that turns are seconds apart."""

    def __init__(self, model: list[str], sets: list[str]) -> None:
        words = [sys.executable, __file__, *model, "--engine"]
        words += [word for value in sets for word in ("--set", value)]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, tokens: int) -> tuple[float, float]:
        """(tokens per second, time to first token in seconds)."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(tokens, file=self._process.stdin, flush=True)
        rate, first = json.loads(self._process.stdout.readline())
        return rate, first

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def engine(model: str | None, sets: list[str]) -> None:
    """The other side of ``Alone``: answers every line of stdin by one run."""
    from hetero.config import wait_passively

    wait_passively()
    from hetero.engine.generate import Engine
    from hetero.engine.load import load_model
    from hetero.engine.request import Request
    from hetero.model.demo import default_model
    from hetero.rules.variables import parse_set

    loaded = load_model(model or default_model().path, overrides=parse_set(sets))
    assert loaded.tokenizer is not None
    runner = Engine(loaded.runnable)
    for line in sys.stdin:
        request = Request(tuple(loaded.tokenizer.encode(PROMPT)), max_tokens=int(line), ignore_eos=True)
        times = runner.complete(request).timings
        print(json.dumps((times.decode_tok_s, times.ttft_s)), flush=True)


def stream_once(url: str, tokens: int, number: int = 0) -> tuple[float, float]:
    """The same of one stream, by the clock of a client; ``number`` makes prompts differ."""
    body = {"prompt": PROMPT + " " * number, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    first = last = 0.0
    with httpx.Client(base_url=url, timeout=600) as client:
        # The connection is there, as it is with any client that has asked before.
        client.get("/health/live")
        began = time.perf_counter()
        with client.stream("POST", "/v1/completions", json=body | {"stream": True, "logprobs": 0}) as answer:
            lines = [(time.perf_counter(), line) for line in answer.iter_lines()]
        for at, line in lines:
            if not line.startswith("data: {"):
                continue
            choices = json.loads(line[6:])["choices"]
            if choices and choices[0]["text"]:
                last = at
                first = first or last
    return (tokens - 1) / (last - first), first - began


def streams(url: str, tokens: int, count: int) -> float:
    """Tokens per second of ``count`` streams together."""
    began = time.perf_counter()
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(lambda number: stream_once(url, tokens, number), range(count)))
    return count * tokens / (time.perf_counter() - began)


def measure(url: str, alone: Alone, rounds: int, tokens: int) -> dict[str, Any]:
    """All figures. What is compared ran one after the other, and the median is that of the comparisons."""
    alone.run(tokens)
    stream_once(url, tokens)
    pairs = []
    for turn in range(rounds):
        # Who is first takes turns as well.
        if turn % 2:
            served, run = stream_once(url, tokens), alone.run(tokens)
        else:
            run, served = alone.run(tokens), stream_once(url, tokens)
        pairs.append((run, served))
    crowds = [(streams(url, tokens, 1), streams(url, tokens, 8)) for _ in range(max(rounds // 4, 2))]
    median = statistics.median
    ratios = sorted(served[0] / run[0] for run, served in pairs)
    more = sorted((served[1] - run[1]) * 1e3 for run, served in pairs)
    return {
        "rounds": rounds,
        "tokens": tokens,
        "run_tok_s": median(run[0] for run, _ in pairs),
        "serve_tok_s": median(served[0] for _, served in pairs),
        "rate_ratio": {"quartiles": statistics.quantiles(ratios, n=4), "all": ratios},
        "run_ttft_ms": median(run[1] for run, _ in pairs) * 1e3,
        "serve_ttft_ms": median(served[1] for _, served in pairs) * 1e3,
        "ttft_more_ms": {"quartiles": statistics.quantiles(more, n=4), "all": more},
        "one_stream_tok_s": median(one for one, _ in crowds),
        "eight_streams_tok_s": median(eight for _, eight in crowds),
        "eight_by_one": median(eight / one for one, eight in crowds),
        "load_average": os.getloadavg(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--set", dest="sets", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        engine(args.model, args.sets)
        return 0
    model = [args.model] if args.model else []
    options = [word for value in args.sets for word in ("--set", value)]
    # Without reuse of prefixes: `hetero run` has none, and both must read the same prompt.
    with serving(*model, "--no-prefix-cache", *options) as (_, url):
        alone = Alone(model, args.sets)
        try:
            result = measure(url, alone, min(max(args.rounds, 2), 100), min(args.tokens, 1000))
        finally:
            alone.close()
    for name, unit in (("tok_s", "tok/s"), ("ttft_ms", "TTFT ms")):
        key = "rate_ratio" if name == "tok_s" else "ttft_more_ms"
        low, mid, high = result[key]["quartiles"]
        means = "serve by run" if name == "tok_s" else "serve more than run"
        print(f"{unit:8} run {result[f'run_{name}']:.1f}  serve {result[f'serve_{name}']:.1f}  ", end="")
        print(f"{means}: {mid:.3f} ({low:.3f} to {high:.3f})")
    print(
        f"streams  one {result['one_stream_tok_s']:.1f}  eight {result['eight_streams_tok_s']:.1f} tok/s  "
        f"ratio {result['eight_by_one']:.2f}  (load average {result['load_average'][0]:.1f})"
    )
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
