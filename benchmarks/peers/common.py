"""What the processes of a comparison share: weights, the steps, and the lines that they exchange.

A process gets one JSON argument, prints a line that it is ready, then answers each line "decode" or "prefill"
on standard input with the seconds of every step, per MoE layer. Lines of ours begin with MARK: engines print
too.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

MARK = "@@"
DISTINCT = 8  # experts with weights of their own; the others repeat them
STEPS = 64  # different routings of decode, in turn


@dataclass(frozen=True)
class Job:
    """One engine in one format."""

    hidden: int
    intermediate: int
    experts: int
    top_k: int
    layers: int
    format: str
    threads: int
    model: str  # a GGUF file, for the engines that need one
    tokens: int  # of a prefill
    seconds: float  # about, of one turn


def job() -> Job:
    return Job(**json.loads(sys.argv[1]))


def weights(spec: Job, seed: int = 0) -> list[dict[str, Any]]:
    """float32 Gaussian weights, deviation 1 / sqrt(inputs), of DISTINCT experts; equal in every process."""
    rng = np.random.default_rng(seed)
    shapes = {
        "gate": (spec.intermediate, spec.hidden),
        "up": (spec.intermediate, spec.hidden),
        "down": (spec.hidden, spec.intermediate),
    }
    return [
        {p: rng.standard_normal(s, dtype=np.float32) / np.float32(s[1] ** 0.5) for p, s in shapes.items()}
        for _ in range(DISTINCT)
    ]


def step(spec: Job, tokens: int, seed: int) -> tuple[Any, Any, Any]:
    """x [tokens, hidden] float32 (exact in bfloat16), ids [tokens, top_k] int64, weights [tokens, top_k]."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, spec.hidden), dtype=np.float32)
    x = (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    ids = np.argsort(rng.random((tokens, spec.experts)), axis=1)[:, : spec.top_k].astype(np.int64).copy()
    share = rng.random((tokens, spec.top_k), dtype=np.float32)
    return x, ids, share / share.sum(1, keepdims=True)


def exact(experts: list[dict[str, Any]], x: Any, ids: Any, share: Any) -> Any:
    """The step in float64."""
    out = np.zeros(x.shape)
    for t, s in np.ndindex(*ids.shape):
        parts = {p: w.astype(np.float64) for p, w in experts[ids[t, s] % DISTINCT].items()}
        gate, up = parts["gate"] @ x[t], parts["up"] @ x[t]
        out[t] += share[t, s] * (parts["down"] @ (gate / (1 + np.exp(-gate)) * up))
    return out


def error(got: Any, want: Any) -> float:
    """Relative norm of the difference."""
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def serve(
    ready: dict[str, Any], decode: Callable[[int], int], prefill: Callable[[int], int], spec: Job
) -> None:
    """Answer turns until standard input ends. A callable runs its n-th step, returns the layers."""
    print(MARK + json.dumps(ready), flush=True)
    counts = {"decode": 0, "prefill": 0}
    for line in sys.stdin:
        kind = line.strip()
        run = decode if kind == "decode" else prefill
        taken = []
        run(counts[kind])  # brings threads and caches back, not counted
        end = time.perf_counter() + spec.seconds
        while not taken or (time.perf_counter() < end and len(taken) < 2000):
            start = time.perf_counter()
            layers = run(counts[kind])
            taken.append((time.perf_counter() - start) / layers)
            counts[kind] += 1
        print(MARK + json.dumps(taken), flush=True)
    sys.stdout.flush()
    os._exit(0)  # engines' own threads may not end
