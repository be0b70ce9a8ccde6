"""Opening whatever holds a model's weights."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from hetero.model.source import Checkpoint, Source


def open_source(path: str | Path) -> Source:
    """The tensors of a model folder, or of a ``.gguf`` file (the first of a split one).

    Raises InputError for what cannot be read.
    """
    path = Path(path)
    if path.suffix.lower() == ".gguf" and not path.is_dir():
        # Here, since few models come so.
        source: Source = import_module("hetero.model.gguf_source").GgufSource(path)
        return source
    return Checkpoint(path)
