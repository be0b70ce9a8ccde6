"""``--auto`` plans this machine and runs what it planned; what a plan says a run takes is what it takes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from typer.testing import CliRunner, Result

from hetero import auto, cli
from hetero.core import MachineError
from hetero.engine.generate import Engine
from hetero.engine.gpu.vram import MARGIN
from hetero.engine.load import Loaded, load_model
from hetero.engine.request import Request
from hetero.formats import parse_format
from hetero.hw import memory, nvml
from hetero.model.build import choose_class
from hetero.model.demo import TEST_MODEL
from hetero.plan.kv import sequence_bytes
from hetero.plan.tiers import all_expert_bytes, dense_bytes
from hetero.rules import load_rules
from tests.model.hf_to_gguf import write as write_gguf
from tests.model.quantised import SCHEMES, small_config, write_quantised
from tests.model.tiny_moe import tiny_model

GIB = 2**30


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("HETERO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HETERO_THREADS", "1")
    return tmp_path / "cache"


def call(*args: object) -> Result:
    return CliRunner().invoke(cli.app, [str(arg) for arg in args])


def test_a_run_by_its_plan(own_cache: Path) -> None:
    ran = call("run", TEST_MODEL, "--auto", "-p", "Hello", "--raw", "--max-tokens", 4, "--json", "--no-stats")
    assert ran.exit_code == 0, ran.output
    told = json.loads(ran.stdout)
    file = own_cache / "plans" / "test-model.yaml"
    assert told["rules"]["file"] == str(file)
    assert load_rules(file).models == ("qwen3_next",)
    assert re.search("auto: experts in int4 g32, dense layers in (float32|bfloat16); ", ran.stderr)
    kept = call("run", TEST_MODEL, "--rules", file, "-p", "Hello", "--raw", "--max-tokens", 4, "--json")
    assert json.loads(kept.stdout)["text"] == told["text"]


def test_a_gguf_file_keeps_its_values(own_cache: Path, tmp_path: Path) -> None:
    config = small_config("qwen3_moe", norm_topk_prob=True)
    chosen = choose_class(config)
    model = tiny_model(chosen.cls, chosen.config, seed=int(torch.randint(2**31, ())))
    file = tmp_path / "model.gguf"
    write_gguf(
        model,
        file,
        "qwen3moe",
        kind_of=lambda name, _: GGMLQuantizationType.Q4_1 if "_exps" in name else None,
    )
    ran = call("run", file, "--auto", "--prompt-ids", "1,2,3", "--max-tokens", 2, "--json", "--no-stats")
    assert ran.exit_code == 0, ran.output
    assert "auto: experts in int4a g32" in ran.stderr
    assert "experts keep the checkpoint's values: int4a g32" in ran.stderr


def test_a_file_of_modelopt_is_looked_at_too(own_cache: Path, tmp_path: Path) -> None:
    write_quantised(tmp_path, "qwen3_moe", SCHEMES["modelopt-nvfp4"])
    config = json.loads((tmp_path / "config.json").read_text())
    told = config.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": told}))
    planned = auto.plan_run(tmp_path, "m", device=None)
    assert "experts in nvfp4" in planned.note
    assert load_rules(planned.rules).variables["experts"] == "keep"


def test_auto_has_the_last_word() -> None:
    for more in (("--rules", "default"), ("--set", "experts=int8")):
        refused = call("run", TEST_MODEL, "--auto", *more, "-p", "x")
        assert refused.exit_code == 2
        assert "--auto chooses the rules itself" in refused.output


def planned(available: int, monkeypatch: pytest.MonkeyPatch) -> auto.Auto:
    monkeypatch.setattr(memory, "available", lambda *_: memory.Available(available, "a test"))
    return auto.plan_run(TEST_MODEL, "m/odd name", device=None)


def test_a_dtype_that_was_asked_for_is_planned_and_told(
    monkeypatch: pytest.MonkeyPatch, own_cache: Path
) -> None:
    monkeypatch.setattr(memory, "available", lambda *_: memory.Available(8 * GIB, "a test"))
    made = auto.plan_run(TEST_MODEL, "m", device=None, dtype="bfloat16")
    assert made.dtype == "bfloat16"
    assert "dense layers in bfloat16" in made.note
    assert "--dtype bfloat16" in made.rules.read_text()


def test_what_does_not_fit_is_refused_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, own_cache: Path
) -> None:
    inventory = auto.inventory_of(TEST_MODEL)
    fmt = parse_format("int4")
    roomy = planned(8 * GIB, monkeypatch)
    assert roomy.dtype in ("float32", "bfloat16")  # by this machine
    assert roomy.rules.name == "m-odd-name.yaml"
    text = roomy.rules.read_text()
    assert "tier" not in text.partition("rules:")[2]
    # Everything but experts, as the plan counts it, and half of the experts.
    from hetero.plan.planner import make_plan
    from hetero.plan.tiers import Request

    machine = auto._here(None)
    plan = make_plan(
        "m", inventory, machine, Request(fmt, ram=8 * GIB, vram=0, context=1024, dense="bfloat16")
    )
    fixed = sum(i.bytes for i in plan.layout.ram.items if i.name != "experts")
    experts = all_expert_bytes(inventory, fmt)
    tight = fixed + experts // 2
    # A tenth stays free for the disk tier, which leaves it less than a token needs here: refused by name.
    with pytest.raises(MachineError, match=r"--auto: .*needs .* of main memory"):
        planned(tight, monkeypatch)
    with pytest.raises(MachineError, match=r"is available"):
        planned(64 << 20, monkeypatch)


def test_a_gpu_is_asked_about_without_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch would tell makes one, and it would count as there before."""
    assert torch.cuda.is_available() or auto.gpu_now(None) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: pytest.fail("torch was asked"))
    monkeypatch.setattr(nvml, "device", lambda index: nvml.Device("A Card", 24 * GIB, 20 * GIB))
    assert auto.gpu_now(None) == ("A Card", 20 * GIB - MARGIN)
    assert auto.gpu_now(12 * GIB) == ("A Card", 12 * GIB)
    monkeypatch.setattr(nvml, "device", lambda index: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (20 * GIB, 24 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Another")
    assert auto.gpu_now(None) == ("Another", 20 * GIB - MARGIN)


def held_bytes(loaded: Loaded) -> tuple[int, int]:
    """Bytes of all parameters that lie in memory, and of the packed experts."""
    seen: dict[int, int] = {}
    for tensor in (*loaded.runnable.model.parameters(), *loaded.runnable.model.buffers()):
        if tensor.device.type != "meta":
            storage = tensor.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
    return sum(seen.values()), loaded.expert_bytes


@pytest.mark.parametrize(("dtype", "fmt"), [("float32", "int4"), ("bfloat16", "int8 g64")])
def test_a_plan_says_what_a_run_takes(dtype: str, fmt: str) -> None:
    loaded = load_model(TEST_MODEL, overrides={"experts": fmt}, dtype=dtype, threads=1)
    inventory = auto.inventory_of(TEST_MODEL)
    dense, experts = held_bytes(loaded)
    assert experts == all_expert_bytes(inventory, parse_format(fmt))
    assert dense == pytest.approx(dense_bytes(inventory, dtype), rel=0.03)
    # What a sequence keeps, by a cache of that run.
    tokens = 50
    with torch.no_grad():
        cache = loaded.runnable.model(
            input_ids=torch.randint(1, 500, (1, tokens)), use_cache=True
        ).past_key_values
    width = 4 if dtype == "float32" else 2
    found = 0
    for layer in cache.layers:
        for value in vars(layer).values():
            for tensor in value.values() if isinstance(value, dict) else [value]:
                if isinstance(tensor, torch.Tensor) and tensor.dim():
                    found += tensor.numel() * tensor.element_size()
    assert found == pytest.approx(sequence_bytes(inventory.states, tokens, width), rel=0.03)
    Engine(loaded.runnable).complete(Request((1, 2, 3), max_tokens=2))
