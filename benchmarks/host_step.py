"""What a decode step costs the host besides the graph: processor time of the engine's thread, part by part.

    python benchmarks/host_step.py --tokens 1000 --parts

A decoder that computes nothing has the shape of the 125B model where the host sees it: n-gram rows of 16
heads out of a table of 95 GiB (sparse: pages that are touched are zeros, at first a fault each), 48 layers
that are handed to a worker by a twin, tokens that a tokenizer turns into text for a sink. A thread in the
GPU's place takes ``--sleep`` milliseconds for a step, so that the host's caches are as cold as they would be.
Times are of the engine's thread alone; what a driver takes for a launch is not among them.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hetero import cpu
from hetero.core import ExpertSpec
from hetero.decode.inputs import PAGE, StepInputs
from hetero.decode.ple import NgramTable
from hetero.engine.answer import Answer, Runnable
from hetero.engine.gpu.pages import Pages
from hetero.engine.gpu.runner import GpuRunner
from hetero.engine.gpu.staging import Results, Staging
from hetero.engine.gpu.steps import TRACKS
from hetero.engine.handoff import Handoff
from hetero.engine.request import Request, Result
from hetero.engine.sample import Sampler, SamplingParams
from hetero.engine.scheduler import Scheduler
from hetero.formats import parse_format
from hetero.model.demo import TEST_MODEL
from hetero.model.synthetic import _sparse
from hetero.model.tokenizer import load_tokenizer
from tests.engine.twins import TwinMeans

HIDDEN, LAYERS, HEADS, PER_HEAD, ROWS_A_HEAD = 2560, 48, 16, 160, 20_000_000
VOCABULARY, CONTEXT = 248_320, 4096


def ngram_table() -> NgramTable:
    rows = HEADS * ROWS_A_HEAD
    weight = _sparse(rows * PER_HEAD, torch.bfloat16).view(rows, PER_HEAD)
    return NgramTable(
        SimpleNamespace(
            ngram_size=3,
            eos_token_id=2,
            layer_multipliers=torch.tensor([3 * 10**8 + 7, 2 * 10**9 + 9, 10**9 + 33]),
            ngram_heads_vocab_sizes=torch.tensor([ROWS_A_HEAD - 2 * i - 1 for i in range(HEADS)]),
            ngram_heads_offsets=torch.arange(HEADS) * ROWS_A_HEAD,
            heads_per_ngram=HEADS // 2,
            ngram_embedding=SimpleNamespace(weight=weight, embedding_dim=PER_HEAD),
        )
    )


class Null:
    """A decoder of no work: a step hands every layer over and says any token."""

    vocabulary, state_bytes, window, grain = VOCABULARY, 0, 3, 1
    gathers_on_host = True
    paged: tuple[Tensor, ...] = ()

    def __init__(self, words: int, rows: int, slots: int) -> None:
        self._words, self._slots = words, slots
        self._table = ngram_table()
        self._logits = torch.zeros(rows, 64)
        spec = ExpertSpec(4, HIDDEN, 32, 2)
        experts = cpu.CpuExperts(spec, parse_format("int8"))
        for expert in range(spec.num_experts):
            for part in ("gate", "up", "down"):
                shape = (HIDDEN, 32) if part == "down" else (32, HIDDEN)
                experts.put(expert, part, torch.zeros(shape))
        self.lane = 0
        self.fed: list[float] = []
        self.handoff = Handoff([experts] * LAYERS, rows=rows, slots=2, lanes=TRACKS)
        backend: Any = self.handoff.backend
        for lane in range(TRACKS):
            backend.stream(lane)
            for layer in range(LAYERS):
                self.handoff.payload(lane, layer).ids.fill_(-1)
                self.handoff.record_submit(lane, layer)
                self.handoff.record_collect(lane, layer)

    def use(self, lane: int) -> None:
        self.lane = lane

    def forget(self) -> None: ...

    def inputs(self, rows: int) -> StepInputs:
        tokens, slots, positions = torch.zeros(3, rows, dtype=torch.int64)
        table = torch.zeros(self._slots, CONTEXT // PAGE, dtype=torch.int32)
        return StepInputs(tokens, slots, positions, table, torch.zeros(rows, HIDDEN, dtype=torch.bfloat16))

    def step(self, inputs: StepInputs) -> Tensor:
        if inputs.await_ple is not None:
            inputs.await_ple()
        self.fed.append(time.perf_counter())
        backend: Any = self.handoff.backend
        twin = backend.twins[self.lane]
        twin.launch()
        twin.synchronize(10.0)
        logits = self._logits[: len(inputs.tokens)]
        logits[:, random.randrange(3, self._words)] += 1.0
        return logits

    def prefill(self, tokens: Tensor, slot: int, start: int, pages: Tensor, **_: Any) -> Tensor:
        return torch.rand(64)

    def clear(self, slot: int) -> None: ...

    def states(self, slot: int) -> list[Tensor]:
        return []

    def expect(self, before: Sequence[int], tokens: Sequence[int]) -> None: ...

    def gather(self, tokens: Sequence[Sequence[int]], out: Tensor) -> Tensor:
        # As ``families.qwen4_exp`` has it.
        table = self._table
        start = [table.eos] * table.size
        windows = np.array([[*start, *row][-table.size :] for row in tokens], dtype=np.int64)
        return table.gather(windows, out)


class Device(TwinMeans):
    """Tells when steps begin and end."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.began: list[float] = []
        self.ended: list[float] = []

    def play(self, run: Callable[[], None]) -> None:
        def step() -> None:
            self.began.append(time.perf_counter())
            run()
            time.sleep(self.seconds)
            self.ended.append(time.perf_counter())

        super().play(step)


