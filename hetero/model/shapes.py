"""What MODEL names: a folder, a config.json, a known shape or a model of the Hub. Imports no torch."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hetero import jsonfile
from hetero.core import InputError

if TYPE_CHECKING:
    from hetero.hub import Bar

SYNTHETIC = "synthetic:"

_SHAPES = Path(__file__).resolve().parent.parent / "data" / "shapes"


@dataclass(frozen=True, slots=True)
class ModelRef:
    """A model that was found, its configuration read as JSON."""

    # "folder" and "gguf" hold weights, "config" is a configuration alone, "synthetic" is a known shape.
    kind: Literal["folder", "gguf", "config", "synthetic"]
    name: str  # for the user: the folder's, the file's or the shape's name
    path: Path  # the folder, the GGUF file, or the file of the configuration
    config: dict[str, Any]

    @property
    def model_type(self) -> str:
        return str(self.config.get("model_type", ""))


def shape_names() -> list[str]:
    """Names of the shapes that hetero ships, for ``synthetic:NAME``."""
    return sorted(path.stem for path in _SHAPES.glob("*.json"))


def resolve_model(
    model: str,
    *,
    revision: str | None = None,
    weights: bool = False,
    say: Callable[[str], None] = lambda _: None,
    bar: Bar = lambda _: nullcontext(None),
) -> ModelRef:
    """Find what ``model`` names: a folder, a GGUF file, a config.json, ``synthetic:NAME``,
    ``synthetic:PATH``, or a model of the Hub (docs/usage.md), which is fetched: its configuration, and all
    that a run needs where ``weights`` is set. ``revision`` is a branch, a tag or a commit of the Hub; ``say``
    and ``bar`` show what goes on.

    Raises InputError, with the nearest known names, when it is none of them, and MachineError where fetching
    fails.
    """
    path = Path(model)
    if revision is not None and (model.startswith(SYNTHETIC) or path.exists()):
        raise InputError(f"--revision {revision}: {model} is not of the Hub")
    if model.startswith(SYNTHETIC):
        return _synthetic(model.removeprefix(SYNTHETIC))
    if path.is_dir() and (path / "config.json").is_file():
        return ModelRef("folder", path.resolve().name, path, read_config(path / "config.json"))
    if (gguf := _gguf(path)) is not None:
        return gguf
    if path.is_dir():
        return ModelRef("folder", path.resolve().name, path, read_config(path / "config.json"))
    if path.is_file():
        if path.suffix != ".json":
            raise InputError(f"{path}: a model is a folder, a .gguf file, a config.json or {SYNTHETIC}NAME")
        return ModelRef("config", path.stem, path, read_config(path))
    from hetero.hub_names import parse_name

    name = parse_name(model)
    if name is None:
        hint = _did_you_mean(model, [f"{SYNTHETIC}{shape}" for shape in shape_names()])
        raise InputError(
            f"no model {model!r}: neither a folder, nor a .gguf file, nor a config.json, "
            f"nor {SYNTHETIC}NAME, nor OWNER/NAME of the Hub{hint}"
        )
    from hetero import hub  # only here: the library takes half a second to import
    from hetero.hub_errors import NoSuchRepositoryError

    try:
        found = hub.fetch(name, revision=revision, weights=weights, check=_check, say=say, bar=bar)
    except NoSuchRepositoryError as error:
        near = [f"{SYNTHETIC}{shape}" for shape in shape_names()] + hub.cached_repos() + _neighbours(path)
        raise InputError(f"{error}{_did_you_mean(model, near)}") from None
    if found.is_dir() and not weights:
        return ModelRef("config", name.short, found / "config.json", read_config(found / "config.json"))
    local = resolve_model(str(found))
    # A repository holds many GGUF files; of other models it is the name.
    return local if local.kind == "gguf" else replace(local, name=name.short)


def _gguf(path: Path) -> ModelRef | None:
    """A GGUF file, or a folder that holds one model of them; None for anything else."""
    if not path.exists():
        return None
    from hetero.model.gguf_file import locate  # here, since few models come so

    file = locate(path)
    if file is None:
        return None
    from hetero.model.gguf_source import config_of

    return ModelRef("gguf", file.stem, file, config_of(file))


def _check(folder: Path) -> None:
    """Refuse a configuration that cannot run before gigabytes of weights are fetched."""
    from hetero.model.config import load_config

    load_config(folder)


def _neighbours(path: Path) -> list[str]:
    """Folders beside ``path``, were it one."""
    try:
        return [str(path.parent / each.name) for each in path.parent.iterdir() if each.is_dir()][:1000]
    except OSError:
        return []


def _did_you_mean(word: str, known: list[str]) -> str:
    """The nearest, by the whole name or by its last part."""
    by_tail = {name.lower().rpartition("/")[2].removeprefix(SYNTHETIC): name for name in known}
    tails = difflib.get_close_matches(word.lower().rpartition("/")[2], by_tail, n=2, cutoff=0.6)
    near = difflib.get_close_matches(word, known, n=2, cutoff=0.7) + [by_tail[tail] for tail in tails]
    return f"; did you mean {' or '.join(dict.fromkeys(near))}?" if near else ""


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
        data = jsonfile.parse(path.read_bytes(), _special_float)
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
    if value.keys() != {"__float__"}:
        return value
    if not isinstance(value["__float__"], str):
        raise ValueError("a '__float__' that is no text")
    return float(value["__float__"])
