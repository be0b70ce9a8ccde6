"""Models over several devices: where the values of a forward pass change device.

A module whose whole subtree is on one device needs nothing inside. Where such a module stands in a parent
that is spread over devices, its inputs are brought to it and its outputs back to where they came from, so
that the parent's own arithmetic (residual sums, masks) stays on one device: that of the embedding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hetero.core import InputError
from hetero.rules.placement import Placement

# Dotted name of a module -> the devices that it and what is below it are on.
Spans = dict[str, frozenset[str]]


def connect(model: Any, placement: Placement) -> list[str]:
    """Install the hops on a loaded model; the names of the modules that have one.

    Raises InputError when a module that is spread over devices has weights of its own away from the
    embedding.
    """
    spans: Spans = {}
    _span(model, "", placement, spans)
    if len(spans[""]) < 2:
        return []
    home = _name_of(model, model.get_input_embeddings())
    home_device = placement.device_of(home) or "cpu"
    hops = []
    for name, module in model.named_modules():
        devices = spans.get(name, frozenset())
        if len(devices) > 1:
            _refuse_strays(name, module, placement, home_device)
        elif devices and len(spans[name.rpartition(".")[0]]) > 1:
            _install(module, torch.device(*devices))
            hops.append(name)
    return hops


def _span(module: nn.Module, name: str, placement: Placement, spans: Spans) -> frozenset[str]:
    """Devices that the modules at and below ``name`` are assigned to. A replaced module is one unit."""
    assignment = placement.by_module.get(name)
    devices = {assignment.device} if assignment is not None else set()
    if assignment is None or not assignment.replaces:
        for leaf, child in module.named_children():
            devices |= _span(child, f"{name}.{leaf}" if name else leaf, placement, spans)
    spans[name] = frozenset(devices)
    return spans[name]


def _name_of(model: nn.Module, wanted: nn.Module) -> str:
    return next((name for name, module in model.named_modules() if module is wanted), "")


def _refuse_strays(name: str, module: nn.Module, placement: Placement, home: str) -> None:
    own = [*module._parameters, *module._buffers]
    assignment = placement.by_module.get(name)
    if own and assignment is not None and assignment.device != home:
        raise InputError(
            f"{assignment.rule.label}: {name} has weights of its own ({', '.join(own[:3])}) on "
            f"{assignment.device} and modules on other devices; it must be where the embedding is, on {home}"
        )


def _install(module: nn.Module, device: torch.device) -> None:
    origin = device  # where the inputs of the pass under way came from; a model runs one pass at a time

    def bring(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        nonlocal origin
        origin = next(_devices((args, kwargs)), device)
        return _to(args, device), _to(kwargs, device)

    def bring_back(_: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
        return _to(output, origin)

    module.register_forward_pre_hook(bring, with_kwargs=True)
    module.register_forward_hook(bring_back)


def _devices(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        yield value.device
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _devices(item)
    elif type(value) is dict:
        for item in value.values():
            yield from _devices(item)


def _to(value: Any, device: torch.device) -> Any:
    """``value`` with its tensors on ``device``. Caches and other objects are left alone: they hold state."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if type(value) is tuple or type(value) is list:
        return type(value)(_to(item, device) for item in value)
    if type(value) is dict:
        return {key: _to(item, device) for key, item in value.items()}
    return value
