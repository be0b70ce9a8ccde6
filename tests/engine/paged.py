"""A decoder of tests: what it says depends on every token of a sequence, which it reads through the pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hetero.decode.inputs import PAGE, Mark, StepInputs

VOCAB = 97


def seed_of(tokens: Sequence[int], seed: int = 1) -> int:
    """Every token and its place counts."""
    for token in tokens:
        seed = (seed * 31 + int(token) + 7) % 2**31
    return seed


def logits_of(tokens: Sequence[int], vocabulary: int = VOCAB) -> Tensor:
    """float32 [vocabulary] after a sequence."""
    return torch.randn(vocabulary, generator=torch.Generator().manual_seed(seed_of(tokens)))


def greedy(prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logits_of(tokens).argmax()))
    return tokens[len(prompt) :]


class PagedDecoder:
    """``fail``: raises that at the next step. ``recurrent``: a slot has a state besides, without which it
    says nothing."""

    state_bytes = 0

    def __init__(
        self,
        slots: int,
        context: int,
        ple: int = 0,
        *,
        recurrent: bool = False,
        grain: int = 1,
        vocabulary: int = VOCAB,
    ) -> None:
        self.vocabulary = vocabulary
        self.most = -(-context // PAGE)
        self.slots, self.ple, self.recurrent, self.grain = slots, ple, recurrent, grain
        self.memory = torch.full((slots * self.most, PAGE), -1)
        self.seeds = torch.zeros(slots, dtype=torch.int64)
        self.reads: list[int] = []  # tokens of each piece of a prompt
        self.cleared: list[int] = []
        self.steps: list[int] = []  # rows of each
        self.fail: Exception | None = None
        self.grams: list[list[int]] = []
        self.expected: list[tuple[list[int], list[int]]] = []  # (before, tokens)
        self.window = 16 if ple else 0
        self.check_ple = True
        self.gathers_on_host = True

    def inputs(self, rows: int) -> StepInputs:
        return StepInputs(
            torch.zeros(rows, dtype=torch.int64),
            torch.full((rows,), -1),
            torch.zeros(rows, dtype=torch.int64),
            torch.zeros(self.slots, self.most, dtype=torch.int32),
            torch.zeros(rows, self.ple) if self.ple else None,
        )

    def step(self, inputs: StepInputs) -> Tensor:
        self.steps.append(len(inputs.tokens))
        if self.fail is not None:
            error, self.fail = self.fail, None
            raise error
        out = torch.full((len(inputs.tokens), self.vocabulary), float("nan"))
        numbers = inputs.tokens.tolist(), inputs.slots.tolist(), inputs.positions.tolist()
        for row, (token, slot, position) in enumerate(zip(*numbers, strict=True)):
            if slot < 0:
                continue
            if inputs.ple is not None and inputs.await_ple is not None:
                inputs.await_ple()
                assert not self.check_ple or inputs.ple[row].tolist() == [float(token)] * self.ple
            out[row] = self._append([token], slot, position, inputs.pages)
        return out

    @property
    def paged(self) -> list[Tensor]:
        return [self.memory]

    def states(self, slot: int) -> list[Tensor]:
        return [self.seeds[slot : slot + 1]] if self.recurrent else []

    def prefill(
        self,
        tokens: Tensor,
        slot: int,
        start: int,
        pages: Tensor,
        *,
        marks: Sequence[Mark] = (),
        each: Callable[[int, Tensor], None] | None = None,
    ) -> Tensor:
        self.reads.append(len(tokens))
        if self.fail is not None:
            error, self.fail = self.fail, None
            raise error
        logits = torch.empty(0)
        for index, token in enumerate(tokens.tolist()):
            logits = self._append([token], slot, start + index, pages)
            if each is not None:
                each(index, logits.unsqueeze(0))
            for mark in marks:
                if mark.at == start + index + 1:
                    mark.save(self.states(slot))
        return logits

    def clear(self, slot: int) -> None:
        self.cleared.append(slot)
        self.seeds[slot] = 1

    def expect(self, before: Sequence[int], tokens: Sequence[int]) -> None:
        self.expected.append((list(before), list(tokens)))

    def gather(self, tokens: Sequence[Sequence[int]], out: Tensor) -> Tensor:
        self.grams = [list(row) for row in tokens]
        return out.copy_(torch.tensor([[float(row[-1])] * self.ple for row in tokens]))

    def _append(self, tokens: list[int], slot: int, start: int, pages: Tensor) -> Tensor:
        table = pages[slot].long()
        for place, token in enumerate(tokens, start):
            self.memory[table[place // PAGE], place % PAGE] = token
        end = start + len(tokens)
        held = self.memory[table].flatten()[:end].tolist()
        self.seeds[slot] = seed_of(tokens, int(self.seeds[slot]))
        assert not self.recurrent or int(self.seeds[slot]) == seed_of(held)
        return logits_of(held, self.vocabulary)


class Counted:
    """Experts that only tell."""

    nbytes, expert_bytes = 0, 10

    tallies = torch.tensor([6, 3, 1, 9]), torch.tensor([4, 0, 2])

    def forget(self) -> None:
        pass
