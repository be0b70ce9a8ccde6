"""Fused models on a real device: captured graphs with the CPU's experts in them, through every setting."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from hetero.core import HeteroError, MachineError
from hetero.engine.gpu.loading import GpuOptions
from hetero.engine.gpu.runner import GpuRunner
from hetero.engine.gpu.vram import CONTEXT as CONTEXT_BYTES
from hetero.engine.handoff import HandoffError
from hetero.engine.handoff_choice import GPU_BACKENDS, make_backend
from hetero.engine.load import Loaded, load_model
from hetero.engine.request import Request
from hetero.engine.sample import SamplingParams
from hetero.engine.scheduler import Scheduler
from hetero.ops.embedding import disk_tables, table_reads
from hetero.store.rows import CachedRows
from tests.model.parity import load_reference, save_tiny
from tests.model.routes import Chosen, Routing, chosen_by, forced
from tests.model.tiny_moe import VOCAB

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none"),
]

FAMILIES = ["qwen3_moe", "qwen3_next", "qwen3_5_moe", "qwen4_exp"]
CONTEXT = 128
POINT_WORK, THROW, STALL, DIE = 1, 0, 1, 2


@lru_cache(1)
def usual() -> str:
    """The way between graph and CPU where a test does not care: which one is faster takes a while to find
    out, and every load would."""
    try:
        return make_backend("spin", "cuda").name
    except HeteroError:
        return "auto"


def options_of(slots: int = 1, **more: Any) -> GpuOptions:
    """One slot, and so one number of rows, where a test does not need more: each has kernels of its own."""
    return GpuOptions(**{"slots": slots, "context": CONTEXT, "handoff": usual(), **more})


@contextmanager
def fused(
    folder: Path, gpu: GpuOptions | None = None, rules: str | Path = "qwen-gpu", **sets: str
) -> Iterator[Loaded]:
    """The model under the shipped rules or others, closed afterwards."""
    options = gpu or options_of()
    sets = {"experts": "int8", "cache": "0", "share": "0", **sets}
    loaded = load_model(folder, rules=rules, overrides=sets, threads=2, gpu=options)
    try:
        yield loaded
    finally:
        assert loaded.runnable.runner is not None
        loaded.runnable.runner.close()


def runner_of(loaded: Loaded) -> GpuRunner:
    assert loaded.runnable.runner is not None
    return loaded.runnable.runner


def routed(runner: GpuRunner, chosen: Sequence[Chosen] = ()) -> Routing:
    """Experts are kept, or are those of ``chosen``, in graphs that are captured now."""
    decoder: Any = runner.decoder
    layers, k = len(runner.experts), _any(runner.experts[0]).experts.spec.top_k
    decoder.routing = routing = Routing(runner.device, layers, k, max(runner.rows), chosen)
    routing.step()
    runner.capture(prompt=False)
    return routing


def told(
    runner: GpuRunner, tokens: list[int], prompt: int, routing: Routing | None = None, sequence: int = 0
) -> torch.Tensor:
    """Logits [n - prompt + 1, V] on the CPU: after the prompt, then after each of the other tokens."""
    slot = runner.claim()
    if routing is not None:
        routing.prompt(sequence, 0, prompt)
    rows = [runner.prefill(slot, tokens[:prompt]).cpu()]
    for at, token in enumerate(tokens[prompt:], prompt):
        if routing is not None:
            routing.step([(sequence, at)])
        out = runner.step([(slot, token)]).logits
        assert out is not None
        rows.append(out[0].cpu())
        if routing is not None:
            routing.stepped()
    runner.release(slot)
    return torch.stack(rows)


def errors(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Relative norm of each row."""
    got, want = got.double(), want.double()
    return (got - want).norm(dim=-1) / want.norm(dim=-1)


