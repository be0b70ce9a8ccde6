"""A fused model whose rules defer experts, against transformers' modules that are made to do so in torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from hetero.core import InputError
from hetero.decode.experts import Done
from hetero.engine.effect import effect
from hetero.engine.gpu import fuse as fusing
from hetero.engine.gpu.fuse import find_sites, fuse
from hetero.engine.gpu.loading import GpuOptions
from hetero.engine.load import load_model
from tests.model.parity import relative, save_tiny

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="steps on the CPU, by the interpreter")

LAYERS, DEFER = 2, 2
PROMPT, TOKENS = [7, 20], [33, 11]


def deferring(model: Any) -> None:
    """From now on each layer's experts leave out the token's DEFER lowest, which the next layer's add; the
    last layer leaves out none."""
    blocks = [layer.mlp.experts for layer in model.model.layers]
    carry: list[Tensor] = []
    for number, experts in enumerate(blocks):
        own = experts.submit

        def submit(x: Tensor, ids: Tensor, weights: Tensor, own: Any = own, number: int = number) -> Done:
            last = number + 1 == len(blocks)
            order = weights.argsort(dim=-1)
            late = torch.zeros_like(weights).scatter_(-1, order[:, :DEFER], 1.0) * (not last)
            out: Tensor = own(x, ids, weights * (1 - late)).collect()
            if carry:
                out = out + carry.pop()
            if not last:
                carry.append(own(x, ids, weights * late).collect())
            return Done(out)

        experts.submit = submit


def reference(folder: Path, defer: bool) -> Tensor:
    """Logits after each of TOKENS; the prompt is read without deferral."""
    loaded = load_model(folder, rules="default-cpu", overrides={"experts": "f32"}, dtype="float32", threads=1)
    model: Any = loaded.runnable.model
    with torch.no_grad():
        cache = model(input_ids=torch.tensor([PROMPT]), use_cache=True).past_key_values
        if defer:
            deferring(model)
        rows = []
        for token in TOKENS:
            out = model(input_ids=torch.tensor([[token]]), past_key_values=cache, use_cache=True)
            rows.append(out.logits[0, -1].float())
    return torch.stack(rows)


def fused(folder: Path, defer: int, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    loaded = load_model(
        folder, rules="default-cpu", overrides={"experts": "f32"}, dtype="bfloat16", threads=1
    )
    sites = [replace(site, defer=defer) for site in find_sites(loaded.runnable.model, loaded.placement)]
    monkeypatch.setattr(fusing, "find_sites", lambda model, placement: sites)
    told: list[str] = []
    options = GpuOptions(slots=1, context=32)
    runner = fuse(loaded.runnable.model, loaded.placement, "cpu", options, say=told.append)
    assert any("added one layer later" in text for text in told) == (defer > 0)
    slot = runner.claim()
    runner.prefill(slot, PROMPT)
    rows = []
    for token in TOKENS:
        logits = runner.step([(slot, token)]).logits
        assert logits is not None
        rows.append(logits[0].clone())
    runner.close()
    return torch.stack(rows)


def test_logits_are_those_of_the_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 the error is less than half of what deferral itself does."""
    save_tiny("qwen3_moe", tmp_path, num_hidden_layers=LAYERS, mlp_only_layers=[])
    plain, wanted = reference(tmp_path, False), reference(tmp_path, True)
    found = fused(tmp_path, DEFER, monkeypatch)
    assert relative(found, wanted) < 0.5 * relative(found, plain)
    assert effect(plain, found).kl > effect(wanted, found).kl


def test_layers_must_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny("qwen3_moe", tmp_path, num_hidden_layers=LAYERS, mlp_only_layers=[])
    loaded = load_model(tmp_path, rules="default-cpu", overrides={"experts": "f32"}, threads=1)
    sites = find_sites(loaded.runnable.model, loaded.placement)
    odd = [sites[0], replace(sites[1], defer=2)]
    monkeypatch.setattr(fusing, "find_sites", lambda model, placement: odd)
    with pytest.raises(InputError, match="'defer' is one for all layers, and the rules say 0, 2"):
        fuse(loaded.runnable.model, loaded.placement, "cpu", GpuOptions(slots=1, context=32))
