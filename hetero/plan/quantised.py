"""The packed format that the experts of a quantised checkpoint keep, from its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hetero.core import InputError
from hetero.formats import GROUPS, Format, parse_format

_FIXED = {"fp8": "fp8", "mxfp4": "mxfp4"}


def kept_format(config: Mapping[str, Any]) -> Format | None:
    """None for a checkpoint that is not quantised, or whose values no packed format is known to keep here.

    The loader looks at every tensor; this is what the configuration says of most of them.
    """
    told = config.get("quantization_config") or config.get("compression_config")
    if not isinstance(told, Mapping):
        return None
    method = str(told.get("quant_method") or "").lower()
    try:
        if method in _FIXED:
            return parse_format(_FIXED[method])
        if method == "modelopt" or str(told.get("quant_algo", "")).upper() == "NVFP4":
            return parse_format("nvfp4")
        if method == "awq":
            return _integers(told.get("bits", 4), told.get("group_size", 128), symmetric=False)
        if method == "gptq":
            symmetric = bool(told.get("sym", False))
            return _integers(told.get("bits"), told.get("group_size", 128), symmetric=symmetric)
        if method == "compressed-tensors":
            return _compressed(told)
    except (InputError, TypeError, ValueError):
        return None
    return None


def _compressed(told: Mapping[str, Any]) -> Format | None:
    groups = told.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
    weights = first.get("weights") if isinstance(first, Mapping) else None
    if not isinstance(weights, Mapping) or str(weights.get("type", "int")) != "int":
        return None
    size = weights.get("group_size")
    return _integers(
        weights.get("num_bits"), -1 if size is None else size, bool(weights.get("symmetric", True))
    )


def _integers(bits: Any, group: Any, symmetric: bool) -> Format | None:
    """Groups wider than a format's are several of them with one scale."""
    if bits not in (4, 8) or not isinstance(group, int):
        return None
    fits = [g for g in reversed(GROUPS) if group < 0 or group % g == 0]
    return parse_format(f"int{bits}{'' if symmetric else 'z'} g{fits[0]}") if fits else None
