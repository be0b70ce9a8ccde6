"""FBGEMM's checkpoints (``quant_method: fbgemm_fp8``): E4M3 with a scale per output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hetero.core import InputError
from hetero.model.quantised.base import Finder
from hetero.model.quantised.floats import Fp8Matrix

_SUFFIX = "_scale"


def find(found: Finder, config: Mapping[str, Any]) -> None:
    """Matrices [n, k] with scales [n, 1], and packed experts [E, k, n] with scales [E, 1, n] or [E, n, 1]."""
    for name in found.ending("", ("F8_E4M3",)):
        scale = f"{name}{_SUFFIX}"
        info, shape = found.info(name), found.companion(name, scale, ("F32", "BF16", "F16")).shape
        *experts, first, second = info.shape if len(info.shape) in (2, 3) else (0, 0, 0, 0)
        if len(experts) > 1:
            raise InputError(f"{info.file}: tensor {name} of shape {list(info.shape)} is no matrix")
        count = experts[0] if experts else None
        n, k = (second, first) if experts else (first, second)
        if tuple(size for size in shape if size != 1) != tuple(size for size in (*experts, n) if size != 1):
            raise InputError(
                f"{info.file}: tensor {scale} has shape {list(shape)}; expected one scale an output, "
                f"{[*experts, n, 1]}, for {name} of shape {list(info.shape)}"
            )
        stored, turned = (name, scale), bool(experts)
        found.add(Fp8Matrix(found.raw, name, stored, (n, k), tile=(1, k), count=count, transposed=turned))
    found.drop(r"\.input_scale(?:_ub)?")
    found.notes.append(
        "the checkpoint's quantisation of activations is not used: activations stay as they are"
    )
    found.refuse_left((".weight_scale", "_proj_scale"), "FP8 tensor")
