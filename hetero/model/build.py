"""A model's module tree from its configuration, without its weights.

Parameters stay on the ``meta`` device until the loader brings them; buffers that no checkpoint holds (rotary
frequencies, hash multipliers, position ids) are computed here, by the same code of transformers that computes
them in ``from_pretrained``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hetero.core import MOE_BLOCK, ExpertSpec, HeteroError, InputError, ModuleInfo
from hetero.model import hf
from hetero.model.config import choose_class, load_config
from hetero.model.moe_types import expert_spec, mark_experts

__all__ = [
    "TOWER",
    "MoeSite",
    "assert_only_experts_on_meta",
    "build_meta",
    "choose_class",
    "describe",
    "find_moe",
    "float32_names",
    "is_experts",
    "load_config",
    "materialise_buffers",
    "meta_tensors",
    "target_dtype",
]

# Components of names that belong to parts of a model that text generation does not run.
TOWER = re.compile(
    r"vision|visual|audio|image|video|speech|projector|resampler|aligner|merger|sam_model|talker|code2wav|^mtp"
)


def build_meta(config: hf.Config, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Build the causal language model of ``config``, in eval mode, every parameter on ``meta`` in ``dtype``.

    Towers that text does not pass (vision, audio, MTP) are replaced by None and named in ``dropped_towers``.
    Learned buffers stay on ``meta`` until the checkpoint brings them; computed ones are real.
    """
    chosen = choose_class(deepcopy(config))
    try:
        with torch.device("meta"):
            model = chosen.cls._from_config(chosen.config, dtype=dtype)
    except Exception as error:  # whatever a constructor says to fields that do not go together
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"the configuration does not build a {chosen.cls.__name__}: {reason}") from error
    mark_experts(model)
    model.eval()
    model.requires_grad_(False)
    model.checkpoint_prefix = chosen.checkpoint_prefix
    model.dropped_towers = tuple(_drop_towers(model))
    materialise_buffers(model)
    return model  # type: ignore[no-any-return]


def _drop_towers(model: Any) -> Iterator[str]:
    decoder = model.get_decoder()
    path = next((name for name, module in model.named_modules() if module is decoder), "")
    parts = path.split(".") if path else []
    for depth in range(len(parts)):
        owner_name = ".".join(parts[:depth])
        owner = model.get_submodule(owner_name) if owner_name else model
        for name, child in list(owner.named_children()):
            if name != parts[depth] and TOWER.search(name) and not isinstance(child, type(decoder)):
                setattr(owner, name, None)
                yield f"{owner_name}.{name}" if owner_name else name


def materialise_buffers(model: Any) -> None:
    """Give real values to the buffers that ``meta`` lost and that are computed, not learned.

    Those are the non-persistent ones, and the persistent ones of integers (hash multipliers). A persistent
    buffer of floats is learned (a router's correction bias) and has to come from the checkpoint; so has one
    of integers that starts as zeros (DeepSeek V4's table of experts by token).

    The values come from the model's own initialisation, run with everything else marked as initialised.
    Each buffer is poisoned first, so that one that the model's code does not fill is an error, not garbage.
    """
    optional = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_missing or ()]
    persistent = {name for name, _ in model.named_buffers()} - {
        name for name, _ in model.named_non_persistent_buffers()
    }
    for parameter in model.parameters():
        parameter._is_hf_initialized = True
    poisoned: dict[str, torch.Tensor] = {}
    for name, buffer in list(model.named_buffers()):
        computed = not buffer.is_floating_point() or any(pattern.search(name) for pattern in optional)
        if (name in persistent and not computed) or buffer.device.type != "meta":
            buffer._is_hf_initialized = True
        else:
            poisoned[name] = _poison(torch.empty_like(buffer, device="cpu"))
            owner, leaf = _owner(model, name)
            owner._buffers[leaf] = poisoned[name]
    for module in model.modules():
        module._is_hf_initialized = False
    with torch.random.fork_rng(devices=[]):
        model.initialize_weights()
    for name, before in poisoned.items():
        after = model.get_buffer(name)
        if after.device.type == "meta" or (after is before and _is_poison(after)):
            raise HeteroError(
                f"{type(model).__name__}: buffer {name} is not filled by the model's initialisation"
            )
        if name in persistent and not after.is_floating_point() and not after.any():
            owner, leaf = _owner(model, name)
            owner._buffers[leaf] = torch.empty_like(after, device="meta")


