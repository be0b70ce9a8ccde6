"""FP8 checkpoints of DeepSeek and Qwen (``quant_method: fp8``): E4M3 with ``weight_scale_inv`` per block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hetero.core import InputError
from hetero.model.quantised.base import Finder
from hetero.model.quantised.floats import Fp8Matrix

SCALES = ("F32", "BF16", "F16", "F8_E8M0")
_SUFFIX = "_scale_inv"


def find(found: Finder, config: Mapping[str, Any]) -> None:
    """The quantised matrices: 2-D weights, and packed experts [E, n, k]."""
    block = _block(found, config)
    for name in found.ending("", ("F8_E4M3",)):
        scale = f"{name}{_SUFFIX}"
        if name.endswith(_SUFFIX):
            continue
        info = found.info(name)
        scales = found.companion(name, scale, SCALES)
        if len(info.shape) not in (2, 3):
            raise InputError(f"{info.file}: tensor {name} of shape {list(info.shape)} is no matrix")
        count = info.shape[0] if len(info.shape) == 3 else None
        shape = (info.shape[-2], info.shape[-1])
        if block is None:
            tile = shape
            if scales.nbytes and _numel(scales.shape) != (count or 1):
                raise _disagree(
                    found, scale, scales.shape, "one scale a matrix ('weight_block_size' is absent)"
                )
        else:
            tile = block
            wanted = tuple(-(-size // step) for size, step in zip(shape, block, strict=True))
            wanted = wanted if count is None else (count, *wanted)
            if scales.shape != wanted:
                raise _disagree(
                    found, scale, scales.shape, f"{list(wanted)} for 'weight_block_size' {list(block)}"
                )
        found.add(Fp8Matrix(found.raw, name, (name, scale), shape, tile=tile, count=count))
    if found.drop(r"\.(?:activation_scale|input_scale)|\.[kvq]_scale"):
        found.notes.append(
            "the checkpoint's scales of activations are not used: activations stay as they are"
        )
    found.refuse_left((_SUFFIX,), "FP8 tensor")


def _block(found: Finder, config: Mapping[str, Any]) -> tuple[int, int] | None:
    fmt = config.get("fmt", "e4m3")
    if fmt != "e4m3":
        raise InputError(f"{found.where}: 'fmt' is {fmt!r}; of the FP8 formats hetero reads e4m3")
    block = config.get("weight_block_size", (128, 128))
    if block is None:
        return None
    if (
        not isinstance(block, list | tuple)
        or len(block) != 2
        or not all(isinstance(b, int) and b > 0 for b in block)
    ):
        raise InputError(f"{found.where}: 'weight_block_size' is {block!r}; expected two sizes, [128, 128]")
    return block[0], block[1]


def _disagree(found: Finder, name: str, shape: tuple[int, ...], wanted: str) -> InputError:
    return InputError(
        f"{found.info(name).file}: tensor {name} has shape {list(shape)}; expected {wanted}: "
        "config and tensors disagree"
    )


def _numel(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
