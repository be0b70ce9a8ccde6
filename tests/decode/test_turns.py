"""Halves of a prompt's chunk that take turns: the order of their work, and the same bits as one by one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from hetero.decode import turns
from hetero.decode.inputs import Chunk
from hetero.decode.turns import parted, prefill
from hetero.ops.gpu.hybrid import DirectPort, HybridExperts
from hetero.ops.gpu.hybrid_shared import HybridShared
from hetero.ops.gpu.stamps import Stamps, start
from hetero.trace import EXPERTS, MIXER, ROUTER, STAMPED, WAIT, recorder, whole_steps
from tests.decode.tiny import DEVICE, decoder_of, step, tiny, tokens_of
from tests.decode.tiny import prefill as prefilled

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []


class Told:
    """A layer that says what it does. A stream is (name, layers that it went through)."""

    def __init__(self, number: int, log: list[str]) -> None:
        self.number, self.log = number, log

    def begin_prefill(self, stream: tuple[str, int], chunk: Chunk) -> Callable[[], tuple[str, int]]:
        name, done = stream
        assert done == self.number
        self.log.append(f"{name}{self.number} begins")

        def end() -> tuple[str, int]:
            self.log.append(f"{name}{self.number} ends")
            return name, done + 1

        return end


def chunk_of(tokens: int, start_at: int = 0) -> Chunk:
    return Chunk(torch.arange(tokens), 0, start_at, torch.zeros(1, 4, dtype=torch.int32))


def test_the_order_of_two_halves() -> None:
    log: list[str] = []
    layers: list[Any] = [Told(number, log) for number in range(3)]
    done = prefill(layers, [("a", 0), ("b", 0)], [chunk_of(64), chunk_of(9, 64)])
    assert done == [("a", 3), ("b", 3)]
    assert log == [
        "a0 begins", "b0 begins",
        "a0 ends", "a1 begins", "b0 ends", "b1 begins",
        "a1 ends", "a2 begins", "b1 ends", "b2 begins",
        "a2 ends", "b2 ends",
    ]  # fmt: skip


def test_halves_of_a_chunk() -> None:
    for tokens, wanted in ((1, [1]), (64, [64]), (65, [64, 1]), (128, [64, 64]), (1000, [512, 488])):
        halves = parted(chunk_of(tokens, 7))
        assert [len(half.tokens) for half in halves] == wanted
        assert torch.equal(torch.cat([half.tokens for half in halves]), torch.arange(tokens))
        assert [half.start for half in halves] == [7, 7 + wanted[0]][: len(halves)]


def beside(backends: list[Any]) -> list[HybridExperts]:
    """Experts that the CPU computes on a thread of its own."""
    port, shared = DirectPort(backends, 4, DEVICE), HybridShared(DEVICE)
    return [HybridExperts(one, layer, port, shared) for layer, one in enumerate(backends)]


def test_turns_give_the_bits_of_two_chunks(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "ALIGNED", 16)
    changes: dict[str, Any] = {"num_hidden_layers": 2, "mlp_only_layers": []}
    model = tiny("qwen3_next", generator, layer_types=["linear_attention", "full_attention"], **changes)
    plain, turning = decoder_of(model), decoder_of(model)
    whole = [list(one.experts) for one in (plain, turning)]  # of steps, in float32
    for decoder, given in zip((plain, turning), whole, strict=True):
        backends: list[Any] = given
        decoder.experts[:] = beside([one._backend for one in backends])
    turning.turns = True
    tokens = tokens_of(20, generator)
    prefilled(plain, tokens[:16], 1)
    wanted = prefilled(plain, tokens[16:], 1, 16)
    tape = Stamps(DEVICE).tape()
    since = recorder.next_number() + 1
    with recorder.recording(stamps=True):
        recorder.begin_step(20)
        with tape.recording():
            start()
            logits = prefilled(turning, tokens, 1)
            tape.seal()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        tape.tell(20)
        recorder.end_step(STAMPED)
    assert torch.equal(logits, wanted)
    for decoder, given in zip((plain, turning), whole, strict=True):
        decoder.experts[:] = given
    row = [(5, 1, 20)]
    assert torch.equal(step(turning, turning.inputs(1), row), step(plain, plain.inputs(1), row))
    # Two pieces of each layer, on the lanes of who computed them.
    (told,) = whole_steps(recorder.spans(since), since)
    for name, lane in ((MIXER, "gpu"), (ROUTER, "gpu"), (WAIT, "gpu"), (EXPERTS, "cpu")):
        parts = [part for part in told.parts if part.name == name]
        assert [part.lane for part in parts] == [lane] * 4, name
        assert sorted(part.layer for part in parts) == [0, 0, 1, 1]


def test_one_half_is_at_its_mixer_while_the_others_experts_work(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first half's experts wait until the second half has come through its mixer: were it one after the
    other, for ever."""
    monkeypatch.setattr(turns, "ALIGNED", 16)
    decoder = decoder_of(tiny("qwen3_moe", generator, num_hidden_layers=1, mlp_only_layers=[]))
    given: list[Any] = decoder.experts
    (experts,) = decoder.experts[:] = beside([given[0]._backend])
    submitted, second = [0], threading.Event()
    start_one, forward = experts.prefill_submit, experts.experts.forward

    def submit(*args: Tensor) -> Any:
        submitted[0] += 1
        if submitted[0] == 2:
            second.set()
        return start_one(*args)

    def compute(*args: Tensor) -> Tensor:
        assert second.wait(60), "nothing went on beside the experts"
        return forward(*args)

    monkeypatch.setattr(experts, "prefill_submit", submit)
    monkeypatch.setattr(experts.experts, "forward", compute)
    decoder.turns = True
    assert torch.isfinite(prefilled(decoder, tokens_of(20, generator), 0)).all()
    assert submitted == [2]
