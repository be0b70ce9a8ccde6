"""Quantised safetensors checkpoints as sources: one scheme a module, see docs/checkpoints.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hetero.core import InputError
from hetero.model.quantised import awq, compressed_tensors, fbgemm, fp8, gptq, modelopt, mxfp4
from hetero.model.quantised.base import Finder, InexactError
from hetero.model.shapes import read_config
from hetero.model.source import Checkpoint, Source

__all__ = ["METHODS", "InexactError", "is_quantised", "open_quantised", "stated_quantisation"]

METHODS: dict[str, Callable[[Finder, Mapping[str, Any]], None]] = {
    "fp8": fp8.find,
    "compressed-tensors": compressed_tensors.find,
    "awq": awq.find,
    "gptq": gptq.find,
    "mxfp4": mxfp4.find,
    "modelopt": modelopt.find,
    "fbgemm_fp8": fbgemm.find,
}
_MODELOPT_FILE = "hf_quant_config.json"


def open_quantised(raw: Checkpoint) -> Source:
    """``raw`` itself, or its logical tensors where the folder's configuration says that it is quantised.

    Raises InputError, one clear message, for a method that is not known, scales that are absent, sizes that
    do not divide and a configuration that its tensors contradict.
    """
    config, where = _configuration(raw.folder)
    if config is None:
        _refuse_undeclared(raw)
        return raw
    method = str(config.get("quant_method") or "").lower()
    if method not in METHODS:
        raise InputError(
            f"{where}: quantised with {config.get('quant_method') or 'an unknown method'!s}; "
            f"hetero reads {', '.join(METHODS)} and GGUF"
        )
    found = Finder(raw, str(where))
    with raw:  # some schemes read small tensors to know the rest
        METHODS[method](found, config)
    return found.finish(method)


def stated_quantisation(folder: Path) -> Mapping[str, Any] | None:
    """What a folder's configuration says of its checkpoint's quantisation; None: that there is none."""
    return _configuration(folder)[0]


def is_quantised(folder: Path) -> bool:
    """Whether a folder's configuration says that its checkpoint is quantised."""
    return stated_quantisation(folder) is not None


def _configuration(folder: Path) -> tuple[Mapping[str, Any] | None, Path]:
    """The quantisation that a folder's files state, and the file that does."""
    path = folder / "config.json"
    if path.is_file():
        data = read_config(path)
        text = data.get("text_config")
        for one in (data, text if isinstance(text, Mapping) else {}):
            for key in ("quantization_config", "compression_config"):
                value = one.get(key)
                if value is None:
                    continue
                if not isinstance(value, Mapping):
                    raise InputError(f"{path}: field {key!r} is no JSON object")
                if value:
                    return value, path
    path = folder / _MODELOPT_FILE
    if path.is_file():
        value = read_config(path).get("quantization")
        if not isinstance(value, Mapping):
            raise InputError(f"{path}: expected a field 'quantization'")
        if value.get("quant_algo"):
            return {"quant_method": "modelopt", **value}, path
    return None, path


# Endings of names that only quantised checkpoints have.
_MARKS = (".qweight", ".weight_packed", ".weight_scale", "_scale_inv", "_blocks", ".weight_scale_2")


def _refuse_undeclared(raw: Checkpoint) -> None:
    for name, info in raw.tensors.items():
        if name.endswith(_MARKS) or info.dtype.startswith("F8_"):
            raise InputError(
                f"{info.file}: tensor {name} ({info.dtype}) is of a quantised checkpoint, "
                f"but {raw.folder / 'config.json'} has no 'quantization_config'"
            )
