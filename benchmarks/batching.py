"""What slots bring and cost on the demo model: answers alone, one through the scheduler, and many at once.

``python benchmarks/batching.py [turns] [streams] [threads]`` prints one line of JSON: medians of tokens a
second of decode. The ways take turns, so that all meet the same load of the machine, and a ratio is the
median of the turns' own ratios.
"""

from __future__ import annotations

import json
import statistics
import sys
import threading
import time

from hetero.config import wait_passively
from hetero.core import HeteroError
from hetero.engine.generate import Engine
from hetero.engine.load import load_model
from hetero.engine.request import Piece, Request, Result
from hetero.engine.scheduler import Scheduler
from hetero.model import hf
from hetero.model.demo import default_model

TOKENS = 48


class Stream:
    """When the tokens of one answer came."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.done = threading.Event()

    def __call__(self, event: Piece | Result | HeteroError) -> None:
        if isinstance(event, Piece):
            self.times.append(time.perf_counter())
        else:
            self.done.set()


def request(number: int) -> Request:
    prompt = tuple(1000 + 37 * number + 11 * place for place in range(24))
    return Request(prompt, max_tokens=TOKENS, ignore_eos=True)


def alone(engine: Engine) -> float:
    times = [time.perf_counter() for event in engine.stream(request(0)) if isinstance(event, Piece)]
    return (TOKENS - 1) / (times[-1] - times[0])


def together(engine: Scheduler, count: int) -> float:
    """Tokens a second while all of ``count`` answers are being made."""
    streams = [Stream() for _ in range(count)]
    for number, stream in enumerate(streams):
        engine.submit(request(number), stream)
    for stream in streams:
        stream.done.wait()
    began, end = max(s.times[0] for s in streams), min(s.times[-1] for s in streams)
    return sum(began < moment <= end for s in streams for moment in s.times) / (end - began)


def main() -> None:
    turns, streams, threads = (
        int(sys.argv[place]) if len(sys.argv) > place else default
        for place, default in ((1, 5), (2, 8), (3, 0))
    )
    wait_passively()
    hf.quiet()
    run = load_model(default_model().path, threads=threads or None).runnable
    found: dict[str, list[float]] = {"alone": [], "one": [], "many": []}
    for _ in range(turns):
        found["alone"].append(alone(Engine(run)))
        # A scheduler changes the model while it lives.
        engine = Scheduler(run, slots=streams, prefix_cache=False)
        engine.start()
        found["one"].append(together(engine, 1))
        found["many"].append(together(engine, streams))
        engine.close()
    pairs = list(zip(found["alone"], found["one"], found["many"], strict=True))
    print(
        json.dumps(
            {
                **{f"{name}_tok_s": round(statistics.median(rates), 1) for name, rates in found.items()},
                "one_to_alone": round(statistics.median(one / base for base, one, _ in pairs), 3),
                "many_to_alone": round(statistics.median(many / base for base, _, many in pairs), 3),
                "streams": streams,
                "turns": turns,
            }
        )
    )


if __name__ == "__main__":
    main()
