"""hetero's expert operator over the layers of a comparison, and plain reads of the same memory."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import common
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from hetero import cpu
from hetero.core import ExpertSpec
from hetero.cpu import CpuExperts
from hetero.formats import parse_format

spec = common.job()
torch.set_num_threads(1)
shape = ExpertSpec(spec.experts, spec.hidden, spec.intermediate, spec.top_k)
base = common.weights(spec)
layers = []
for _ in range(spec.layers):
    layer = CpuExperts(shape, parse_format(spec.format), threads=spec.threads)
    for e in range(spec.experts):
        if e >= common.DISTINCT:
            layer.copy_expert(e % common.DISTINCT, e)
            continue
        for part in ("gate", "up", "down"):
            layer.put(e, part, torch.from_numpy(base[e][part]))
    layers.append(layer)

x, ids, share = common.step(spec, 2, 7)
got = layers[0].forward(*map(torch.from_numpy, (x, ids, share))).double().numpy()
one = [tuple(map(torch.from_numpy, common.step(spec, 1, i))) for i in range(common.STEPS)]
many = [tuple(map(torch.from_numpy, common.step(spec, spec.tokens, i))) for i in range(2)]
layers[0].plain_read()
start = time.perf_counter()
read = sum(layer.plain_read() for layer in layers)
gb_s = read / (time.perf_counter() - start) / 1e9


def decode(n: int) -> int:
    """One token through every layer, each with a routing of its own."""
    for i, layer in enumerate(layers):
        layer.forward(*one[(n * len(layers) + i) % len(one)])
    return len(layers)


def prefill(n: int) -> int:
    layers[n % len(layers)].forward(*many[n % len(many)])
    return 1


common.serve(
    {
        "isa": layers[0].isa,
        "error": common.error(got, common.exact(base, x, ids, share)),
        "expert_bytes": layers[0].nbytes / spec.experts,
        "read_gb_s": gb_s,
        "threads": cpu.threads(),
    },
    decode,
    prefill,
    spec,
)
