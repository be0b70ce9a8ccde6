"""Log-probabilities against float64."""

from __future__ import annotations

import math

import pytest
import torch

from hetero.core import InputError
from hetero.engine.logprobs import token_logprob, token_logprobs
from hetero.engine.request import Request


@pytest.mark.parametrize("top", [0, 1, 5, 20])
@pytest.mark.parametrize("at_once", [2000, 1 << 20])
def test_of_many_rows(top: int, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetero.engine.logprobs._VALUES", at_once)
    logits = torch.randn(9, 500, generator=torch.Generator().manual_seed(top)) * 4
    tokens = list(range(0, 450, 50))
    want = torch.log_softmax(logits.double(), dim=-1)
    got = token_logprobs(logits, tokens, top)
    for row, (entry, token) in enumerate(zip(got, tokens, strict=True)):
        assert entry.token == token
        assert entry.logprob == pytest.approx(float(want[row, token]), abs=1e-5)
        order = want[row].argsort(descending=True)[:top].tolist()
        assert [t for t, _ in entry.top] == order
        assert [v for _, v in entry.top] == pytest.approx(want[row, order].tolist(), abs=1e-5)
    assert token_logprob(logits[4], tokens[4], top).top == got[4].top


def test_equals_come_by_their_ids_and_the_impossible_is_minus_infinity() -> None:
    entry = token_logprob(torch.tensor([1.0, 1.0, -math.inf]), 2, 2)
    assert entry.logprob == -math.inf
    assert entry.top == ((0, pytest.approx(-math.log(2))), (1, pytest.approx(-math.log(2))))


def test_more_alternatives_than_tokens() -> None:
    assert len(token_logprob(torch.zeros(3), 0, 20).top) == 3


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize("value", [-1, 21])
def test_a_number_outside_the_range_is_named(field: str, value: int) -> None:
    with pytest.raises(InputError, match=f"^{field}={value}"):
        Request((1,), **{field: value})  # type: ignore[arg-type]


def test_no_answer_only_with_the_prompt_scored() -> None:
    assert Request((1,), max_tokens=0, prompt_logprobs=0).max_tokens == 0
    with pytest.raises(InputError, match="max_tokens=0: must be at least 1"):
        Request((1,), max_tokens=0)
    with pytest.raises(InputError, match="deadline_s"):
        Request((1,), deadline_s=0.0)
