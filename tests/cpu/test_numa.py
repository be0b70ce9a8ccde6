"""Experts over memory nodes. Machines on paper run the split and copied layouts on any machine; what only a
real second node can show is in tests/numa."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hetero import cpu
from hetero.core import ExpertSpec, InputError
from hetero.cpu import CpuExperts
from hetero.formats import parse_format
from hetero.hw import cpu as hw_cpu
from hetero.hw import topology
from hetero.hw.topology import Core, Node, Topology
from tests.cpu.reference import fill, random_routing, random_weights, relative

FORMATS = ["f32", "bf16", "int8 g128", "int4 g32", "int4a g64"]


def paper(nodes: int, *, bound: bool = False) -> Topology:
    """A machine with cores of its own on each node; what runs on it runs here."""
    listed = tuple(Node(n, (2 * n, 2 * n + 1), 2**40, ()) for n in range(nodes))
    cores = tuple(Core((c,), n.id, True) for n in listed for c in n.cpus)
    return Topology(listed, cores, tuple(range(nodes)), bound)


@pytest.fixture(autouse=True)
def this_machine_again() -> Iterator[None]:
    yield
    cpu.use_machine(None)


@pytest.mark.parametrize("nodes", [2, 3, 4])
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("hidden", "intermediate"), [(192, 192), (200, 200), (48, 33), (72, 640)])
def test_every_layout_gives_the_same_bits(
    nodes: int, fmt: str, hidden: int, intermediate: int, generator: torch.Generator
) -> None:
    """Also where nodes outnumber the units or blocks, and where the last of them is half empty."""
    cpu.use_machine(paper(nodes))
    cpu.set_threads(3)
    spec = ExpertSpec(5, hidden, intermediate, 3, has_bias=intermediate == 200, has_gate=hidden != 72)
    weights = random_weights(spec, generator)
    kinds = ["off", "split", "replicate", f"node {nodes - 1}"]
    experts = [fill(CpuExperts(spec, parse_format(fmt), numa=kind), weights) for kind in kinds]
    for tokens in (1, 5, 16, 40):
        x, ids, w = random_routing(spec, tokens, generator)
        ids[0, 0] = -1
        want = experts[0].forward(x, ids, w)
        h = experts[0].gate_up(x, ids)
        narrow = h[..., :intermediate].contiguous()
        for other, kind in zip(experts[1:], kinds[1:], strict=True):
            assert torch.equal(other.gate_up(x, ids), h), kind
            assert torch.equal(other.down(narrow, ids), experts[0].down(narrow, ids)), kind
            if tokens <= 16:
                assert torch.equal(other.forward(x, ids, w), want), kind
            else:
                assert relative(other.forward(x, ids, w), want.double()) < 1e-3, kind


@pytest.mark.parametrize("isa", cpu.isas())
def test_every_instruction_set_runs_on_split_weights(isa: str, generator: torch.Generator) -> None:
    spec = ExpertSpec(6, 192, 192, 3)
    weights = random_weights(spec, generator)
    step = random_routing(spec, 4, generator)
    want = fill(CpuExperts(spec, parse_format("int4"), isa="scalar"), weights).forward(*step)
    cpu.use_machine(paper(3))
    split = fill(CpuExperts(spec, parse_format("int4"), isa=isa, numa="split"), weights)
    assert torch.equal(split.forward(*step), want)


@pytest.mark.parametrize("nodes", [2, 3, 5, 7])
def test_shares_of_the_nodes_differ_by_at_most_one(nodes: int) -> None:
    """Units and blocks are all there; over the experts, no node gets more of the odd units than another."""
    cpu.use_machine(paper(nodes))
    spec = ExpertSpec(nodes * 2, 2560, 200, 2)
    experts = CpuExperts(spec, parse_format("int4"), numa="split")
    totals = [0] * nodes
    for e in range(spec.num_experts):
        shares = experts.shares(e)
        assert len(shares) == nodes
        for each, total in ((0, 7), (1, 160)):
            counts = [share[each] for share in shares]
            assert sum(counts) == total
            assert max(counts) - min(counts) <= 1
        totals = [t + share[0] for t, share in zip(totals, shares, strict=True)]
    assert max(totals) == min(totals)


def test_sizes_of_the_layouts() -> None:
    spec = ExpertSpec(4, 192, 192, 2)
    whole = CpuExperts(spec, parse_format("int8")).nbytes
    cpu.use_machine(paper(3))
    assert CpuExperts(spec, parse_format("int8"), numa="split").nbytes == whole
    assert CpuExperts(spec, parse_format("int8"), numa="replicate").nbytes == 3 * whole


def test_copied_experts_equal_their_source(generator: torch.Generator) -> None:
    """Expert 2 holds other units on each node than expert 0."""
    cpu.use_machine(paper(3))
    spec = ExpertSpec(3, 96, 224, 1, has_bias=True)
    weights = {k: v for k, v in random_weights(spec, generator).items() if k[0] == 0}
    for numa in ("split", "replicate"):
        experts = CpuExperts(spec, parse_format("int4"), numa=numa)
        for (expert, part), tensor in weights.items():
            experts.put(expert, part, tensor)  # type: ignore[arg-type]
        experts.copy_expert(0, 1)
        experts.copy_expert(0, 2)
        x = torch.randn(3, 96, generator=generator)
        outs = [experts.forward(x, torch.full((3, 1), e), torch.ones(3, 1)) for e in range(3)]
        assert torch.equal(outs[0], outs[1])
        assert torch.equal(outs[0], outs[2])
        assert outs[0].abs().min() > 0
        assert experts.plain_read() == experts.nbytes // (3 if numa == "replicate" else 1)


def test_replicated_experts_equal_a_source(generator: torch.Generator) -> None:
    cpu.use_machine(paper(3))
    spec = ExpertSpec(6, 96, 224, 1, has_bias=True)
    weights = {k: v for k, v in random_weights(spec, generator).items() if k[0] < 2}
    for numa in ("split", "replicate"):
        experts = CpuExperts(spec, parse_format("int4"), numa=numa)
        for (expert, part), tensor in weights.items():
            experts.put(expert, part, tensor)  # type: ignore[arg-type]
        experts.replicate(2)
        x = torch.randn(3, 96, generator=generator)
        outs = [experts.forward(x, torch.full((3, 1), e), torch.ones(3, 1)) for e in range(6)]
        for out in outs[2:]:
            assert torch.equal(out, outs[0]) or torch.equal(out, outs[1])


def test_more_nodes_than_threads(generator: torch.Generator) -> None:
    """Nodes without a thread are served by the others."""
    cpu.use_machine(paper(4))
    spec = ExpertSpec(4, 128, 128, 2)
    weights = random_weights(spec, generator)
    step = random_routing(spec, 7, generator)
    split = fill(CpuExperts(spec, parse_format("int8"), numa="split"), weights)
    last = fill(CpuExperts(spec, parse_format("int8"), numa="node 3"), weights)
    want = None
    for threads in (1, 2, 3, 8):
        cpu.set_threads(threads)
        for experts in (split, last):
            got = experts.forward(*step)
            assert want is None or torch.equal(got, want), threads
            want = got


def test_a_node_that_is_not_there() -> None:
    listed = ", ".join(str(n.id) for n in topology.read().nodes)
    with pytest.raises(InputError, match=f"no NUMA node 999; this machine has nodes? {listed}$"):
        CpuExperts(ExpertSpec(2, 64, 64, 1), parse_format("int8"), numa="node 999")


def test_the_kernel_says_where_the_pages_are(generator: torch.Generator) -> None:
    """Bound to a node that exists; a second one on paper makes the binding worth asking for."""
    real = topology.read().mems[0]
    found = paper(2, bound=True)
    cpu.use_machine(
        Topology(
            (Node(real, (0, 1), 2**40, ()), Node(real + 1, (2, 3), 2**40, ())), found.cores, (real, real + 1)
        )
    )
    cpu.set_threads(1)
    spec = ExpertSpec(4, 192, 192, 2)
    experts = CpuExperts(spec, parse_format("f32"), numa=f"node {real}")
    if error := experts._experts.bind_error():
        pytest.skip(f"this machine does not allow mbind: {os.strerror(error)}")
    fill(experts, random_weights(spec, generator))
    ((node, pages),) = experts.page_nodes()
    assert node == real
    assert pages.pop(real) >= experts.nbytes // 4096 - 1
    assert sum(pages.values()) <= 1  # the tail of the last page, perhaps never written
    off = CpuExperts(spec, parse_format("f32"))
    assert [(node, set(pages)) for node, pages in off.page_nodes()] == [(-1, {-2})]


DENIED = """
import ctypes, json, logging, os, struct, sys, torch
ERRNO = {errno}
libc = ctypes.CDLL(None, use_errno=True)
# A seccomp filter: mbind, set_mempolicy and set_mempolicy_home_node fail, all else is allowed.
code = [(0x20, 0, 0, 0)]
for number in (237, 238, 450):
    code += [(0x15, 0, 1, number), (0x06, 0, 0, 0x00050000 | ERRNO)]
