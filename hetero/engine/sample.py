"""Choosing the next token.

The order is fixed, since filters do not commute: penalties and bias (``penalties``), the grammar's mask,
temperature, top-k, top-p, min-p, draw. It is the order of transformers and vLLM; a nucleus is therefore one
of the tempered distribution. Temperature 0 is the arg max before the temperature: the filters have no say.

``probabilities`` is apart from ``draw`` so that a verifier of drafts can compare two distributions.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from hetero.core import HeteroError, InputError
from hetero.engine.grammar import Grammar
from hetero.engine.penalties import Penalties

MAX_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to draw. ``top_k`` 0, ``top_p`` 1, ``min_p`` 0 and ``repetition_penalty`` 1 switch a filter off.

    ``frequency_penalty``, ``presence_penalty``: what is taken from the logit of a token for each of its
    occurrences in the answer, and for there being any. ``logit_bias``: (token, what is added to its logit).

    Raises InputError naming the field when a value is outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, 0.0 <= self.temperature <= 100.0, "from 0 to 100")
        _check("top_k", self.top_k, self.top_k >= 0, "0 (off) or more")
        _check("top_p", self.top_p, 0.0 < self.top_p <= 1.0, "above 0 and at most 1")
        _check("min_p", self.min_p, 0.0 <= self.min_p <= 1.0, "from 0 to 1")
        _check(
            "repetition_penalty",
            self.repetition_penalty,
            0.0 < self.repetition_penalty <= 100.0,
            "above 0 and at most 100",
        )
        if self.seed is not None:
            _check("seed", self.seed, 0 <= self.seed <= MAX_SEED, f"from 0 to {MAX_SEED}")
        for name in ("frequency_penalty", "presence_penalty"):
            value = getattr(self, name)
            _check(name, value, -2.0 <= value <= 2.0, "from -2 to 2")
        for token, bias in self.logit_bias:
            if token < 0 or not -100.0 <= bias <= 100.0:
                raise InputError(
                    f"logit_bias: {token}: {bias} must be a token id and a number from -100 to 100"
                )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def _check(name: str, value: float, good: bool, want: str) -> None:
    if not good:  # no comparison holds for NaN
        raise InputError(f"{name}={value}: must be {want}")


def probabilities(logits: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """(probabilities [n] float64 summing to 1, token ids [n]) of penalised logits [V]; temperature above 0.

    Tokens that a filter removed are absent; at least the most likely token stays.
    """
    scaled = logits.double() / params.temperature
    size = scaled.numel()
    if params.top_k:
        scaled, ids = _leading(scaled, min(params.top_k, size))
    else:
        ids = torch.arange(size)
    probs = torch.softmax(scaled, dim=0)
    if params.top_p < 1.0 or params.min_p > 0.0:
        # Both filters keep a prefix of the sorted tokens, nearly always a short one: sort no more.
        for guess in (256, 4096, probs.numel()):
            head, order = _leading(probs, min(guess, probs.numel()))
            stay = _prefix(head, params)
            if stay < head.numel() or head.numel() == probs.numel():
                break
        probs, ids = head[:stay], ids[order[:stay]]
    return probs / probs.sum(), ids


def _prefix(probs: Tensor, params: SamplingParams) -> int:
    """How many of descending ``probs`` [n] top-p and then min-p keep."""
    # A token stays while the mass before it is below top_p, so the one that crosses the line stays.
    before = torch.cumsum(probs, dim=0) - probs
    stays = before < params.top_p if params.top_p < 1.0 else torch.ones_like(probs, dtype=torch.bool)
    stays &= probs >= params.min_p * probs[0]
    return max(int(stays.sum()), 1)


def _leading(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` largest of values [n] in descending order, and their places; ties by ascending place.

    Not ``topk`` alone, whose order among equals is anybody's.
    """
    if count < values.numel():
        floor = torch.topk(values, count, sorted=True).values[-1]
        places = torch.nonzero(values >= floor).flatten()
    else:
        places = torch.arange(values.numel())
    ordered, order = torch.sort(values[places], descending=True, stable=True)
    return ordered[:count], places[order[:count]]


class Scored(NamedTuple):
    """Logits [V] that a device has made, and the largest of them, which it has found and told."""

    logits: Tensor
    token: int
    best: float


class Sampler:
    """Draws the tokens of one request; owns its random stream, its history and its place in the grammar."""

    def __init__(
        self, params: SamplingParams, prompt: Iterable[int] = (), grammar: Grammar | None = None
    ) -> None:
        self.params = params
        self.seed = params.seed if params.seed is not None else secrets.randbits(48)
        self._penalties = Penalties(params, tuple(prompt)) if Penalties.wanted(params) else None
        self._matcher = None if grammar is None else grammar.matcher()

    @cached_property
    def _random(self) -> torch.Generator:
        # The most costly part of a sampler, and greedy answers have no use for it.
        return torch.Generator(device="cpu").manual_seed(self.seed)

    @property
    def done(self) -> bool:
        """The grammar is complete: nothing but the end may follow. Never without a grammar."""
        return self._matcher is not None and self._matcher.done

    @property
    def plain(self) -> bool:
        """Whether every token is simply the one of the largest logit."""
        return self.params.greedy and self._penalties is None and self._matcher is None

    def pick(self, logits: Tensor | Scored) -> int:
        """The next token for logits [V]. Raises HeteroError when they are not finite where it matters."""
        if isinstance(logits, Scored):
            if self.plain:
                _check_finite(logits.best)
                return logits.token
            logits = logits.logits
        scores = logits.detach().to("cpu", torch.float32)
        if self._penalties is not None:
            scores = self._penalties.apply(scores)
        if self._matcher is not None:
            scores = self._matcher.mask(scores)
        best, index = torch.max(scores, dim=0)
        _check_finite(float(best))
        token = int(index) if self.params.greedy else self.draw(*probabilities(scores, self.params))
        if self._penalties is not None:
            self._penalties.add(token)
        if self._matcher is not None:
            self._matcher.accept(token)
        return token

    def draw(self, probs: Tensor, ids: Tensor) -> int:
        """One of ``ids`` [n] with ``probs`` [n], by inverting the distribution at one uniform number."""
        uniform = torch.rand(1, generator=self._random, dtype=torch.float64)
        place = int(torch.searchsorted(torch.cumsum(probs, dim=0), uniform, right=True))
        return int(ids[min(place, len(ids) - 1)])


def _check_finite(best: float) -> None:
    if not math.isfinite(best):
        raise HeteroError(f"the model's logits are not finite (largest: {best})")
