"""transformers' own offload by accelerate: what of a model fits GPU memory stays there, the other layers'
weights cross PCIe for every token. For the row beside ``hetero bench`` of the same shape, layers and cap.

    python benchmarks/offload.py --shape qwen3-30b-a3b --layers 6 --vram-gib 4 --tokens 8 --json FILE
    hetero bench synthetic:qwen3-30b-a3b --layers 6 --vram 5GiB --format bf16 --tokens 64

The model is built with random bfloat16 weights in main memory; the cap is of weights on the device (the
context, some 0.5 GB, comes on top: add it to the other's). Decode is the median over --runs of greedy tokens
behind a prompt of --prompt tokens, with transformers' cache. ``--device cpu`` keeps everything there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from hetero.model.build import build_meta
from hetero.model.config import load_config
from hetero.model.shapes import resolve_model


def build(shape: str, layers: int) -> Any:
    """Random weights of a sane scale, bfloat16, on the CPU."""
    data = dict(resolve_model(f"synthetic:{shape}").config)
    inner = data.get("text_config", data)
    inner["num_hidden_layers"] = layers
    if kinds := inner.get("layer_types"):
        inner["layer_types"] = kinds[:layers]
    model: Any = build_meta(load_config(data), torch.bfloat16)
    for module in model.modules():
        for name, one in list(module.named_parameters(recurse=False)):
            # A row again and again: one core takes minutes for gigabytes of random numbers.
            width = one.shape[-1]
            row = torch.randn(width) * width**-0.5 if one.dim() > 1 else torch.ones(width)
            values = torch.empty(one.shape, dtype=torch.bfloat16).copy_(row.expand(one.shape))
            setattr(module, name, torch.nn.Parameter(values, requires_grad=False))
    model.tie_weights()
    return model


def spread(model: Any, vram_gib: float) -> tuple[Any, dict[str, Any]]:
    """On device 0 what fits, the rest in main memory; which module is where."""
    from accelerate import dispatch_model, infer_auto_device_map

    most = {0: int(vram_gib * 2**30), "cpu": 1 << 50}
    where = infer_auto_device_map(model, max_memory=most, no_split_module_classes=model._no_split_modules)
    return dispatch_model(model, where), where


@torch.inference_mode()
def measure(model: Any, device: str, prompt: int, tokens: int) -> tuple[float, float]:
    """(seconds to the first token, tokens a second after it)."""
    ids = torch.randint(model.config.get_text_config().vocab_size, (1, prompt), device=device)
    begin = time.perf_counter()
    out = model(input_ids=ids, use_cache=True, logits_to_keep=1)
    last = out.logits[:, -1:].argmax(-1).to(device)
    last.item()
    first = time.perf_counter() - begin
    begin = time.perf_counter()
    for _ in range(tokens):
        out = model(input_ids=last, past_key_values=out.past_key_values, use_cache=True)
        last = out.logits[:, -1:].argmax(-1).to(device)
        last.item()
    return first, tokens / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--vram-gib", type=float, default=4.0)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("this measures a GPU, and torch sees none")
    model = build(options.shape, options.layers)
    size = sum(one.nbytes for one in model.parameters())
    where: dict[str, Any] = {}
    if options.device == "cuda":
        model, where = spread(model, options.vram_gib)
    given = options.device, options.prompt, options.tokens
    measure(model, *given)  # what is only slow once
    found = [measure(model, *given) for _ in range(options.runs)]
    first, speed = (statistics.median(column) for column in zip(*found, strict=True))
    away = [name for name, place in where.items() if place == "cpu"]
    result = {
        "engine": "transformers, accelerate", "shape": options.shape, "layers": options.layers,
        "weight_bytes": size, "vram_gib": options.vram_gib, "modules_in_main_memory": len(away),
        "modules": len(where), "first_token_s": first, "tok_s": speed, "prompt": options.prompt,
        "rounds": found, "gpu": torch.cuda.get_device_name() if options.device == "cuda" else None,
    }  # fmt: skip
    there = f"{size / 2**30:.1f} GiB of bfloat16, {len(away)} of {len(where)} modules in main memory"
    took = f"{speed:.2f} tok/s, first token of {options.prompt} after {first:.2f} s"
    print(f"{options.shape}, {options.layers} layers, {there}: {took}")
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
