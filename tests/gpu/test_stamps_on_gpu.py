"""Stamps of a captured graph: on the host's clock, in order, and as long as the work takes."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from hetero.ops.gpu.stamps import Stamps, at_layer, lap, lap_experts, start
from hetero.trace import HEAD, HITS, MIXER, MOVE, STAMPED, clock, recorder, whole_steps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none"),
]


def test_a_replay_is_told_on_the_hosts_clock() -> None:
    stamps = Stamps("cuda")
    tape = stamps.tape()
    x = torch.randn(4096, 4096, device="cuda")
    counts = torch.tensor([10, 20, 30], device="cuda")
    more = torch.tensor([3, 0, 2], device="cuda")
    side = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    x @ x  # cuBLAS is loaded
    torch.cuda.synchronize()
    with tape.recording(), torch.cuda.graph(graph):
        start()
        x @ x
        at_layer(0)
        lap(MIXER)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            start()
            x @ x
            lap(MOVE, lane="pcie", nbytes=7)
        counts += more
        lap_experts(counts, 100)
        torch.cuda.current_stream().wait_stream(side)
        at_layer(-1)
        lap(HEAD)
        tape.seal()
    walls: list[tuple[int, int]] = []
    since = recorder.next_number() + 1
    with recorder.recording():
        for _ in range(5):
            tape.begin()
            recorder.begin_step(1)
            walls.append((clock(), 0))
            graph.replay()
            torch.cuda.synchronize()
            walls[-1] = (walls[-1][0], clock())
            tape.tell(1)
            recorder.end_step(STAMPED)
    steps = whole_steps(recorder.spans(since), since)
    assert len(steps) == 5
    error = stamps.alignment.error
    assert error < 20_000
    for step, (before, after) in zip(steps, walls, strict=True):
        told = {part.name: part for part in step.parts}
        assert set(told) == {MIXER, HITS, MOVE, HEAD}
        gpu = [part for part in step.parts if part.lane == "gpu"]
        assert all(a.end == b.start for a, b in pairwise(gpu))
        assert all(before - error <= part.start <= part.end <= after + error for part in step.parts)
        assert (told[HITS].experts, told[HITS].nbytes) == (3, 300)
        # 137 GFLOP in float32 takes any GPU more than a millisecond.
        assert told[MIXER].duration > 1_000_000
        assert told[MOVE].duration > 1_000_000
        assert told[MOVE].end <= told[HEAD].end


def test_an_untraced_graph_has_no_stamps() -> None:
    stamps = Stamps("cuda")
    x = torch.zeros(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    tape = stamps.tape()
    with torch.cuda.graph(graph):
        start()
        x += 1
        at_layer(0)
        lap(MIXER)
    graph.replay()
    torch.cuda.synchronize()
    assert not tape._device.any()
