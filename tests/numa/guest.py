"""What runs inside the machine of two nodes: places experts there in every way and asks where they are.

Prints one JSON object between markers; the host's tests read it.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import faulthandler
import json
import logging
import struct
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, "/opt")

import torch

from hetero import cpu
from hetero.core import ExpertSpec, InputError
from hetero.formats import parse_format
from hetero.hw import topology

SPEC = ExpertSpec(6, 256, 192, 3)
KINDS = ("off", "split", "replicate", "node 0", "node 1")
FORMATS = ("f32", "bf16", "int8 g128", "int4 g32")
TOKENS = (1, 4, 16)
# System calls: mbind, set_mempolicy, set_mempolicy_home_node.
FORBIDDEN = (237, 238, 450)


def weights(spec: ExpertSpec, seed: int) -> dict[tuple[int, str], torch.Tensor]:
    """Gaussian parts by expert and name."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for e in range(spec.num_experts):
        for part in ("gate", "up", "down"):
            n, k = (spec.hidden, spec.intermediate) if part == "down" else (spec.intermediate, spec.hidden)
            made[e, part] = torch.randn(n, k, generator=generator) / k**0.5
    return made


def filled(
    spec: ExpertSpec, fmt: str, numa: str, parts: dict[tuple[int, str], torch.Tensor]
) -> cpu.CpuExperts:
    experts = cpu.CpuExperts(spec, parse_format(fmt), numa=numa)
    for (expert, part), tensor in parts.items():
        experts.put(expert, part, tensor)  # type: ignore[arg-type]
    return experts


