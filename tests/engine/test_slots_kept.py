"""Beginnings that requests on slots have in common: exact, read once, and never in anybody's way."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

from hetero.core import HeteroError
from hetero.decode.inputs import PAGE
from hetero.engine.answer import Runnable
from hetero.engine.beginnings import NEAR, places
from hetero.engine.generate import Engine
from hetero.engine.gpu.pages import Pages, settled
from hetero.engine.gpu.runner import GpuRunner
from hetero.engine.gpu.stepper import SlotStepper
from hetero.engine.request import Request, Result
from hetero.engine.sample import SamplingParams
from hetero.engine.scheduler import Scheduler
from tests.engine.paged import VOCAB, PagedDecoder, greedy, logits_of
from tests.engine.played import drive, submit
from tests.engine.test_ahead import Lanes
from tests.engine.twins import TwinMeans

CONTEXT = 320
KINDS: dict[str, dict[str, Any]] = {
    "cut": {},
    "recurrent": {"recurrent": True},
    "blocks": {"recurrent": True, "grain": 3},
}


def runner_of(
    slots: int = 4,
    context: int = CONTEXT,
    pages: int | None = None,
    options: dict[str, Any] | None = None,
    **kind: Any,
) -> GpuRunner:
    decoder = PagedDecoder(slots, context, **kind)
    more = {"handoff": None} | (options or {})
    return GpuRunner(decoder, [], slots=slots, context=context, pages=pages, chunk=64, **more)


def runnable_of(runner: GpuRunner) -> Runnable:
    return Runnable(nn.Module(), VOCAB, context=runner.context, runner=runner)


def decoder_of(runner: GpuRunner) -> PagedDecoder:
    decoder: Any = runner.decoder
    return decoder


def words(size: int) -> tuple[int, ...]:
    return tuple(random.randrange(VOCAB) for _ in range(size))


def played(engine: Scheduler, prompt: tuple[int, ...], count: int = 6) -> Result:
    listener = submit(engine, Request(prompt, SamplingParams(), count))
    drive(engine)
    result = listener.result()
    assert list(result.token_ids) == greedy(prompt, count)
    return result


def assert_nothing_held(runner: GpuRunner) -> None:
    pages, keeping = runner.pages, runner.keeping
    assert (pages.free, pages.in_slots, pages.only_kept) == (pages.total, 0, 0)
    assert sorted(pages._free) == list(range(pages.total))
    assert not any(pages._slots_of) and not any(pages._kept_by)  # noqa: PT018
    assert len(keeping._spare) == keeping._made <= max(keeping.most, 0)
    assert sorted(runner._free) == list(range(runner.slots))


def test_pages_that_many_hold() -> None:
    """At random for 3000 operations, against sets of holders."""
    pages = Pages(4, 160, torch.device("cpu"), total=24)
    slots: list[list[int]] = [[] for _ in range(4)]
    kept: list[list[int]] = []
    pages.reclaim = lambda: bool(kept) and (pages.drop(kept.pop(0)) or True)
    for _ in range(3000):
        slot = random.randrange(4)
        kind = random.randrange(6)
        if kind == 0:
            tokens = random.randrange(1, 161)
            missing = -(-tokens // PAGE) - len(slots[slot])
            if missing > 0 and missing > 24 - len({page for held in slots for page in held}):
                with pytest.raises(HeteroError, match="all 24 pages"):
                    pages.grow(slot, tokens)
            else:
                pages.grow(slot, tokens)
        elif kind == 1:
            pages.release(slot)
        elif kind == 2 and slots[slot]:
            kept.append(list(slots[slot][: random.randrange(1, len(slots[slot]) + 1)]))
            pages.keep(kept[-1])
        elif kind == 3 and kept:
            pages.drop(kept.pop(random.randrange(len(kept))))
        elif kind == 4:
            source = random.choice([*kept, *slots])
            pages.share(slot, list(source))
        elif slots[slot]:
            index = random.randrange(len(slots[slot]))
            try:
                old = pages.own(slot, index)
            except HeteroError:
                assert not kept
                assert len({page for held in slots for page in held}) == 24
            else:
                assert old is None or old == slots[slot][index] != pages.held(slot)[index]
                mine = pages.held(slot)[index]
                assert sum(mine in held for held in [*(pages.held(n) for n in range(4)), *kept]) == 1
        slots = [list(pages.held(n)) for n in range(4)]
        in_slots = {page for held in slots for page in held}
        only_kept = {page for held in kept for page in held} - in_slots
        assert (pages.in_slots, pages.only_kept) == (len(in_slots), len(only_kept))
        assert sorted(pages._free) == sorted(set(range(24)) - in_slots - only_kept)
        for n, held in enumerate(slots):
            assert pages.table[n, : len(held)].tolist() == held
    for slot in range(4):
        pages.release(slot)
    for held in kept:
        pages.drop(held)
    assert sorted(pages._free) == list(range(24))


def test_pages_that_are_written_no_more() -> None:
    assert [settled(tokens, 1) for tokens in (0, 15, 16, 31, 32)] == [0, 0, 1, 1, 2]
    assert [settled(tokens, 4) for tokens in (15, 16, 17)] == [0, 1, 1]
    # The block of tokens 15, 16, 17 is noted in the first page, once the last of them is there.
    assert [settled(tokens, 3) for tokens in (16, 17, 18, 32, 33)] == [0, 0, 1, 1, 2]


@pytest.mark.parametrize("kind", KINDS)
def test_the_next_turn_of_a_talk_reads_only_what_is_new(kind: str) -> None:
    runner = runner_of(**KINDS[kind])
    engine = Scheduler(runnable_of(runner), slots=runner.slots)
    prompt = words(50)
    made = played(engine, prompt, 12).token_ids
    for _ in range(3):
        reads = decoder_of(runner).reads
        reads.clear()
        prompt = (*prompt, *made, *words(9))
        warm = played(engine, prompt, 12)
        assert warm.usage.cached_tokens == len(prompt) - 9 - 1  # nobody has read an answer's last token
        assert sum(reads) == 10
        made = warm.token_ids
    assert engine.status().prefix_hit_tokens == sum(50 + 21 * turn + 11 for turn in range(3))
    engine.close()
    assert_nothing_held(runner)


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_said_of_a_stopped_answer_is_known(kind: str) -> None:
    runner = runner_of(**KINDS[kind])
    engine = Scheduler(runnable_of(runner), slots=runner.slots)
    prompt = words(40)
    listener = submit(engine, Request(prompt, SamplingParams(), 50))
    while len(listener.pieces) < 7:
        engine.step()
    listener.handle.cancel()
    drive(engine)
    said = listener.result().token_ids
    assert played(engine, (*prompt, *said, *words(8))).usage.cached_tokens == 40 + len(said) - 1
    engine.close()
    assert_nothing_held(runner)


@pytest.mark.parametrize("kind", KINDS)
def test_a_turn_whose_template_forgets_the_thinking(kind: str) -> None:
    """It parts from the earlier one just before its end."""
    runner = runner_of(**KINDS[kind])
    engine = Scheduler(runnable_of(runner), slots=runner.slots)
    talk, thinking = words(150), words(4)
    played(engine, (*talk, *thinking))
    assert played(engine, (*talk, *words(30))).usage.cached_tokens >= 154 - NEAR
    engine.close()
    assert_nothing_held(runner)


@pytest.mark.parametrize("kind", KINDS)
def test_a_common_beginning_of_many_prompts(kind: str) -> None:
    """Where a sequence can be cut the second prompt profits; elsewhere it shows where the third will. The
    common part is read together with what follows."""
    runner = runner_of(**KINDS[kind])
    engine = Scheduler(runnable_of(runner), slots=runner.slots)
    system = words(100)
    cached, reads = [], decoder_of(runner).reads
    for number in range(4):
        reads.clear()
        cached.append(played(engine, (*system, number, *words(20))).usage.cached_tokens)
        assert len(reads) == (2 if cached[-1] == 0 else 1)
    assert cached == ([0, 100, 100, 100] if kind == "cut" else [0, 0, 100, 100])
    # Together they hold the common part once.
    engine.close()
    assert_nothing_held(runner)


def test_places_within_a_prompt() -> None:
    assert places(70, 0, 0) == {}
    assert places(1000, 0, 0) == {984: False}
    assert places(1000, 0, 930) == {}
    assert places(1000, 400, 0) == {400: False, 984: False}
    assert places(1000, 980, 0) == {980: False}
    assert places(10000, 0, 5000) == {9984: False}
    assert places(12000, 0, 0) == {4096: True, 8192: True, 11984: False}
    assert list(places(100000, 0, 0)) == [28672, 57344, 99984]


@pytest.mark.parametrize("kind", ["cut", "recurrent"])
def test_running_requests_share_pages(kind: str) -> None:
    """Requests whose lengths are more than there are pages run at once where most of their tokens are the
    same."""
    runner = runner_of(pages=20, **KINDS[kind])
    engine = Scheduler(runnable_of(runner), slots=runner.slots)
    system = words(160)
    played(engine, (*system, *words(20)), 1)
    played(engine, (*system, *words(20)), 1)
    prompts = [(*system, *words(20)) for _ in range(4)]
    listeners = [submit(engine, Request(prompt, SamplingParams(), 12)) for prompt in prompts]
    together = 0
    while engine.status().running + engine.status().waiting:
        engine.step()
        status = engine.status()
        together = max(together, status.running)
        assert status.kv_tokens_used + status.kv_tokens_cached <= status.kv_tokens_total
    for prompt, listener in zip(prompts, listeners, strict=True):
        assert list(listener.result().token_ids) == greedy(prompt, 12)
        assert listener.result().usage.cached_tokens >= 160
    assert together == 3
    engine.close()
    assert_nothing_held(runner)


@pytest.mark.parametrize("kind", KINDS)
def test_without_room_for_both_what_is_kept_becomes_the_sequence(kind: str) -> None:
    runner = runner_of(slots=1, pages=20, **KINDS[kind])
    engine = Scheduler(runnable_of(runner), slots=1)
    prompt = words(140)
    made = played(engine, prompt, 4).token_ids
    longer = (*prompt, *made, *words(130))
    assert played(engine, longer, 40).usage.cached_tokens == 143
    assert engine.status().preemptions == 0
    # The last page of what is kept is full but for a token, and no other is left.
    whole = words(CONTEXT - 3)
    made = played(engine, whole, 2).token_ids
    assert played(engine, (*whole, *made[:1], 5), 1).usage.cached_tokens == CONTEXT - 2
    engine.close()
    assert_nothing_held(runner)


@pytest.mark.parametrize("kind", [*KINDS, "ahead"])
def test_random_requests(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They begin alike or not, are cancelled, fail in prompts and in steps, and find too few pages and too
    little memory for states: answers are right, and in the end nothing is held. ``ahead``: steps are launched
    before the last one has ended, and it is those that fail."""
    monkeypatch.setenv("HETERO_SNAPSHOTS", "768")  # three states
    lanes: Any = Lanes()
    ahead = {"handoff": lanes, "means": TwinMeans(), "ahead": True, "rows": (1, 2, 4)}
    options = ahead if kind == "ahead" else None
    runner = runner_of(slots=3, pages=28, options=options, **KINDS.get(kind, {"recurrent": True, "ple": 2}))
    decoder_of(runner).check_ple = False  # a step that nobody asks for has none
    runner.capture()
    engine = Scheduler(runnable_of(runner), slots=3, prefill_chunk=random.choice([7, 64]))
    known = [words(size) for size in (0, 40, 90, 130)]
    listeners: list[tuple[tuple[int, ...], int, Any]] = []
    for _ in range(300):
        status = engine.status()
        if status.waiting < 3 and random.random() < 0.3:
            base = random.choice(known)
            part = len(base) if random.random() < 0.7 else random.randrange(len(base) + 1)
            prompt = (*base[:part], *words(random.randrange(1, 60)))
            count = random.randrange(1, 40)
            deadline = 1e-9 if random.random() < 0.05 else None
            request = Request(
                prompt, SamplingParams(), count, deadline_s=deadline, client=str(len(prompt) % 3)
            )
            listeners.append((prompt, count, submit(engine, request)))
            known[random.randrange(1, 4)] = (*prompt, *greedy(prompt, count))[:200]
        if random.random() < 0.03 and listeners:
            random.choice(listeners)[2].handle.cancel()
        if random.random() < 0.03:
            if kind == "ahead":
                lanes.fail = random.randrange(1, 4)
            else:
                decoder_of(runner).fail = RuntimeError("out of something")
        engine.step()
        pages = runner.pages
        assert pages.free + pages.in_slots + pages.only_kept == pages.total
    decoder_of(runner).fail, lanes.fail = None, 0
    drive(engine)
    ends = {"whole": 0, "failed": 0}
    for prompt, count, listener in listeners:
        end = listener.wait()
        if isinstance(end, HeteroError):
            assert str(end) == "internal error" or "the worker is stuck" in str(end)
            ends["failed"] += 1
            continue
        assert list(end.token_ids) == greedy(prompt, count)[: len(end.token_ids)]
        ends["whole"] += len(end.token_ids) == count
    assert min(ends.values()) > 0
    assert engine.status().prefix_hit_tokens > 0
    engine.close()
    assert_nothing_held(runner)
    runner.close()


