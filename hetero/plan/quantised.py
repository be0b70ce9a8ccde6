"""The packed format that the experts of a quantised checkpoint keep, from its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hetero.core import InputError
from hetero.formats import GROUPS, Format, in_order, parse_format

_FP8_TILE = 128
_PACKED = {"nvfp4-pack-quantized": "nvfp4", "mxfp4-pack-quantized": "mxfp4"}
_MODELOPT = {"NVFP4": "nvfp4", "FP8": "fp8", "FP8_PER_CHANNEL_PER_TOKEN": "fp8_row"}


def kept_format(config: Mapping[str, Any]) -> Format | None:
    """None for a checkpoint that is not quantised, or whose values no packed format is known to keep here.

    The loader looks at every tensor; this is what the configuration says of most of them.
    """
    told = config.get("quantization_config") or config.get("compression_config")
    if not isinstance(told, Mapping):
        return None
    method = str(told.get("quant_method") or "").lower()
    try:
        if method == "mxfp4":
            return parse_format("mxfp4")
        if method == "fbgemm_fp8":
            return parse_format("fp8_row")
        if method == "fp8":
            return _fp8(told.get("weight_block_size", (_FP8_TILE, _FP8_TILE)))
        if method == "modelopt" or "quant_algo" in told:
            found = _MODELOPT.get(str(told.get("quant_algo", "")).upper())
            return None if found is None else parse_format(found)
        if method == "awq":
            return _integers(told.get("bits", 4), told.get("group_size", 128), symmetric=False)
        if method == "gptq":
            symmetric, size = bool(told.get("sym", True)), told.get("group_size", 128)
            fmt = _integers(told.get("bits"), size, symmetric=symmetric)
            # One group of all columns has no order.
            return in_order(fmt) if fmt is not None and told.get("desc_act") and size > 0 else fmt
        if method == "compressed-tensors":
            return _compressed(told)
    except (InputError, TypeError, ValueError):
        return None
    return None


def _compressed(told: Mapping[str, Any]) -> Format | None:
    if told.get("format") in _PACKED:
        return parse_format(_PACKED[str(told["format"])])
    groups = told.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
    weights = first.get("weights") if isinstance(first, Mapping) else None
    if not isinstance(weights, Mapping):
        return None
    if str(weights.get("type", "int")) != "int":
        strategy = weights.get("strategy")
        if weights.get("num_bits") != 8 or strategy not in ("tensor", "channel", "block"):
            return None
        if strategy == "channel":
            return parse_format("fp8_row")
        return _fp8(weights.get("block_structure") if strategy == "block" else None)
    size = weights.get("group_size")
    return _integers(
        weights.get("num_bits"), -1 if size is None else size, bool(weights.get("symmetric", True))
    )


def _fp8(block: Any) -> Format | None:
    """``block``: rows and columns of a scale; None: one scale a matrix."""
    if block is not None and any(int(size) % _FP8_TILE for size in block):
        return None
    return parse_format("fp8")


def _integers(bits: Any, group: Any, symmetric: bool) -> Format | None:
    """Groups wider than a format's are several of them with one scale."""
    if bits not in (4, 8) or not isinstance(group, int):
        return None
    fits = [g for g in reversed(GROUPS) if group < 0 or group % g == 0]
    return parse_format(f"int{bits}{'' if symmetric else 'z'} g{fits[0]}") if fits else None