def steps(spec: ExpertSpec, seed: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for tokens in TOKENS:
        x = torch.randn(tokens, spec.hidden, generator=generator)
        ids = torch.rand(tokens, spec.num_experts, generator=generator).topk(spec.top_k).indices
        made.append((x, ids, torch.rand(tokens, spec.top_k, generator=generator)))
    return made


def reference(parts: dict[tuple[int, str], torch.Tensor], step: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Float64, straight from the weights: what format f32 must come near to."""
    x, ids, w = step
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(x.shape[0]):
        for slot in range(ids.shape[1]):
            gate, up, down = (parts[int(ids[t, slot]), p].double() for p in ("gate", "up", "down"))
            h = torch.nn.functional.silu(gate @ x[t].double()) * (up @ x[t].double())
            out[t] += w[t, slot].double() * (down @ h)
    return out


def layouts() -> dict[str, Any]:
    """Outputs of every way to place experts, compared with "off"; pages as the kernel tells them."""
    same: dict[str, bool] = {}
    pages: dict[str, Any] = {}
    error = 0.0
    for fmt in FORMATS:
        parts, todo = weights(SPEC, len(fmt)), steps(SPEC, len(fmt) + 1)
        want: list[torch.Tensor] = []
        for kind in KINDS:
            experts = filled(SPEC, fmt, kind, parts)
            got = [experts.forward(*step) for step in todo]
            if kind == "off":
                want = got
                if fmt == "f32":
                    for out, step in zip(got, todo, strict=True):
                        exact = reference(parts, step)
                        error = max(error, float((out - exact).norm() / exact.norm()))
            same[f"{fmt} {kind}"] = all(map(torch.equal, got, want))
            pages[f"{fmt} {kind}"] = experts.page_nodes()
    return {"same": same, "pages": pages, "error": error}


def instruction_sets() -> dict[str, bool]:
    """Each instruction set on split weights against the scalar one on whole weights."""
    parts, todo = weights(SPEC, 3), steps(SPEC, 4)
    experts = filled(SPEC, "int4 g32", "off", parts)
    experts.use("scalar")
    want = [experts.forward(*step) for step in todo]
    split = filled(SPEC, "int4 g32", "split", parts)
    found = {}
    for isa in cpu.isas():
        split.use(isa)
        found[isa] = all(torch.equal(split.forward(*step), w) for step, w in zip(todo, want, strict=True))
    return found


def workers() -> list[list[int]]:
    """CPUs that each thread of the pool may run on."""
    masks = []
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().strip() == "hetero-worker":
            lines = (task / "status").read_text().splitlines()
            value = next(line.split(":")[1] for line in lines if line.startswith("Cpus_allowed_list"))
            masks.append(list(topology.parse_list(value)))
    return sorted(masks)


def deny_binding() -> None:
    """From here on the kernel answers EPERM to everything that binds memory (a seccomp filter)."""
    libc = ctypes.CDLL(None, use_errno=True)
    code = [(0x20, 0, 0, 0)]
    for number in FORBIDDEN:
        code += [(0x15, 0, 1, number), (0x06, 0, 0, 0x00050001)]
    code.append((0x06, 0, 0, 0x7FFF0000))
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *c) for c in code))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code), ctypes.addressof(program)))
    if libc.prctl(38, 1, 0, 0, 0) != 0 or libc.prctl(22, 2, header, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def denied() -> dict[str, Any]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hetero").addHandler(handler)
    parts, todo = weights(SPEC, 5), steps(SPEC, 6)
    want = [filled(SPEC, "int8 g32", "split", parts).forward(*step) for step in todo]
    before = len(lines)
    deny_binding()
    same = []
    for kind in KINDS:
        experts = filled(SPEC, "int8 g32", kind, parts)
        same.append(all(torch.equal(experts.forward(*step), w) for step, w in zip(todo, want, strict=True)))
    return {"same": same, "lines_before": before, "lines": lines}


def refused_node() -> str:
    try:
        cpu.CpuExperts(SPEC, parse_format("int8"), numa="node 5")
    except InputError as error:
        return str(error)
    return ""


RULES = """rules:
  - name: routed experts
    match: {class: MoeBlock}
    replace: {op: moe, device: cpu, experts: {device: cpu, format: int8, numa: %s}}
  - name: everything else
    match: {name: '.*'}
    replace: {op: keep, device: cpu}
"""


def model() -> dict[str, Any]:
    """Tokens of the shipped test model under a rule file of each placement."""
    from hetero.engine.generate import Engine
    from hetero.engine.load import load_model
    from hetero.engine.request import Request
    from hetero.engine.sample import SamplingParams

    tokens = {}
    rules = Path(tempfile.gettempdir()) / "rules.yaml"
    for kind in KINDS:
        rules.write_text(RULES % kind)
        loaded = load_model("/opt/hetero/data/test-model", rules=rules)
        request = Request(
            (20, 30, 40, 50, 60), SamplingParams(temperature=0.0), max_tokens=6, ignore_eos=True
        )
        tokens[kind] = list(Engine(loaded.runnable).complete(request).token_ids)
    return tokens


def libnuma(found: topology.Topology) -> dict[str, Any]:
    """The same questions put to libnuma through its Python bindings, where the disk has them."""
    # The disk has no linker cache to look libraries up in.
    ctypes.util.find_library = lambda name: f"lib{name}.so.1"  # type: ignore[assignment]
    try:
        from numa import LIBNUMA, info
    except (ImportError, OSError) as error:
        return {"absent": str(error)}
    return {
        "max_node": info.get_max_node(),
        "cpus": {n.id: sorted(info.node_to_cpus(n.id)) for n in found.nodes},
        "bytes": {n.id: LIBNUMA.numa_node_size64(n.id, None) for n in found.nodes},
        "distance": {
            f"{a.id} {b.id}": info.numa_distance(a.id, b.id) for a in found.nodes for b in found.nodes
        },
    }


def main() -> None:
    print("=== up", flush=True)  # noqa: T201 (the guest's way to speak)
    # In time for the host, which ends a guest that has not come through after a quarter of an hour.
    faulthandler.dump_traceback_later(600)
    start = time.monotonic()
    torch.set_num_threads(1)
    found = topology.read()
    result = {
        "nodes": [[n.id, list(n.cpus), n.memory_bytes, [list(d) for d in n.distances]] for n in found.nodes],
        "cores": [[list(c.cpus), c.node] for c in found.cores],
        "threads": cpu.threads(),
        "layouts": layouts(),
        "workers": workers(),
        "isas": instruction_sets(),
        "kernels": cpu.kernel_counts(),
        "refused": refused_node(),
        "libnuma": libnuma(found),
        "model": model(),
        "denied": denied(),  # last: nothing can be bound after it
    }
    result["seconds"] = time.monotonic() - start
    print("=== result", json.dumps(result), "=== end", flush=True)  # noqa: T201 (the guest's way to speak)


main()
