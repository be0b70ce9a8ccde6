"""Opening whatever holds a model's weights."""

from __future__ import annotations

from pathlib import Path

from hetero.model.gguf_file import locate
from hetero.model.gguf_source import GgufSource
from hetero.model.quantised import open_quantised
from hetero.model.source import Checkpoint, Source


def open_source(path: str | Path) -> Source:
    """The tensors of a model folder, quantised or not, or of a GGUF file (the first of a split one).

    Raises InputError for what cannot be read.
    """
    gguf = locate(path)
    return open_quantised(Checkpoint(path)) if gguf is None else GgufSource(gguf)
