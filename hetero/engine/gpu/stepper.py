"""Sequences as slots of a runner, for everything that runs requests."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any

import torch
from torch import Tensor

from hetero.engine.gpu.runner import GpuRunner
from hetero.engine.sample import Scored


class SlotSequence:
    """State of one sequence in a slot, which ``close`` gives back."""

    keepable = False
    """Nothing copies a slot: no other sequence may start from this one's state."""
    cuttable = False
    host_bytes = 0
    cache: Any = None

    def __init__(self, runner: GpuRunner) -> None:
        self._runner = runner
        self.slot = runner.claim()
        self._open = True

    @property
    def length(self) -> int:
        return self._runner.length(self.slot) if self._open else 0

    def begin(self, cache: Any, held: int, used: int) -> None:
        raise NotImplementedError("slots begin empty")

    def kept(self) -> Any:
        raise NotImplementedError("slots are not copied")

    def close(self) -> None:
        if self._open:
            self._open = False
            self._runner.release(self.slot)

    def __del__(self) -> None:
        if getattr(self, "_open", False):
            self.close()

    def advance(self, tokens: list[int]) -> Tensor | Scored:
        """Logits [V] after appending ``tokens`` [n >= 1]; they hold until the next step."""
        if len(tokens) > 1 or self.length == 0:
            return self._runner.prefill(self.slot, tokens)
        return step(self._runner, [self], tokens)[0]

    def advance_all(self, tokens: list[int]) -> Tensor:
        """Logits [n, V] at each of the appended ``tokens``: a step for each, since a prompt that is read at
        once tells its last only."""
        rows = []
        for token in tokens:
            logits = self._runner.step([(self.slot, token)]).logits
            assert logits is not None
            rows.append(logits[0].clone())
        return torch.stack(rows)


class SlotStepper:
    """Runs sequences through a runner, up to its largest graph in one replay."""

    together = True

    def __init__(self, runner: GpuRunner) -> None:
        self._runner = runner

    def start(self) -> SlotSequence:
        """A new, empty sequence. Raises HeteroError where all slots are taken."""
        return SlotSequence(self._runner)

    def advance(self, sequences: Many[SlotSequence], tokens: Many[int]) -> list[Scored]:
        """Logits of each after one token; they hold until the next step."""
        return step(self._runner, sequences, tokens)

    def close(self) -> None:
        """The runner stays: whoever loaded the model closes it."""


def step(runner: GpuRunner, sequences: Many[SlotSequence], tokens: Many[int]) -> list[Scored]:
    out = runner.step([(one.slot, token) for one, token in zip(sequences, tokens, strict=True)])
    assert out.logits is not None
    return [Scored(*row) for row in zip(out.logits, out.ids, out.best, strict=True)]