code.append((0x06, 0, 0, 0x7FFF0000))
program = b"".join(struct.pack("HBBI", *c) for c in code)
buffer = ctypes.create_string_buffer(program)
fprog = struct.pack("HxxxxxxP", len(code), ctypes.addressof(buffer))
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.create_string_buffer(fprog), 0, 0) == 0, ctypes.get_errno()
torch.set_num_threads(1)
lines = []
handler = logging.Handler()
handler.emit = lambda record: lines.append(record.getMessage())
logging.getLogger("hetero").addHandler(handler)
from hetero import cpu
from hetero.core import ExpertSpec
from hetero.formats import parse_format
from tests.cpu.reference import fill, random_routing, random_weights
from tests.cpu.test_numa import paper
generator = torch.Generator().manual_seed(5)
spec = ExpertSpec(4, 96, 96, 2)
weights = random_weights(spec, generator)
step = random_routing(spec, 3, generator)
want = fill(cpu.CpuExperts(spec, parse_format("int4")), weights).forward(*step)
cpu.use_machine(paper(2, bound=True))
same = []
for kind in ("split", "replicate", "node 1", "split"):
    experts = fill(cpu.CpuExperts(spec, parse_format("int4"), numa=kind), weights)
    same.append(bool(torch.equal(experts.forward(*step), want)))
