"""Trees of modules for the tests of rules, made without torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hetero.core import MOE_BLOCK, ExpertSpec, ModuleInfo
from hetero.rules import Placement, load_rules, match
from hetero.rules.mistakes import Mistakes

SPEC = ExpertSpec(num_experts=4, hidden=64, intermediate=32, top_k=2)


def tree(layers: int = 12, dense: int = 0, block: str = "mlp") -> list[ModuleInfo]:
    """A decoder: embedding, ``layers`` layers (a plain MLP in the first ``dense``), norm and head."""
    below = [
        *(m for i in range(layers) for m in _layer(f"model.layers.{i}", i, i < dense, block)),
    ]
    head = [
        _module("model.embed_tokens", ("Embedding", "Module"), None, 640),
        _module("model.layers", ("ModuleList", "Module"), None, 0, total=sum(m.own_params for m in below)),
    ]
    tail = [_module("model.norm", ("TinyRMSNorm", "Module"), None, 64)]
    inside = [*head, *below, *tail]
    total = sum(m.own_params for m in inside)
    return [
        _module("", ("TinyForCausalLM", "PreTrainedModel", "Module"), None, 0, total=total + 640),
        _module("model", ("TinyModel", "PreTrainedModel", "Module"), None, 0, total=total),
        *inside,
        _module("lm_head", ("Linear", "Module"), None, 640),
    ]


def _layer(name: str, index: int, dense: bool, block: str) -> list[ModuleInfo]:
    def one(child: str, cls: str, own: int, *more: str, experts: ExpertSpec | None = None) -> ModuleInfo:
        return _module(f"{name}.{child}", (cls, "Module", *more), index, own, experts=experts)

    attention = [one("self_attn", "TinyAttention", 0), one("self_attn.q_proj", "Linear", 4096)]
    if dense:
        mlp = [one(block, "TinyMLP", 0), one(f"{block}.up_proj", "Linear", 2048)]
    else:
        mlp = [
            one(block, "TinySparseMoeBlock", 0, MOE_BLOCK),
            one(f"{block}.gate", "TinyTopKRouter", 256),
            one(f"{block}.experts", "TinyExperts", SPEC.params, experts=SPEC),
            one(f"{block}.experts.act_fn", "SiLUActivation", 0),
            one(f"{block}.shared_expert", "TinyMLP", 0),
            one(f"{block}.shared_expert.up_proj", "Linear", 2048),
        ]
    return [
        _module(name, ("TinyDecoderLayer", "Module"), index, 0),
        *attention,
        *mlp,
        one("input_layernorm", "TinyRMSNorm", 64),
    ]


def _module(
    name: str,
    classes: tuple[str, ...],
    layer: int | None,
    own: int,
    *,
    total: int | None = None,
    experts: ExpertSpec | None = None,
) -> ModuleInfo:
    return ModuleInfo(name, classes, layer, own if total is None else total, own, experts)


def write(folder: Path, text: str, name: str = "my.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def place(
    path: Path,
    modules: Sequence[ModuleInfo] | None = None,
    devices: Sequence[str] = ("cpu", "cuda:0"),
    overrides: dict[str, str] | None = None,
    *,
    strict: bool = True,
) -> Placement:
    mistakes = Mistakes()
    ruleset = load_rules(path, overrides, mistakes)
    modules = tree() if modules is None else modules
    return match(ruleset, modules, devices=devices, strict=strict, mistakes=mistakes)


MOE = "  - name: experts\n    match: {class: MoeBlock}\n    replace: {op: moe, experts: {format: int4}}\n"
REST = "  - name: rest\n    match: {name: '.*'}\n    replace: {op: keep}\n"
GOOD = f"rules:\n{MOE}{REST}"