class Clocks:
    """Processor time of functions, by name, without what was timed within them."""

    def __init__(self) -> None:
        self.ns: dict[str, int] = {}
        self._inner = [0]

    def around(self, owner: Any, method: str, name: str) -> None:
        real: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0)
            began = time.thread_time_ns()
            try:
                return real(*args, **kwargs)
            finally:
                took = time.thread_time_ns() - began
                self.ns[name] = self.ns.get(name, 0) + took - self._inner.pop()
                self._inner[-1] += took

        setattr(owner, method, timed)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--sleep", type=float, default=8.0, metavar="MS")
    parser.add_argument("--apart", action="store_true", help="no step before the last one has ended")
    parser.add_argument("--parts", action="store_true", help="time the parts, which costs a few microseconds")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    cpu.set_threads(1)
    torch.set_num_threads(1)
    decoder: Any = Null(60, options.streams, options.streams)
    device = Device(options.sleep / 1e3)
    runner = GpuRunner(
        decoder,
        [],
        handoff=decoder.handoff,
        slots=options.streams,
        context=CONTEXT,
        rows=(options.streams,),
        means=device,
        port=decoder,
        ahead=not options.apart,
    )
    runner.capture()
    clocks = Clocks()
    if options.parts:
        for owner, method, name in (
            (decoder, "gather", "n-gram rows"),
            (Staging, "fill", "staging.fill"),
            (Device, "wait", "wait"),
            (Device, "play", "(the launch, of a twin)"),
            (Results, "read", "results.read"),
            (Pages, "grow", "pages.grow"),
            (Handoff, "begin", "handoff.begin"),
            (Handoff, "end", "handoff.end"),
            (runner, "step", "the rest of runner.step"),
            (Sampler, "pick", "sampler"),
            (Answer, "take", "answer, detokenizer, stop strings"),
            (Scheduler, "step", "the rest of the scheduler"),
        ):
            clocks.around(owner, method, name)
    runnable = Runnable(nn.Module(), VOCABULARY, load_tokenizer(TEST_MODEL), context=CONTEXT, runner=runner)
    engine = Scheduler(runnable, slots=options.streams)
    ends: list[Any] = []
    for _ in range(options.streams):
        request = Request((5, 6, 7), SamplingParams(), options.tokens, ignore_eos=True)
        engine.submit(request, lambda event: ends.append(event) if isinstance(event, Result) else None)
    engine.step()
    for _ in range(50):
        engine.step()
    clocks.ns.clear()
    began, steps = time.thread_time_ns(), 0
    while len(ends) < options.streams:
        engine.step()
        steps += 1
    whole = (time.thread_time_ns() - began) / steps / 1e3
    gap, fed = (
        statistics.median(
            (now - before) * 1e6 for now, before in zip(at[1 - steps :], device.ended[-steps:], strict=False)
        )
        for at in (device.began, decoder.fed)
    )
    found = {name: ns / steps / 1e3 for name, ns in sorted(clocks.ns.items(), key=lambda one: -one[1])}
    for name, us in found.items():
        print(f"{us:8.1f} us  {name}")
    print(f"{whole:8.1f} us of the engine's thread a step")
    print(f"{gap:8.1f} us from one step to the next, {fed:.1f} until it has its n-gram rows")
    engine.close()
    runner.close()
    if options.json:
        options.json.write_text(
            json.dumps(
                {"steps": steps, "whole_us": whole, "gap_us": gap, "fed_us": fed, "parts_us": found}, indent=1
            )
            + "\n"
        )


if __name__ == "__main__":
    main()
