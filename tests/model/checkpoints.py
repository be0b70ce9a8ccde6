"""Checkpoints of tiny models for the loader's tests, and a sink that keeps what it is given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from hetero.model.build import build_meta, choose_class, is_experts, load_config
from hetero.model.loader import LoadReport, load
from hetero.model.source import Checkpoint
from tests.model.tiny_moe import tiny_config, tiny_model


class Kept:
    """An ExpertSink that stores copies and refuses a part that comes twice."""

    def __init__(self, experts: nn.Module) -> None:
        has_gate, has_bias = bool(experts.has_gate), bool(experts.has_bias)
        parts = ["gate", "up", "down"] if has_gate else ["up", "down"]
        parts += [f"{part}_bias" for part in parts] if has_bias else []
        count = experts.down_proj.shape[0]
        self.wanted = [(expert, part) for expert in range(count) for part in parts]
        self.got: dict[tuple[int, str], torch.Tensor] = {}

    def put(self, expert: int, part: str, tensor: torch.Tensor) -> None:
        assert (expert, part) not in self.got, f"{part} of expert {expert} came twice"
        assert (expert, part) in self.wanted, f"nobody asked for {part} of expert {expert}"
        self.got[expert, part] = tensor.clone()

    def missing(self) -> list[tuple[int, str]]:
        return [key for key in self.wanted if key not in self.got]


def expected_parts(experts: Any) -> dict[tuple[int, str], torch.Tensor]:
    """What a sink has to get, written out from the parameters of transformers' module."""
    parts: dict[tuple[int, str], torch.Tensor] = {}
    for expert in range(experts.down_proj.shape[0]):
        first = experts.gate_up_proj if experts.has_gate else experts.up_proj
        up, down = first.detach()[expert], experts.down_proj.detach()[expert]
        if experts.is_transposed:
            up, down = up.mT, down.mT
        half = up.shape[0] // 2
        gate_rows = slice(0, half) if experts.is_concatenated else slice(0, None, 2)
        up_rows = slice(half, None) if experts.is_concatenated else slice(1, None, 2)
        parts[expert, "down"] = down
        if not experts.has_gate:
            parts[expert, "up"] = up
            continue
        parts[expert, "gate"], parts[expert, "up"] = up[gate_rows], up[up_rows]
        if experts.has_bias:
            bias = experts.gate_up_proj_bias.detach()[expert]
            parts[expert, "gate_bias"], parts[expert, "up_bias"] = bias[gate_rows], bias[up_rows]
            parts[expert, "down_bias"] = experts.down_proj_bias.detach()[expert]
    return parts


def write(model_type: str, folder: Path, dtype: torch.dtype = torch.float32, **save: Any) -> PreTrainedModel:
    """A tiny random model of a type, and its checkpoint in ``folder`` as transformers saves it."""
    return write_config(tiny_config(model_type), folder, dtype, **save)


def write_config(
    config: PretrainedConfig, folder: Path, dtype: torch.dtype = torch.float32, **save: Any
) -> PreTrainedModel:
    chosen = choose_class(config)
    model = tiny_model(chosen.cls, chosen.config, seed=1).to(dtype)
    model.save_pretrained(folder, **save)
    return model


def load_into(
    folder: Path, *, stream: bool, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[Any, dict[str, Kept], LoadReport]:
    """Build and load a folder; with ``stream`` experts go to sinks, else they become parameters."""
    model = build_meta(load_config(folder), dtype)
    sinks = {name: Kept(module) for name, module in model.named_modules() if is_experts(module)}
    report = load(model, Checkpoint(folder), sinks if stream else None, dtype=dtype, **options)
    return model, sinks, report


def edit_tensors(folder: Path, change: Any) -> None:
    """Rewrite model.safetensors after ``change`` has edited the dictionary of its tensors in place."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})


def edit_config(folder: Path, change: Any) -> None:
    """Rewrite config.json after ``change`` has edited it in place."""
    path = folder / "config.json"
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