@pytest.mark.parametrize("kind", KINDS)
def test_what_one_person_says_next(kind: str) -> None:
    """The engine of ``hetero chat``: a turn that was stopped, one that is read anew, and the end."""
    runner = runner_of(slots=1, **KINDS[kind])
    engine = Engine(runnable_of(runner), reuse=True)
    reads = decoder_of(runner).reads
    prompt = words(90)
    made = engine.complete(Request(prompt, SamplingParams(), 8)).token_ids
    reads.clear()
    prompt = (*prompt, *made, *words(12))
    calls = iter(range(100))
    *_, stopped = engine.stream(Request(prompt, SamplingParams(), 20), lambda: next(calls) > 4)
    assert isinstance(stopped, Result)
    assert stopped.usage.cached_tokens == 97
    assert sum(reads) == 13
    prompt = (*prompt, *stopped.token_ids, *words(5))
    last = engine.complete(Request(prompt, SamplingParams(), 9))
    assert last.usage.cached_tokens == len(prompt) - 6
    assert list(last.token_ids) == greedy(prompt, 9)
    other = words(40)
    assert list(engine.complete(Request(other, SamplingParams(), 9)).token_ids) == greedy(other, 9)
    engine.close()
    assert_nothing_held(runner)


def test_without_memory_for_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETERO_SNAPSHOTS", "0")
    runner = runner_of(recurrent=True)
    assert "HETERO_SNAPSHOTS" in str(runner.keeping.told())
    engine = Scheduler(runnable_of(runner), slots=runner.slots)
    prompt = words(100)
    assert [played(engine, prompt).usage.cached_tokens for _ in range(3)] == [0, 0, 0]
    assert engine.status().kv_tokens_cached == 0
    engine.close()
    monkeypatch.setenv("HETERO_SNAPSHOTS", "512")
    assert "up to 2 states of sequences are kept in main memory" in str(
        runner_of(recurrent=True).keeping.told()
    )
    assert runner_of().keeping.told() is None


