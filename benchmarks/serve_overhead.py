"""What the server costs: one stream against ``hetero run``'s engine, and eight streams against one.

    python benchmarks/serve_overhead.py --rounds 20 --json overhead.json [MODEL]
    python benchmarks/serve_overhead.py --cpu     # CPU time by threads, around a model that costs nothing

The same request goes to what ``hetero run`` does once its model is loaded and to a running ``hetero serve``
in turns, so that what else the machine does meets both. The times are those of whoever reads the text: the
server's at a socket, the run's at the pipe that it writes to. A short request that is not counted goes before
each: memory that a process has not touched for seconds is slow to come back, which is the machine's and meets
``hetero run`` as well.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from served import serving

# Tokens of a request that only warms.
WARM = 8
# After the text of a run.
END = b"\0"
PROMPT = "Once upon a time there was a whale that"


class Other:
    """This file with ``words`` in a process of its own, which answers lines by lines of JSON."""

    def __init__(self, *words: str) -> None:
        command = [sys.executable, __file__, *words]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, line: str) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(line, file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class Alone(Other):
    """What ``hetero run`` does, with one load for all runs, so that turns are seconds apart."""

    def __init__(self, model: list[str], sets: list[str]) -> None:
        super().__init__(*model, "--engine", *[word for value in sets for word in ("--set", value)])

    def run(self, tokens: int) -> tuple[float, float]:
        """(tokens per second, time to first token in seconds), as whoever reads the text sees them."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        began = time.perf_counter()
        print(tokens, file=self._process.stdin, flush=True)
        times: list[float] = []
        part = b""
        while not part.endswith(END):
            part = os.read(self._process.stdout.fileno(), 1 << 16)
            if not part:
                raise ConnectionError("the engine has ended")
            times.append(time.perf_counter())
        # The last part is the end of the line, after the last token.
        return (tokens - 1) / (times[-2] - times[0]), times[0] - began


def engine(model: str | None, sets: list[str]) -> None:
    """The other side of ``Alone``: answers every line of stdin by one run, as ``hetero run`` shows it."""
    from hetero.config import wait_passively

    wait_passively()
    from hetero.engine.generate import Engine
    from hetero.engine.load import load_model
    from hetero.engine.request import Request
    from hetero.model.demo import default_model
    from hetero.rules.variables import parse_set
    from hetero.terminal import stream_answer

    loaded = load_model(model or default_model().path, overrides=parse_set(sets))
    assert loaded.tokenizer is not None
    runner = Engine(loaded.runnable)
    for line in sys.stdin:
        stream_answer(
            runner, Request(tuple(loaded.tokenizer.encode(PROMPT)), max_tokens=int(line), ignore_eos=True)
        )
        sys.stdout.buffer.write(END)
        sys.stdout.flush()


def stream_once(url: str, tokens: int, number: int = 0) -> tuple[float, float]:
    """The same of one stream, by the clock of a client; ``number`` makes prompts differ.

    A client that only takes what comes, for its own work is done on the same cores: it reads afterwards.
    """
    body = {"prompt": PROMPT + " " * number, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    where = urlsplit(url)
    address = (where.hostname or "", where.port or 80)
    with socket.create_connection(address, timeout=600) as connection:
        # The connection is known, as it is with any client that has asked before.
        connection.sendall(_request("GET", "/health/live", b""))
        list(_received(connection, b"}"))
        words = _request("POST", "/v1/completions", json.dumps(body | {"stream": True}).encode())
        began = time.perf_counter()
        connection.sendall(words)
        received = list(_received(connection, b"\r\n0\r\n\r\n"))
    times = [at for at, part in received if _has_text(part)]
    # A few tokens may have come at once.
    seconds = times[-1] - times[0]
    return (tokens - 1) / seconds if seconds else math.inf, times[0] - began


def _received(connection: socket.socket, end: bytes) -> Iterator[tuple[float, bytes]]:
    """What comes and when, until ``end`` has come."""
    last = b""
    while not last.endswith(end):
        part = connection.recv(1 << 16)
        if not part:
            raise ConnectionError(f"the answer has no end: {last!r}")
        yield time.perf_counter(), part
        last = (last + part)[-1000:]


def _request(method: str, path: str, body: bytes) -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
    return f"{head}content-type: application/json\r\n\r\n".encode() + body


def _has_text(part: bytes) -> bool:
    """Whether an event with text is within what came at once; the server sends no event in parts."""
    events = [line[6:] for line in part.split(b"\n") if line.startswith(b"data: {")]
    return any(choice["text"] for event in events for choice in json.loads(event)["choices"])


def streams(url: str, tokens: int, count: int) -> float:
    """Tokens per second of ``count`` streams together."""
    began = time.perf_counter()
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(lambda number: stream_once(url, tokens, number), range(count)))
    return count * tokens / (time.perf_counter() - began)


