"""What goes into a step and what comes out: pinned buffers and their twins on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

LATER = -1
"""In place of a token: ``LATER - n`` is the one that the step before has found for its row n."""


class Staging:
    """The inputs of steps of ``rows`` rows. ``inputs``: of the decoder, whose small tensors become parts of
    one buffer; ``pages``: the table that all numbers of rows share. ``arrive``: is recorded before n-gram
    embeddings are copied, once a step; ``found``: int64, the tokens of the step before.

    On the CPU the decoder reads the host's tensors themselves.
    """

    def __init__(
        self,
        inputs: Any,
        rows: int,
        pages: Tensor,
        *,
        found: Tensor | None = None,
        arrive: Callable[[], None] = lambda: None,
    ) -> None:
        self.rows = rows
        device: torch.device = inputs.tokens.device
        self._host = torch.zeros(3, rows, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._there = self._host if device.type == "cpu" else self._host.to(device)
        self._numbers = self._host.numpy()  # tokens, slots, positions
        self._found, self._arrive = found, arrive
        self._came = False
        ple: Tensor | None = inputs.ple
        self.ple: Tensor | None = None
        self._ple_there: Tensor | None = None
        if ple is not None:
            self.ple = torch.zeros(ple.shape, dtype=ple.dtype, pin_memory=device.type == "cuda")
            self._ple_there = self.ple if device.type == "cpu" else self.ple.to(device)
        tokens, slots, positions = self._there
        self.inputs = replace(
            inputs,
            tokens=tokens,
            slots=slots,
            positions=positions,
            pages=pages,
            ple=self._ple_there,
            await_ple=None if ple is None else self._bring_ple,
        )
        self.idle()

    def idle(self, first: int = 0) -> None:
        """Rows from ``first`` on are of no sequence."""
        self._numbers[0, first:] = 0
        self._numbers[1, first:] = -1
        self._numbers[2, first:] = 0

    def fill(self, rows: list[tuple[int, int, int]]) -> None:
        """(token, slot, position) of the first rows; the others are idle."""
        self._numbers[:, : len(rows)] = list(zip(*rows, strict=True))
        if len(rows) < self.rows:
            self.idle(len(rows))

    def send(self) -> None:
        """Into the current stream: the host's numbers to the device, with the tokens of the step before."""
        self._came = False
        if self._there is not self._host:
            self._there.copy_(self._host, non_blocking=True)
        if self._found is not None:
            _feed(self._there[0], self._found)

    def _bring_ple(self) -> None:
        """Into the current stream: n-gram embeddings to the device, once they are there."""
        if self._came:
            return
        self._came = True
        self._arrive()
        if self._ple_there is not self.ple:
            assert self.ple is not None
            assert self._ple_there is not None
            self._ple_there.copy_(self.ple, non_blocking=True)


def _feed(tokens: Tensor, found: Tensor) -> None:
    if tokens.device.type == "cpu":
        place = (LATER - tokens).clamp_(min=0)
        tokens.copy_(torch.where(tokens < 0, found[place], tokens))
        return
    from hetero.ops.gpu.feed import feed

    feed(tokens, found)


class Results:
    """The most likely token of each of up to ``rows`` rows and its logit, found on the device."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self._host = torch.zeros(rows * 12, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._there = self._host if device.type == "cpu" else torch.zeros_like(self._host, device=device)
        self.found, self._best = _pair(self._there, rows)
        ids, best = _pair(self._host, rows)
        self._ids, self._bests = ids.numpy(), best.numpy()

    def take(self, logits: Tensor) -> None:
        """Into the current stream: the largest of logits [R, V], and its copy to the host."""
        rows = len(logits)
        ids, best = self.found[:rows], self._best[:rows]
        if self._there is self._host:
            torch.max(logits, dim=1, out=(best, ids))
            return
        from hetero.ops.gpu.route import argmax

        argmax(logits, ids)
        torch.gather(logits, 1, ids.unsqueeze(1), out=best.unsqueeze(1))
        self._host.copy_(self._there, non_blocking=True)

    def read(self, rows: int) -> tuple[list[int], list[float]]:
        """Once the stream is through."""
        return self._ids[:rows].tolist(), self._bests[:rows].tolist()


def _pair(buffer: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    return buffer[: rows * 8].view(torch.int64), buffer[rows * 8 :].view(torch.float32)
