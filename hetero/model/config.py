"""Reading a model's configuration, and choosing the class of transformers that runs it."""

from __future__ import annotations

import difflib
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetero.core import InputError
from hetero.model import hf
from hetero.model.gguf_file import locate
from hetero.model.gguf_source import config_of
from hetero.model.moe_types import check_type
from hetero.model.numbers import CHOSEN, EXPERTS, POSITIVE, check_numbers
from hetero.model.shapes import read_config

# Fields that shape a model. transformers would fill an absent one with a default of its own, and the error
# would show up much later as a wrong shape.
_SHAPING_FIELDS = (*POSITIVE, *EXPERTS, *CHOSEN)


def load_config(source: str | Path | dict[str, Any]) -> hf.Config:
    """Read a config.json, the one of a folder, that of a GGUF file, or a dictionary.

    Raises InputError for a file that cannot be read, an unknown or refused ``model_type``, an absent shaping
    field and numbers that mean nothing.
    """
    data, where = _read_config(source)
    model_type = data.get("model_type")
    if not isinstance(model_type, str):
        raise InputError(
            f"{where}: field 'model_type' is absent: it names the architecture, e.g. \"qwen3_moe\""
        )
    if model_type not in hf.CONFIG_MAPPING_NAMES and model_type not in hf.CONFIG_MAPPING:
        near = difflib.get_close_matches(model_type, list(hf.CONFIG_MAPPING_NAMES), n=3, cutoff=0.5)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        if "auto_map" in data:
            hint += "; the model brings code of its own, which hetero never runs (trust_remote_code)"
        raise InputError(f"{where}: unknown model_type {model_type!r}{hint}")
    check_type(model_type)
    check_numbers(data, where)
    config_class = hf.CONFIG_MAPPING[model_type]
    _check_fields(data, config_class, where)
    try:
        return config_class.from_dict(deepcopy(data))
    except Exception as error:  # strict configuration classes raise many kinds
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"{where}: not a valid {model_type} configuration: {reason}") from error


def _read_config(source: str | Path | dict[str, Any]) -> tuple[dict[str, Any], str]:
    if isinstance(source, dict):
        return source, "config"
    path = Path(source)
    if (gguf := locate(path)) is not None:
        return config_of(gguf), str(gguf)
    if path.is_dir():
        path = path / "config.json"
    return read_config(path), str(path)


def _check_fields(data: dict[str, Any], config_class: Any, where: str, prefix: str = "") -> None:
    sub = getattr(config_class, "sub_configs", {}).get("text_config")
    if sub is not None:
        text = data.get("text_config")
        if text is None:
            raise InputError(
                f"{where}: field '{prefix}text_config' is absent: it holds the language model's shape"
            )
        if isinstance(text, dict):
            _check_fields(text, sub, where, f"{prefix}text_config.")
        return
    fields = {name for base in config_class.__mro__ for name in vars(base).get("__annotations__", {})}
    aliases: dict[str, str] = getattr(config_class, "attribute_map", {})
    for name in _SHAPING_FIELDS:
        if name not in fields:
            continue
        stored = aliases.get(name, name)
        spellings = {stored, *(alias for alias, field in aliases.items() if field == stored)}
        if not spellings & data.keys():
            raise InputError(f"{where}: field '{prefix}{name}' is absent; {config_class.model_type} needs it")


@dataclass(frozen=True, slots=True)
class ModelClass:
    """The class of transformers that runs a configuration, and the part of the configuration it takes."""

    cls: Any
    config: hf.Config
    # What checkpoint names start with where the class is a part of a larger model ("thinker.").
    checkpoint_prefix: str = ""


def choose_class(config: hf.Config) -> ModelClass:
    """Pick the causal language model of a configuration, or a multimodal model whose text part runs.

    Raises InputError, naming the type, where neither is there or the type is refused.
    """
    check_type(config.model_type)
    if getattr(config, "is_encoder_decoder", False):
        raise InputError(
            f"model_type {config.model_type!r} is an encoder-decoder; hetero runs causal language models"
        )
    if "thinker_config" in getattr(config, "sub_configs", {}):
        inner = choose_class(config.thinker_config)
        return ModelClass(inner.cls, inner.config, "thinker.")
    for mapping in (
        hf.MODEL_FOR_CAUSAL_LM_MAPPING,
        hf.MODEL_FOR_MULTIMODAL_LM_MAPPING,
        hf.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    ):
        if type(config) not in mapping:
            continue
        cls = mapping[type(config)]
        cls = cls[0] if isinstance(cls, list | tuple) else cls
        text_class = config.sub_configs.get("text_config")
        if text_class is not None and cls.config_class is text_class:
            quantised = getattr(config, "quantization_config", None)
            config = config.get_text_config()
            if quantised is not None:
                config.quantization_config = quantised
        return ModelClass(cls, config)
    raise InputError(f"model_type {config.model_type!r} has no causal language model in transformers")
