"""The scheduler on tiny models: what it promises about one request among others."""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from hetero.core import HeteroError, InputError
from hetero.engine import job as module
from hetero.engine.generate import Engine, Runnable
from hetero.engine.request import QueueFull, Request, Result
from hetero.engine.sample import SamplingParams
from hetero.engine.scheduler import Scheduler
from hetero.hw import memory
from hetero.kv.prefix import BLOCK
from tests.engine.played import Listener, Passes, drive, prompt, runnable, scheduler, solo, submit
from tests.model.quiet import quiet  # noqa: F401  a fixture of every test here


@pytest.fixture
def run() -> Runnable:
    return runnable()


@pytest.fixture
def passes(run: Runnable) -> Iterator[Passes]:
    made = Passes(run.model)
    yield made
    made.remove()


def free(engine: Scheduler) -> bool:
    status = engine.status()
    return (status.running, status.waiting, status.kv_tokens_used) == (0, 0, 0)


def test_answers_are_those_of_the_request_alone(run: Runnable, passes: Passes) -> None:
    requests = [Request(prompt(seed, 5 + 3 * seed), max_tokens=9 + seed) for seed in range(6)]
    alone = [solo(run, request) for request in requests]
    with scheduler(run, slots=4) as engine:
        listeners = [submit(engine, request) for request in requests]
        assert [listener.result().token_ids for listener in listeners] == alone
        assert free(engine)
        assert engine.status().completion_tokens == sum(9 + seed for seed in range(6))
    assert max(rows for rows, _ in passes.shapes) == 4


def test_drawn_answers_are_those_of_their_seeds(run: Runnable) -> None:
    requests = [
        Request(
            prompt(seed), SamplingParams(temperature=0.9, top_p=0.9, seed=seed), max_tokens=20, logprobs=2
        )
        for seed in range(5)
    ]
    alone = [Engine(run).complete(request).token_ids for request in requests]
    engine = Scheduler(run)
    listeners = [submit(engine, request) for request in requests]
    drive(engine)
    assert [listener.result().token_ids for listener in listeners] == alone
    for piece in listeners[0].pieces:
        assert piece.logprob is not None
        assert piece.logprob.token == piece.token
        assert len(piece.logprob.top) == 2


