"""Op ``embedding``: a table of which a step reads a few rows, in main memory or in a checkpoint's files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from hetero.core import HeteroError, InputError
from hetero.model.build import layer_of
from hetero.model.tables import StoredTable
from hetero.registry import register_op
from hetero.store.rows import CachedRows, RowFiles, RowReads, Rows


@register_op("embedding")
class HostEmbedding(nn.Module):
    """An embedding whose rows are gathered by the host, of which they leave in ``dtype``.

    ``table``: where the rows are on disk; None: they are the module's weight, in ``held`` until the loader
    brings them (its type is kept where it says the same in fewer bytes). ``ram``: bytes of rows of a table on
    disk that main memory keeps. Results are the same to the bit.
    """

    def __init__(
        self,
        source: nn.Embedding,
        table: StoredTable | None = None,
        *,
        ram: int = 0,
        held: torch.dtype | None = None,
        layer: int = -1,
    ) -> None:
        super().__init__()
        self.source = source
        self.dtype = source.weight.dtype
        self.num_embeddings, self.embedding_dim = source.num_embeddings, source.embedding_dim
        self.rows: CachedRows | None = None
        self._table = table
        like = source.weight
        if table is not None:
            self.rows = CachedRows(RowFiles(table.runs, table.row_bytes), ram, layer)
            like = torch.empty(0, source.embedding_dim, dtype=self.dtype)
        elif held is not None:
            like = torch.empty(like.shape, dtype=held, device=like.device)
        source.weight = nn.Parameter(like, requires_grad=False)
        source.padding_idx = None  # of training; it may be beyond the few rows of a step
        # Some types of embeddings do more than to gather.
        self._plain = type(source).forward is nn.Embedding.forward

    @staticmethod
    def from_module(
        module: nn.Module, *, name: str, config: Any, device: str, options: Mapping[str, Any]
    ) -> nn.Module:
        """Raises InputError for a module that is no table, MachineError where a file cannot be opened."""
        kind = type(module).__name__
        if not isinstance(module, nn.Embedding):
            raise InputError(f"op 'embedding' replaces tables of embeddings; {name} is a {kind}")
        table = options["table"]
        if table["tier"] != "disk":
            held = getattr(torch, table["dtype"]) if "dtype" in table else None
            return HostEmbedding(module, held=held)
        if table.get("stored") is None:
            raise HeteroError(f"{name}: nothing tells where the rows of its table are")
        layer = layer_of(name)
        return HostEmbedding(module, table["stored"], ram=table["ram"], layer=-1 if layer is None else layer)

    @property
    def weight(self) -> Tensor:
        """The table; of one on disk, no rows of it."""
        return self.source.weight

    @property
    def nbytes(self) -> int:
        """Bytes of main memory: of the table, or of the rows that it keeps at most."""
        return self.weight.nbytes if self.rows is None else self.rows.ram

    @property
    def disk_nbytes(self) -> int:
        """Bytes of the table in files that it is read from; 0 where it is in main memory."""
        return 0 if self.rows is None else self.rows.files.nbytes

    @property
    def path(self) -> Path:
        """A file that it is read from. Raises HeteroError where it is in main memory."""
        if self.rows is None:
            raise HeteroError("a table in main memory has no file")
        return self.rows.files.files[0]

    def gather(self, ids: Tensor) -> Tensor:
        """Rows [n, width] in ``dtype`` of ids int64 [n] on the host. MachineError where a file fails."""
        if self.rows is None:
            return self.weight.detach().index_select(0, ids).to(self.dtype)
        assert self._table is not None
        rows = torch.from_numpy(self.rows.gather(ids.numpy()))
        return self._table.decode(rows).to(self.dtype)

    def expect(self, ids: Callable[[], Rows]) -> Future[None] | None:
        """Begin to read rows from disk that are needed soon: ``ids`` int64 [n], which another thread asks
        for. The future is of the reading; None where there is none to do."""
        return None if self.rows is None else self.rows.expect(ids)

    def forward(self, ids: Tensor) -> Tensor:
        """ids [...] on the host -> [..., width]."""
        flat = ids.detach().reshape(-1).long()
        if self._plain:
            return self.gather(flat).view(*ids.shape, self.embedding_dim)
        distinct, places = torch.unique(flat, return_inverse=True)
        weights = {"weight": self.gather(distinct)}
        found: Tensor = functional_call(self.source, weights, (places.view(ids.shape),))
        return found


def disk_tables(model: Any) -> list[HostEmbedding]:
    """The tables of a model whose rows are read from disk."""
    found = (module for module in model.modules() if isinstance(module, HostEmbedding))
    return [module for module in found if module.rows is not None]


def table_reads(tables: Sequence[HostEmbedding]) -> RowReads:
    """What all of them have read since the start."""
    return sum((table.rows.reads for table in tables if table.rows is not None), RowReads())
