"""What moves logits before the draw: penalties on tokens that were there already, and a bias on chosen ones.

The order is fixed: the repetition penalty over prompt and answer; then, over the answer alone as OpenAI's API
defines them, frequency (times the number of occurrences) and presence (once); then the bias, which therefore
means exactly what it says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hetero.core import InputError

if TYPE_CHECKING:
    from hetero.engine.sample import SamplingParams


def penalise(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Logits [V] with those of ``seen`` (bool [V]) moved away from being chosen, whatever their sign."""
    if penalty == 1.0:
        return logits
    pushed = torch.where(logits > 0, logits / penalty, logits * penalty)
    return torch.where(seen, pushed, logits)


class Penalties:
    """The tokens of one request so far, and what they do to the next logits."""

    def __init__(self, params: SamplingParams, prompt: tuple[int, ...]) -> None:
        self._params = params
        self._prompt = prompt
        # Their size comes from the logits: some heads are padded beyond the configured vocabulary.
        self._seen: Tensor | None = None  # bool [V], prompt and answer
        self._counts: Tensor | None = None  # float32 [V], answer
        self._biased: tuple[Tensor, Tensor] | None = None

    @staticmethod
    def wanted(params: SamplingParams) -> bool:
        """Whether the parameters ask for any of it."""
        return (
            params.repetition_penalty != 1.0
            or params.frequency_penalty != 0.0
            or params.presence_penalty != 0.0
            or bool(params.logit_bias)
        )

    def apply(self, logits: Tensor) -> Tensor:
        """Logits [V] for the next token; the argument stays as it is."""
        params = self._params
        if self._seen is None or self._counts is None:
            self._prepare(logits.numel())
        assert self._seen is not None
        assert self._counts is not None
        logits = penalise(logits, self._seen, params.repetition_penalty)
        if params.frequency_penalty or params.presence_penalty:
            logits = (
                logits
                - params.frequency_penalty * self._counts
                - params.presence_penalty * (self._counts > 0).to(logits.dtype)
            )
        if self._biased is not None:
            logits = logits.index_add(0, *self._biased)
        return logits

    def add(self, token: int) -> None:
        """A token was drawn."""
        if self._seen is not None and self._counts is not None:
            self._seen[token] = True
            self._counts[token] += 1

    def _prepare(self, size: int) -> None:
        self._seen = torch.zeros(size, dtype=torch.bool)
        self._seen[torch.tensor(self._prompt, dtype=torch.long)] = True
        self._counts = torch.zeros(size)
        if self._params.logit_bias:
            tokens, values = zip(*self._params.logit_bias, strict=True)
            if max(tokens) >= size:
                raise InputError(f"logit_bias: token id {max(tokens)} is not in the vocabulary of {size}")
            self._biased = (torch.tensor(tokens, dtype=torch.long), torch.tensor(values))
