"""ModelOpt's checkpoints: NVFP4 (``weight_scale``, ``weight_scale_2``) and FP8 (a scale a matrix or row)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hetero.core import InputError
from hetero.model.quantised.base import Finder
from hetero.model.quantised.floats import Fp8Matrix, Nvfp4Matrix

_BY_ROW = "FP8_PER_CHANNEL_PER_TOKEN"
_ALGORITHMS = ("NVFP4", "FP8", _BY_ROW, "MIXED_PRECISION")
_SIDES = (".weight_scale", ".weight_scale_2")


def find(found: Finder, config: Mapping[str, Any]) -> None:
    """``config`` is the one of config.json, or "quantization" of hf_quant_config.json."""
    algorithm = str(config.get("quant_algo", "")).upper()
    if algorithm not in _ALGORITHMS:
        raise InputError(
            f"{found.where}: ModelOpt's 'quant_algo' is {config.get('quant_algo')!r}; hetero reads "
            f"{', '.join(_ALGORITHMS)}"
        )
    for name in found.ending(".weight", ("U8",)):
        weight, scale, whole = f"{name}.weight", f"{name}.weight_scale", f"{name}.weight_scale_2"
        info = found.info(weight)
        found.companion(weight, scale, ("F8_E4M3",))
        found.companion(weight, whole, ("F32",))
        add_nvfp4(found, weight, (weight, scale, whole), info.shape)
    for name in found.ending(".weight", ("F8_E4M3",)):
        weight, scale = f"{name}.weight", f"{name}.weight_scale"
        scales = found.companion(weight, scale, ("F32", "BF16", "F16"))
        n, k = found.matrix(weight)
        by_row = algorithm in (_BY_ROW, "MIXED_PRECISION") and scales.shape in ((n,), (n, 1))
        if not by_row and (scales.shape not in ((), (1,)) or algorithm == _BY_ROW):
            wanted = "one scale a row" if algorithm == _BY_ROW else "one scale a matrix"
            raise InputError(
                f"{scales.file}: tensor {scale} has shape {list(scales.shape)}; expected {wanted}"
            )
        tile = (1, k) if by_row else (n, k)
        found.add(Fp8Matrix(found.raw, weight, (weight, scale), (n, k), tile=tile))
    if found.drop(r"\.(?:input_scale|[kv]_scale|output_scale)"):
        found.notes.append(
            "the checkpoint's scales of activations are not used: activations stay as they are"
        )
    found.refuse_left(_SIDES, "ModelOpt tensor")


def add_nvfp4(
    found: Finder,
    name: str,
    stored: tuple[str, str, str],
    packed: tuple[int, ...],
    *,
    divides: bool = False,
) -> None:
    """A matrix in NVFP4, its shapes checked. ``stored``: codes, scales by 16, the matrix's scale."""
    codes, scale, whole = stored
    info = found.info(codes)
    if len(packed) != 2 or packed[1] % 8:
        raise InputError(
            f"{info.file}: tensor {codes} of shape {list(packed)} is not in groups of 16: expected [n, k / 2]"
        )
    n, k = packed[0], packed[1] * 2
    found.expect(scale, (n, k // 16), codes)
    if found.info(whole).shape not in ((), (1,)):
        raise InputError(f"{info.file}: tensor {whole} must be one number")
    found.add(Nvfp4Matrix(found.raw, name, stored, (n, k), divides=divides))
