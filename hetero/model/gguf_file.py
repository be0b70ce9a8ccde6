"""GGUF files: which one a path names, and what it, or all files of its split, hold (by ``gguf_scan``)."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from gguf.constants import Keys

from hetero.core import InputError
from hetero.model.gguf_scan import GgufTensor, Scanned, Value, scan_one

SUFFIX = ".gguf"


@dataclass(frozen=True, slots=True)
class GgufFile:
    """What a file, or all files of a split, hold. ``path`` is the (first) file."""

    path: Path
    metadata: dict[str, Value]
    tensors: dict[str, GgufTensor]
    files: tuple[Path, ...]

    @property
    def arch(self) -> str:
        """Name of the architecture. Raises InputError where the file names none."""
        value = self.metadata.get(Keys.General.ARCHITECTURE)
        if not isinstance(value, str) or not value:
            raise InputError(f"{self.path}: metadata {Keys.General.ARCHITECTURE} is missing")
        return value


def scan(path: str | Path) -> GgufFile:
    """Scan a file, and the other files of a split of which it is the first.

    Raises InputError for whatever is wrong with them.
    """
    path = Path(path)
    first = scan_one(path)
    count = _split_value(first, Keys.Split.LLM_KV_SPLIT_COUNT, 1)
    if count <= 1:
        return GgufFile(path, first.metadata, first.tensors, (path,))
    number = _split_value(first, Keys.Split.LLM_KV_SPLIT_NO, 0)
    if number != 0:
        name = _part_name(path, 0, count)
        hint = f"{path.parent / name}" if name else "the one whose name ends in -00001-of-...gguf"
        raise InputError(
            f"{path} is part {number + 1} of {count} of a split file: give its first part, {hint}"
        )
    return _scan_split(path, first, count)


def find_gguf(folder: Path) -> Path | None:
    """The model of a folder that holds GGUF files and no config.json; None where there are no such files.

    Raises InputError where it holds several.
    """
    files = sorted(folder.glob(f"*{SUFFIX}"))
    models = [file for file in files if (found := _PART.fullmatch(file.name)) is None or int(found[2]) == 1]
    if len(models) > 1:
        names = ", ".join(file.name for file in models[:5])
        raise InputError(f"{folder} holds {len(models)} GGUF models: give the path of one: {names}")
    # Without a first part, the scan says what is wrong with the part that is there.
    return models[0] if models else files[0] if files else None


def locate(path: str | Path) -> Path | None:
    """The GGUF file that ``path`` names: itself, or the only model of a folder without a config.json.

    None for a path that names something else.
    """
    path = Path(path)
    if not path.is_dir():
        return path if path.suffix.lower() == SUFFIX else None
    return None if (path / "config.json").exists() else find_gguf(path)


def opened(path: Path) -> GgufFile:
    """The scan of a file, kept as long as all its parts are the same."""
    found, states = _scanned(path)
    if _states(found) != states:
        _scanned.cache_clear()
        found, _ = _scanned(path)
    return found


_State = tuple[int, int, int] | None


@lru_cache(maxsize=1)
def _scanned(path: Path) -> tuple[GgufFile, list[_State]]:
    found = scan(path)
    return found, _states(found)


def _states(found: GgufFile) -> list[_State]:
    """Of each part: (time of change, size, inode); None for one that is gone."""
    states: list[_State] = []
    for file in found.files:
        try:
            status = os.stat(file)
        except OSError:
            states.append(None)
        else:
            states.append((status.st_mtime_ns, status.st_size, status.st_ino))
    return states


_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


def _part_name(path: Path, number: int, count: int) -> str | None:
    """The name of part ``number`` (from 0) of the split that ``path`` belongs to, None for another name."""
    found = _PART.fullmatch(path.name)
    if found is None or int(found[3]) != count:
        return None
    return f"{found[1]}-{number + 1:05d}-of-{count:05d}{SUFFIX}"


def _scan_split(path: Path, first: Scanned, count: int) -> GgufFile:
    if _part_name(path, 0, count) != path.name:
        raise InputError(
            f"{path} is part 1 of {count} of a split file, but its name does not end in "
            f"-00001-of-{count:05d}{SUFFIX}, so that the other parts cannot be found"
        )
    files = [path.with_name(str(_part_name(path, number, count))) for number in range(count)]
    missing = [f"part {number + 1} ({file.name})" for number, file in enumerate(files) if not file.exists()]
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise InputError(f"{path.parent}: of {count} parts of a split file {len(missing)} are missing: "
                         f"{', '.join(missing[:5])}{more}")  # fmt: skip
    tensors = dict(first.tensors)
    for number, file in enumerate(files[1:], 1):
        part = scan_one(file)
        said = (
            _split_value(part, Keys.Split.LLM_KV_SPLIT_NO, 0),
            _split_value(part, Keys.Split.LLM_KV_SPLIT_COUNT, 1),
        )
        if said != (number, count):
            raise InputError(
                f"{file}: says that it is part {said[0] + 1} of {said[1]}; its name makes it part "
                f"{number + 1} of {count}"
            )
        for name, tensor in part.tensors.items():
            if name in tensors:
                raise InputError(f"tensor {name} is in two parts: {tensors[name].file} and {file}")
            tensors[name] = tensor
    total = _split_value(first, Keys.Split.LLM_KV_SPLIT_TENSORS_COUNT, len(tensors))
    if total != len(tensors):
        raise InputError(f"{path}: says that its parts hold {total} tensors, but they hold {len(tensors)}")
    return GgufFile(path, first.metadata, tensors, tuple(files))


def _split_value(scanned: Scanned, key: str, default: int) -> int:
    value = scanned.metadata.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InputError(f"{scanned.path}: metadata {key} is {value!r}, must be a whole number")
    return value
