"""A loaded model's layers fused, on the CPU: the tokens that transformers' own modules give."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from hetero import inject
from hetero.core import InputError
from hetero.decode.decoder import Decoder
from hetero.decode.experts import DirectExperts
from hetero.engine.answer import Runnable
from hetero.engine.generate import Engine
from hetero.engine.gpu.fuse import find_sites, fuse
from hetero.engine.gpu.loading import GpuOptions, fused_device
from hetero.engine.gpu.runner import GpuRunner
from hetero.engine.load import Loaded, load_model
from hetero.engine.request import Request
from hetero.engine.sample import SamplingParams
from hetero.engine.scheduler import Scheduler
from hetero.model.build import build_meta, describe
from hetero.model.config import load_config
from hetero.model.keep import resolve_formats
from hetero.model.loader import load as load_weights
from hetero.model.loader import plan_load
from hetero.model.sources import open_source
from hetero.model.tables import leave_out, resolve_tables
from hetero.ops.embedding import disk_tables, table_reads
from hetero.ops.gpu.linear import PackedLinear
from hetero.registry import op_names
from hetero.rules import Placement, load_rules, match
from hetero.rules.gpu_options import parse_cache
from hetero.rules.options import schemas_for
from tests.model.parity import load_reference, relative, save_tiny
from tests.model.routes import Routing, chosen_by

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
    for cache, share in (("0", 0.0), ("50%", 0.5)):
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
        assert runner.kv_tokens == 32
        slot = runner.claim()
        logits = [runner.prefill(slot, [7, 20])]
        for token in (33, 11):
            out = runner.step([(slot, token)]).logits
            assert out is not None
            logits.append(out[0].clone())
        found[cache] = torch.stack(logits)
        held = {"0": 0, "50%": 4}[cache]
        assert any(text.startswith(f"{held} of 8 experts lie in GPU memory") for text in told)
        runner.close()
    assert relative(found["50%"], found["0"]) < 0.01


def test_a_cache_fills_what_is_left_once_a_prompt_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a device's memory that is counted by the test: few slots first, then all that fit."""
    from hetero.engine.gpu import fuse as fusing
    from hetero.engine.gpu import room

    save_tiny("qwen3_moe", tmp_path, num_hidden_layers=1, mlp_only_layers=[], num_experts=32)
    loaded = load(tmp_path, "int8", "bfloat16")
    sites = [
        replace(site, cache=parse_cache("auto"), share=0.0)
        for site in find_sites(loaded.runnable.model, loaded.placement)
    ]
    monkeypatch.setattr(fusing, "find_sites", lambda model, placement: sites)
    monkeypatch.setattr(fusing.Fusing, "_handoff", lambda self, numbers: None)
    monkeypatch.setattr(room, "LATER", 1000)
    read: list[int] = []
    longest = GpuRunner.read_longest

    class Counted:
        """Room for the first slots and nine more, and the margin."""

        used, basis = 0, "by this process"

        @property
        def left(self) -> int:
            return 9 * -(-sites[0].experts.whole_bytes // 4096) * 4096 + 1000

        def hold(self) -> None:
            pass

    def spy(self: GpuRunner) -> None:
        read.append(sum(one.slots for one in self.experts))  # type: ignore[attr-defined]
        longest(self)

    monkeypatch.setattr(GpuRunner, "read_longest", spy)
    memory: Any = Counted()
    told: list[str] = []
    options = GpuOptions(slots=1, context=CONTEXT)
    runner = fuse(loaded.runnable.model, loaded.placement, "cpu", options, vram=memory, say=told.append)
    assert read == [room.FEW, room.FEW + 9]
    assert any(text.startswith(f"{room.FEW + 9} of 32 experts lie in GPU memory") for text in told)
    slot = runner.claim()
    runner.prefill(slot, [7, 20, 33])
    out = runner.step([(slot, 5)])
    assert out.logits is not None
    assert torch.isfinite(out.logits).all()
    assert sum(runner.reads()["gpu"]) + sum(runner.reads()["cpu"]) > 0
    runner.close()


# Few layers of every kind: the interpreter takes its time.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_next": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    "qwen4_exp": {},
}


def as_on_gpu(folder: Path, **sets: str) -> tuple[Any, Placement]:
    """The tree under the shipped rules for a GPU, loaded on the CPU, and the placement."""
    config = load_config(folder)
    model = build_meta(config, torch.bfloat16)
    placement = match(
        load_rules("qwen-gpu", sets),
        describe(model),
        devices=("cpu", "cuda:0"),
        ops=schemas_for(op_names()),
        model_type=config.model_type,
    )
    assert fused_device(placement, model, "bfloat16") == "cuda:0"
    here = replace(placement, assignments=tuple(replace(one, device="cpu") for one in placement.assignments))
    checkpoint = open_source(folder)
    plan = plan_load(model, checkpoint)
    here, _ = resolve_formats(here, plan, checkpoint)
    here = resolve_tables(here, model, plan, checkpoint)
    leave_out(plan, here)
    injected = inject.apply(model, here)
    load_weights(model, checkpoint, injected.sinks, dtype=torch.bfloat16, plan=plan)
    inject.finish(model)
    return model, here