def _poison(buffer: torch.Tensor) -> torch.Tensor:
    if buffer.is_floating_point() or buffer.is_complex():
        return buffer.fill_(float("nan"))
    if buffer.dtype != torch.bool:
        return buffer.fill_(torch.iinfo(buffer.dtype).max)
    return buffer.fill_(False)


def _is_poison(buffer: torch.Tensor) -> bool:
    if buffer.numel() == 0 or buffer.dtype == torch.bool:
        return False
    if buffer.is_floating_point() or buffer.is_complex():
        return bool(buffer.isnan().any())
    return bool((buffer == torch.iinfo(buffer.dtype).max).all())


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return (model.get_submodule(path) if path else model), leaf


def meta_tensors(model: nn.Module) -> Iterator[str]:
    """Names of all tensors on ``meta``: parameters, buffers, and plain attributes of modules."""
    for prefix, module in model.named_modules():
        dot = f"{prefix}." if prefix else ""
        held = {**module._parameters, **module._buffers, **vars(module)}
        for name, value in held.items():
            if isinstance(value, torch.Tensor) and value.device.type == "meta":
                yield dot + name


def assert_only_experts_on_meta(model: nn.Module, experts_names: Iterable[str]) -> None:
    """Raise HeteroError, naming the tensors, when anything outside the given modules is still on ``meta``."""
    inside = tuple(f"{name}." for name in experts_names)
    left = [name for name in meta_tensors(model) if not name.startswith(inside)]
    if left:
        raise HeteroError(f"left on the meta device: {', '.join(left[:5])} ({len(left)} tensors)")


@dataclass(frozen=True, slots=True)
class MoeSite:
    """A block that owns routed experts."""

    name: str  # dotted name of the block
    experts_name: str  # dotted name of its experts module
    block: nn.Module
    experts: nn.Module
    spec: ExpertSpec


def is_experts(module: nn.Module) -> bool:
    """Whether the module follows transformers' experts interface."""
    return all(hasattr(module, flag) for flag in hf.EXPERT_FLAGS) and hasattr(module, "down_proj")


def find_moe(model: Any) -> list[MoeSite]:
    """Every MoE block of the tree, in the order of the tree."""
    sites = []
    for name, module in model.named_modules():
        if is_experts(module):
            block_name = name.rpartition(".")[0]
            block = model.get_submodule(block_name) if block_name else model
            sites.append(MoeSite(block_name, name, block, module, expert_spec(module, model.config)))
    return sites


_LAYER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


def describe(model: Any) -> list[ModuleInfo]:
    """The tree as rules see it: every module, in order, the root first.

    A weight that modules share counts once, in the one that the others are tied to.
    """
    held = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    tied = {name for name, source in model.all_tied_weights_keys.items() if source in held and name != source}
    own = {
        name: sum(
            p.numel()
            for leaf, p in module._parameters.items()
            if p is not None and (f"{name}.{leaf}" if name else leaf) not in tied
        )
        for name, module in model.named_modules()
    }
    total = dict(own)
    for name, count in own.items():
        parent = name
        while parent:
            parent = parent.rpartition(".")[0]
            total[parent] += count
    sites = find_moe(model)
    blocks = {site.name for site in sites}
    specs = {site.experts_name: site.spec for site in sites}
    infos = []
    for name, module in model.named_modules():
        classes = tuple(base.__name__ for base in type(module).__mro__ if base is not object)
        if name in blocks:
            classes = (*classes, MOE_BLOCK)
        infos.append(ModuleInfo(name, classes, layer_of(name), total[name], own[name], specs.get(name)))
    return infos


def layer_of(name: str) -> int | None:
    """Index of the layer that a dotted module name is in, None outside layers."""
    found = _LAYER.search(name)
    return int(found.group(1)) if found else None


def float32_names(model: Any, dtype: torch.dtype) -> re.Pattern[str] | None:
    """Pattern of the parameters that transformers keeps in float32 when the rest is of ``dtype``."""
    patterns = model._get_dtype_plan(dtype)
    if not patterns:
        return None
    return re.compile("|".join(f"(?:{pattern.replace('*', '.*')})" for pattern in patterns))


def target_dtype(name: str, tensor: torch.Tensor, float32: re.Pattern[str] | None) -> torch.dtype:
    """The dtype that a parameter or buffer of the tree is loaded in.

    It is the one that the tree was built in, which for some tensors is not the model's, or float32.
    """
    return torch.float32 if float32 is not None and float32.search(name) else tensor.dtype