print(json.dumps(dict(same=same, lines=lines)))
"""


@pytest.mark.parametrize(
    ("errno", "words"), [(1, "Operation not permitted"), (38, "Function not implemented")]
)
def test_denied_binding_is_one_warning_and_the_same_output(errno: int, words: str) -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", DENIED.format(errno=errno)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=root,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])},
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["same"] == [True] * 4
    assert len(result["lines"]) == 1
    assert words in result["lines"][0]


def test_workers_sit_on_their_cores_and_leave_one() -> None:
    """A pool of all usable cores: every worker on one core of its own, none on the first."""
    here = topology.read()
    cpu.use_machine(None)
    if len(here.worker_cores) < 2:
        pytest.skip("one core: no worker")
    if hw_cpu.quota() is not None:
        pytest.skip("under a CPU quota threads are not pinned")
    cpu.set_threads(len(here.worker_cores))
    cpu._cpu.pool_exercise(64, 100, -1)
    masks = []
    for task in Path("/proc/self/task").iterdir():
        status = dict(
            line.split(":", 1) for line in (task / "status").read_text().splitlines() if ":" in line
        )
        if status["Name"].strip() == "hetero-worker":
            masks.append(topology.parse_list(status["Cpus_allowed_list"]))
    assert sorted(masks) == [(core.cpus[0],) for core in here.worker_cores[1:]]


def test_a_caller_on_a_workers_core_steps_off_and_keeps_its_mask() -> None:
    here = topology.read()
    if len(here.worker_cores) < 2 or hw_cpu.quota() is not None:
        pytest.skip("no worker is pinned")
    cpu.set_threads(len(here.worker_cores))
    first, last = here.worker_cores[0].cpus, here.worker_cores[-1].cpus[0]
    mask = os.sched_getaffinity(0)
    libc = ctypes.CDLL(None)
    on_first = 0
    try:
        for _ in range(20):
            os.sched_setaffinity(0, {last})
            os.sched_setaffinity(0, mask)
            cpu._cpu.pool_exercise(1, 0, -1)
            on_first += libc.sched_getcpu() in first
            assert os.sched_getaffinity(0) == mask
        # A caller that may run on that one core alone is left there.
        os.sched_setaffinity(0, {last})
        assert cpu._cpu.pool_exercise(8, 10, -1) == 16
        assert os.sched_getaffinity(0) == {last}
    finally:
        os.sched_setaffinity(0, mask)
    assert on_first >= 10  # the kernel may move it again at any time
