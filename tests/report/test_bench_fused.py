"""The benchmark's side of fused steps, on the CPU by the kernels' interpreter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from hetero.decode.decoder import Decoder
from hetero.decode.experts import DirectExperts
from hetero.engine.gpu.fuse import find_sites
from hetero.engine.gpu.runner import GpuRunner
from hetero.engine.synthetic import load_synthetic
from hetero.ops.gpu.hybrid import DirectPort, HybridExperts
from hetero.ops.gpu.hybrid_shared import HybridShared
from hetero.ops.gpu.pinned import PinnedArena
from hetero.report.bench import Bench, Series
from hetero.report.bench_runs import FusedRun, NoExperts, SerialPort
from hetero.report.bench_trace import traced
from hetero.report.forced import ForcedRouting
from hetero.report.routing import make_table

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has these on the device")

SHAPE: dict[str, Any] = {
    "model_type": "qwen3_moe", "vocab_size": 40, "hidden_size": 32, "intermediate_size": 32,
    "moe_intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 64,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "attention_bias": False,
    "tie_word_embeddings": False, "rms_norm_eps": 1e-6,
}  # fmt: skip


def run_of(slots: int = 4, layers: int = 1) -> FusedRun:
    """Two sequences at once; half of the experts in "GPU memory", of the others half read over "PCIe"."""
    loaded = load_synthetic(SHAPE, layers=layers, dtype="bfloat16", overrides={"experts": "int8"}, threads=1)
    experts = [site.experts for site in find_sites(loaded.runnable.model, loaded.placement)]
    decoder = Decoder(
        loaded.runnable.model, [DirectExperts(one) for one in experts], slots=2, context=32, device="cpu"
    )
    shared, port = HybridShared("cpu", share=0.5), DirectPort(experts, 2)
    hybrid = [
        HybridExperts(one, layer, port, shared, slots=slots, arena=PinnedArena(one, "cpu"))
        for layer, one in enumerate(experts)
    ]
    decoder.experts[:] = hybrid
    return FusedRun(GpuRunner(decoder, hybrid, handoff=None, slots=2, context=32, rows=(2,), shared=shared))


def test_fused_steps_follow_a_table() -> None:
    run = run_of(layers=2)
    table = make_table("uniform", layers=2, steps=4, rows=2, experts=8, top_k=2, seed=3)
    seen: list[torch.Tensor] = []
    for one in run.runner.experts:
        submit = one.submit  # type: ignore[attr-defined]

        def spy(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, submit: Any = submit) -> None:
            seen.append(ids.clone())
            submit(x, ids, weights)

        one.submit = spy  # type: ignore[attr-defined]
    forced = ForcedRouting(table, "cpu")
    run.force(forced)
    states = [run.prefill([1, 2, 3])[0] for _ in range(2)]
    before = run.counts()
    for step in range(2):
        seen.clear()
        tokens = run.step(states, [5, 6])
        assert len(tokens) == 2
        assert torch.equal(torch.stack(seen), torch.from_numpy(table[:, step]).long())
    counts = run.counts().since(before)
    distinct = sum(len(set(table[layer, step].ravel().tolist())) for layer in range(2) for step in range(2))
    assert counts.gpu + counts.pcie + counts.cpu == distinct
    assert counts.pcie
    assert run.slots == 8
    for state in states:
        run.end(state)


def test_a_series_of_fused_steps() -> None:
    run = run_of(slots=8)
    series = Series(routings=("local",), prefills=(2,), context=4, tokens=2, runs=1)
    bench = Bench(run, series, 40)
    (local,) = list(bench.decode_all())
    assert local["hit_rate"] is not None
    assert set(local["bytes_a_step"]) == {"gpu", "pcie", "cpu", "moved"}
    each = sum(local["bytes_a_step"][tier] for tier in ("gpu", "pcie", "cpu"))
    assert each == pytest.approx(2 * run.expert_bytes)
    (prefill,) = list(bench.prefill_all())
    assert prefill["tokens"] == 2
    assert run.runner.decoder.routing is None  # type: ignore[attr-defined]


def test_graphs_are_of_certain_sizes() -> None:
    run = run_of()
    assert [run.rows_of(batch) for batch in (1, 2)] == [2, 2]
    bench = Bench(run, Series(routings=("local",), batches=(1,)), 40)
    assert bench.table("local").shape[2] == 2


def test_a_share_can_be_changed_and_given_back() -> None:
    run = run_of()
    shared: Any = run.runner.experts[0].shared  # type: ignore[attr-defined]
    first = shared.shares()
    run.set_share(0.0)
    assert not shared.shares().any()
    run.set_share(None)
    assert torch.equal(shared.shares(), first)


def test_serial_steps_compute_the_same() -> None:
    outs = []
    for serial in (False, True):
        run = run_of(slots=0)
        if serial:
            run.serialise()
            assert all(isinstance(one.port, SerialPort) for one in run.runner.experts)  # type: ignore[attr-defined]
        state, _ = run.prefill([1, 2, 3])
        outs.append(run.runner.step([(state, 7)]).logits)
    assert torch.equal(*outs)


def test_caches_of_another_size_compute_the_same() -> None:
    """As they get it once it is known what room there is."""
    run, outs = run_of(slots=2), []
    run.set_share(0.0)
    for slots in (2, 8):
        for one in run.runner.experts:
            one.resize(slots)  # type: ignore[attr-defined]
        run.runner.capture()
        state, _ = run.prefill([1, 2, 3])
        outs.append(run.runner.step([(state, 7)]).logits)
        run.end(state)
        assert run.slots == slots
    assert run.counts().gpu > 0
    for out in outs[1:]:
        assert out is not None
        assert float((out - outs[0]).norm() / out.norm()) < 0.01


def test_the_stream_waits_at_once_when_serial() -> None:
    calls: list[tuple[str, int]] = []

    class Told:
        def payload(self, layer: int) -> str:
            return f"payload {layer}"

        def record_submit(self, layer: int) -> None:
            calls.append(("submit", layer))

        def record_collect(self, layer: int) -> None:
            calls.append(("collect", layer))

    port = SerialPort(Told())
    port.record_submit(3)
    assert calls == [("submit", 3), ("collect", 3)]
    port.record_collect(3)
    assert len(calls) == 2
    assert port.payload(1) == "payload 1"


def test_experts_that_are_nothing() -> None:
    none = NoExperts(4, 8, torch.device("cpu"))
    none.submit(torch.ones(2, 8), torch.zeros(2, 1), torch.ones(2, 1))
    assert not none.collect().any()


def test_a_series_is_recorded_once_more(tmp_path: Path) -> None:
    """A step, and a prompt whose experts the CPU computes."""
    run = run_of()
    run.read_prompts(True, "cpu")
    path = tmp_path / "out.json"
    series = Series(routings=("local",), prefills=(17,), context=4, tokens=2, runs=1)
    decode, prompt = traced(Bench(run, series, 40), path)
    assert (decode["kind"], decode["routing"], decode["rows"]) == ("decode", "local", 1)
    told = decode["overlap"]
    assert (told["steps"], told["tokens"]) == (1, 1)
    assert told["hits"] + told["in_place"] > 0
    assert told["gpu_bytes"] + told["in_place_bytes"] > 0
    assert (prompt["kind"], prompt["tokens"], prompt["overlap"]["steps"]) == ("prefill", 17, 1)
    assert prompt["strategies"]["cpu"]["chunks"] == 1
    assert any("prefill by 'cpu'" in line for line in prompt["lines"])
    body = json.loads(path.read_text())
    names = {event["name"] for event in body["traceEvents"]}
    assert {"mixer", "router", "submit", "GPU experts", "wait for the CPU", "head", "prefill"} <= names
    assert body["otherData"]["events_overwritten"] == 0


def test_what_deferral_does_is_told() -> None:
    run = run_of(slots=0, layers=2)
    shared: Any = run.runner.experts[0].shared  # type: ignore[attr-defined]
    port: Any = run.runner.experts[0].port  # type: ignore[attr-defined]
    port._defer = True
    found = run.deferral(2, [1, 2, 3], [4, 5])
    assert shared.defer == 2
    assert found["tokens"] == 2
    assert found["relative"] > 0
    assert "KL" in found["line"]
