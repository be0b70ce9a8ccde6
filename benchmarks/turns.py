"""Time to first token of a conversation's turns and of requests with one system prompt, with and without what
earlier ones left.

    python benchmarks/turns.py MODEL --system 4096 --new 64 --answer 64
    python benchmarks/turns.py hetero/data/shapes/qwen3.8-flash-next-125b.json --rules qwen-gpu --vram 24GiB

MODEL: a checkpoint, or a config.json for random weights. Prompts are random tokens; every turn adds ``--new``
of them to what was said. Requests come one after the other, to the scheduler of ``hetero serve``.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from pathlib import Path
from typing import Any

from hetero.core import HeteroError
from hetero.engine.answer import Runnable
from hetero.engine.gpu.loading import GpuOptions
from hetero.engine.load import load_model
from hetero.engine.request import Request, Result
from hetero.engine.sample import SamplingParams
from hetero.engine.scheduler import Scheduler
from hetero.plan.sizes import parse_size


def played(engine: Scheduler, prompt: tuple[int, ...], count: int) -> Result:
    ends: list[Any] = []
    engine.submit(Request(prompt, SamplingParams(), count, ignore_eos=True), ends.append)
    while not ends or not isinstance(ends[-1], Result | HeteroError):
        engine.step()
    if isinstance(ends[-1], HeteroError):
        raise ends[-1]
    return ends[-1]


def figures(result: Result) -> dict[str, Any]:
    usage = result.usage
    return {
        "prompt": usage.prompt_tokens,
        "known": usage.cached_tokens,
        "ttft_s": round(result.timings.ttft_s, 4),
    }


def measured(run: Runnable, words: argparse.Namespace, reuse: bool) -> dict[str, list[dict[str, Any]]]:
    """Of the turns of a talk, and of requests that have a system prompt in common; the same tokens for either
    ``reuse``."""
    source = random.Random(7)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(source.randrange(run.vocabulary) for _ in range(count))

    slots = 1 if run.runner is None else run.runner.slots
    engine = Scheduler(run, slots=slots, prefix_cache=reuse)
    try:
        played(engine, tokens(words.system), 2)  # what is only slow once
        talk, turns = tokens(words.system), []
        for _ in range(words.turns):
            talk = (*talk, *tokens(words.new))
            result = played(engine, talk, words.answer)
            talk = (*talk, *result.token_ids)
            turns.append(figures(result))
        system = tokens(words.system)
        requests = [
            figures(played(engine, (*system, *tokens(words.new)), words.answer)) for _ in range(words.turns)
        ]
    finally:
        engine.close()
    return {"turns": turns, "one system prompt": requests}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rules")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--vram", metavar="SIZE")
    parser.add_argument("--system", type=int, default=4096)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--answer", type=int, default=64)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--json", type=Path)
    words = parser.parse_args()
    context = words.system + words.turns * (words.new + words.answer)
    gpu = GpuOptions(
        vram=None if words.vram is None else parse_size(words.vram, "--vram"), slots=2, context=context
    )
    sets = dict(value.split("=", 1) for value in words.set)
    loaded = load_model(words.model, rules=words.rules, overrides=sets, threads=words.threads, gpu=gpu)
    found = {
        name: measured(loaded.runnable, words, reuse) for name, reuse in (("anew", False), ("kept", True))
    }
    for kind in found["anew"]:
        print(f"{kind}:")
        for number, (cold, warm) in enumerate(zip(found["anew"][kind], found["kept"][kind], strict=True), 1):
            print(
                f"  {number}: {warm['prompt']} tokens, {warm['known']} known: first token after "
                f"{warm['ttft_s']:.3f} s, anew {cold['ttft_s']:.3f} s"
            )
        rest = [one["ttft_s"] for one in found["kept"][kind][2:]]
        if rest:
            print(f"  median from the third on: {statistics.median(rest):.3f} s")
    if words.json is not None:
        words.json.write_text(json.dumps({"model": words.model, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
