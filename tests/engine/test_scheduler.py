"""The scheduler on tiny models: what it promises about one request among others."""

from __future__ import annotations

import pytest

from hetero.core import InputError
from hetero.engine.request import QueueFull, Request
from hetero.engine.scheduler import Scheduler
from tests.engine.played import runnable, scheduler, solo, submit
from tests.model.quiet import quiet  # noqa: F401  a fixture of every test here


def prompt(seed: int, size: int = 20) -> tuple[int, ...]:
    return tuple((seed * 31 + place * (7 + seed)) % 90 + 3 for place in range(size))


def test_answers_are_those_of_the_request_alone() -> None:
    run = runnable()
    requests = [Request(prompt(seed, 5 + 3 * seed), max_tokens=4 + seed) for seed in range(6)]
    alone = [solo(run, request) for request in requests]
    with scheduler(run, slots=4) as engine:
        listeners = [submit(engine, request) for request in requests]
        assert [listener.result().token_ids for listener in listeners] == alone
        status = engine.status()
    assert (status.running, status.waiting, status.kv_tokens_used) == (0, 0, 0)
    assert status.completion_tokens == sum(4 + seed for seed in range(6))


def test_memory_for_three_serves_ten() -> None:
    run = runnable()
    requests = [Request(prompt(seed, 30), max_tokens=40, client=str(seed)) for seed in range(10)]
    with scheduler(run, slots=8, kv_tokens=3 * 80) as engine:
        listeners = [submit(engine, request) for request in requests]
        answers = [listener.result().token_ids for listener in listeners]
        status = engine.status()
    assert answers == [solo(run, request) for request in requests]
    assert len(set(answers)) == 10, "answers alike would hide a mix-up"
    assert status.preemptions > 0
    assert status.kv_tokens_used == 0


def test_a_prompt_that_never_fits_is_refused_with_numbers() -> None:
    engine = Scheduler(runnable(), kv_tokens=64)
    with pytest.raises(InputError, match=r"prompt has 64 tokens .* holds 64"):
        engine.submit(Request(prompt(1, 64)), lambda event: None)
    assert engine.check(Request(prompt(1, 60), max_tokens=9)) == 4
    engine.close()


def test_a_full_queue_refuses() -> None:
    engine = Scheduler(runnable(), slots=1, max_queue=1)  # not started: nothing leaves the queue
    listeners = [submit(engine, Request(prompt(1), max_tokens=2)) for _ in range(2)]
    with pytest.raises(QueueFull) as refused:
        submit(engine, Request(prompt(1), max_tokens=2))
    assert refused.value.retry_after_s >= 1
    engine.start()
    for listener in listeners:
        listener.result()
    submit(engine, Request(prompt(1), max_tokens=2)).result()
    engine.close()