def measure(url: str, alone: Alone, rounds: int, tokens: int) -> dict[str, Any]:
    """All figures. What is compared ran one after the other, and the median is that of the comparisons."""

    def of_run() -> tuple[float, float]:
        alone.run(WARM)
        return alone.run(tokens)

    def of_server() -> tuple[float, float]:
        stream_once(url, WARM)
        return stream_once(url, tokens)

    of_run(), of_server()
    pairs = []
    for turn in range(rounds):
        # Who is first takes turns as well.
        if turn % 2:
            served, run = of_server(), of_run()
        else:
            run, served = of_run(), of_server()
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


def client(url: str) -> None:
    """Answers every line of stdin, "requests tokens", by the CPU milliseconds that its own work took."""
    for line in sys.stdin:
        requests, tokens = map(int, line.split())
        began = time.process_time()
        for _ in range(requests):
            stream_once(url, tokens)
        print(json.dumps((time.process_time() - began) * 1e3), flush=True)


def cpu(tokens: int, rounds: int) -> dict[str, Any]:
    """CPU milliseconds and sleeps of every thread around a model that costs nothing; medians."""
    from instant import engine_alone, instant_server

    def of(requests: int, tokens: int) -> dict[str, tuple[float, float]]:
        before = server.used()
        client_ms = browser.ask(f"{requests} {tokens}")
        after = server.used()
        found = {
            name: (after[name].ms - before[name].ms, after[name].sleeps - before[name].sleeps)
            for name in after
        }
        return found | {"client": (client_ms, 0)}

    with instant_server() as server:
        browser = Other("--client", server.url)
        try:
            of(3, 16)
            # What a request costs once is the same for both lengths.
            runs = [(of(8, 2), of(1, 2), of(1, tokens + 2)) for _ in range(rounds)]
        finally:
            browser.close()
    median = statistics.median
    each = {}
    for name in runs[0][0]:
        each[name] = {
            "token_ms": median((long[name][0] - short[name][0]) / tokens for _, short, long in runs),
            "token_sleeps": median((long[name][1] - short[name][1]) / tokens for _, short, long in runs),
            "request_ms": median(eight[name][0] / 8 for eight, _, _ in runs),
        }
    return {"tokens": tokens, "rounds": rounds, "run_token_ms": engine_alone(PROMPT, tokens), "threads": each}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--set", dest="sets", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument(
        "--cpu", action="store_true", help="CPU time of each thread around a model that costs nothing"
    )
    parser.add_argument("--client", metavar="URL", help=argparse.SUPPRESS)
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        engine(args.model, args.sets)
        return 0
    if args.client:
        client(args.client)
        return 0
    rounds, tokens = min(max(args.rounds, 2), 100), min(args.tokens, 1000)
    if args.cpu:
        result = cpu(tokens, rounds)
        print(f"hetero run's engine: {result['run_token_ms']:.3f} ms a token")
        for name, use in result["threads"].items():
            print(
                f"{name:7} {use['token_ms']:.3f} ms and {use['token_sleeps']:.2f} sleeps a token, "
                f"{use['request_ms']:.2f} ms a request of two tokens"
            )
        if args.json:
            Path(args.json).write_text(json.dumps(result, indent=2) + "\n")
        return 0
    model = [args.model] if args.model else []
    options = [word for value in args.sets for word in ("--set", value)]
    # Without reuse of prefixes: `hetero run` has none, and both must read the same prompt.
    with serving(*model, "--no-prefix-cache", *options) as (_, url):
        alone = Alone(model, args.sets)
        try:
            result = measure(url, alone, rounds, tokens)
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
