"""Beginnings that requests have in common: found, exact, and given up when memory is short."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetero.engine.request import Request, Result
from hetero.engine.scheduler import Scheduler
from hetero.kv.prefix import BLOCK, Entry, PrefixStore, common
from tests.engine.played import Passes, drive, prompt, runnable, solo, submit
from tests.model.quiet import quiet  # noqa: F401  a fixture of every test here

FAMILIES = ["qwen3_moe", "deepseek_v3", "qwen3_next", "lfm2_moe", "gpt_oss"]
CUTTABLE = ("qwen3_moe", "deepseek_v3")


def played(engine: Scheduler, request: Request) -> Result:
    listener = submit(engine, request)
    drive(engine)
    return listener.result()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_next_turn_of_a_talk_reads_only_what_is_new(family: str) -> None:
    run = runnable(family)
    first = Request(prompt(1, 50), max_tokens=12)
    made = solo(run, first)
    second = Request((*first.prompt, *made, *prompt(5, 9)), max_tokens=12)
    cold = solo(run, second)
    passes = Passes(run.model)
    engine = Scheduler(run)
    played(engine, first)
    passes.shapes.clear()
    warm = played(engine, second)
    assert warm.token_ids == cold
    assert warm.usage.cached_tokens == 50 + 12 - 1  # nobody has read the last token of an answer
    assert passes.shapes[0] == (1, 10)
    assert engine.status().prefix_hit_tokens == warm.usage.cached_tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_a_common_beginning_of_many_prompts(family: str) -> None:
    """Where a cache can be cut the second prompt profits; elsewhere it shows where the third will."""
    run = runnable(family)
    system = prompt(1, 45)
    requests = [Request((*system, *prompt(40 + number, 20)), max_tokens=6) for number in range(4)]
    cold = [solo(run, request) for request in requests]
    engine = Scheduler(run)
    results = [played(engine, request) for request in requests]
    assert [result.token_ids for result in results] == cold
    assert len(set(cold)) == 4
    shared = common(requests[0].prompt, requests[1].prompt)
    cached = [result.usage.cached_tokens for result in results]
    assert cached[0] == 0
    assert cached[1] == (shared if family in CUTTABLE else 0)
    assert min(cached[2:]) >= len(system)


def test_requests_at_once_profit_from_each_other() -> None:
    run = runnable()
    request = Request(prompt(1, 60), max_tokens=10)
    cold = solo(run, request)
    engine = Scheduler(run)
    listeners = [submit(engine, request) for _ in range(3)]
    drive(engine)
    assert [listener.result().token_ids for listener in listeners] == [cold] * 3
    assert [listener.result().usage.cached_tokens for listener in listeners] == [0, 59, 59]


def test_without_the_cache_nothing_is_kept() -> None:
    run = runnable()
    engine = Scheduler(run, prefix_cache=False)
    request = Request(prompt(1, 60), max_tokens=10)
    assert [played(engine, request).usage.cached_tokens for _ in range(2)] == [0, 0]
    assert engine.status().kv_tokens_cached == 0


def test_what_is_kept_makes_room_for_requests() -> None:
    run = runnable()
    engine = Scheduler(run, kv_tokens=320)
    kept = Request(prompt(1, 60), max_tokens=4)
    played(engine, kept)
    assert engine.status().kv_tokens_cached == 64
    large = Request(prompt(2, 200), max_tokens=40)
    cold = solo(run, large)
    assert played(engine, large).token_ids == cold
    assert engine.status().preemptions == 0


def test_without_room_for_both_what_is_kept_becomes_the_sequence() -> None:
    run = runnable(context=320)
    engine = Scheduler(run, kv_tokens=320)
    kept = Request(prompt(1, 60), max_tokens=4)
    longer = replace(kept, prompt=(*kept.prompt, *prompt(7, 210)), max_tokens=40)
    cold = solo(run, longer)
    played(engine, kept)
    warm = played(engine, longer)  # 272 and 64 tokens are more than 320
    assert warm.token_ids == cold
    assert warm.usage.cached_tokens == engine.status().prefix_hit_tokens == 60
    # The scores of a prompt need all of it read.
    played(engine, kept)
    scored = replace(longer, prompt_logprobs=0)
    assert engine.status().kv_tokens_cached == 64
    result = played(engine, scored)
    assert result.usage.cached_tokens == 0
    assert result.prompt_logprobs is not None
    assert len(result.prompt_logprobs) == 270
    assert result.token_ids == cold


def entry(*tokens: int, cuttable: bool = True) -> Entry:
    return Entry(tokens, object(), cuttable)


def test_an_entry_serves_what_it_can() -> None:
    tokens = tuple(range(40))
    assert entry(*tokens).serves((*range(30), 99, 98)) == 30
    assert entry(*tokens).serves(tokens) == 39, "one token must be left to be read"
    assert entry(*tokens, cuttable=False).serves((*range(30), 99, 98)) == 0
    assert entry(*tokens, cuttable=False).serves(tokens) == 0
    assert entry(*tokens, cuttable=False).serves((*tokens, 50)) == 40
    assert entry(1, 2).serves((3, 4)) == 0


@pytest.mark.parametrize("shared", [0, 1, 7, 8, 99, 100])
def test_common(shared: int) -> None:
    one = (*range(shared), *(1000 for _ in range(100 - shared)))
    other = (*range(shared), *(2000 for _ in range(50)))
    assert common(one, other) == common(other, one) == shared
    assert common(one, one[:20]) == 20


def test_the_store_keeps_the_most_recent() -> None:
    store = PrefixStore(2, 10 * BLOCK)
    one, two, three = (entry(*prompt(seed, 20)) for seed in range(3))
    store.put(one)
    store.put(two)
    assert store.find((*one.tokens, 5)) == (one, 20)  # used: the other is the older now
    store.put(three)
    assert store.find((*two.tokens, 5)) is None
    assert store.find((*one.tokens, 5)) == (one, 20)
    assert store.tokens == 4 * BLOCK
    store.shrink(2 * BLOCK, spare=three)
    assert store.find((*one.tokens, 5)) is None
    store.shrink(0, spare=three)
    assert store.find((*three.tokens, 5)) == (three, 20)
    store.shrink(0)
    assert store.tokens == 0


def test_the_store_keeps_nothing_needless() -> None:
    store = PrefixStore(8, 100 * BLOCK)
    short, long = entry(*range(20)), entry(*range(50))
    store.put(short)
    store.put(long)
    assert store.tokens == 4 * BLOCK
    store.put(entry(*range(30)))
    assert store.tokens == 4 * BLOCK
    store.put(entry(*range(BLOCK - 1, 2, -1)))  # smaller than a block
    store.put(entry(*range(101 * BLOCK)))  # larger than all
    assert store.tokens == 4 * BLOCK
    whole = PrefixStore(8, 100 * BLOCK)
    for size in (20, 50, 20):
        whole.put(entry(*range(size), cuttable=False))
    assert whole.tokens == (2 + 4) * BLOCK, "of what cannot be cut, each length is of use"
