"""Steps of models without fused layers over a cache that stays in its place, a thread in the GPU's: the same
tokens as transformers' own way, whatever happens around them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hetero.cpu import CpuExperts
from hetero.engine.forward import Sequence as Cached
from hetero.engine.forward import Stepper
from hetero.engine.gpu.graphs import CaptureError
from hetero.engine.gpu.plain import PlainGraphs
from hetero.engine.handoff import Handoff, HandoffError
from hetero.engine.load import load_model
from hetero.ops.experts import CpuExpertsOp
from hetero.ops.watch import ExpertUse
from hetero.trace import recorder
from tests.engine.handoffs import POINTS, THROW
from tests.engine.twins import PlayedFlags, TwinMeans
from tests.model.parity import prompt, relative, save_tiny

CPU = torch.device("cpu")


class Handing:
    """By flags that go through twins, which are replayed when a step comes to them."""

    def __init__(self, experts: Sequence[CpuExperts], dtype: torch.dtype, device: torch.device) -> None:
        slots = max(one.spec.top_k for one in experts)
        self.handoff = Handoff(experts, rows=1, slots=slots, dtype=dtype)
        self._played = PlayedFlags(self.handoff)

    def begin(self) -> None:
        self.handoff.begin(0, 1)

    def end(self, *, abort: bool = False) -> None:
        self.handoff.end(0, abort=abort)

    def submit(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        to = self.handoff.payload(0, layer)
        for mine, theirs in ((to.x, x), (to.ids, ids), (to.weights, weights)):
            mine.copy_(theirs)
        self._played.record_submit(0, layer)

    def collect(self, layer: int, out: Tensor) -> None:
        self._played.record_collect(0, layer)
        out.copy_(self.handoff.payload(0, layer).result)

    def close(self) -> None:
        self.handoff.close()


def steppers(folder: Path, model_type: str, **changes: Any) -> tuple[Stepper, Stepper, TwinMeans]:
    """Of one model: transformers' own way, and by graphs."""
    save_tiny(model_type, folder, **changes)
    run = load_model(folder, rules="default-cpu", overrides={"experts": "f32"}, threads=1).runnable
    plain, other, means = Stepper(run.model), Stepper(run.model), TwinMeans()
    fixed = other._fixed | other._last_only
    other.graphs = PlainGraphs(run.model, CPU, fixed, means=means, make=Handing)
    return plain, other, means


def graphs_of(stepper: Stepper) -> PlainGraphs:
    assert stepper.graphs is not None
    return stepper.graphs


def uses(stepper: Stepper) -> list[Any]:
    return [module.use for module in stepper._model.modules() if isinstance(module, CpuExpertsOp)]


def top_k(stepper: Stepper) -> int:
    return next(m.spec.top_k for m in stepper._model.modules() if isinstance(m, CpuExpertsOp))


@torch.inference_mode()
def advanced(sequence: Cached, tokens: list[int]) -> Tensor:
    return sequence.advance(tokens).clone()


def same(one: Cached, other: Cached, tokens: list[int]) -> int:
    """Both after ``tokens``; the likeliest next one."""
    want, got = advanced(one, tokens), advanced(other, tokens)
    assert relative(got, want) < 1e-4
    assert one.length == other.length
    return int(want.argmax())


@pytest.mark.parametrize("model_type", ["mixtral", "deepseek_v3", "gpt_oss", "glm4_moe"])
def test_as_without_graphs(model_type: str, tmp_path: Path) -> None:
    """Two sequences, in turns and for a while alone; one begins anew from what the other has kept."""
    plain, other, means = steppers(tmp_path, model_type)
    ids = prompt()[0].tolist()
    pairs = [(plain.start(), other.start()) for _ in range(2)]
    last = [same(*pairs[0], ids), same(*pairs[1], ids[:5])]
    for turn in (0, 0, 1, 0, 1, 1, 1, 0):
        last[turn] = same(*pairs[turn], [last[turn]])
    assert means.replays == 8
    # Each of both ways has counted the same uses of experts.
    totals = [sum(use.snapshot().counts) for use in uses(plain)]
    assert totals == [2 * (len(ids) + 5 + 8) * top_k(plain)] * len(totals)
    third = plain.start(), other.start()
    for one, mine in zip(pairs[0], third, strict=True):
        mine.begin(one.kept(), one.length, one.length - (2 if one.cuttable else 0))
    token = 7
    for _ in range(3):
        token = same(*third, [token])
    last[0] = same(*pairs[0], [last[0]])
    # More tokens at once, and a step that is traced, take the other way, and find all that graphs have made.
    same(*pairs[0], [4, 9, 11])
    with recorder.recording():
        token = same(*pairs[0], [5])
    assert means.replays == 12
    same(*pairs[0], [token])
    assert means.replays == 13
    assert graphs_of(other).why_eager == ""
    pairs[0][1].close()
    same(*pairs[1], [last[1]])
    other.close()
    same(*pairs[1], [3])


