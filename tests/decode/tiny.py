"""Tiny random models, and decoders of copies of them."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from hetero.cpu import CpuExperts
from hetero.decode.decoder import Decoder
from hetero.decode.experts import DirectExperts
from hetero.formats import parse_format
from hetero.model.build import choose_class, find_moe
from hetero.ops.gpu.linear import PackedLinear
from tests.model.tiny_moe import tiny_config, tiny_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Small, for the interpreter of kernels takes its time for every output.
SIZES = {"vocab_size": 40, "hidden_size": 32, "head_dim": 16, "shared_expert_intermediate_size": 16}
VOCAB = SIZES["vocab_size"]


def tiny(model_type: str, generator: torch.Generator, **changes: Any) -> Any:
    """A float32 model of transformers on the device."""
    seed = int(torch.randint(2**31, (1,), generator=generator))
    chosen = choose_class(tiny_config(model_type, **(SIZES | changes)))
    model: Any = tiny_model(chosen.cls, chosen.config, seed)
    return model.to(DEVICE)


def direct_experts(model: Any) -> list[DirectExperts]:
    """The routed experts of each MoE layer on the CPU, in float32."""
    made = []
    for site in find_moe(model):
        experts: Any = site.experts
        backend = CpuExperts(site.spec, parse_format("f32"))
        for index in range(site.spec.num_experts):
            gate, up = experts.gate_up_proj[index].detach().cpu().chunk(2)
            down = experts.down_proj[index].detach().cpu()
            for part, weight in (("gate", gate), ("up", up), ("down", down)):
                backend.put(index, part, weight)  # type: ignore[arg-type]
        made.append(DirectExperts(backend))
    return made


def decoder_of(model: Any, *, slots: int = 3, context: int = 160, pages: int | None = None) -> Decoder:
    """Over a copy of the model's weights, everything in float32."""
    copied = deepcopy(model)
    return Decoder(
        copied,
        direct_experts(copied),
        slots=slots,
        context=context,
        device=DEVICE,
        kv_dtype=torch.float32,
        pages=pages,
    )


def packed_copy(model: Any, fmt: str) -> Any:
    """A copy of a model whose linear layers are packed."""
    copied = deepcopy(model)
    for name, module in list(copied.named_modules()):
        if type(module) is nn.Linear and module.out_features > 1:
            packed = PackedLinear(module, parse_format(fmt), DEVICE)
            packed.after_load()
            path, _, leaf = name.rpartition(".")
            setattr(copied.get_submodule(path), leaf, packed)
    return copied


def tokens_of(count: int, generator: torch.Generator) -> torch.Tensor:
    """int64 [count] on the device."""
    return torch.randint(VOCAB, (count,), generator=generator).to(DEVICE)


def reference(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Logits float32 [T, V] of transformers' own forward."""
    # Convolutions too in float32 on a GPU.
    with torch.no_grad(), torch.backends.cudnn.flags(allow_tf32=False):
        logits: torch.Tensor = model(input_ids=tokens[None], use_cache=False).logits[0].float()
    return logits


def step(decoder: Decoder, inputs: Any, rows: Iterable[tuple[int, int, int]]) -> torch.Tensor:
    """Logits [R, V] of rows (token, slot, position)."""
    given = torch.tensor(list(rows)).T
    for target, values in zip((inputs.tokens, inputs.slots, inputs.positions), given, strict=True):
        target.copy_(values)
    with torch.no_grad():
        return decoder.step(inputs)


def prefill(decoder: Decoder, tokens: torch.Tensor, slot: int, start: int = 0) -> torch.Tensor:
    with torch.no_grad():
        return decoder.prefill(tokens, slot, start, decoder.inputs(1).pages)


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative norm."""
    return float((got - wanted).norm() / wanted.norm())
