"""Steps of a fused decoder: slots of sequences, and one captured graph for each number of rows.

A step is: fill a pinned buffer, replay the graph of the smallest size that holds the rows, wait for an event,
read the tokens. The graph has the copy of the buffer to the device, the decoder, the choice of the most
likely token and its copy back. On the CPU the same code runs without graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hetero.config import settings
from hetero.core import HeteroError
from hetero.engine.gpu.pages import Pages
from hetero.engine.gpu.parts import Decoder, Experts, Shared
from hetero.engine.gpu.staging import Results, Staging
from hetero.engine.handoff import Handoff

ROWS = (1, 2, 4, 8, 16)

_REMEMBERED = 16
"""Tokens of a sequence that are kept for n-grams."""


class StepOut(NamedTuple):
    """Of each row: the most likely token, its logit, and all logits float32 [n, V] on the device, which hold
    until the next step; None where they were not asked for."""

    ids: list[int]
    best: list[float]
    logits: Tensor | None


class GpuRunner:
    """A fused decoder, its experts, the hand-off and one captured graph for each number of rows.

    ``slots``: sequences at once. ``context``: most tokens of one. ``rows``: sizes of graphs. ``eager``: no
    graphs, which on the CPU is so in any case. ``shared``: what the experts have in common. One thread
    at a time.
    """

    def __init__(
        self,
        decoder: Decoder,
        experts: Sequence[Experts],
        *,
        handoff: Handoff | None,
        slots: int,
        context: int,
        rows: Sequence[int] = ROWS,
        eager: bool = False,
        shared: Shared | None = None,
        chunk: int | None = None,
    ) -> None:
        self.decoder, self.experts, self.handoff = decoder, list(experts), handoff
        self.slots, self.context, self.rows = slots, context, tuple(sorted(rows))
        first = decoder.inputs(self.rows[0])
        self.device: torch.device = first.tokens.device
        self.eager = eager or self.device.type == "cpu"
        self.pages = Pages(slots, context, self.device)
        self._staging = {n: Staging(decoder.inputs(n), n, self.pages.table) for n in self.rows}
        self._results = {n: Results(n, self.device) for n in self.rows}
        self._shared = shared
        self._chunk = chunk or settings().prefill_chunk
        self._free = list(range(slots - 1, -1, -1))
        self._length = [0] * slots
        self._last: list[list[int]] = [[] for _ in range(slots)]

    def claim(self) -> int:
        """An empty slot. Raises HeteroError where all are taken."""
        if not self._free:
            raise HeteroError(f"all {self.slots} slots of the GPU are taken")
        slot = self._free.pop()
        self.decoder.clear(slot)
        self._length[slot] = 0
        self._last[slot] = []
        return slot

    def release(self, slot: int) -> None:
        """Give a slot and its pages back."""
        if slot in self._free:
            raise ValueError(f"slot {slot} is free")
        self.pages.release(slot)
        self._free.append(slot)

    def length(self, slot: int) -> int:
        """Tokens that a slot holds."""
        return self._length[slot]

    def prefill(self, slot: int, tokens: Sequence[int]) -> Tensor:
        """Append tokens; logits float32 [V] on the device after the last. After an error the slot's contents
        are worth nothing."""
        logits: Tensor | None = None
        with torch.inference_mode():
            for first in range(0, len(tokens), self._chunk):
                part = list(tokens[first : first + self._chunk])
                self.pages.grow(slot, self._length[slot] + len(part))
                ids = torch.tensor(part, dtype=torch.int64, device=self.device)
                logits = self.decoder.prefill(ids, slot, self._length[slot], self.pages.table)
                self._note(slot, part)
        if logits is None:
            raise ValueError("no tokens to append")
        return logits

    def step(self, rows: Sequence[tuple[int, int]], logits: bool = True) -> StepOut:
        """One token for each of (slot, token), all of different slots. Raises HandoffError where the CPU side
        failed: the slots of this step are then worth nothing, and the next step works."""
        if len({slot for slot, _ in rows}) != len(rows) or not 1 <= len(rows) <= self.rows[-1]:
            raise ValueError(f"{len(rows)} rows, must be 1 to {self.rows[-1]} of different slots")
        size = next(n for n in self.rows if n >= len(rows))
        staging, results = self._staging[size], self._results[size]
        with torch.inference_mode():
            for slot, token in rows:
                self.pages.grow(slot, self._length[slot] + 1)
                self._note(slot, [token], count=False)
            if staging.ple is not None:
                gathered = self.decoder.gather([self._last[slot] for slot, _ in rows])
                assert gathered is not None
                staging.ple[: len(rows)] = gathered
            staging.fill([(token, slot, self._length[slot]) for slot, token in rows])
            out = self.decoder.step(staging.inputs)
            if self._shared is not None:
                self._shared.join()
            results.take(out)
        for slot, _ in rows:
            self._length[slot] += 1
        ids, best = results.read(len(rows))
        return StepOut(ids, best, out[: len(rows)] if logits else None)

    def capture(self) -> None:
        """Make the graphs."""

    def close(self) -> None:
        """End the hand-off."""
        if self.handoff is not None:
            self.handoff.close()

    def _note(self, slot: int, tokens: list[int], count: bool = True) -> None:
        self._last[slot] = (self._last[slot] + tokens)[-_REMEMBERED:]
        if count:
            self._length[slot] += len(tokens)