def random_tokens(count: int, seed: int = 3) -> list[int]:
    return torch.randint(4, VOCAB - 4, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_as_transformers(family: str, tmp_path: Path) -> None:
    """Logits in bfloat16 beside transformers' in float32 of the same weights, over 64 tokens that it chose,
    by its experts. Some rows of these small models are ill-conditioned: as far off as transformers' own in
    bfloat16, twice that at most. A token may only differ where two were as near as the error."""
    model_class = save_tiny(family, tmp_path)
    reference = load_reference(family, model_class, tmp_path)
    tokens = random_tokens(12)
    with torch.inference_mode():
        for weight in reference.parameters():
            weight.copy_(weight.bfloat16())
        for _ in range(64):
            logits = reference(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
            tokens.append(int(logits[-1].argmax()))
        ids = torch.tensor([tokens])
        with chosen_by(reference) as chosen:
            want = reference(input_ids=ids, use_cache=False).logits[0, 11:].float()
        with forced(reference.bfloat16(), chosen):
            theirs = errors(reference(input_ids=ids, use_cache=False).logits[0, 11:].float(), want)
    with fused(tmp_path, experts="bf16") as loaded:
        runner = runner_of(loaded)
        assert not runner.eager, runner.why_eager
        assert runner.launches[1] > 0
        got = told(runner, tokens, 12, routed(runner, [chosen]))
    ours = errors(got, want)
    assert float(ours.median()) < max(0.02, 1.5 * float(theirs.median())), theirs.median()
    assert float(ours.max()) < max(0.05, 2.0 * float(theirs.max())), theirs.max()
    same_tokens(got, want)


def same_tokens(got: torch.Tensor, want: torch.Tensor) -> None:
    """The likeliest token of each row, unless two were nearer than a few times what the row is off by."""
    for row, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        gap = theirs.max() - theirs[ours.argmax()]
        assert float(gap) <= 6 * float((ours - theirs).norm() / len(theirs) ** 0.5), row


def test_every_hand_off_gives_the_same_bits(tmp_path: Path) -> None:
    save_tiny("qwen3_next", tmp_path)
    tokens, found = random_tokens(40), {}
    for backend in GPU_BACKENDS:
        try:
            make_backend(backend, "cuda")
        except HeteroError:
            continue
        options = options_of(handoff=backend)
        with fused(tmp_path, options) as loaded:
            runner = runner_of(loaded)
            assert runner.handoff is not None
            assert runner.handoff.backend.name == backend
            found[backend] = told(runner, tokens, 5)
    assert found
    first = next(iter(found.values()))
    for backend, logits in found.items():
        assert torch.equal(logits, first), backend


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen4_exp"])
def test_wherever_experts_lie(family: str, tmp_path: Path) -> None:
    """No, some and all experts in GPU memory; none, half and all others read over the bus; and eagerly."""
    save_tiny(family, tmp_path)
    tokens = random_tokens(60)
    with fused(tmp_path) as loaded:
        routing = routed(runner_of(loaded))
        want = told(runner_of(loaded), tokens, 5, routing)
        chosen = [routing.kept()]
    for cache in ("0", "50%", "100%"):
        for share in ("0", "0.5", "1"):
            with fused(tmp_path, cache=cache, share=share) as loaded:
                got = told(runner_of(loaded), tokens, 5, routed(runner_of(loaded), chosen))
            # Sums in another order, as bfloat16 rounds them on the way.
            assert float(errors(got, want).max()) < 0.01, (cache, share)
    with fused(tmp_path, options_of(eager=True), cache="50%") as loaded:
        assert runner_of(loaded).why_eager == "asked for"
        got = told(runner_of(loaded), tokens, 5, routed(runner_of(loaded), chosen))
        assert float(errors(got, want).max()) < 0.01


def test_a_table_on_disk(tmp_path: Path) -> None:
    """As with one in main memory; a file that has changed ends the step, and the next ones work."""
    save_tiny("qwen4_exp", tmp_path)
    tokens = random_tokens(60)
    with fused(tmp_path, table="ram") as loaded:
        want = told(runner_of(loaded), tokens, 5)
    with fused(tmp_path, table="disk") as loaded:
        runner, tables = runner_of(loaded), disk_tables(loaded.runnable.model)
        assert not runner.eager, runner.why_eager
        assert float(errors(told(runner, tokens, 5), want).max()) < 1e-3
        assert table_reads(tables).nbytes > 0
        for table in tables:  # that every step reads
            assert table.rows is not None
            table.rows = CachedRows(table.rows.files, 0)
        slot = runner.claim()
        runner.prefill(slot, tokens[:5])
        file, stat = tables[0].path, tables[0].path.stat()
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
        with pytest.raises(MachineError, match="cannot be read: it has changed"):
            runner.step([(slot, tokens[5])])
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        runner.release(slot)
        assert float(errors(told(runner, tokens, 5), want).max()) < 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_batches(family: str, tmp_path: Path) -> None:
    """Sequences in batches of every size, some rows idle, are what they are alone."""
    save_tiny(family, tmp_path)
    sequences = [random_tokens(20 + index, index) for index in range(16)]
    with fused(tmp_path, options_of(16), cache="50%") as loaded:
        runner = runner_of(loaded)
        assert set(runner.launches) == {1, 2, 4, 8, 16}
        want, chosen = [], []
        routing = routed(runner)
        for tokens in sequences:
            want.append(told(runner, tokens, 4, routing))
            chosen.append(routing.kept())
        routing = routed(runner, chosen)
        for count in (2, 3, 8, 16):
            slots = [runner.claim() for _ in range(count)]
            for sequence, (slot, tokens) in enumerate(zip(slots, sequences, strict=False)):
                routing.prompt(sequence, 0, 4)
                runner.prefill(slot, tokens[:4])
            rows: list[list[torch.Tensor]] = [[] for _ in slots]
            for at in range(4, 20):
                routing.step([(sequence, at) for sequence in range(count)])
                out = runner.step([(slot, sequences[i][at]) for i, slot in enumerate(slots)])
                assert out.logits is not None
                assert out.ids == out.logits.argmax(-1).tolist()
                for i, row in enumerate(out.logits.cpu()):
                    rows[i].append(row)
            for i, slot in enumerate(slots):
                assert float(errors(torch.stack(rows[i]), want[i][1:17]).max()) < 0.02, (count, i)
                runner.release(slot)


def test_a_thousand_steps_with_migrations(tmp_path: Path) -> None:
    """Experts come and go between any two steps, by the cache's own moves and at random."""
    save_tiny("qwen3_moe", tmp_path, max_position_embeddings=2048, num_experts=32)
    tokens = random_tokens(1010)
    options = options_of(context=1024)
    with fused(tmp_path, options) as loaded:
        routing = routed(runner_of(loaded))
        want = told(runner_of(loaded), tokens, 10, routing)
        chosen = [routing.kept()]
    with fused(tmp_path, options, cache="50%", share="0.5") as loaded:
        runner = runner_of(loaded)
        routing = routed(runner, chosen)
        slot, rows = runner.claim(), []
        routing.prompt(0, 0, 10)
        runner.prefill(slot, tokens[:10])
        for at, token in enumerate(tokens[10:]):
            routing.step([(0, at + 10)])
            if at % 10 == 0:
                for one in runner.experts:
                    hybrid: Any = one
                    hybrid.seed(torch.rand(32).tolist())
                torch.cuda.synchronize()
            out = runner.step([(slot, token)]).logits
            assert out is not None
            rows.append(out[0].cpu())
        moved = sum(hybrid.counts().moved for hybrid in map(_any, runner.experts))
    found = errors(torch.stack(rows), want[1:])
    assert moved > 0
    assert float(found.max()) < 0.02
    # Nothing accumulates beyond what keys and values in bfloat16 are rounded by.
    assert float(found[-200:].mean()) < 4 * float(found[:200].mean()) + 2.0**-9


def _any(value: object) -> Any:
    return value


@pytest.mark.parametrize("backend", ["memop", "spin"])
@pytest.mark.parametrize("kind", [THROW, STALL, DIE])
def test_a_worker_that_fails(backend: str, kind: int, tmp_path: Path) -> None:
    """Its step has an error within two seconds, and the next request works."""
    save_tiny("qwen3_moe", tmp_path)
    options = options_of(2, handoff=backend)
    with fused(tmp_path, options) as loaded:
        runner = runner_of(loaded)
        tokens = random_tokens(20)
        want = told(runner, tokens, 5)
        engine = Scheduler(loaded.runnable, slots=2)
        ends: list[Any] = []
        engine.submit(Request(tuple(tokens[:5]), SamplingParams(), 50), ends.append)
        for _ in range(4):
            engine.step()
        assert runner.handoff is not None
        runner.handoff._channel.inject(POINT_WORK, kind, -1, 1, int(3e9))
        began = time.monotonic()
        for _ in range(3):  # it may meet a step that was launched ahead
            if not isinstance(ends[-1], HandoffError):
                engine.step()
        assert time.monotonic() - began < 2.0
        assert isinstance(ends[-1], HandoffError)
        for _ in range(3):
            assert torch.equal(told(runner, tokens, 5), want)
        engine.close()


def test_what_cannot_be_captured_runs_eagerly(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_tiny("qwen3_moe", tmp_path)
    tokens = random_tokens(12)
    with fused(tmp_path) as loaded:
        runner = runner_of(loaded)
        want = told(runner, tokens, 4)
        decoder: Any = runner.decoder

        def synchronizing(layer: int, ids: torch.Tensor, weights: torch.Tensor) -> Any:
            return ids.cpu().to(ids.device), weights

        decoder.routing = synchronizing
        with caplog.at_level(logging.WARNING, "hetero.engine"):
            runner.capture()
        (message,) = [text for text in caplog.messages if "cannot be captured" in text]
        assert "runs eagerly" in message
        assert runner.eager
        assert runner.launches == {}
        assert torch.equal(told(runner, tokens, 4), want)


def answered(runner: GpuRunner, prompts: list[list[int]], count: int, *, ahead: bool) -> list[list[int]]:
    """Greedy tokens of several sequences together; half of them end early."""
    slots = [runner.claim() for _ in prompts]
    made = [[int(runner.prefill(slot, prompt).argmax())] for slot, prompt in zip(slots, prompts, strict=True)]
    for at in range(count):
        live = [i for i in range(len(slots)) if at < count // 2 or i % 2 == 0]
        if at == count // 2:
            for i in set(range(len(slots))) - set(live):
                runner.release(slots[i])
        out = runner.step([(slots[i], made[i][-1]) for i in live], ahead=ahead)
        for i, token in zip(live, out.ids, strict=True):
            made[i].append(token)
    for i in live:
        runner.release(slots[i])
    return made


@pytest.mark.parametrize("backend", GPU_BACKENDS)
@pytest.mark.parametrize("family", ["qwen3_next", "qwen4_exp"])
def test_steps_that_are_launched_ahead(family: str, backend: str, tmp_path: Path) -> None:
    """The same tokens as one after the other; n-gram embeddings come while a step runs."""
    save_tiny(family, tmp_path)
    try:
        make_backend(backend, "cuda")
    except HeteroError as error:
        pytest.skip(f"{backend}: {error}")
    options = options_of(4, handoff=backend)
    with fused(tmp_path, options, experts="f32") as loaded:
        runner = runner_of(loaded)
        assert runner._steps.fits_ahead(4)
        for count in (1, 3, 4):
            prompts = [random_tokens(5 + i, i) for i in range(count)]
            want = answered(runner, prompts, 24, ahead=False)
            assert answered(runner, prompts, 24, ahead=True) == want
        slot = runner.claim()
        (token,) = runner.step([(slot, 9)], ahead=True).ids
        runner.settle()
        assert runner.length(slot) == 2
        runner.step([(slot, token)])


def go_on(runner: GpuRunner, slot: int, token: int, steps: int) -> None:
    for _ in range(steps):
        (token,) = runner.step([(slot, token)], ahead=True).ids


def test_a_worker_that_fails_while_a_step_is_ahead(tmp_path: Path) -> None:
    save_tiny("qwen4_exp", tmp_path)
    with fused(tmp_path, options_of(2)) as loaded:
        runner = runner_of(loaded)
        prompts = [random_tokens(5)]
        want = answered(runner, prompts, 10, ahead=False)
        for lane in (0, 1):
            slot = runner.claim()
            tokens = [int(runner.prefill(slot, prompts[0]).argmax())]
            assert runner.handoff is not None
            runner.handoff._channel.inject(POINT_WORK, THROW, lane, 1, 0)
            began = time.monotonic()
            with pytest.raises(HandoffError):
                go_on(runner, slot, tokens[-1], 4)
            assert time.monotonic() - began < 2.0
            runner.release(slot)
            assert answered(runner, prompts, 10, ahead=True) == want


@pytest.mark.parametrize("lanes", ["2", "auto"])
@pytest.mark.parametrize("family", ["qwen3_next", "qwen4_exp"])
def test_halves_that_take_turns(family: str, lanes: str, tmp_path: Path) -> None:
    """As one step, but for the order of sums; and the same tokens one after the other and ahead."""
    save_tiny(family, tmp_path)
    rules = tmp_path / "turns.yaml"
    rules.write_text(
        "extends: qwen-gpu\nrules:\n  - name: layers in turns\n    match: {class: '*DecoderLayer'}\n"
        f"    replace: {{op: fused, device: 'cuda:0', kwargs: {{lanes: {lanes}}}}}\n"
    )
    options = options_of(4)
    sequences = [random_tokens(16, index) for index in range(4)]
    with fused(tmp_path, options, cache="50%", share="0.5") as loaded:
        runner = runner_of(loaded)
        routing = routed(runner)
        want, chosen = [], []
        for tokens in sequences:
            want.append(told(runner, tokens, 4, routing))
            chosen.append(routing.kept())
    with fused(tmp_path, options, rules, cache="50%", share="0.5") as loaded:
        runner = runner_of(loaded)
        assert lanes == "auto" or runner._steps.turns == {2, 4}
        assert any("halves take turns" in note for note in loaded.notes) == (lanes == "auto")
        routing = routed(runner, chosen)
        for count in (3, 4):
            slots = [runner.claim() for _ in range(count)]
            for sequence, (slot, tokens) in enumerate(zip(slots, sequences, strict=False)):
                routing.prompt(sequence, 0, 4)
                runner.prefill(slot, tokens[:4])
            for at in range(4, 16):
                routing.step([(sequence, at) for sequence in range(count)])
                out = runner.step([(slot, sequences[i][at]) for i, slot in enumerate(slots)]).logits
                assert out is not None
                for i, row in enumerate(out.cpu()):
                    assert float(errors(row, want[i][at - 3])) < 0.02, (count, at, i)
            for slot in slots:
                runner.release(slot)
    with fused(tmp_path, options, rules, experts="f32") as loaded:
        runner = runner_of(loaded)
        prompts = [random_tokens(5 + i, i) for i in range(4)]
        want_tokens = answered(runner, prompts, 20, ahead=False)
        assert answered(runner, prompts, 20, ahead=True) == want_tokens


def test_requests_of_a_server(tmp_path: Path) -> None:
    save_tiny("qwen3_next", tmp_path)
    with fused(tmp_path, options_of(4), cache="50%") as loaded:
        engine = Scheduler(loaded.runnable, slots=4)
        ends: dict[int, Any] = {}
        for index in range(9):
            request = Request(tuple(random_tokens(3 + 2 * index, index)), SamplingParams(), 4 + index)
            engine.submit(request, lambda event, index=index: ends.__setitem__(index, event))  # type: ignore[misc]
        while engine.status().running + engine.status().waiting:
            engine.step()
        assert [len(ends[index].token_ids) for index in range(9)] == [4 + index for index in range(9)]
        engine.close()


def test_memory_under_a_cap(tmp_path: Path) -> None:
    """As the driver tells it, beside the context that is there already."""
    save_tiny("qwen3_moe", tmp_path)
    cap = 3 << 30
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    with fused(tmp_path, options_of(vram=cap), cache="auto") as loaded:
        told(runner_of(loaded), random_tokens(100), 50)
        assert before - torch.cuda.mem_get_info()[0] <= cap - CONTEXT_BYTES
        assert any("experts lie in GPU memory" in note for note in loaded.notes)
    with (
        pytest.raises(MachineError, match=r"--vram"),
        fused(tmp_path, options_of(vram=64 << 20)),
    ):
        pass
    with pytest.raises(MachineError, match=r"--vram"), fused(tmp_path, GpuOptions(vram=1 << 50)):
        pass
