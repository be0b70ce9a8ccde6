"""Whole steps of a runner whose experts are handed to the real worker: a thread stands in the GPU's place for
flags alone, and the kernels' interpreter for the rest."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from hetero.core import HeteroError
from hetero.decode.decoder import Decoder
from hetero.decode.experts import DirectExperts
from hetero.engine.gpu.fuse import find_sites
from hetero.engine.gpu.runner import GpuRunner
from hetero.engine.handoff import Handoff, Payload
from hetero.engine.handoff_backends import ThreadBackend
from hetero.engine.synthetic import load_synthetic
from hetero.ops.gpu.hybrid import DirectPort, HybridExperts
from hetero.ops.gpu.hybrid_shared import HybridShared
from hetero.ops.gpu.pinned import PinnedArena
from hetero.overlap import hand_offs, overlap
from hetero.trace import DEFERRED, EXPERTS, recorder, whole_steps
from tests.engine.handoffs import POINTS, THROW

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has these on the device")

SHAPE: dict[str, Any] = {
    "model_type": "qwen3_moe", "vocab_size": 40, "hidden_size": 32, "intermediate_size": 32,
    "moe_intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 4, "max_position_embeddings": 64,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [1], "attention_bias": False,
    "tie_word_embeddings": False, "rms_norm_eps": 1e-6,
}  # fmt: skip
MOE = [0, 2]


class TwinPort:
    """Flags go through twins, a pair for each layer, which are replayed when a step comes to them."""

    def __init__(self, handoff: Handoff) -> None:
        backend = handoff.backend
        assert isinstance(backend, ThreadBackend)
        self._handoff, self._backend = handoff, backend
        for layer in range(handoff.layers):
            backend.stream(2 * layer)
            handoff.record_submit(0, layer)
            backend.stream(2 * layer + 1)
            handoff.record_collect(0, layer)

    def payload(self, layer: int) -> Payload:
        return self._handoff.payload(0, layer)

    def record_submit(self, layer: int) -> None:
        self._play(2 * layer)

    def record_collect(self, layer: int) -> None:
        self._play(2 * layer + 1)

    def _play(self, index: int) -> None:
        twin = self._backend.twins[index]
        twin.launch()
        assert twin.synchronize(30.0)


def runner_of(defer: int, handed: bool) -> GpuRunner:
    """With two slots of a cache in each layer, from which nothing moves; the same weights every time."""
    torch.manual_seed(5)
    loaded = load_synthetic(SHAPE, dtype="bfloat16", overrides={"experts": "int8"}, threads=1)
    experts = [site.experts for site in find_sites(loaded.runnable.model, loaded.placement)]
    given = [DirectExperts(one) for one in experts]
    decoder = Decoder(loaded.runnable.model, given, slots=2, context=32, device="cpu")
    assert decoder.moe_numbers == MOE
    handoff = None
    if handed:
        handoff = Handoff(experts, rows=2, slots=4, defer=defer > 0, numbers=decoder.moe_numbers)
    port: Any = DirectPort(experts, 2, defer=defer > 0) if handoff is None else TwinPort(handoff)
    shared = HybridShared("cpu", moves=0, defer=defer)
    hybrid = [
        HybridExperts(one, layer, port, shared, slots=2, arena=PinnedArena(one, "cpu"))
        for layer, one in enumerate(experts)
    ]
    decoder.experts[:] = hybrid
    return GpuRunner(decoder, hybrid, handoff=handoff, slots=2, context=32, rows=(2,), shared=shared)


def test_steps_and_what_the_trace_tells_of_them() -> None:
    """The worker computes what experts on the spot do, to the bit, with deferred ones among it."""
    direct, handed = runner_of(2, False), runner_of(2, True)
    slots = [direct.claim(), direct.claim()]
    assert slots == [handed.claim(), handed.claim()]
    since = recorder.next_number() + 1
    for step in range(2):
        rows = [(slot, 3 + step + slot) for slot in slots]
        wanted = direct.step(rows).logits
        with recorder.recording(stamps=True):
            got = handed.step(rows).logits
        assert wanted is not None
        assert got is not None
        assert torch.equal(got, wanted)
    steps = whole_steps(recorder.spans(since), since)
    assert len(steps) == 2
    for told in steps:
        assert [part.layer for part in told.parts if part.name == EXPERTS] == MOE
        assert [part.layer for part in told.parts if part.name == DEFERRED] == MOE[:1]
        assert [one.layer for one in hand_offs(told)] == MOE
    summary = overlap(steps)
    # Every chosen expert is somewhere, once for each step and layer unless it is both due and deferred.
    assert summary.hits + summary.in_place + summary.cpu_experts >= 2 * len(MOE) * 4
    assert summary.layers == len(MOE)
    assert math.isfinite(summary.handoff_us)
    direct.close()
    handed.close()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter's numpy, for results that are NaN
def test_a_failure_of_the_worker_is_the_steps() -> None:
    handed = runner_of(0, True)
    assert handed.handoff is not None
    slot = handed.claim()
    handed.handoff._channel.inject(POINTS["work"], THROW, -1, 1, 0)
    with pytest.raises(HeteroError, match="layer 1"):
        handed.step([(slot, 3)])
    assert handed.step([(slot, 3)]).ids
    handed.close()
