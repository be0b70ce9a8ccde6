"""The choice of experts by a table, in place of the router's: the same on every engine and in every run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from hetero.report.routing import Table


class ForcedRouting:
    """A hook for ``Decoder.routing``, or of MoE blocks: ids of decode steps come from a table on ``device``,
    weights stay the router's. The table's place moves on in the step of layer 0, on the device, so that a
    captured graph follows it. Outside ``decoding`` nothing is changed: prompts are routed as they are.
    """

    def __init__(self, table: Table, device: torch.device | str) -> None:
        # By steps, so that one read brings the choices of all layers.
        self._table = torch.from_numpy(table).transpose(0, 1).contiguous().to(device)
        self._next = torch.zeros(1, dtype=torch.int64, device=device)
        self._now = torch.zeros(self._table.shape[1:], dtype=torch.int64, device=device)
        self._idle = torch.ones(1, self._table.shape[2], 1, dtype=torch.bool, device=device)
        self._rows = 0
        self._decoding = False

    @property
    def steps(self) -> int:
        return len(self._table)

    @property
    def nbytes(self) -> int:
        """On the device."""
        return self._table.nbytes + self._now.nbytes

    def use(self, table: Table) -> None:
        """Another table of the same shape; captured graphs follow."""
        self._table.copy_(torch.from_numpy(table).transpose(0, 1))

    def start(self, step: int) -> None:
        """The next step takes this row of the table."""
        self._next.fill_(step % self.steps)
        self._wait()

    def live(self, rows: int) -> None:
        """The first ``rows`` of a step are of sequences, none at first; nobody is chosen for the others."""
        if rows != self._rows:
            self._rows = rows
            self._idle[:, :rows] = False
            self._idle[:, rows:] = True
            self._wait()

    def _wait(self) -> None:
        """Steps run on a stream of their own."""
        if self._next.device.type == "cuda":
            torch.cuda.synchronize(self._next.device)

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """What runs, or is captured, within it are decode steps."""
        self._decoding = True
        try:
            yield
        finally:
            self._decoding = False

    def __call__(self, layer: int, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """``ids`` int64 and ``weights`` [R, k], R at most the table's rows."""
        if not self._decoding:
            return ids, weights
        rows = ids.shape[0]
        if rows > self._now.shape[1]:
            raise ValueError(f"a step of {rows} rows, the table has {self._now.shape[1]}")
        if layer == 0:
            chosen = self._table.index_select(0, self._next)[0]
            self._now.copy_(chosen.masked_fill(self._idle, -1))
            self._next.add_(1).remainder_(self.steps)
        return self._now[layer, :rows], weights
