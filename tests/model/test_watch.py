"""What a running model tells: spans of its steps, bytes of its experts, and how often each was used."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from hetero import cli
from hetero.engine.forward import Stepper
from hetero.engine.load import load_model
from hetero.model.demo import TEST_MODEL
from hetero.ops.experts import CpuExpertsOp
from hetero.ops.watch import ExpertUse, dense_bytes, layer_of
from hetero.trace import DENSE, EXPERTS, SHARED, recorder, summarise, whole_steps


@pytest.fixture(scope="module")
def model() -> Any:
    torch.set_num_threads(1)
    return load_model(TEST_MODEL, threads=1).runnable.model


@pytest.fixture
def overlapping(model: Any) -> Iterator[Any]:
    for op in experts_of(model):
        op.overlap = True
    yield model
    for op in experts_of(model):
        op.overlap = False


def experts_of(model: Any) -> list[CpuExpertsOp]:
    return [module for module in model.modules() if isinstance(module, CpuExpertsOp)]


def advance(model: Any, *chunks: list[int]) -> None:
    with torch.inference_mode():
        sequence = Stepper(model).start()
        for chunk in chunks:
            sequence.advance(chunk)


def chosen(model: Any) -> tuple[list[Any], dict[int, list[torch.Tensor]]]:
    """Hooks that see what each layer's router chose, from outside of what is tested."""
    seen: dict[int, list[torch.Tensor]] = {}
    hooks = []
    for op in experts_of(model):
        before = op.submit

        def submit(x: Any, ids: Any, weights: Any, *, op: CpuExpertsOp = op, before: Any = before) -> Any:
            seen.setdefault(op.layer, []).append(ids.clone())
            return before(x, ids, weights)

        op.submit = submit  # type: ignore[method-assign]
        hooks.append(op)
    return hooks, seen


def test_steps_are_recorded_layer_by_layer(model: Any) -> None:
    layers = len(experts_of(model))
    since = recorder.next_number() + 1
    advance(model, [1, 2, 3])
    assert recorder.spans(since) == []
    with recorder.recording():
        advance(model, list(range(5)), [6], [7])
    advance(model, [1])
    steps = whole_steps(recorder.spans(since), since)
    assert [step.span.tokens for step in steps] == [5, 1, 1]
    for step in steps:
        experts = [part for part in step.parts if part.name == EXPERTS]
        assert [part.layer for part in experts] == list(range(layers))
        assert all(part.tokens == step.span.tokens for part in experts)
        assert [part.name for part in step.parts] == [DENSE, EXPERTS] * layers + [DENSE]
        # On one thread nothing overlaps and nothing is left out.
        assert step.parts[0].start == step.span.start
        assert step.parts[-1].end == step.span.end
        assert all(a.end == b.start for a, b in itertools.pairwise(step.parts))
    summary = summarise(steps)
    assert summary.experts_s + summary.dense_s == pytest.approx(summary.seconds)


def test_bytes_are_of_the_experts_that_were_chosen(model: Any) -> None:
    hooks, seen = chosen(model)
    before = {op.layer: op.use.snapshot() for op in experts_of(model)}
    since = recorder.next_number() + 1
    try:
        with recorder.recording():
            # Enough rows that an event does not keep the ids, then one.
            advance(model, [token % 200 for token in range(300)], [6])
    finally:
        for op in hooks:
            del op.submit
    steps = whole_steps(recorder.spans(since), since)
    for op in experts_of(model):
        each = op.backend.nbytes // op.spec.num_experts
        want = [len(set(ids.flatten().tolist())) for ids in seen[op.layer]]
        told = [part.nbytes for step in steps for part in step.parts if part.layer == op.layer if part.nbytes]
        assert told == [count * each for count in want]
        use = op.use.snapshot()
        assert use.reads - before[op.layer].reads == sum(want)
        counts = Counter(expert for ids in seen[op.layer] for expert in ids.flatten().tolist())
        gained = [b - a for a, b in zip(before[op.layer].counts, use.counts, strict=True)]
        assert gained == [counts[expert] for expert in range(op.spec.num_experts)]


def test_experts_on_their_own_thread_overlap_what_the_block_does(overlapping: Any) -> None:
    since = recorder.next_number() + 1
    with recorder.recording():
        advance(overlapping, [1, 2], [3])
    steps = whole_steps(recorder.spans(since), since)
    assert len(steps) == 2
    layers = len(experts_of(overlapping))
    for step in steps:
        names = Counter(part.name for part in step.parts)
        assert names[EXPERTS] == names[SHARED] == layers
        assert all(step.span.start <= part.start <= part.end <= step.span.end for part in step.parts)


def test_use_is_counted_across_folds_and_without_foreign_ids() -> None:
    use = ExpertUse(4)
    for _ in range(3000):
        use.note(torch.tensor([[0, 2], [2, 4], [-1, 3]]))
    told = use.snapshot()
    assert told.counts == (3000, 0, 6000, 3000)
    assert told.reads == 9000
    assert use.snapshot() == told


def test_layer_is_read_off_the_name() -> None:
    assert layer_of("model.layers.12.mlp.experts") == 12
    assert layer_of("model.layers.3") == 3
    assert layer_of("lm_head") == -1


def test_dense_bytes_leave_out_a_table_that_is_only_looked_up(model: Any) -> None:
    total = sum(weight.nbytes for weight in model.parameters())
    table = model.get_input_embeddings().weight
    tied = model.get_output_embeddings().weight is table
    assert dense_bytes(model) == {"cpu": total if tied else total - table.nbytes}


def test_run_writes_a_trace_and_says_what_it_saw(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    words = [
        str(TEST_MODEL),
        "--prompt-ids",
        "1,2,3",
        "--max-tokens",
        "5",
        "--ignore-eos",
        "--trace",
        str(out),
    ]
    done = CliRunner().invoke(cli.app, ["run", *words])
    assert done.exit_code == 0, done.output
    assert "[trace: 5 steps, " in done.stderr
    body = json.loads(out.read_text())
    assert body["otherData"]["steps"] == 5
    assert body["otherData"]["expert_bytes"] > 0
    assert not recorder.active


def test_trace_that_cannot_be_written_is_told_before_the_model_is_loaded(tmp_path: Path) -> None:
    out = tmp_path / "none" / "out.json"
    done = CliRunner().invoke(cli.app, ["run", "no/such/model", "-p", "x", "--trace", str(out)])
    assert done.exit_code == 2
    assert f"--trace {out}: cannot be written" in done.stderr
