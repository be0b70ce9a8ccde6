"""What the routed experts of a model type compute, read off the module, and the types that are refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from hetero.core import Activation, ActKind, ExpertSpec, InputError

# Model type -> why hetero does not run it.
REFUSED: dict[str, str] = {
    "dbrx": "its experts are outside transformers' experts interface",
    "diffusion_gemma": "it denoises blocks of tokens by diffusion and is not a causal language model",
    "doge": "its experts are outside transformers' experts interface",
    "jetmoe": "its experts, in attention too, are outside transformers' experts interface",
    "longcat_flash": "its experts are outside transformers' experts interface",
    "nllb-moe": "it is an encoder-decoder",
    "openai_privacy_filter": "it classifies tokens and is not a causal language model",
    "switch_transformers": "it is an encoder-decoder",
}
_PARTS = {"diffusion_gemma_text": "diffusion_gemma"}


# Types whose forward in transformers does not carry all of its state from one piece of a prompt to the next
# (a recurrence that starts anew, a window that the first piece defines): their prompts are read in one pass.
WHOLE_PROMPT = frozenset({"jamba", "unlimited_ocr"})


# Types whose forward in transformers cannot take one token of each of several sequences of different lengths
# (``hetero.model.rows``): it keeps state of the whole sequence outside the modules that use it, or counts
# positions by what its cache holds. Their sequences take turns.
APART = frozenset({"llama4", "llama4_text", "qwen4_exp", "qwen4_exp_text"})


def refusal(model_type: str) -> str | None:
    """Why this model type is refused; None where it is not."""
    return REFUSED.get(_PARTS.get(model_type, model_type))


def check_type(model_type: str) -> None:
    """Raise InputError, with the reason, for a model type that hetero refuses."""
    reason = refusal(model_type)
    if reason is not None:
        raise InputError(f"model_type {model_type!r} is not supported: {reason}")


# Experts classes with the parameters of the interface, but without its marks: name -> marks. The call of
# Llama 4's is another; its block (``hetero.ops.recipes``) makes the interface's of it.
_UNMARKED: dict[str, dict[str, bool]] = {
    "Llama4TextExperts": {
        "has_gate": True,
        "has_bias": False,
        "is_transposed": True,
        "is_concatenated": True,
    },
    "Step3p7Experts": {
        "has_gate": True,
        "has_bias": False,
        "is_transposed": False,
        "is_concatenated": True,
    },
}


def mark_experts(model: nn.Module) -> None:
    """Give experts that only lack the marks of transformers' interface these marks."""
    for module in model.modules():
        act: Any = getattr(module, "act_fn", None)
        marks: dict[str, Any] = {**_UNMARKED.get(type(module).__name__, {})}
        if marks and not hasattr(module, "_apply_gate"):
            marks["_apply_gate"] = partial(_plain_gate, act)
        for name, value in marks.items():
            setattr(module, name, value)


def _plain_gate(act: Callable[[torch.Tensor], torch.Tensor], joined: torch.Tensor) -> torch.Tensor:
    gate, up = joined.chunk(2, dim=-1)
    return act(gate) * up


# Spellings of "experts a token is sent to" in configurations.
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")

_KINDS = {
    "silu": Activation(ActKind.SILU),
    "gelu": Activation(ActKind.GELU),
    "gelu_tanh": Activation(ActKind.GELU_TANH),
    "quick_gelu": Activation(ActKind.SILU, alpha=1.702),
    "relu": Activation(ActKind.RELU),
    "relu2": Activation(ActKind.RELU2),
    "identity": Activation(ActKind.IDENTITY),
}


