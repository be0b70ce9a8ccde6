"""One model type, from a saved checkpoint through our whole path, compared with transformers' own."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from hetero.engine.load import load_model
from hetero.model.build import choose_class, load_config
from tests.model.tiny_moe import VOCAB, tiny_config, tiny_model

PROMPT, STEPS = 12, 16


@dataclass(frozen=True)
class Trace:
    """Logits [PROMPT, V] of the prompt, then [STEPS, V] of greedy steps, and the tokens they chose."""

    prefill: torch.Tensor
    steps: torch.Tensor
    tokens: list[int]


def save_tiny(model_type: str, folder: Path, seed: int = 0, **changes: Any) -> type:
    """Save a tiny random checkpoint of this type as transformers saves it; the class that runs it."""
    config = tiny_config(model_type, **changes)
    chosen = choose_class(config)
    model = tiny_model(chosen.cls, chosen.config, seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # generation defaults of tiny configurations
        model.save_pretrained(folder)
    if chosen.checkpoint_prefix:  # the class is a part of what the checkpoint holds
        file = folder / "model.safetensors"
        save_file(
            {chosen.checkpoint_prefix + k: v for k, v in load_file(file).items()}, file, {"format": "pt"}
        )
        (folder / "config.json").write_text(json.dumps(config.to_dict(), default=str))
    return chosen.cls


def load_reference(model_type: str, model_class: Any, folder: Path) -> Any:
    """transformers' own ``from_pretrained`` in float32."""
    kwargs: dict[str, Any] = {"dtype": torch.float32, "experts_implementation": "eager"}
    config = load_config(folder)
    chosen = choose_class(config)
    if chosen.checkpoint_prefix:
        prefix = chosen.checkpoint_prefix.replace(".", r"\.")
        kwargs |= {"config": chosen.config, "key_mapping": {f"^{prefix}": ""}}
    model = model_class.from_pretrained(folder, **kwargs)
    return model.eval()


def load_ours(folder: Path, experts: str = "f32", isa: str = "auto") -> Any:
    """The model as ``hetero run`` loads it, on the CPU, the experts in the format given."""
    loaded = load_model(folder, rules="default-cpu", overrides={"experts": experts}, isa=isa, threads=1)
    return loaded.runnable.model


def prompt(seed: int = 1) -> torch.Tensor:
    """Token ids [1, PROMPT], special ones left out."""
    return torch.randint(4, VOCAB - 4, (1, PROMPT), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def trace(model: Any, ids: torch.Tensor) -> Trace:
    """Prefill, then greedy steps of one token over the model's own cache."""
    out = model(input_ids=ids, use_cache=True)
    prefill = out.logits[0].float()
    cache, last = out.past_key_values, prefill[-1]
    steps, tokens = [], []
    for _ in range(STEPS):
        tokens.append(int(last.argmax()))
        out = model(input_ids=torch.tensor([tokens[-1:]]), past_key_values=cache, use_cache=True)
        cache, last = out.past_key_values, out.logits[0, -1].float()
        steps.append(last)
    return Trace(prefill, torch.stack(steps), tokens)


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest relative norm of the error over rows, in float64; rows are logits [.., V]."""
    got, want = got.double(), want.double()
    return float(((got - want).norm(dim=-1) / want.norm(dim=-1)).max())
