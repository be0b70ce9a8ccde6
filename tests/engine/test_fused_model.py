"""A loaded model's layers fused, on the CPU: the tokens that transformers' own modules give."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from hetero.decode.decoder import Decoder
from hetero.decode.experts import DirectExperts
from hetero.engine.answer import Runnable
from hetero.engine.generate import Engine
from hetero.engine.gpu.fuse import find_sites, fuse
from hetero.engine.gpu.loading import GpuOptions
from hetero.engine.gpu.runner import GpuRunner
from hetero.engine.load import Loaded, load_model
from hetero.engine.request import Request
from hetero.engine.sample import SamplingParams
from hetero.engine.scheduler import Scheduler
from hetero.rules.gpu_options import parse_cache
from tests.model.parity import relative, save_tiny

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has these on the device")

SLOTS, CONTEXT = 4, 32


def load(folder: Path, experts: str, dtype: str) -> Loaded:
    return load_model(folder, rules="default-cpu", overrides={"experts": experts}, dtype=dtype, threads=1)


def answers(runnable: Runnable, requests: list[Request]) -> list[tuple[int, ...]]:
    """Of all requests together."""
    engine = Scheduler(runnable, slots=SLOTS)
    ends = {}
    for index, request in enumerate(requests):
        engine.submit(request, lambda event, index=index: ends.__setitem__(index, event))  # type: ignore[misc]
    while engine.status().running + engine.status().waiting:
        engine.step()
    engine.close()
    return [ends[index].token_ids for index in range(len(requests))]


def test_requests_together_are_as_transformers_runs_them(tmp_path: Path) -> None:
    """Requests of different lengths join and leave. In float32, so that tokens are the same."""
    save_tiny("qwen3_moe", tmp_path, num_hidden_layers=1, mlp_only_layers=[])
    requests = [
        Request(tuple(range(5, 5 + size)), SamplingParams(), count)
        for size, count in ((1, 4), (7, 3), (4, 6), (18, 2), (3, 3))
    ]
    plain = load(tmp_path, "f32", "float32")
    want = [Engine(plain.runnable).complete(request).token_ids for request in requests]
    experts = [DirectExperts(site.experts) for site in find_sites(plain.runnable.model, plain.placement)]
    decoder = Decoder(
        plain.runnable.model,
        experts,
        slots=SLOTS,
        context=CONTEXT,
        device="cpu",
        kv_dtype=torch.float32,
    )
    runner = GpuRunner(decoder, [], handoff=None, slots=SLOTS, context=CONTEXT, rows=(1, 2, 4))
    assert answers(replace(plain.runnable, runner=runner, context=CONTEXT), requests) == want
    assert runner.pages.free == runner.pages.total


def test_experts_on_all_tiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever experts lie, logits are the same but for the order of sums, which bfloat16 rounds."""
    from hetero.engine.gpu import fuse as fusing

    save_tiny("qwen3_moe", tmp_path, num_hidden_layers=1, mlp_only_layers=[])
    found = {}
    for cache, share in (("0", 0.0), ("50%", 0.5), ("100%", 1.0)):
        loaded = load(tmp_path, "int8", "bfloat16")
        sites = [
            replace(site, cache=parse_cache(cache), share=share)
            for site in find_sites(loaded.runnable.model, loaded.placement)
        ]
        monkeypatch.setattr(fusing, "find_sites", lambda model, placement, sites=sites: sites)
        told: list[str] = []
        runner = fuse(
            loaded.runnable.model,
            loaded.placement,
            "cpu",
            GpuOptions(slots=1, context=CONTEXT, kv_tokens=20),
            say=told.append,
        )
        assert runner.kv_tokens == 16
        slot = runner.claim()
        logits = [runner.prefill(slot, [7, 20])]
        for token in (33, 11):
            out = runner.step([(slot, token)]).logits
            assert out is not None
            logits.append(out[0].clone())
        found[cache] = torch.stack(logits)
        held = {"0": 0, "50%": 4, "100%": 8}[cache]
        assert any(text.startswith(f"{held} of 8 experts lie in GPU memory") for text in told)
        runner.close()
    assert relative(found["50%"], found["0"]) < 0.01
    assert relative(found["100%"], found["0"]) < 0.01
