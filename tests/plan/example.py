"""A machine and a model whose figures are easy to compute by hand."""

from __future__ import annotations

from typing import Any

from hetero.formats import parse_format
from hetero.model.shapes import resolve_model
from hetero.plan.families import inventory
from hetero.plan.hardware import Hardware, parse_hardware
from hetero.plan.inventory import Inventory
from hetero.plan.tiers import Request

GIB = 2**30

# 2 layers of attention, 8 experts of 64 x 32 of which 2 are taken.
QWEN3_MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "attention_bias": False,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}


def shape(name: str) -> dict[str, Any]:
    return resolve_model(f"synthetic:{name}").config


def small() -> Inventory:
    found = inventory(QWEN3_MOE)
    assert found is not None
    return found


def flagship() -> Inventory:
    found = inventory(shape("qwen3.8-flash-next-125b"))
    assert found is not None
    return found


def measured(value: float) -> dict[str, Any]:
    return {"measured": value, "source": "a test"}


def machine(*, gpu: bool = True, ram: int = 64 * GIB, vram: int = 24 * GIB, **changes: Any) -> Hardware:
    """100 GB/s of main memory, 1000 of the GPU, 25 of PCIe, 20 us a hand-off, 5 us a launch."""
    data: dict[str, Any] = {
        "kind": "hetero-hardware",
        "version": 1,
        "name": "paper",
        "cpu": {
            "name": "Paper CPU",
            "cores": 8,
            "isa": "avx512",
            "expert_share": measured(0.5),
            "prefill_tops": measured(2.0),
            "dense_tflops": measured(1.0),
            "op_us": measured(10.0),
        },
        "ram": {"bytes": ram, "read_gb_s": measured(100.0)},
        "disk": {"read_gb_s": measured(2.0), "latency_us": measured(100.0)},
    }
    if gpu:
        data["gpu"] = {
            "name": "Paper GPU",
            "bytes": vram,
            "read_gb_s": measured(1000.0),
            "bf16_tflops": measured(100.0),
            "launch_us": measured(5.0),
        }
        data["pcie"] = {"copy_gb_s": measured(30.0), "read_gb_s": measured(25.0)}
        data["handoff_us"] = measured(20.0)
    return parse_hardware({**data, **changes}, "paper")


def asked(fmt: str = "int4", **changes: Any) -> Request:
    return Request(expert_format=parse_format(fmt), **changes)
