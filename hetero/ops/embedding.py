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
    """An embedding whose rows are gathered by the host, in the type that the module's weight had (``dtype``).

    Without ``table`` they are that weight, which the loader brings as ``held`` (the files' type where that
    says the same in fewer bytes). With it they are read from files: when they are wanted, ``ram`` bytes of
    them kept in main memory; or with ``ram`` None all of them at once, to stay as they are in the files.
    Results are the same to the bit. Raises MachineError where a file cannot be read.
    """

    def __init__(
        self,
        source: nn.Embedding,
        table: StoredTable | None = None,
        *,
        ram: int | None = None,
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
        self._raw: Tensor | None = None  # uint8 [rows, bytes of one]
        if table is not None:
            files = RowFiles(table.runs, table.row_bytes)
            if ram is None:
                self._raw = torch.empty(files.rows, table.row_bytes, dtype=torch.uint8)
                files.read_all(self._raw.numpy())
                files.close()
            else:
                self.rows = CachedRows(files, ram, layer)
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
        stored, on_disk = table.get("stored"), table["tier"] == "disk"
        if stored is not None and (on_disk or stored.in_blocks):
            layer = layer_of(name)
            ram = table["ram"] if on_disk else None
            return HostEmbedding(module, stored, ram=ram, layer=-1 if layer is None else layer)
        if on_disk:
            raise HeteroError(f"{name}: nothing tells where the rows of its table are")
        return HostEmbedding(module, held=getattr(torch, table["dtype"]) if "dtype" in table else None)

    @property
    def weight(self) -> Tensor:
        """The table; no rows of one that is on disk, or in blocks."""
        return self.source.weight

    @property
    def nbytes(self) -> int:
        """Bytes of main memory: of the table, or of the rows that it keeps at most."""
        if self.rows is not None:
            return self.rows.ram
        return self.weight.nbytes + self.raw_nbytes

    @property
    def raw_nbytes(self) -> int:
        """Bytes of a table in main memory that is not the module's weight."""
        return 0 if self._raw is None else self._raw.nbytes

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
        if self._table is None:
            return self.weight.detach().index_select(0, ids).to(self.dtype)
        if self.rows is not None:
            rows = torch.from_numpy(self.rows.gather(ids.numpy()))
        else:
            assert self._raw is not None
            rows = self._raw.index_select(0, ids)
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


def host_tables(model: Any) -> list[HostEmbedding]:
    """The tables of a model, wherever they are."""
    return [module for module in model.modules() if isinstance(module, HostEmbedding)]


def disk_tables(model: Any) -> list[HostEmbedding]:
    """Those whose rows are read from disk."""
    return [table for table in host_tables(model) if table.rows is not None]


def table_reads(tables: Sequence[HostEmbedding]) -> RowReads:
    """What all of them have read since the start."""
    return sum((table.rows.reads for table in tables if table.rows is not None), RowReads())