def expert_spec(experts: nn.Module, config: Any) -> ExpertSpec:
    """Read shapes and activation off an experts module (which may be on ``meta``) of the interface.

    The activation is found by evaluating the module's own gate on numbers, so that a formula that the
    kernels do not have is seen: ``staged`` is then set, as it is where a norm follows each expert.
    """
    m: Any = experts
    rows, columns = m.down_proj.shape[-2:]
    hidden, intermediate = (columns, rows) if m.is_transposed else (rows, columns)
    activation = find_activation(experts)
    count, top_k = m.down_proj.shape[0], _top_k(getattr(m, "config", config), config)
    if not 1 <= top_k <= count:
        raise InputError(
            f"the configuration chooses {top_k} experts for a token (num_experts_per_tok, or the type's name "
            f"for it): must be from 1 to its {count} experts"
        )
    return ExpertSpec(
        num_experts=count,
        hidden=hidden,
        intermediate=intermediate,
        top_k=top_k,
        activation=activation or Activation(),
        has_gate=bool(m.has_gate),
        has_bias=bool(m.has_bias),
        staged=activation is None or bool(getattr(m, "has_post_expert_norm", False)),
    )


def _top_k(*configs: Any) -> int:
    for config in configs:
        for c in (config, getattr(config, "text_config", None)):
            for name in _TOP_K:
                value = getattr(c, name, None)
                if isinstance(value, int):
                    return value
    return 1


def gate_function(experts: nn.Module) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The module's own ``(gate, up) -> h``; for experts without a gate ``gate`` is ignored.

    Works on a module whose weights are gone: only the activation is used.
    """
    m: Any = experts
    if not m.has_gate:
        return lambda gate, up: m.act_fn(up)

    def apply(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        if m.is_concatenated:
            joined = torch.cat((gate, up), dim=-1)
        else:
            joined = torch.stack((gate, up), dim=-1).flatten(-2)
        return m._apply_gate(joined)  # type: ignore[no-any-return]

    return apply


def evaluate(activation: Activation, has_gate: bool, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The formula of ``Activation`` in torch, any shape and dtype."""
    a = activation
    g = torch.clamp(gate, max=a.gate_max) if has_gate else up
    match a.kind:
        case ActKind.SILU:
            h = g * torch.sigmoid(a.alpha * g)
        case ActKind.GELU:
            h = nn.functional.gelu(g)
        case ActKind.GELU_TANH:
            h = nn.functional.gelu(g, approximate="tanh")
        case ActKind.RELU:
            h = torch.relu(g)
        case ActKind.RELU2:
            h = torch.relu(g).square()
        case ActKind.IDENTITY:
            h = g
    if not has_gate:
        return h
    h = torch.clamp(h, max=a.act_max)
    return h * (torch.clamp(up, -a.up_limit, a.up_limit) + a.up_offset)


def find_activation(experts: nn.Module) -> Activation | None:
    """The ``Activation`` that agrees with the module's own gate on a grid of numbers; None if none does."""
    m: Any = experts
    with torch.no_grad(), torch.device("cpu"):  # also where the model is being built on meta
        gate, up = _grid(_limit(m))
        want = gate_function(experts)(gate, up)
    for candidate in _candidates(m):
        got = evaluate(candidate, bool(m.has_gate), gate, up)
        # some modules compute their gate in float32 whatever comes in
        if want.shape == got.shape and torch.allclose(want, got, rtol=2e-6, atol=1e-6):
            return candidate
    return None


def _limit(module: Any) -> float:
    for name in ("swiglu_limit", "limit"):
        value = getattr(module, name, None)
        if isinstance(value, int | float):
            return float(value)
    return math.inf


def _candidates(module: Any) -> Iterator[Activation]:
    limit = _limit(module)
    yield from _KINDS.values()
    if math.isfinite(limit):
        for plain in _KINDS.values():
            yield Activation(plain.kind, plain.alpha, gate_max=limit, up_limit=limit)
            yield Activation(plain.kind, plain.alpha, up_limit=limit, act_max=limit)
        for name in ("alpha", "swiglu_alpha"):
            alpha = getattr(module, name, None)
            if isinstance(alpha, int | float):
                yield Activation(ActKind.SILU, float(alpha), limit, limit, up_offset=1.0)


def _grid(limit: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Gates and ups [rows, columns] float64 on both sides of every limit and around zero."""
    reach = 3.0 * limit if math.isfinite(limit) else 40.0
    fine = torch.linspace(-6.0, 6.0, 49, dtype=torch.float64)
    wide = torch.linspace(-reach, reach, 32, dtype=torch.float64)
    values = torch.cat((fine, wide))
    gate, up = torch.meshgrid(values, values, indexing="ij")
    return gate.contiguous(), up.contiguous()
