"""What the user's MODEL names: a folder, a config.json or a known shape. Imports no torch."""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hetero.core import InputError

SYNTHETIC = "synthetic:"

# What names a model on the Hub: owner/name.
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SHAPES = Path(__file__).resolve().parent.parent / "data" / "shapes"


@dataclass(frozen=True, slots=True)
class ModelRef:
    """A model that was found, its configuration read as JSON."""

    # "folder" holds weights, "config" is a configuration alone, "synthetic" is a known shape.
    kind: Literal["folder", "config", "synthetic"]
    name: str  # for the user: the folder's, the file's or the shape's name
    path: Path  # the folder, or the file of the configuration
    config: dict[str, Any]

    @property
    def model_type(self) -> str:
        return str(self.config.get("model_type", ""))


def shape_names() -> list[str]:
    """Names of the shapes that hetero ships, for ``synthetic:NAME``."""
    return sorted(path.stem for path in _SHAPES.glob("*.json"))


def resolve_model(model: str) -> ModelRef:
    """Find what ``model`` names: a folder, a config.json, ``synthetic:NAME`` or ``synthetic:PATH``.

    Raises InputError, with the nearest known names, when it is none of them.
    """
    if model.startswith(SYNTHETIC):
        return _synthetic(model.removeprefix(SYNTHETIC))
    path = Path(model)
    if path.is_dir():
        return ModelRef("folder", path.resolve().name, path, read_config(path / "config.json"))
    if path.is_file():
        if path.suffix != ".json":
            raise InputError(f"{path}: a model is a folder, a config.json or {SYNTHETIC}NAME")
        return ModelRef("config", path.stem, path, read_config(path))
    if _HUB_ID.fullmatch(model):
        raise InputError(
            f"no folder {model!r}: models are not downloaded yet; fetch the checkpoint, for example with "
            f"`hf download {model} --local-dir FOLDER`, then give FOLDER"
        )
    near = difflib.get_close_matches(model, shape_names(), n=2, cutoff=0.5)
    hint = "; did you mean " + " or ".join(f"{SYNTHETIC}{name}" for name in near) + "?" if near else ""
    raise InputError(f"no model {model!r}: neither a folder, nor a config.json, nor {SYNTHETIC}NAME{hint}")


def _synthetic(name: str) -> ModelRef:
    known = shape_names()
    if name in known:
        path = _SHAPES / f"{name}.json"
        return ModelRef("synthetic", name, path, read_config(path))
    path = Path(name)
    if name and path.exists():
        path = path / "config.json" if path.is_dir() else path
        return ModelRef("synthetic", path.stem, path, read_config(path))
    near = difflib.get_close_matches(name.lower(), known, n=2, cutoff=0.4)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    raise InputError(
        f"no shape {name!r}{hint or '.'} Known: {', '.join(known)}; or the path of a config.json"
    )


def read_config(path: Path) -> dict[str, Any]:
    """A config.json as it is written. Raises InputError for a file that is absent or no JSON object."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"), object_hook=_special_float)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; a model folder holds a config.json") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise InputError(f"{path}: expected a JSON object, got {type(data).__name__}")
    return data


def _special_float(value: dict[str, Any]) -> Any:
    """transformers writes an infinity, which JSON lacks, as an object with one key."""
    return float(value["__float__"]) if value.keys() == {"__float__"} else value
