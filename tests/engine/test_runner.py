"""The runner of fused decoders without a GPU: slots, pages, batches, errors, and requests on top."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from hetero.core import HeteroError, InputError, MachineError
from hetero.decode.inputs import PAGE
from hetero.engine.answer import Runnable
from hetero.engine.generate import Engine
from hetero.engine.gpu.pages import Pages
from hetero.engine.gpu.runner import GpuRunner
from hetero.engine.handoff import HandoffError
from hetero.engine.request import Request, Result
from hetero.engine.sample import SamplingParams, Scored
from hetero.engine.scheduler import Scheduler
from hetero.terminal import tiers
from tests.engine.paged import VOCAB, Counted, PagedDecoder, greedy, logits_of

CONTEXT = 80


def runner_of(slots: int = 4, context: int = CONTEXT, **options: Any) -> GpuRunner:
    decoder = PagedDecoder(slots, context, options.pop("ple", 0))
    return GpuRunner(decoder, [], handoff=None, slots=slots, context=context, **options)


def runnable_of(runner: GpuRunner) -> Runnable:
    return Runnable(nn.Module(), VOCAB, context=runner.context, runner=runner)


def random_prompt(size: int) -> list[int]:
    return [random.randrange(VOCAB) for _ in range(size)]


def decoder_of(runner: GpuRunner) -> PagedDecoder:
    decoder: Any = runner.decoder
    return decoder


def test_sequences_join_leave_and_take_each_others_slots() -> None:
    """At random for 300 steps; every token is what the sequence alone would have said."""
    runner = runner_of(chunk=7)
    live: dict[int, list[int]] = {}
    for _ in range(300):
        if runner._free and random.random() < 0.2:
            slot = runner.claim()
            live[slot] = random_prompt(random.randrange(1, 40))
            got = runner.prefill(slot, live[slot])
            assert torch.equal(got, logits_of(live[slot]))
            live[slot].append(int(got.argmax()))
        stepping = random.sample(sorted(live), random.randrange(len(live) + 1))
        if stepping:
            out = runner.step([(slot, live[slot][-1]) for slot in stepping])
            assert out.logits is not None
            for slot, token, best, row in zip(stepping, out.ids, out.best, out.logits, strict=True):
                want = logits_of(live[slot])
                assert torch.equal(row, want)
                assert (token, best) == (int(want.argmax()), float(want.max()))
                assert runner.length(slot) == len(live[slot])
                live[slot].append(token)
        for slot in [slot for slot in live if len(live[slot]) >= CONTEXT or random.random() < 0.03]:
            runner.release(slot)
            del live[slot]
    for slot in live:
        runner.release(slot)
    assert runner.pages.free == runner.pages.total == 4 * (CONTEXT // PAGE)


def test_embeddings_of_the_next_chunk_are_expected_while_one_is_read() -> None:
    """Each token once, and what precedes it."""
    runner = runner_of(chunk=7, ple=3)
    decoder = decoder_of(runner)
    slot = runner.claim()
    prompt = random_prompt(40)
    for first, last in ((0, 25), (25, 26), (26, 40)):
        decoder.expected.clear()
        runner.prefill(slot, prompt[first:last])
        at = first
        for before, tokens in decoder.expected:
            assert before == prompt[max(at - len(before), 0) : at]
            assert len(before) >= min(at, decoder.window - 1)
            assert tokens == prompt[at : at + len(tokens)]
            at += len(tokens)
        assert at == last
    sizes = [len(tokens) for _, tokens in decoder.expected]
    assert sizes == [14]
    decoder.window = 0
    decoder.expected.clear()
    runner.prefill(slot, prompt[:9])
    assert decoder.expected == []


class Narrow(PagedDecoder):
    """Has memory for so many tokens at once."""

    room = 10**9

    def prefill(self, tokens: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if len(tokens) > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().prefill(tokens, *args, **options)


def test_chunks_that_do_not_fit_are_halved_and_prompts_begin_anew(caplog: pytest.LogCaptureFixture) -> None:
    decoder = Narrow(2, 1024)
    runner = GpuRunner(decoder, [], handoff=None, slots=2, context=1024, chunk=400)
    decoder.room = 120
    prompt = random_prompt(700)
    slot = runner.claim()
    assert torch.equal(runner.prefill(slot, prompt), logits_of(prompt))
    assert (runner.chunk, runner.length(slot)) == (100, 700)
    assert caplog.text.count("tokens at a time") == 2
    # What a slot held already cannot be read once more; the next prompts are read in smaller pieces.
    decoder.room = 80
    with pytest.raises(MachineError, match=r"100 tokens of a prompt at once take more memory.* 64 at a time"):
        runner.prefill(slot, random_prompt(200))
    assert runner.chunk == 64
    other = runner.claim()
    assert torch.equal(runner.prefill(other, prompt), logits_of(prompt))
    decoder.room = 8
    runner.release(other)
    with pytest.raises(MachineError, match="64 tokens of a prompt at once"):
        runner.prefill(runner.claim(), prompt)


def test_the_longest_chunk_is_the_last_of_the_longest_sequence() -> None:
    decoder = Narrow(2, 1024, 0)
    seen: list[tuple[int, int]] = []
    read = decoder.prefill

    def spy(tokens: Any, slot: int, start: int, pages: Any, **options: Any) -> torch.Tensor:
        seen.append((start, len(tokens)))
        return read(tokens, slot, start, pages, **options)

    decoder.prefill = spy  # type: ignore[method-assign]
    for chunk, pages, want in ((400, None, (624, 400)), (4096, None, (0, 1024)), (400, 40, (240, 400))):
        runner = GpuRunner(decoder, [], handoff=None, slots=2, context=1024, chunk=chunk, pages=pages)
        seen.clear()
        runner.read_longest()
        assert seen == [want]
        assert runner.pages.free == runner.pages.total
        assert len(runner._free) == 2


def test_a_batch_takes_the_smallest_graph_that_holds_it() -> None:
    runner = runner_of(slots=8, rows=(1, 2, 4, 8))
    slots = [runner.claim() for _ in range(8)]
    for count in (1, 2, 3, 5, 8, 1):
        runner.step([(slot, 3) for slot in slots[:count]], logits=False)
    assert decoder_of(runner).steps == [1, 2, 4, 8, 8, 1]
    for rows in ([], [(0, 1), (0, 2)], [(slot % 8, 1) for slot in range(9)]):
        with pytest.raises(ValueError, match=r"rows, must be 1 to 8 of different slots"):
            runner.step(rows)


def test_without_graphs_on_the_cpu() -> None:
    runner = runner_of()
    runner.capture()
    assert (runner.eager, runner.why_eager, runner.launches) == (True, "there is no GPU", {})
    assert runner.totals is None
    runner.close()
    runner.close()


def test_embeddings_of_n_grams_follow_each_row() -> None:
    runner = runner_of(ple=5)
    first, second = runner.claim(), runner.claim()
    prompt = random_prompt(20)
    runner.prefill(first, prompt)
    runner.step([(second, 9)])
    runner.step([(second, 8), (first, 7)])
    assert decoder_of(runner).grams == [[9, 8], [*prompt[-15:], 7]]


def test_a_step_that_has_no_pages_changes_nobodys_past() -> None:
    runner = runner_of(slots=2, ple=5, pages=2)
    first, second = runner.claim(), runner.claim()
    runner.prefill(first, [3, 4])
    runner.prefill(second, list(range(PAGE)))
    with pytest.raises(HeteroError, match="all 2 pages"):
        runner.step([(first, 5), (second, 6)])
    runner.step([(first, 5)])
    assert decoder_of(runner).grams == [[3, 4, 5]]


def test_an_eager_step_that_failed_leaves_nothing_behind() -> None:
    class Half(Counted):
        forgotten = 0

        def forget(self) -> None:
            self.forgotten += 1

    experts = Half()
    decoder = PagedDecoder(1, CONTEXT)
    runner = GpuRunner(decoder, [experts], handoff=None, slots=1, context=CONTEXT)
    slot = runner.claim()
    decoder.fail = RuntimeError("out of something")
    with pytest.raises(RuntimeError, match="out of something"):
        runner.step([(slot, 1)])
    assert experts.forgotten == 1
    runner.step([(slot, 1)])
    assert experts.forgotten == 1


def test_what_is_told_of_the_experts() -> None:
    decoder = PagedDecoder(1, CONTEXT)
    experts = [Counted(), Counted()]
    runner = GpuRunner(decoder, experts, handoff=None, slots=1, context=CONTEXT, numbers=(1, 3))
    assert runner.uses() == {1: [4, 0, 2], 3: [4, 0, 2]}
    assert runner.reads() == {"gpu": (12, 120), "pcie": (6, 60), "cpu": (2, 20)}
    told = "[experts: 60% in GPU memory, 30% read over the bus, 10% computed by the CPU]"
    assert tiers(runner.reads()) == told
    assert tiers(runner_of().reads()) == "[experts: none]"


def test_slots_and_pages_run_out() -> None:
    runner = runner_of(slots=1)
    slot = runner.claim()
    with pytest.raises(HeteroError, match="all 1 slots"):
        runner.claim()
    runner.prefill(slot, random_prompt(CONTEXT))
    with pytest.raises(HeteroError, match=f"{CONTEXT + 1} tokens of a sequence, and a slot holds {CONTEXT}"):
        runner.step([(slot, 1)])
    runner.release(slot)
    with pytest.raises(ValueError, match="is free"):
        runner.release(slot)
    with pytest.raises(ValueError, match="no tokens"):
        runner.prefill(runner.claim(), [])
    assert decoder_of(runner).cleared == [0, 0]


def test_pages_are_shared_by_need() -> None:
    pages = Pages(3, 64, torch.device("cpu"), total=5)
    pages.grow(0, 33)
    pages.grow(1, 16)
    pages.grow(1, 10)
    assert pages.free == 1
    with pytest.raises(HeteroError, match="all 5 pages"):
        pages.grow(2, 17)
    pages.release(0)
    pages.grow(2, 64)
    with pytest.raises(HeteroError, match="35 tokens of a sequence, and a slot holds 34"):
        Pages(1, 34, torch.device("cpu")).grow(0, 35)
    used = [*pages.table[1, :1].tolist(), *pages.table[2].tolist()]
    assert sorted(used) == list(range(5))


class FailingHandoff:
    """Fails the step that it is told to."""

    def __init__(self) -> None:
        self.fail = False
        self.rows: list[dict[int, int]] = []

    @contextmanager
    def step(self, rows: dict[int, int]) -> Iterator[None]:
        self.rows.append(rows)
        yield
        if self.fail:
            self.fail = False
            raise HandoffError("hand-off, lane 0, layer 3: the worker is stuck")

    def close(self) -> None:
        pass


def test_a_failed_step_ends_its_requests_and_the_next_one_works() -> None:
    handoff: Any = FailingHandoff()
    decoder = PagedDecoder(4, CONTEXT)
    runner = GpuRunner(decoder, [], handoff=handoff, slots=4, context=CONTEXT)
    engine = Scheduler(runnable_of(runner), slots=4)
    ends: dict[str, Any] = {}
    for name in ("one", "two"):
        request = Request((5, 6), SamplingParams(), 8, client=name)
        engine.submit(request, lambda event, name=name: ends.update({name: event}))  # type: ignore[misc]
    for _ in range(4):
        engine.step()
    handoff.fail = True
    engine.step()
    assert {type(event) for event in ends.values()} == {HandoffError}
    assert "the worker is stuck" in str(ends["one"])
    assert runner.pages.free == runner.pages.total
    engine.submit(Request((1, 2, 3), SamplingParams(), 5), lambda event: ends.update(last=event))
    while not isinstance(ends.get("last"), Result | HeteroError):
        engine.step()
    assert ends["last"].token_ids == tuple(greedy((1, 2, 3), 5))
    assert handoff.rows[-1] == {0: 1}
    engine.close()


def test_requests_through_the_scheduler() -> None:
    """More than there are slots, of different lengths, some stopped early: each as if alone."""
    runner = runner_of(slots=3, chunk=5)
    engine = Scheduler(runnable_of(runner), slots=3)
    wanted, ends = {}, {}
    handles = {}
    for index in range(12):
        prompt, count = random_prompt(random.randrange(1, 30)), random.randrange(1, 40)
        wanted[index] = greedy(prompt, count)
        request = Request(tuple(prompt), SamplingParams(), count, client=str(index % 4))
        handles[index] = engine.submit(
            request,
            lambda event, index=index: ends.__setitem__(index, event),  # type: ignore[misc]
        )
    handles[7].cancel()
    while engine.status().running + engine.status().waiting:
        engine.step()
    for index, want in wanted.items():
        result = ends[index]
        assert isinstance(result, Result)
        assert list(result.token_ids) == ([] if index == 7 else want)
    assert max(decoder_of(runner).steps) <= 4
    engine.close()
    assert runner.pages.free == runner.pages.total


def test_memory_for_keys_and_values_is_the_runners() -> None:
    """A scheduler that may hold less than all requests want sends some back, and all come out right."""
    runner = runner_of(slots=3)
    engine = Scheduler(runnable_of(runner), slots=3, kv_tokens=96)
    assert engine.status().kv_tokens_total == 96
    ends = {}
    prompts = [random_prompt(20) for _ in range(3)]
    for index, prompt in enumerate(prompts):
        request = Request(tuple(prompt), SamplingParams(), 40)
        engine.submit(request, lambda event, index=index: ends.__setitem__(index, event))  # type: ignore[misc]
    while engine.status().running + engine.status().waiting:
        engine.step()
    for index, prompt in enumerate(prompts):
        assert list(ends[index].token_ids) == greedy(prompt, 40)
    assert Scheduler(runnable_of(runner_of(slots=2)), slots=2).status().kv_tokens_total == 2 * CONTEXT
    with pytest.raises(InputError, match="slots=4: the model was loaded for 3 sequences"):
        Scheduler(runnable_of(runner), slots=4)


def test_one_request_alone() -> None:
    runner = runner_of(slots=1)
    engine = Engine(runnable_of(runner), prefill_chunk=6)
    prompt = random_prompt(17)
    for _ in range(2):
        result = engine.complete(Request(tuple(prompt), SamplingParams(), 20))
        assert list(result.token_ids) == greedy(prompt, 20)
    stream = engine.stream(Request(tuple(prompt), SamplingParams(), 20))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert runner.pages.free == runner.pages.total


def test_scores_of_a_prompt_and_of_the_answer() -> None:
    runner = runner_of(slots=1)
    prompt = random_prompt(9)
    request = Request(tuple(prompt), SamplingParams(), 3, logprobs=2, prompt_logprobs=1)
    events = list(Engine(runnable_of(runner)).stream(request))
    result = events[-1]
    assert isinstance(result, Result)
    assert result.prompt_logprobs is not None
    for place in range(1, len(prompt)):
        found = result.prompt_logprobs[place]
        want = torch.log_softmax(logits_of(prompt[:place]).double(), 0)[prompt[place]]
        assert found is not None
        assert found.logprob == pytest.approx(float(want), abs=1e-5)


def test_a_sampled_answer_is_the_seeds() -> None:
    prompt = random_prompt(4)
    request = Request(tuple(prompt), SamplingParams(temperature=1.5, seed=11), 12)
    one, other = (Engine(runnable_of(runner_of(slots=1))).complete(request) for _ in range(2))
    assert one.token_ids == other.token_ids


def test_the_most_likely_token_needs_no_logits() -> None:
    """Greedy choice takes what the device has found; everything else reads the logits."""
    from hetero.engine.sample import Sampler

    class Unread:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"{name} of logits that nobody should read")

    unread: Any = Unread()
    assert Sampler(SamplingParams()).pick(Scored(unread, 42, 1.5)) == 42
    with pytest.raises(HeteroError, match="not finite"):
        Sampler(SamplingParams()).pick(Scored(unread, 42, float("nan")))
    logits = torch.tensor([0.0, 3.0, 2.9])
    penal = Sampler(SamplingParams(repetition_penalty=2.0), prompt=[1])
    assert penal.pick(Scored(logits, 1, 3.0)) == 2
