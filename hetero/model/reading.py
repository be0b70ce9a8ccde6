"""What one piece of a load reads of a checkpoint: tensors, or the parts of an expert, counted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hetero.model.pieces import PartSource
from hetero.model.source import Source
from hetero.quant.pack import Codes


class Reading:
    """What one job reads of a source, counted. Matrices that several parts stand in are read once."""

    def __init__(self, checkpoint: Source) -> None:
        self.nbytes = 0
        self._checkpoint = checkpoint
        self._known: dict[tuple[str, str, int | None], Any] = {}

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor."""
        value: torch.Tensor = self._counted("read", name, None)
        return value

    def slice(self, name: str, index: int) -> torch.Tensor:
        """Element ``index`` along dimension 0, that dimension kept."""
        value: torch.Tensor = self._counted("read_slice", name, index)
        return value

    def floats(self, source: PartSource, expert: int) -> tuple[torch.Tensor]:
        """A part as floats, for ``put``."""
        piece = source.piece(expert)
        value = self._once("read" if piece.index is None else "read_slice", piece.name, piece.index)
        return (source.floats(value if piece.index is None else value[0], piece),)

    def codes(self, source: PartSource, expert: int) -> Codes:
        """A part in its format, for ``put_codes``. Raises InexactError."""
        piece = source.piece(expert)
        return source.cut(self._once("codes", piece.name, piece.index), expert)

    def whole_codes(self, name: str) -> Codes:
        """A quantised matrix in its format. Raises InexactError."""
        value: Codes = self._counted("codes", name, None)
        return value

    def blocks(self, source: PartSource, expert: int) -> tuple[str, torch.Tensor]:
        """A part in the blocks of its file, for ``put_ggml``."""
        piece = source.piece(expert)
        rows = self._once("blocks", piece.name, piece.index)
        return source.ggml, (rows if piece.rows is None else rows[piece.rows]).contiguous()

    def _once(self, method: str, name: str, index: int | None) -> Any:
        key = (method, name, index)
        if key not in self._known:
            self._known[key] = self._counted(*key)
        return self._known[key]

    def _counted(self, method: str, name: str, index: int | None) -> Any:
        read = getattr(self._checkpoint, method)
        value = read(name) if index is None else read(name, index)
        info = self._checkpoint.tensors[name]
        self.nbytes += info.nbytes if index is None else info.nbytes // info.shape[0]
        return value


def together(sources: Mapping[str, PartSource], expert: int) -> list[tuple[str, ...]]:
    """Parts of an expert, those that stand in one tensor together."""
    by_name: dict[str, tuple[str, ...]] = {}
    for part, source in sources.items():
        name = source.piece(expert).name
        by_name[name] = (*by_name.get(name, ()), part)
    return list(by_name.values())