def test_types_that_cannot_be_batched_take_turns(
    run: Runnable, passes: Passes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetero.engine.forward.takes_rows", lambda model: False)
    requests = [Request(prompt(seed), max_tokens=6) for seed in range(3)]
    alone = [solo(run, request) for request in requests]
    passes.shapes.clear()
    engine = Scheduler(run)
    listeners = [submit(engine, request) for request in requests]
    drive(engine)
    assert [listener.result().token_ids for listener in listeners] == alone
    assert {rows for rows, _ in passes.shapes} == {1}
    ends = [listener.order for listener in listeners]
    assert max(ends) - min(ends) < 6, "they ran one after the other"


def test_the_head_gets_rows_that_lie_together(run: Runnable) -> None:
    strides = []
    head = run.model.get_output_embeddings()
    hook = head.register_forward_pre_hook(
        lambda _, given: strides.append((given[0].shape, given[0].stride()))
    )
    try:
        solo(run, Request(prompt(0), max_tokens=2))
    finally:
        hook.remove()
    assert strides
    for shape, stride in strides:
        assert shape[:2] == (1, 1)
        assert stride == (shape[2], shape[2], 1)


def test_clients_take_turns(run: Runnable) -> None:
    engine = Scheduler(run, slots=1)
    order: list[str] = []
    for name in ("a1", "a2", "a3", "b1", "c1", "b2"):
        request = Request(prompt(1), max_tokens=1, client=name[0])
        engine.submit(
            request, lambda event, name=name: order.append(name) if isinstance(event, Result) else None
        )
    drive(engine)
    assert order == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_cancel_frees_all_within_a_step(run: Runnable, passes: Passes) -> None:
    engine = Scheduler(run, slots=2, prefill_chunk=4)
    writing, reading, waiting = (
        submit(engine, Request(prompt(seed, 40), max_tokens=50)) for seed in range(3)
    )
    while len(writing.pieces) < 3:
        engine.step()
    assert reading.pieces == []
    for listener in (writing, reading, waiting):
        listener.handle.cancel()
    before = len(passes.shapes)
    engine.step()
    assert len(passes.shapes) == before
    assert free(engine)
    assert [listener.result().finish_reason for listener in (writing, reading, waiting)] == ["cancelled"] * 3
    assert len(writing.result().token_ids) == 3
    writing.handle.cancel()  # after the end: nothing
    engine.step()


def test_a_deadline_ends_an_answer_as_it_is(run: Runnable, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(module, "clock", lambda: now)
    engine = Scheduler(run, slots=1)
    late, waiting = (submit(engine, Request(prompt(seed), max_tokens=50, deadline_s=5)) for seed in range(2))
    other = submit(engine, Request(prompt(3), max_tokens=4))
    for _ in range(4):
        engine.step()
    now = 104.9
    engine.step()
    assert late.end is None
    now = 105.0
    drive(engine)
    assert late.result().finish_reason == waiting.result().finish_reason == "deadline"
    assert len(late.result().token_ids) > 2
    assert waiting.result().token_ids == ()
    assert other.result().finish_reason == "length"


def test_a_long_prompt_is_read_between_the_tokens_of_others(run: Runnable, passes: Passes) -> None:
    """Between two tokens of a stream there is at most one piece of a prompt, of at most a chunk."""
    engine = Scheduler(run, prefill_chunk=16)
    stream = submit(engine, Request(prompt(1), max_tokens=60))
    while not stream.pieces:
        engine.step()
    passes.shapes.clear()
    submit(engine, Request(prompt(2, 180), max_tokens=2))
    seen: list[list[int]] = [[]]
    passes.before = lambda shape: seen[-1].append(shape[1]) if shape[1] > 1 else seen.append([])
    while stream.end is None:
        engine.step()
    assert max(map(len, seen)) == 1
    assert max(sum(pieces) for pieces in seen) <= 16
    assert sum(map(sum, seen)) >= 160, "the long prompt stood still"


def test_a_short_prompt_does_not_wait_for_a_long_one(run: Runnable) -> None:
    engine = Scheduler(run, prefill_chunk=16)
    long = submit(engine, Request(prompt(1, 200), max_tokens=2))
    short = submit(engine, Request(prompt(2, 10), max_tokens=2))
    while short.end is None:
        engine.step()
    assert long.pieces == []
    drive(engine)


@pytest.mark.parametrize("tokens", [240, 160])
def test_memory_for_three_serves_ten(run: Runnable, tokens: int) -> None:
    requests = [Request(prompt(seed, 30), max_tokens=40, client=str(seed)) for seed in range(10)]
    alone = [solo(run, request) for request in requests]
    assert len(set(alone)) == 10, "answers alike would hide a mix-up"
    engine = Scheduler(run, slots=8, kv_tokens=tokens)
    listeners = [submit(engine, request) for request in requests]
    most = 0
    while not free(engine):
        engine.step()
        status = engine.status()
        most = max(most, status.kv_tokens_used)
        assert status.kv_tokens_used + status.kv_tokens_cached <= tokens
    assert [listener.result().token_ids for listener in listeners] == alone
    assert most > tokens / 2
    assert engine.status().preemptions > 0


def test_a_prompt_that_never_fits_is_refused_with_numbers(run: Runnable) -> None:
    engine = Scheduler(run, kv_tokens=64)
    with pytest.raises(InputError, match=r"prompt has 64 tokens .* holds 64"):
        engine.submit(Request(prompt(1, 64)), lambda event: None)
    assert engine.check(Request(prompt(1, 60), max_tokens=9)) == 4
    listener = submit(engine, Request(prompt(1, 60), max_tokens=9))
    drive(engine)
    assert (len(listener.result().token_ids), listener.result().finish_reason) == (4, "length")


def test_a_full_queue_refuses(run: Runnable) -> None:
    engine = Scheduler(run, slots=1, max_queue=1)
    listeners = [submit(engine, Request(prompt(1), max_tokens=2)) for _ in range(2)]
    with pytest.raises(QueueFull) as refused:
        submit(engine, Request(prompt(1), max_tokens=2))
    assert refused.value.retry_after_s >= 1
    listeners[1].handle.cancel()  # who has left is not waiting
    submit(engine, Request(prompt(1), max_tokens=2))
    drive(engine)


def test_closing_ends_every_request(run: Runnable) -> None:
    engine = Scheduler(run, slots=1)
    engine.start()
    listeners = [submit(engine, Request(prompt(seed), max_tokens=200)) for seed in range(3)]
    engine.stop_accepting()
    with pytest.raises(HeteroError, match="no more requests"):
        submit(engine, Request(prompt(1), max_tokens=2))
    engine.close()
    assert {listener.result().finish_reason for listener in listeners} == {"cancelled"}
    assert free(engine)


def test_logits_that_are_not_finite_end_one_request(run: Runnable, passes: Passes) -> None:
    # Long enough to be under way together however long the prompts take to read.
    requests = [Request(prompt(seed), max_tokens=100) for seed in range(3)]
    alone = [solo(run, request) for request in requests]

    def poison(output: Any) -> None:
        if len(output.logits) == 3:
            output.logits[1] = float("nan")

    passes.after = poison
    engine = Scheduler(run)
    listeners = [submit(engine, request) for request in requests]
    drive(engine)
    end = listeners[1].wait()
    assert isinstance(end, HeteroError)
    assert "not finite" in str(end)
    assert [listeners[place].result().token_ids for place in (0, 2)] == [alone[0], alone[2]]


def test_a_failing_step_ends_those_in_it_and_no_others(run: Runnable, passes: Passes) -> None:
    request = Request(prompt(1), max_tokens=8)
    alone = solo(run, request)

    def fail(shape: tuple[int, int]) -> None:
        if shape == (2, 1):
            raise RuntimeError("/secret/path")

    passes.before = fail
    engine = Scheduler(run)
    listeners = [submit(engine, request) for _ in range(2)]
    drive(engine)
    for listener in listeners:
        end = listener.wait()
        assert isinstance(end, HeteroError)
        assert str(end) == "internal error"
    after = submit(engine, request)
    drive(engine)
    assert after.result().token_ids == alone
    assert free(engine)


@dataclass(frozen=True)
class Broken:
    """A grammar that fails at the third token."""

    made: list[int]

    def matcher(self) -> Broken:
        return Broken([])

    @property
    def done(self) -> bool:
        return False

    def mask(self, scores: Tensor) -> Tensor:
        if len(self.made) == 2:
            raise ValueError("a defect")
        return scores

    def accept(self, token: int) -> None:
        self.made.append(token)


def test_a_failing_sampler_or_sink_ends_its_own_request(run: Runnable) -> None:
    request = Request(prompt(1), max_tokens=8)
    alone = solo(run, request)
    engine = Scheduler(run)
    broken = submit(engine, Request(prompt(1), max_tokens=8, grammar=Broken([])))

    def fail(event: object) -> None:
        raise RuntimeError("the listener has gone")

    engine.submit(request, fail)
    fine = submit(engine, request)
    drive(engine)
    assert isinstance(broken.wait(), HeteroError)
    assert len(broken.pieces) == 2
    assert fine.result().token_ids == alone
    assert free(engine)


def test_prompt_scores_are_those_of_the_request_alone(run: Runnable) -> None:
    request = Request(prompt(1, 40), max_tokens=0, prompt_logprobs=2)
    want = Engine(run).complete(request)
    engine = Scheduler(run, prefill_chunk=16)
    submit(engine, Request(prompt(1, 40), max_tokens=3))
    drive(engine)
    listener = submit(engine, request)
    drive(engine)
    got = listener.result()
    assert got.prompt_logprobs is not None
    assert want.prompt_logprobs is not None
    assert (got.prompt_logprobs[0], got.finish_reason, got.token_ids) == (None, "length", ())
    assert got.usage.cached_tokens == 0
    for one, other in zip(got.prompt_logprobs[1:], want.prompt_logprobs[1:], strict=True):
        assert one is not None
        assert other is not None
        assert one.token == other.token
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_a_prompt_that_must_be_whole_is_read_in_one_pass() -> None:
    run = runnable(whole_prompt=True)
    passes = Passes(run.model)
    engine = Scheduler(run, prefill_chunk=8)
    for _ in range(2):
        listener = submit(engine, Request(prompt(1, 40), max_tokens=2))
        drive(engine)
        assert listener.result().usage.cached_tokens == 0
    assert [tokens for _, tokens in passes.shapes if tokens > 1] == [40, 40]


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next", "gpt_oss"])
@pytest.mark.parametrize("seed", range(3))
def test_whatever_comes_and_goes(family: str, seed: int) -> None:
    """Requests that share beginnings come, are cancelled, are sent back; each answer is that of it alone."""
    run = runnable(family)
    choose = random.Random(seed)
    starts = [prompt(number, 60) for number in range(3)]
    requests = [
        Request(
            (
                *choose.choice(starts)[: choose.randrange(1, 60)],
                *prompt(90 + number, choose.randrange(1, 30)),
            ),
            max_tokens=choose.randrange(1, 25),
            client=choose.choice("abc"),
        )
        for number in range(16)
    ]
    alone = [solo(run, request) for request in requests]
    engine = Scheduler(run, slots=4, max_queue=64, prefill_chunk=choose.choice((8, 32)), kv_tokens=20 * 16)
    listeners: list[Listener] = []
    left: set[int] = set()
    while len(listeners) < len(requests) or not free(engine):
        if len(listeners) < len(requests) and choose.random() < 0.3:
            listeners.append(submit(engine, requests[len(listeners)]))
        if listeners and choose.random() < 0.03:
            place = choose.randrange(len(listeners))
            listeners[place].handle.cancel()
            left.add(place)
        engine.step()
        status = engine.status()
        assert status.kv_tokens_used + status.kv_tokens_cached <= status.kv_tokens_total
    for place, (listener, want) in enumerate(zip(listeners, alone, strict=True)):
        got = listener.result()
        assert got.token_ids == want[: len(got.token_ids)]
        assert place in left or got.token_ids == want
    if family == "qwen3_moe":  # the others reuse whole entries only, which need luck here
        assert engine.status().prefix_hit_tokens > 0


def test_a_step_of_no_request_does_nothing(run: Runnable, passes: Passes) -> None:
    engine = Scheduler(run)
    engine.step()
    assert passes.shapes == []
    with torch.inference_mode(), pytest.raises(InputError, match="slots=0"):
        Scheduler(run, slots=0)


@pytest.mark.parametrize("available", [1 << 16, 1 << 40])
def test_a_budget_beyond_the_memory_is_told_once(
    run: Runnable, monkeypatch: pytest.MonkeyPatch, available: int
) -> None:
    told: list[logging.LogRecord] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", told.append)
    logger = logging.getLogger("hetero.engine")
    logger.addHandler(handler)
    monkeypatch.setattr(memory, "available", lambda: memory.Available(available, "a test"))
    try:
        engine = Scheduler(run, kv_tokens=4096)
        for seed in range(2):
            submit(engine, Request(prompt(seed), max_tokens=2))
        drive(engine)
    finally:
        logger.removeHandler(handler)
    if available == 1 << 40:
        assert not told
        return
    (record,) = told
    found = re.search(r"4096 tokens .* --kv-tokens (\d+) fits", record.getMessage())
    assert found is not None
    config: Any = run.model.config
    size = config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim * 4
    assert int(found[1]) == available // size // BLOCK * BLOCK
