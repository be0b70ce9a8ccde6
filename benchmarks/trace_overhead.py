"""What recording costs a decode step of the demo model: steps with it and without take turns, by medians.

``python benchmarks/trace_overhead.py [pairs]`` prints one line of JSON. Turns, so that both meet the same
load of the machine. A loop over the calls would not do: between two layers their code leaves the caches.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from contextlib import nullcontext
from operator import sub

import torch

from hetero.config import wait_passively
from hetero.engine.forward import Stepper
from hetero.engine.load import load_model
from hetero.model import hf
from hetero.model.demo import default_model
from hetero.trace import recorder


def main() -> None:
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    wait_passively()
    hf.quiet()
    loaded = load_model(default_model().path)
    times: dict[bool, list[float]] = {False: [], True: []}
    with torch.inference_mode():
        sequence = Stepper(loaded.runnable.model).start()
        sequence.advance(list(range(32)))
        for turn in range(2 * pairs + 20):
            # Which of the two is first changes every pair, so that a growing cache favours neither.
            watched = (turn + turn // 2) % 2 == 1
            with recorder.recording() if watched else nullcontext():
                began = time.perf_counter()
                sequence.advance([turn % 1000])
                took = time.perf_counter() - began
            if turn >= 20:
                times[watched].append(took)
    off, on = (statistics.median(times[key]) * 1e3 for key in (False, True))
    print(
        json.dumps(
            {
                "pairs": pairs,
                "step_ms": round(off, 3),
                "recorded_step_ms": round(on, 3),
                "difference": round(on / off - 1, 4),
                "median_of_pairs_ms": round(statistics.median(map(sub, times[True], times[False])) * 1e3, 3),
            }
        )
    )


if __name__ == "__main__":
    main()
