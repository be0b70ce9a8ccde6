"""Where files of packed experts lie, and which of them serves a model."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hetero.config import settings
from hetero.core import InputError
from hetero.store.manifest import Manifest
from hetero.store.packfile import PackFile, PackUnusable

AUTO, WRITE, OFF = "auto", "write", "off"
"""Words of ``--pack-cache``; anything else is a folder."""


@dataclass(frozen=True, slots=True)
class PackCache:
    """What a user wants of the pack cache: where to look, first first, and where to write, if at all."""

    look: tuple[Path, ...]
    write: Path | None

    @staticmethod
    def of(option: str, model: Path) -> PackCache:
        """``auto``: use what is there, beside the model or in the cache folder, and write nothing. ``write``:
        also write to the cache folder. ``off``: neither. A folder: look and write there.

        ``model`` is a checkpoint's folder or file. Raises InputError for a folder that is a file.
        """
        common = settings().cache / "packed"
        beside = model if model.is_dir() else model.parent
        if option == OFF:
            return PackCache((), None)
        if option in (AUTO, WRITE):
            return PackCache((beside, common), common if option == WRITE else None)
        folder = Path(option).expanduser()
        if folder.exists() and not folder.is_dir():
            raise InputError(f"--pack-cache {option}: not a folder")
        return PackCache((folder, beside, common), folder)


@dataclass(frozen=True, slots=True)
class Found:
    """A file that serves, and why others do not, one sentence each."""

    file: PackFile | None
    notes: tuple[str, ...] = ()


def find(folders: Iterable[Path], name: str, manifest: Manifest) -> Found:
    """The first file called ``name`` in ``folders`` that holds what ``manifest`` says."""
    notes = []
    for path in dict.fromkeys(folder / name for folder in folders):
        if not path.is_file():
            continue
        try:
            file = PackFile(path)
        except PackUnusable as error:
            notes.append(f"{path} {error}; it is not used")
            continue
        except OSError as error:
            notes.append(f"{path} cannot be read ({error.strerror}); it is not used")
            continue
        difference = file.manifest.difference(manifest)
        if difference is None:
            return Found(file, tuple(notes))
        file.close()
        notes.append(f"{path}: {difference}; it is not used")
    return Found(None, tuple(notes))


def find_likely(folders: Iterable[Path], model: str, source: Path) -> PackFile | None:
    """The only file that experts of ``model`` have in ``folders``, of a source that is as it was, by its
    files' sizes and times; ``find`` knows whether it serves. None where there is none, or are several.

    ``source`` is a checkpoint's folder or file. Raises OSError for one that cannot be read.
    """
    name = re.compile(re.escape(model) + r"-[0-9a-f]{12}\.hpack")
    found: dict[str, Path] = {}
    for folder in folders:
        if folder.is_dir():
            for path in folder.iterdir():
                if name.fullmatch(path.name):
                    found.setdefault(path.name, path)
    if len(found) != 1:
        return None
    try:
        file = PackFile(*found.values())
    except PackUnusable:
        return None
    try:
        if file.manifest.source.lies_in(source if source.is_dir() else source.parent):
            return file
    except BaseException:
        file.close()
        raise
    file.close()
    return None


def discard(path: Path) -> None:
    """Remove a file that cannot serve; one that is gone already is no fault."""
    with contextlib.suppress(OSError):
        path.unlink()