@pytest.mark.parametrize("family", FAMILIES)
def test_the_shipped_rules(family: str, tmp_path: Path) -> None:
    """Packed linear layers of int8, in and beside MoE blocks, every kind of layer that a family has, and
    n-grams from disk."""
    model_class = save_tiny(family, tmp_path, **FAMILIES[family])
    model, placement = as_on_gpu(
        tmp_path, experts="int8", dense="int8", share="0.5", cache="50%", table="disk"
    )
    packed = {name for name, module in model.named_modules() if isinstance(module, PackedLinear)}
    assert "lm_head" in packed
    assert any("shared_expert" in name for name in packed)
    assert not any(name.endswith(("in_proj_b", "in_proj_a", "shared_expert_gate")) for name in packed)
    tokens = [7, 20, 33, 11, 64]
    reference = load_reference(family, model_class, tmp_path)
    with torch.inference_mode(), chosen_by(reference) as chosen:
        want = reference(input_ids=torch.tensor([tokens])).logits[0].float()
    runner = fuse(model, placement, "cpu", GpuOptions(slots=2, context=CONTEXT))
    decoder: Any = runner.decoder
    routing = Routing("cpu", len(chosen), chosen[0][0].shape[1], chosen=[chosen])
    decoder.routing = routing
    slot = runner.claim()
    routing.prompt(0, 0, 4)
    got = [runner.prefill(slot, tokens[:4])]
    for at, token in enumerate(tokens[4:], 4):
        routing.step([(0, at)])
        out = runner.step([(slot, token)]).logits
        assert out is not None
        got.append(out[0].clone())
    assert relative(torch.stack(got), want[3:]) < 0.05
    assert bool(disk_tables(model)) == (family == "qwen4_exp")
    assert table_reads(disk_tables(model)).nbytes > 0 or family != "qwen4_exp"
    runner.close()


def test_rules_that_fuse_some_layers_are_refused(tmp_path: Path) -> None:
    save_tiny("qwen3_moe", tmp_path)
    path = tmp_path / "some.yaml"
    path.write_text(
        "extends: qwen-gpu\nvars: {experts: int8}\nrules:\n  - name: first\n"
        "    match: {class: '*DecoderLayer', layers: 0-1}\n    replace: {op: keep, device: 'cuda:0'}\n"
    )
    model = build_meta(load_config(tmp_path), torch.bfloat16)
    modules = describe(model)

    def refused(rules: Path | str, dtype: str = "bfloat16") -> str:
        placement = match(load_rules(rules), modules, devices=("cpu", "cuda:0"), ops=schemas_for(op_names()))
        with pytest.raises(InputError) as caught:
            fused_device(placement, model, dtype)
        return str(caught.value)

    assert "op 'fused' is for all decoder layers or none, and model.layers.0 has another" in refused(path)
    assert "--dtype float32: op 'fused' computes in bfloat16" in refused("qwen-gpu", "float32")
    path.write_text(
        "extends: qwen-gpu\nrules:\n  - name: too many\n"
        "    match: {name: 'norm$'}\n    replace: {op: fused, device: 'cuda:0'}\n"
    )
    assert "op 'fused' replaces decoder layers, and model.layers.0.input_layernorm is none" in refused(path)


BLOCK = "  - name: blocks\n    match: {class: MoeBlock}\n    replace: {op: %s}\n"


@pytest.mark.parametrize(
    ("base", "replace", "message"),
    [
        ("qwen-gpu", "keep, device: 'cuda:0'", "fused layers need 'op: moe' for their blocks"),
        (
            "qwen-gpu",
            "moe, device: 'cuda:0', experts: {device: 'cuda:0', format: int8}",
            "fused layers keep all experts in main memory; 'cache' says",
        ),
        (
            "qwen-gpu",
            "moe, device: 'cuda:0', experts: {tier: disk}",
            "fused layers need experts of backend 'native', all of them in main memory",
        ),
        (
            "default-gpu",
            "moe, device: 'cuda:0', experts: {share: 0.5}",
            "experts: 'share' needs fused decoder layers: a rule with 'op: fused'",
        ),
        (
            "default-gpu",
            "moe, device: 'cuda:0', experts: {cache: 1GiB}",
            "experts: 'cache' needs fused decoder layers: a rule with 'op: fused'",
        ),
    ],
)
def test_experts_that_do_not_go_with_layers(base: str, replace: str, message: str, tmp_path: Path) -> None:
    save_tiny("qwen3_moe", tmp_path, num_hidden_layers=1, mlp_only_layers=[])
    path = tmp_path / "rules.yaml"
    path.write_text(f"extends: {base}\nrules:\n" + BLOCK % replace)
    model = build_meta(load_config(tmp_path), torch.bfloat16)
    placement = match(
        load_rules(path), describe(model), devices=("cpu", "cuda:0"), ops=schemas_for(op_names())
    )
    with pytest.raises(InputError) as caught:
        fused_device(placement, model, "bfloat16")
    assert message in str(caught.value)
    assert base == "qwen-gpu" or f"{path}:3: rule 1 'blocks': " in str(caught.value)


def test_a_type_without_fused_steps(tmp_path: Path) -> None:
    save_tiny("mixtral", tmp_path)
    path = tmp_path / "rules.yaml"
    path.write_text(
        "extends: mixtral-gpu\nrules:\n  - name: layers\n"
        "    match: {class: '*DecoderLayer'}\n    replace: {op: fused, device: 'cuda:0'}\n"
    )
    model = build_meta(load_config(tmp_path), torch.bfloat16)
    placement = match(
        load_rules(path), describe(model), devices=("cpu", "cuda:0"), ops=schemas_for(op_names())
    )
    with pytest.raises(InputError, match=r"no steps for layers of class MixtralDecoderLayer; it"):
        fused_device(placement, model, "bfloat16")
