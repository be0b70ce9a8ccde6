"""Steps that are launched before the last one has ended: the same tokens, whoever joins, leaves or fails."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hetero.core import HeteroError
from hetero.engine.answer import Runnable
from hetero.engine.generate import Engine
from hetero.engine.gpu.runner import GpuRunner
from hetero.engine.handoff import HandoffError
from hetero.engine.request import Request, Result
from hetero.engine.sample import SamplingParams
from hetero.engine.scheduler import Scheduler
from hetero.trace import recorder
from tests.engine.paged import VOCAB, PagedDecoder, greedy, logits_of
from tests.engine.twins import TwinMeans

CONTEXT = 80


class Lanes:
    """A hand-off that only watches which lanes are in use, and fails the step that it is told to."""

    def __init__(self) -> None:
        self.busy: set[int] = set()
        self.fail = 0  # steps until one fails; 0: none does

    def begin(self, lane: int, rows: int) -> None:
        assert lane not in self.busy
        self.busy.add(lane)

    def end(self, lane: int, *, abort: bool = False) -> None:
        self.busy.remove(lane)
        if self.fail:
            self.fail -= 1
            if not self.fail and not abort:
                raise HandoffError("hand-off, lane 0, layer 3: the worker is stuck")

    @contextmanager
    def step(self, rows: dict[int, int]) -> Iterator[None]:
        for lane, count in rows.items():
            self.begin(lane, count)
        yield
        for lane in rows:
            self.end(lane)

    def forget(self, lane: int) -> None: ...
    def close(self) -> None:
        assert not self.busy


class Made:
    """A runner over a twin, and what it is made of."""

    def __init__(
        self, slots: int = 4, ple: int = 3, delay: float = 0.001, recurrent: bool = False, **options: Any
    ) -> None:
        self.decoder = PagedDecoder(slots, CONTEXT, ple, recurrent=recurrent)
        self.means, self.lanes = TwinMeans(delay), Lanes()
        handoff: Any = self.lanes
        self.runner = GpuRunner(
            self.decoder,
            [],
            handoff=handoff,
            slots=slots,
            context=CONTEXT,
            rows=(1, 2, 4),
            chunk=7,
            means=self.means,
            ahead=True,
            **options,
        )
        self.runner.capture()
        self.means.replays = self.means.ahead = 0

    @property
    def runnable(self) -> Runnable:
        return Runnable(nn.Module(), VOCAB, context=CONTEXT, runner=self.runner)

    def close(self) -> None:
        self.runner.close()
        assert not self.lanes.busy


def random_prompt(size: int) -> list[int]:
    return [random.randrange(VOCAB) for _ in range(size)]


@pytest.mark.parametrize("ple", [0, 3])
def test_sequences_come_and_go_around_steps_ahead(ple: int) -> None:
    """At random: some steps ask for the next one, for all sequences or a part of them; n-gram embeddings
    arrive while the step runs. Every token is what the sequence alone would have said."""
    made = Made(ple=ple)
    runner = made.runner
    live: dict[int, list[int]] = {}
    for _ in range(250):
        if runner._free and random.random() < 0.15:
            slot = runner.claim()
            live[slot] = random_prompt(random.randrange(1, 30))
            got = runner.prefill(slot, live[slot])
            assert torch.equal(got, logits_of(live[slot]))
            live[slot].append(int(got.argmax()))
        if random.random() < 0.1:
            runner.settle()
        some = random.random() < 0.3
        stepping = random.sample(sorted(live), random.randrange(len(live) + 1)) if some else sorted(live)
        if stepping:
            ahead = random.random() < 0.8
            out = runner.step([(slot, live[slot][-1]) for slot in stepping], ahead=ahead)
            for row, (slot, token, best) in enumerate(zip(stepping, out.ids, out.best, strict=True)):
                want = logits_of(live[slot])
                assert (token, best) == (int(want.argmax()), float(want.max()))
                if out.logits is not None and not bool(out.logits[row].isnan().any()):
                    assert torch.equal(out.logits[row], want)
                live[slot].append(token)
        for slot in [slot for slot in live if len(live[slot]) >= CONTEXT or random.random() < 0.05]:
            runner.release(slot)
            del live[slot]
    assert made.means.ahead > 20
    for slot in live:
        runner.release(slot)
    assert runner.pages.free == runner.pages.total
    made.close()


def run(engine: Scheduler) -> None:
    while engine.status().running + engine.status().waiting:
        engine.step()


def test_requests_that_end_in_every_way() -> None:
    """Greedy ones beside a sampled one, some cancelled, some stopped by a token, some by their length."""
    made = Made(slots=4)
    ending = 5
    runnable = Runnable(nn.Module(), VOCAB, context=CONTEXT, runner=made.runner, eos=frozenset({ending}))
    engine = Scheduler(runnable, slots=4)
    ends: dict[int, Any] = {}
    wanted: dict[int, list[int]] = {}
    handles = {}
    for index in range(14):
        prompt, count = random_prompt(random.randrange(1, 30)), random.randrange(1, 40)
        tokens = greedy(prompt, count)
        wanted[index] = tokens[: tokens.index(ending) + 1] if ending in tokens else tokens
        params = SamplingParams(temperature=1.0, seed=3) if index == 6 else SamplingParams()
        handles[index] = engine.submit(
            Request(tuple(prompt), params, count, logprobs=1 if index == 9 else None),
            lambda event, index=index: ends.__setitem__(index, event),  # type: ignore[misc]
        )
    for step in range(400):
        if step == 12:
            handles[2].cancel()
        engine.step()
        if not engine.status().running + engine.status().waiting:
            break
    for index, want in wanted.items():
        result = ends[index]
        assert isinstance(result, Result), result
        if index == 2:
            assert list(result.token_ids) == want[: len(result.token_ids)]
        elif index != 6:
            assert list(result.token_ids) == want
    engine.close()
    assert made.runner.pages.free == made.runner.pages.total
    made.close()


def test_one_request_alone_is_nearly_all_ahead() -> None:
    made = Made(slots=1)
    prompt = random_prompt(9)
    result = Engine(made.runnable).complete(Request(tuple(prompt), SamplingParams(), 40))
    assert list(result.token_ids) == greedy(prompt, 40)
    # Of 39 steps the first is launched when it is asked for; nothing is made for nobody.
    assert (made.means.replays, made.means.ahead) == (39, 38)
    assert set(made.runner.host) == {"fill", "launch", "rows", "wait", "read"}
    assert min(made.runner.host.values()) > 0.0
    made.close()


@pytest.mark.parametrize("recurrent", [False, True])
def test_what_an_answer_leaves_is_of_all_its_tokens(recurrent: bool) -> None:
    """The step ahead of the end has read the last token as well, and the next request begins from there."""
    made = Made(ple=0, recurrent=recurrent)
    engine = Scheduler(made.runnable, slots=4)
    text, ends = random_prompt(18), []
    for _ in range(3):
        # Its end is not foreseen: a token stops it.
        tokens = greedy(text, 12)
        made_here = Runnable(
            nn.Module(), VOCAB, context=CONTEXT, runner=made.runner, eos=frozenset({tokens[-1]})
        )
        engine.runnable = made_here
        engine.submit(Request(tuple(text), SamplingParams(), 30), ends.append)
        run(engine)
        result = ends[-1]
        assert isinstance(result, Result)
        want = tokens[: tokens.index(tokens[-1]) + 1]
        assert list(result.token_ids) == want
        assert len(ends) == len(want) + 1 or result.usage.cached_tokens > 0
        text = [*text, *want, 7]
        ends.clear()
    assert engine.status().prefix_hit_tokens > 0
    engine.close()
    made.close()


def test_what_a_slot_holds_after_a_step_ahead() -> None:
    made = Made()
    runner = made.runner
    slot = runner.claim()
    runner.prefill(slot, [3, 4])
    (token,) = runner.step([(slot, 9)], ahead=True).ids
    assert runner.length(slot) == 3
    runner.settle()
    assert runner.length(slot) == 4
    with pytest.raises(ValueError, match="a step ahead that nobody has asked for"):
        runner.prefill(slot, [1])
    with pytest.raises(ValueError, match=f"went on with token {token}, not {token + 1}"):
        runner.step([(slot, token + 1)])
    runner.release(slot)
    slot = runner.claim()
    runner.step([(slot, 9)], ahead=True)
    with pytest.raises(ValueError, match="went on with token"):
        runner.step([(slot, -5)])
    made.close()


def test_no_step_ahead_while_a_trace_is_recorded() -> None:
    made = Made()
    slot = made.runner.claim()
    tokens = [7]
    with recorder.recording():
        for _ in range(3):
            tokens += made.runner.step([(slot, tokens[-1])], ahead=True).ids
    assert made.means.ahead == 0
    for _ in range(3):
        tokens += made.runner.step([(slot, tokens[-1])], ahead=True).ids
    with recorder.recording():
        tokens += made.runner.step([(slot, tokens[-1])], ahead=True).ids
    assert tokens[1:] == greedy(tokens[:1], 7)
    assert made.means.ahead == 3
    made.close()


@pytest.mark.parametrize("failing", [1, 2])
def test_a_step_that_fails_ends_its_requests(failing: int) -> None:
    """The one that is asked for, or the one that was launched ahead of it: the next request works."""
    made = Made()
    engine = Scheduler(made.runnable, slots=4)
    ends: dict[Any, Any] = {}
    for name in ("one", "two"):
        request = Request((5, 6), SamplingParams(), 20, client=name)
        engine.submit(request, lambda event, name=name: ends.update({name: event}))  # type: ignore[misc]
    for _ in range(5):
        engine.step()
    made.lanes.fail = failing
    made.decoder.check_ple = False  # a step that is dropped runs with any
    for _ in range(2):
        engine.step()
    assert {type(event) for event in ends.values()} == {HandoffError}
    assert made.runner.pages.free == made.runner.pages.total
    engine.submit(Request((1, 2, 3), SamplingParams(), 8), lambda event: ends.update(last=event))
    run(engine)
    assert ends["last"].token_ids == tuple(greedy((1, 2, 3), 8))
    engine.close()
    made.close()


def test_a_failure_ahead_is_told_to_its_own_sequences() -> None:
    made = Made()
    runner = made.runner
    first, second, gone = (runner.claim() for _ in range(3))
    rows = [(first, 1), (gone, 4)]
    out = runner.step(rows, ahead=True)
    runner.release(gone)
    made.lanes.fail = 1
    other = runner.step([(second, 2)])
    assert other.ids == greedy([2], 1)
    with pytest.raises(HandoffError, match="the worker is stuck"):
        runner.step([(first, out.ids[0])])
    assert runner.claim() == gone
    assert runner.step([(gone, 8)]).ids == greedy([8], 1)
    made.close()


def test_embeddings_that_lie_on_the_device_come_before_the_step() -> None:
    """What the device itself must bring, it may not be waiting for."""
    decoder = PagedDecoder(2, CONTEXT, 3)
    decoder.gathers_on_host = False
    means = TwinMeans()
    runner = GpuRunner(
        decoder, [], handoff=None, slots=2, context=CONTEXT, rows=(1, 2), means=means, ahead=True
    )
    runner.capture()
    means.ahead = 0
    slot, tokens = runner.claim(), [7]
    for _ in range(4):
        tokens += runner.step([(slot, tokens[-1])], ahead=True).ids
    assert tokens[1:] == greedy([7], 4)
    assert means.ahead == 0
    runner.close()


class Broken:
    """N-gram embeddings of which the one after so many cannot be read."""

    def __init__(self, decoder: PagedDecoder, after: int) -> None:
        self._gather, self.left = decoder.gather, after + 1

    def __call__(self, tokens: Any, out: Tensor) -> None:
        self.left -= 1
        if self.left == 0:
            raise HeteroError("the table cannot be read")
        self._gather(tokens, out)


@pytest.mark.parametrize("after", [0, 1, 3])
def test_embeddings_that_do_not_come(after: int) -> None:
    made = Made()
    decoder: Any = made.decoder
    slot, tokens = made.runner.claim(), [7]
    decoder.check_ple = False
    decoder.gather = Broken(made.decoder, after)
    # The first step brings its own and those of the next one, and each that follows those of the next.
    for _ in range(max(0, after - 1)):
        tokens += made.runner.step([(slot, tokens[-1])], ahead=True).ids
    with pytest.raises(HeteroError, match="cannot be read"):
        made.runner.step([(slot, tokens[-1])], ahead=True)
    made.runner.release(slot)
    assert not made.lanes.busy
    slot = made.runner.claim()
    assert made.runner.step([(slot, 3)], ahead=True).ids == greedy([3], 1)
    made.close()


def test_a_launch_that_fails_leaves_no_gate_open(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made()
    slot = made.runner.claim()

    def fails(run: Any) -> None:
        raise RuntimeError("no launch")

    with monkeypatch.context() as patch:
        patch.setattr(made.means, "play", fails)
        with pytest.raises(RuntimeError, match="no launch"):
            made.runner.step([(slot, 7)])
    made.runner.release(slot)
    slot, tokens = made.runner.claim(), [3]
    for _ in range(4):
        tokens += made.runner.step([(slot, tokens[-1])], ahead=True).ids
    assert tokens[1:] == greedy([3], 4)
    made.close()


def test_an_operator_that_fails_while_a_step_is_ahead() -> None:
    made = Made(ple=0)
    slot = made.runner.claim()
    out = made.runner.step([(slot, 7)], ahead=True)
    made.runner.settle()
    made.decoder.fail = RuntimeError("out of something")
    out = made.runner.step([(slot, out.ids[0])])
    with pytest.raises(RuntimeError, match="out of something"):
        made.runner.step([(slot, out.ids[0])], ahead=True)
    made.runner.release(slot)
    slot = made.runner.claim()
    assert made.runner.step([(slot, 3)]).ids == greedy([3], 1)
    made.close()


def test_pages_that_only_suffice_for_now() -> None:
    """A step ahead that finds no room waits until it is asked for, and then fails as any would."""
    made = Made(slots=2, pages=1)
    slot, tokens = made.runner.claim(), random_prompt(10)
    tokens.append(int(made.runner.prefill(slot, tokens).argmax()))
    while len(tokens) < 17:
        tokens += made.runner.step([(slot, tokens[-1])], ahead=True).ids
    with pytest.raises(HeteroError, match="all 1 pages"):
        made.runner.step([(slot, tokens[-1])], ahead=True)
    assert tokens[10:] == greedy(tokens[:10], 7)
    made.close()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # idle rows hold anything, which may overflow
def test_n_grams_of_a_real_decoder_come_while_it_runs(generator: torch.Generator) -> None:
    """Of qwen4_exp: layers before the one with n-grams do not wait for them."""
    pytest.importorskip("triton", reason="triton is not installed")
    if torch.cuda.is_available():
        pytest.skip("tests/gpu has this on the device")
    from tests.decode.tiny import decoder_of, tiny

    kinds = ["indexed_attention", "linear_attention"]
    sizes = {"num_hidden_layers": 2, "layer_types": kinds, "hc_count": 2, "ple_layer_ids": [2]}
    model = tiny("qwen4_exp_text", generator, **sizes)
    want: list[int] = []
    for means in (None, TwinMeans()):
        decoder = decoder_of(model, slots=1, context=32)
        assert decoder.window == 3
        runner = GpuRunner(
            decoder, [], handoff=None, slots=1, context=32, rows=(1,), means=means, ahead=means is not None
        )
        if means is not None:
            with torch.inference_mode():
                runner._steps.capture()
            means.ahead = 0
        slot, tokens = runner.claim(), [7]
        for _ in range(4):
            tokens += runner.step([(slot, tokens[-1])], ahead=True).ids
        assert not want or tokens == want
        want = tokens
        assert means is None or means.ahead == 4
        runner.close()