def test_memory_that_is_taken_before(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_of(recurrent=True)
    monkeypatch.setattr(
        "hetero.engine.gpu.snapshots._memory",
        lambda nbytes, device: torch.full((nbytes,), 0xFF, dtype=torch.uint8, device=device),
    )
    runner.keeping.most = 5
    for count in (3, 2, 8):  # no more than there may be
        runner.keeping.prepare(count)
    monkeypatch.setattr("hetero.engine.gpu.snapshots._memory", None)  # nothing more is taken
    engine = Scheduler(runnable_of(runner), slots=runner.slots)
    prompt = words(100)
    assert [played(engine, prompt).usage.cached_tokens > 0 for _ in range(2)] == [False, True]
    engine.close()
    assert_nothing_held(runner)
    runner_of().keeping.prepare(3)  # where there are no states, nothing


def test_memory_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    runner = runner_of(recurrent=True)
    engine = Scheduler(runnable_of(runner), slots=runner.slots)
    prompt = words(100)

    def fails(*_: Any) -> Any:
        raise RuntimeError("cannot pin memory")

    with monkeypatch.context() as patch:
        patch.setattr("hetero.engine.gpu.snapshots._memory", fails)
        assert played(engine, prompt).usage.cached_tokens == 0
    assert played(engine, prompt).usage.cached_tokens == 0
    assert "no more states of sequences are kept than 0: cannot pin memory" in caplog.text
    engine.close()
    assert_nothing_held(runner)


@pytest.mark.parametrize("kind", KINDS)
def test_scores_of_a_prompt_are_read_at_once(kind: str) -> None:
    runner = runner_of(slots=1, **KINDS[kind])
    prompt = words(150)
    engine = Scheduler(runnable_of(runner), slots=1)
    played(engine, prompt)
    decoder_of(runner).reads.clear()
    listener = submit(engine, Request(prompt, SamplingParams(), 2, prompt_logprobs=1))
    drive(engine)
    assert decoder_of(runner).reads == [64, 64, 22]  # anew: what is kept tells no scores
    result = listener.result()
    assert result.prompt_logprobs is not None
    for place in range(1, len(prompt)):
        found = result.prompt_logprobs[place]
        want = torch.log_softmax(logits_of(prompt[:place]).double(), 0)[prompt[place]]
        assert found is not None
        assert found.logprob == pytest.approx(float(want), abs=1e-5)
    engine.close()


def test_memory_of_a_sequence_that_goes() -> None:
    """What was marked and nobody asked for goes with its sequence, before it is read and after."""
    runner = runner_of(recurrent=True)
    for read in (0, 30, 60):
        sequence = SlotStepper(runner).start()
        sequence.mark(40)
        with torch.inference_mode():
            if read:
                sequence.advance(list(words(read)))
        sequence.close()
        assert_nothing_held(runner)
    sequence = SlotStepper(runner).start()
    sequence.mark(20)
    decoder_of(runner).fail = RuntimeError("out of something")
    with pytest.raises(RuntimeError, match="out of something"):
        sequence.advance(list(words(30)))
    sequence.close()
    assert_nothing_held(runner)
