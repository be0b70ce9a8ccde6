"""``hetero bench`` on a device: every part of it, with a shape of some megabytes."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from hetero import cli

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none"),
]

SHAPE: dict[str, Any] = {
    "model_type": "qwen3_moe", "vocab_size": 1024, "hidden_size": 512, "intermediate_size": 512,
    "moe_intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 64, "num_experts": 64, "num_experts_per_tok": 4, "max_position_embeddings": 1024,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "attention_bias": False,
    "tie_word_embeddings": False, "rms_norm_eps": 1e-6,
}  # fmt: skip
VRAM = 3 * 2**30


@pytest.fixture(autouse=True)
def whole_device() -> Iterator[None]:
    """What a cap leaves behind in this process."""
    gc.collect()
    torch.cuda.empty_cache()
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    gc.collect()
    torch.cuda.empty_cache()


def bench(folder: Path, *options: object) -> dict[str, Any]:
    shape, out = folder / "shape.json", folder / "out.json"
    shape.write_text(json.dumps(SHAPE))
    command = ["bench", f"synthetic:{shape}", "--json", str(out), "--runs", "2", "--tokens", "12"]
    done = CliRunner().invoke(cli.app, [*command, "--context", "40", *map(str, options)])
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_everything_at_once(tmp_path: Path) -> None:
    found = bench(
        tmp_path, "--vram", "3GiB", "--cache", "50%", "--routing", "local,router", "--batch", "1,3",
        "--prefill", "40,200", "--share", "0.5,0", "--serial", "--plan",
    )  # fmt: skip
    assert found["complete"]
    assert found["engine"] == "fused"
    assert len(found["decode"]) == 8
    assert len(found["serial"]) == 4
    for one in found["decode"]:
        assert one["eager"] is None
        assert one["launches"] > 20
        assert 0 < one["hit_rate"] < 1
        assert (one["bytes_a_step"]["pcie"] > 0) == (one["share"] > 0)
        assert one["bytes_a_step"]["cpu"] > 0
        assert one["cpu_work_us_a_layer"]["median"] > 0
        assert one["bound"]["share"] > 0
    assert 0 < found["slots_on_gpu"] <= 4 * 32
    assert set(found["rates"]) == {
        "cpu", "pcie", "copy", "cpu_of_both", "pcie_of_both", "gpu", "launch_us",
    }  # fmt: skip
    assert set(found["dense_ms"]) == {"1", "4"}
    assert all(ms > 0 for ms in found["dense_ms"].values())
    plan = found["plan"]
    assert [one["tier"] for one in plan["memory"]] == ["main memory", "GPU memory"]
    assert plan["slots"]["measured"] == found["slots_on_gpu"]
    assert all(one["expected_tok_s"] > 0 for one in plan["decode"])
    memory = found["gpu_memory"]
    assert memory["under_cap"]
    assert memory["cap"] == VRAM
    assert 0 < memory["peak"] <= VRAM


def test_a_cache_takes_what_is_left_of_a_cap(tmp_path: Path) -> None:
    """Experts of 1.8 GB under a cap of 2.5 GiB: nearly all of it is used, and never more. In a process of its
    own: what tests before it left counts as this one's."""
    shape, out = tmp_path / "wide.json", tmp_path / "wide-out.json"
    wide = {"hidden_size": 1024, "moe_intermediate_size": 2048, "num_hidden_layers": 8, "head_dim": 128}
    shape.write_text(json.dumps({**SHAPE, **wide}))
    command = ["bench", f"synthetic:{shape}", "--vram", "2560MiB", "--runs", "1", "--tokens", "8"]
    more = ["--context", "600", "--prefill", "1000", "--json", str(out)]
    done = subprocess.run(
        [sys.executable, "-m", "hetero", *command, *more], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    memory, slots = found["gpu_memory"], found["slots_on_gpu"]
    assert 0 < slots < 8 * 64
    assert memory["under_cap"]
    assert memory["cap"] - memory["peak"] < 400 << 20, (slots, memory, done.stdout)


def test_modules_of_transformers_on_a_device(tmp_path: Path) -> None:
    found = bench(tmp_path, "--modules", "--routing", "uniform", "--batch", "1,2")
    assert found["engine"] == "modules"
    for one in found["decode"]:
        assert one["hit_rate"] is None
        assert one["bytes_a_step"]["cpu"] >= 16 * found["expert_bytes"]["one"]


def test_a_cap_that_is_too_small_is_told(tmp_path: Path) -> None:
    shape = tmp_path / "shape.json"
    shape.write_text(json.dumps(SHAPE))
    done = CliRunner().invoke(cli.app, ["bench", f"synthetic:{shape}", "--vram", "100MiB"])
    assert done.exit_code == 3
    assert "--vram" in done.stderr
