"""Log-probabilities of drawn tokens and of a prompt, with the most likely alternatives.

They are those of the model's own distribution: before bias, penalties, grammar, temperature and filters. A
drawn token may therefore stand below alternatives that a filter removed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hetero.core import InputError

# As many as the API allows.
MAX_TOP = 20

_VALUES = 4 << 20  # logits that are scored at once


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token, its natural log-probability, and the most likely (token, log-probability), best first.

    The token itself is among ``top`` only when it is one of them. Their text is the tokenizer's affair.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def check_top(name: str, top: int | None) -> None:
    """Raises InputError naming the field when a number of alternatives is outside its range."""
    if top is not None and not 0 <= top <= MAX_TOP:
        raise InputError(f"{name}={top}: must be from 0 to {MAX_TOP}")


def token_logprob(logits: Tensor, token: int, top: int) -> TokenLogprob:
    """Of ``token`` under the model's own logits [V], with ``top`` alternatives."""
    return token_logprobs(logits.unsqueeze(0), [token], top)[0]


def token_logprobs(logits: Tensor, tokens: list[int], top: int) -> list[TokenLogprob]:
    """Of ``tokens`` [n] under logits [n, V], row by row; ties among alternatives go to the lower id."""
    # A prompt's worth of rows over a whole vocabulary would be gigabytes once more.
    each = max(_VALUES // logits.shape[1], 1)
    return [
        found
        for first in range(0, len(tokens), each)
        for found in _scored(logits[first : first + each], tokens[first : first + each], top)
    ]


def _scored(logits: Tensor, tokens: list[int], top: int) -> list[TokenLogprob]:
    """On the device of the logits, of which little is told."""
    scores = torch.log_softmax(logits.detach().float(), dim=-1)
    drawn = scores.gather(1, torch.tensor(tokens, device=scores.device).unsqueeze(1)).flatten().tolist()
    count = min(top, scores.shape[1])
    if not count:
        return [TokenLogprob(token, value) for token, value in zip(tokens, drawn, strict=True)]
    values, places = torch.topk(scores, count, dim=-1)
    rows = zip(tokens, drawn, values.tolist(), places.tolist(), strict=True)
    return [
        TokenLogprob(
            token, value, tuple(sorted(zip(ids, best, strict=True), key=lambda pair: (-pair[1], pair[0])))
        )
        for token, value, best, ids in rows
    ]
