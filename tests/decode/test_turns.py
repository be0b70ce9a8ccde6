"""Halves of a prompt's chunk that take turns: the order of their work, and the same bits as one by one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from hetero.cpu import CpuExperts
from hetero.decode.experts import DirectExperts
from hetero.decode.inputs import Chunk
from hetero.decode.turns import parted, prefill
from hetero.ops.gpu.offload import Offloaded, offload
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


class Away(DirectExperts):
    """On the CPU beside the rest."""

    def __init__(self, backend: Any) -> None:
        super().__init__(backend)
        self.submitted = 0

    def prefill_submit(self, x: Tensor, ids: Tensor, weights: Tensor) -> Offloaded:
        self.submitted += 1
        backend: Any = self._backend
        return offload.submit(backend, x, ids, weights)


def test_turns_give_the_bits_of_two_chunks(generator: torch.Generator) -> None:
    changes: dict[str, Any] = {"num_hidden_layers": 2, "mlp_only_layers": []}
    model = tiny("qwen3_next", generator, layer_types=["linear_attention", "full_attention"], **changes)
    plain, turning = decoder_of(model), decoder_of(model)
    turning.experts[:] = [Away(one._backend) for one in turning.experts]  # type: ignore[attr-defined]
    turning.turns = True
    tokens = tokens_of(70, generator)
    prefilled(plain, tokens[:64], 1)
    wanted = prefilled(plain, tokens[64:], 1, 64)
    tape = Stamps(DEVICE).tape()
    since = recorder.next_number() + 1
    with recorder.recording(stamps=True):
        recorder.begin_step(70)
        with tape.recording():
            start()
            logits = prefilled(turning, tokens, 1)
            tape.seal()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        tape.tell(70)
        recorder.end_step(STAMPED)
    assert torch.equal(logits, wanted)
    row = [(5, 1, 70)]
    assert torch.equal(step(turning, turning.inputs(1), row), step(plain, plain.inputs(1), row))
    # Two pieces of each layer, on the lanes of who computed them.
    (told,) = whole_steps(recorder.spans(since), since)
    for name, lane in ((MIXER, "gpu"), (ROUTER, "gpu"), (WAIT, "gpu"), (EXPERTS, "cpu")):
        parts = [part for part in told.parts if part.name == name]
        assert [part.lane for part in parts] == [lane] * 4, name
        assert sorted(part.layer for part in parts) == [0, 0, 1, 1]


class Meeting:
    """Experts whose first piece is at work until the second one's mixer is through."""

    def __init__(self, inner: CpuExperts, seen: threading.Event) -> None:
        self.inner, self.seen = inner, seen

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        assert self.seen.wait(60), "nothing went on beside the experts"
        return self.inner.forward(x, ids, weights)


def test_one_half_is_at_its_mixer_while_the_others_experts_work(generator: torch.Generator) -> None:
    """Were it one after the other, the first half's experts would wait for ever."""
    model = tiny("qwen3_moe", generator, num_hidden_layers=1, mlp_only_layers=[])
    decoder = decoder_of(model)
    seen = threading.Event()
    inner: Any = decoder.experts[0]

    class Noting(Away):
        def prefill_submit(self, x: Tensor, ids: Tensor, weights: Tensor) -> Offloaded:
            if self.submitted == 1:
                seen.set()  # the second half has come through its mixer
            return super().prefill_submit(x, ids, weights)

    decoder.experts[0] = Noting(Meeting(inner._backend, seen))
    decoder.turns = True
    tokens = tokens_of(70, generator)
    assert torch.isfinite(prefilled(decoder, tokens, 0)).all()
    assert seen.is_set()


def test_an_error_of_the_experts_is_the_callers(generator: torch.Generator) -> None:
    class Broken:
        spec: Any = None

        def forward(self, *_: Tensor) -> Tensor:
            raise RuntimeError("no such luck")

    broken: Any = Broken()
    pending = offload.submit(broken, torch.zeros(2, 4), torch.zeros(2, 1), torch.zeros(2, 1))
    with pytest.raises(RuntimeError, match="no such luck"):
        pending.collect()
