"""The decode loop against transformers' own ``generate`` on tiny models of several families."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import PreTrainedModel

from hetero.core import InputError
from hetero.engine.generate import Engine, Runnable
from hetero.engine.request import Piece, Request, Result
from hetero.engine.sample import SamplingParams
from tests.model.tiny import FAMILIES, tiny

PROMPT = tuple(torch.randint(3, 96, (23,), generator=torch.Generator().manual_seed(1)).tolist())


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return tiny(request.param)


@pytest.fixture(scope="module")
def plain() -> PreTrainedModel:
    return tiny("qwen3_moe")


def engine(
    model: PreTrainedModel, context: int | None = 256, chunk: int = 512, eos: tuple[int, ...] = ()
) -> Engine:
    return Engine(Runnable(model, 96, context=context, eos=frozenset(eos)), prefill_chunk=chunk)


def generate(model: PreTrainedModel, new: int, **options: object) -> list[int]:
    ids = torch.tensor([PROMPT])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, **options
    )
    return out[0, len(PROMPT) :].tolist()


@pytest.mark.filterwarnings("ignore")
def test_greedy_is_the_same_as_transformers(model: PreTrainedModel) -> None:
    want = generate(model, 24, eos_token_id=[])
    assert len(set(want)) > 3, "a constant answer would prove little"
    result = engine(model).complete(Request(PROMPT, max_tokens=24))
    assert list(result.token_ids) == want
    assert result.finish_reason == "length"
    assert result.text is None


@pytest.mark.parametrize("chunk", [1, 4, 7, 22])
def test_prefill_in_chunks_changes_nothing(model: PreTrainedModel, chunk: int) -> None:
    whole = engine(model).complete(Request(PROMPT, max_tokens=12))
    assert engine(model, chunk=chunk).complete(Request(PROMPT, max_tokens=12)).token_ids == whole.token_ids


@pytest.mark.filterwarnings("ignore")
def test_repetition_penalty_is_that_of_transformers(plain: PreTrainedModel) -> None:
    want = generate(plain, 20, repetition_penalty=1.7, eos_token_id=[])
    got = engine(plain).complete(Request(PROMPT, SamplingParams(repetition_penalty=1.7), max_tokens=20))
    assert list(got.token_ids) == want
    assert want != generate(plain, 20, eos_token_id=[])


def test_any_of_several_eos_ends_and_is_counted(plain: PreTrainedModel) -> None:
    free = engine(plain).complete(Request(PROMPT, max_tokens=12)).token_ids
    last = free[4]
    at = free.index(last)
    got = engine(plain, eos=(95 if last != 95 else 94, last)).complete(Request(PROMPT, max_tokens=12))
    assert got.token_ids == free[: at + 1]
    assert got.finish_reason == "stop"
    assert got.usage.completion_tokens == at + 1
    ignoring = engine(plain, eos=(last,)).complete(Request(PROMPT, max_tokens=12, ignore_eos=True))
    assert ignoring.token_ids == free


def test_the_context_limit(plain: PreTrainedModel) -> None:
    short = engine(plain, context=32)
    got = short.complete(Request(PROMPT, max_tokens=4096))
    assert (len(got.token_ids), got.finish_reason) == (32 - len(PROMPT), "length")
    assert short.complete(Request(PROMPT)).token_ids == got.token_ids
    with pytest.raises(InputError, match=r"has 32 tokens and the context of this model holds 32.*at least 1"):
        short.stream(Request(tuple(range(3, 35))))
    with pytest.raises(InputError, match="max_tokens"):
        engine(plain, context=None).stream(Request(PROMPT))


def test_prompts_that_cannot_run(plain: PreTrainedModel) -> None:
    for bad in (96, -1):
        with pytest.raises(InputError, match=f"token id {bad} is not in the vocabulary of 96"):
            engine(plain).stream(Request((3, bad)))
    with pytest.raises(InputError, match="empty"):
        Request(())
    with pytest.raises(InputError, match="max_tokens=0"):
        Request(PROMPT, max_tokens=0)
    with pytest.raises(InputError, match="tokenizer"):
        engine(plain).stream(Request(PROMPT, stop=("x",)))


def test_cancelled_within_one_step(plain: PreTrainedModel) -> None:
    made: list[int] = []
    for event in engine(plain).stream(Request(PROMPT, max_tokens=50), lambda: len(made) >= 3):
        if isinstance(event, Piece):
            made.append(event.token)
        else:
            assert event.finish_reason == "cancelled"
            assert len(event.token_ids) == 3
    last = list(engine(plain, chunk=4).stream(Request(PROMPT, max_tokens=2), lambda: True))
    assert len(last) == 1
    assert isinstance(last[0], Result)
    assert last[0].token_ids == ()


def test_a_seed_repeats_and_requests_do_not_touch_each_other(plain: PreTrainedModel) -> None:
    runner = engine(plain)
    hot = Request(PROMPT, SamplingParams(temperature=1.5, seed=4), max_tokens=16)
    first = runner.complete(hot)
    runner.complete(Request(PROMPT[:5], SamplingParams(temperature=1.0, seed=9), max_tokens=9))
    assert runner.complete(hot).token_ids == first.token_ids
    unseeded = runner.complete(Request(PROMPT, SamplingParams(temperature=1.5), max_tokens=16))
    again = Request(PROMPT, SamplingParams(temperature=1.5, seed=unseeded.seed), max_tokens=16)
    assert runner.complete(again).token_ids == unseeded.token_ids


def test_timings_and_kernels_belong_to_the_request(plain: PreTrainedModel) -> None:
    counts = {"int8.avx2.gemv": 100}

    def kernels() -> dict[str, int]:
        counts["int8.avx2.gemv"] += 7
        return dict(counts)

    runner = Engine(Runnable(plain, 96, context=256, kernels=kernels, load_s=1.5))
    result = runner.complete(Request(PROMPT, max_tokens=5))
    assert result.kernels == {"int8.avx2.gemv": 7}
    times = result.timings
    assert times.load_s == 1.5
    assert times.prefill_tok_s == pytest.approx(len(PROMPT) / times.ttft_s)
    assert times.decode_tok_s > 0