@pytest.mark.parametrize(
    ("model_type", "why"), [("qwen3_next", "LinearAttentionLayer"), ("qwen4_exp", "IndexedLayer")]
)
def test_other_caches_run_eagerly(
    model_type: str, why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain, other, means = steppers(tmp_path, model_type)
    one, mine = plain.start(), other.start()
    with caplog.at_level(logging.WARNING, "hetero.engine"):
        token = same(one, mine, prompt()[0].tolist())
        for _ in range(3):
            token = same(one, mine, [token])
    (message,) = [record.message for record in caplog.records if record.name == "hetero.engine"]
    assert "cannot be captured as a graph and runs eagerly: its cache" in message
    assert why in message
    assert means.replays == 0
    other.close()


def test_what_cannot_be_captured_runs_eagerly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, other, means = steppers(tmp_path, "mixtral")

    def refuse(record: Callable[[], Tensor], pool: Any) -> Any:
        raise CaptureError("cumsum in modeling_mixtral.py:7: operation not permitted")

    monkeypatch.setattr(means, "graph", refuse)
    one, mine = plain.start(), other.start()
    with caplog.at_level(logging.WARNING, "hetero.engine"):
        token = same(one, mine, prompt()[0].tolist())
        for _ in range(3):
            token = same(one, mine, [token])
    told = [record.message for record in caplog.records if record.name == "hetero.engine"]
    assert [message.rpartition("eagerly: ")[2] for message in told] == [
        "cumsum in modeling_mixtral.py:7: operation not permitted"
    ]
    other.close()


def test_keys_and_values_without_room_run_eagerly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hetero.engine.gpu import plain as graphs

    def lacking(like: Any, length: int) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(graphs, "HeldCache", lacking)
    plain, other, means = steppers(tmp_path, "mixtral")
    one, mine = plain.start(), other.start()
    with caplog.at_level(logging.WARNING, "hetero.engine"):
        token = same(one, mine, prompt()[0].tolist())
        for _ in range(3):
            token = same(one, mine, [token])
    (message,) = [record.message for record in caplog.records if record.name == "hetero.engine"]
    assert "runs eagerly" in message
    assert "out of memory" in message
    assert means.replays == 0
    other.close()


def test_experts_on_the_device_are_counted(tmp_path: Path) -> None:
    """Which note ids themselves, of a step that is recorded once: in every step, and not in trials."""
    _, other, means = steppers(tmp_path, "mixtral")
    model, use = other._model, ExpertUse(8)
    model.lm_head.use = use
    hook = model.lm_head.register_forward_hook(lambda *_: use.note(torch.tensor([[6, 2, -1]])))
    other.graphs = PlainGraphs(model, CPU, other._fixed | other._last_only, means=means, make=Handing)
    mine = other.start()
    advanced(mine, prompt()[0].tolist())
    for _ in range(3):
        advanced(mine, [3])
    assert means.replays == 3
    assert use.snapshot().counts == (0, 0, 4, 0, 0, 0, 4, 0)
    hook.remove()
    other.close()


def test_a_worker_that_fails(tmp_path: Path) -> None:
    plain, other, _ = steppers(tmp_path, "mixtral")
    ids = prompt()[0].tolist()
    broken = other.start()
    advanced(broken, ids)
    advanced(broken, [3])
    handing: Any = graphs_of(other)._handing
    handing.handoff._channel.inject(POINTS["work"], THROW, 0, 1, 0)
    with pytest.raises(HandoffError, match="layer 1"):
        advanced(broken, [4])
    broken.close()
    one, mine = plain.start(), other.start()
    token = same(one, mine, ids)
    for _ in range(3):
        token = same(one, mine, [token])
    other.close()


def test_beyond_the_room_of_a_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hetero.engine.gpu import plain as graphs

    monkeypatch.setattr(graphs, "LONGEST", 15)
    plain, other, means = steppers(tmp_path, "mixtral")
    one, mine = plain.start(), other.start()
    token = same(one, mine, prompt()[0].tolist())
    for _ in range(6):
        token = same(one, mine, [token])
    assert means.replays == 3
    other.close()
