"""Compare the backends of the experts on one MoE layer: same weights and steps, in turns, with errors.

A rule chooses a backend by ``experts: {backend: ...}``; this calls the same classes. kt-kernel is left out
where it is not installed. Errors are relative norms against float64 on the same bfloat16 weights.

    python benchmarks/backends.py --shape 2560x640x64x10 --formats bf16 int8 int4 --threads 1
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import signal
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from hetero.core import ExpertSpec
from hetero.hw.cpu import identity
from hetero.ops.experts import make_backend
from hetero.ops.reference import expert_parts


def random_weights(spec: ExpertSpec) -> list[dict[str, torch.Tensor]]:
    """Gaussian weights of every expert in bfloat16, so that no backend rounds them on the way in."""
    generator = torch.Generator().manual_seed(0)
    return [
        {
            part: (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).bfloat16()
            for part, shape in expert_parts(spec).items()
        }
        for _ in range(spec.num_experts)
    ]


def exact(weights: list[dict[str, torch.Tensor]], x: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> Any:
    """The step in float64."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for e in ids.unique().tolist():
        parts = {name: part.double() for name, part in weights[e].items()}
        rows, slots = (ids == e).nonzero(as_tuple=True)
        gate, up = x[rows].double() @ parts["gate"].T, x[rows].double() @ parts["up"].T
        y = (torch.nn.functional.silu(gate) * up) @ parts["down"].T
        out.index_add_(0, rows, y * w[rows, slots, None].double())
    return out


def make_steps(spec: ExpertSpec, tokens: int, count: int) -> list[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(tokens)
    return [
        (
            torch.randn(tokens, spec.hidden, generator=generator).bfloat16().float(),
            torch.rand(tokens, spec.num_experts, generator=generator).topk(spec.top_k).indices,
            torch.rand(tokens, spec.top_k, generator=generator),
        )
        for _ in range(count)
    ]


def serve(name: str, fmt: str, spec: ExpertSpec, threads: int, pipe: Connection) -> None:
    """One backend in a process of its own: answers each number of tokens with seconds and an error.

    Threads of both are pinned, and kt-kernel's spin: in one process they would fight for the same core.
    """
    torch.set_num_threads(1)
    weights = random_weights(spec)
    backend = make_backend(spec, {"backend": name, "format": fmt, "threads": threads})
    for e, parts in enumerate(weights):
        for part, tensor in parts.items():
            backend.put(e, part, tensor)
    errors: dict[int, float] = {}
    while (tokens := pipe.recv()) > 0:
        steps = make_steps(spec, tokens, max(1, min(32, 64 // tokens)))
        if tokens not in errors:
            want, got = exact(weights, *steps[0]), backend.forward(*steps[0]).double()
            errors[tokens] = float((got - want).norm() / want.norm())
        backend.forward(*steps[0])
        taken = []
        for step in steps:
            start = time.perf_counter()
            backend.forward(*step)
            taken.append(time.perf_counter() - start)
        pipe.send((statistics.median(taken), errors[tokens]))


class Served:
    """A backend's process, stopped while it is not asked."""

    def __init__(self, name: str, fmt: str, spec: ExpertSpec, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(name, fmt, spec, threads, theirs), daemon=True)
        self._process.start()
        self.ask(1)  # ends when the weights are packed

    def ask(self, tokens: int) -> tuple[float, float]:
        """Seconds of a step, median, and the error."""
        pid = self._process.pid
        assert pid is not None
        os.kill(pid, signal.SIGCONT)
        self._pipe.send(tokens)
        while not self._pipe.poll(1):
            if not self._process.is_alive():
                raise SystemExit("a backend ended; its message is above")
        answer: tuple[float, float] = self._pipe.recv()
        os.kill(pid, signal.SIGSTOP)
        return answer

    def end(self) -> None:
        self._process.kill()
        self._process.join()


def compare(backends: dict[str, Served], tokens: int, rounds: int) -> dict[str, dict[str, Any]]:
    """Seconds of each round and the error of each backend, in turns."""
    results: dict[str, dict[str, Any]] = {name: {"seconds": []} for name in backends}
    order = list(backends)
    for number in range(rounds):
        for name in order[number % len(order) :] + order[: number % len(order)]:
            seconds, results[name]["error"] = backends[name].ask(tokens)
            results[name]["seconds"].append(seconds)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", default="2560x640x64x10", help="hidden x intermediate x experts x top-k")
    parser.add_argument("--formats", nargs="+", default=["bf16", "int8", "int4"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 4, 256])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    hidden, intermediate, experts, top_k = map(int, options.shape.split("x"))
    spec = ExpertSpec(experts, hidden, intermediate, top_k)
    names = ["native"] + (["kt_kernel"] if importlib.util.find_spec("kt_kernel") else [])
    found = []
    for fmt in options.formats:
        backends = {name: Served(name, fmt, spec, options.threads) for name in names}
        for tokens in options.tokens:
            results = compare(backends, tokens, options.rounds)
            for name, one in results.items():
                ratio = [b / a for a, b in zip(results["native"]["seconds"], one["seconds"], strict=True)]
                print(
                    f"{fmt:5} {tokens:5} tokens  {name:10} {statistics.median(one['seconds']) * 1e3:9.3f} ms "
                    f"{statistics.median(ratio):5.2f} x native ({min(ratio):.2f} to {max(ratio):.2f})  "
                    f"error {one['error']:.4f}"
                )
                found.append({"format": fmt, "tokens": tokens, "backend": name, **one})
        for backend in backends.values():
            backend.end()
    if options.json:
        document = {
            "machine": identity(),
            "threads": options.threads,
            "shape": options.shape,
            "results": found,
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
