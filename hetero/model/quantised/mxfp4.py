"""gpt-oss's checkpoints (``quant_method: mxfp4``): packed experts as ``_blocks`` and ``_scales``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hetero.core import InputError
from hetero.model.quantised.base import Finder
from hetero.model.quantised.floats import Mxfp4Matrix


def find(found: Finder, config: Mapping[str, Any]) -> None:
    """Each pair is the logical tensor [E, k, n], since the tree of gpt-oss has its experts transposed."""
    for name in found.ending("_blocks"):
        blocks, scales = f"{name}_blocks", f"{name}_scales"
        info = found.info(blocks)
        if info.dtype != "U8" or len(info.shape) != 4 or info.shape[-1] != 16:
            raise InputError(
                f"{info.file}: tensor {blocks} is {info.dtype} of shape {list(info.shape)}; "
                "expected U8 [experts, rows, columns / 32, 16]"
            )
        found.companion(blocks, scales, ("U8", "F8_E8M0"))
        found.expect(scales, info.shape[:3], blocks)
        count, rows, groups, _ = info.shape
        found.add(Mxfp4Matrix(found.raw, name, (blocks, scales), (rows, groups * 32), count, transposed=True))
    found.refuse_left(("_scales",), "tensor of MXFP4 blocks")
