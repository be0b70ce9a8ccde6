"""``hetero bench``: the whole command on the CPU, its parts, and what it says to bad options."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner, Result

from hetero import cli, cpu
from hetero.core import InputError, MachineError
from hetero.cpu import CpuExperts
from hetero.engine.synthetic import load_synthetic
from hetero.formats import parse_format
from hetero.model.shapes import resolve_model
from hetero.plan import families
from hetero.plan.hardware import load_hardware
from hetero.report import bandwidth, bench_load, bench_memory, bench_options
from hetero.report.bandwidth import CpuReads, Rates, threads_within
from hetero.report.bench import Bench, Series, spread
from hetero.report.bench_memory import Memory, require_memory
from hetero.report.bench_options import Options
from hetero.report.bench_plan import predicted
from hetero.report.bench_runs import Counts, ModulesRun
from hetero.report.bench_text import show
from hetero.report.bound import Bound, hardware_of
from hetero.report.forced import ForcedRouting
from hetero.report.routing import make_table, save_table
from hetero.rules.defaults import default_rules_for

SMALL: dict[str, Any] = {
    "model_type": "qwen3_moe", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64,
    "moe_intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 32, "num_experts": 16, "num_experts_per_tok": 3, "max_position_embeddings": 256,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "attention_bias": False,
    "tie_word_embeddings": False, "rms_norm_eps": 1e-6,
}  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Any:
    threads, before = cpu.threads(), torch.get_num_threads()
    monkeypatch.setattr(bandwidth, "READ_BYTES", 1 << 20)
    monkeypatch.setenv("HETERO_THREADS", "1")
    cpu.set_threads(1)
    torch.set_num_threads(1)
    yield
    cpu.set_threads(threads)
    torch.set_num_threads(before)


@pytest.fixture
def shape(tmp_path: Path) -> Path:
    path = tmp_path / "small.json"
    path.write_text(json.dumps(SMALL))
    return path


def call(*args: object) -> Result:
    return CliRunner().invoke(cli.app, ["bench", *map(str, args)])


SHORT = ("--no-gpu", "--context", 12, "--tokens", 4, "--runs", 2, "--threads", 1)


def test_a_shape_is_measured(shape: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    options = ("--routing", "local,router", "--batch", "1,2", "--prefill", "5", "--plan", "--json", out)
    done = call(f"synthetic:{shape}", *SHORT, *options, "--predict", "rtx4090-7950x")
    assert done.exit_code == 0, done.output
    for words in ("of bound", "local routing:", "predicted, not measured, on rtx4090-7950x", "CPU reads"):
        assert words in done.stdout
    found = json.loads(out.read_text())
    assert (found["kind"], found["version"], found["synthetic"]) == ("hetero-bench", 1, True)
    assert found["hardware"]["date"]
    assert found["cpu"]["threads"] == 1
    assert {"wait", "chunk", "rules", "isa", "threads", "handoff"} <= set(found["options"])
    assert [(one["routing"], one["rows"]) for one in found["decode"]] == [
        ("local", 1), ("local", 2), ("router", 1), ("router", 2),
    ]  # fmt: skip
    for one in found["decode"]:
        rate, bound = one["tok_s"], one["bound"]
        assert len(rate["rounds"]) == 2
        assert rate["q1"] <= rate["median"] <= rate["q3"]
        assert bound["share"] == pytest.approx(rate["median"] / bound["tok_s"])
        assert bound["binds"] in [term["name"] for term in bound["terms"]]
        assert one["hit_rate"] is None
        layer = one["bytes_a_step"]["cpu"] / found["expert_bytes"]["one"] / 2
        assert 3 <= layer <= 3 * one["rows"]  # experts of a layer
        assert (layer == 3) == (one["rows"] == 1)
    (prefill,) = found["prefill"]
    assert prefill["tokens"] == 5
    assert prefill["tok_s"]["rounds"] == pytest.approx([5 / t for t in prefill["ttft_s"]["rounds"]])
    assert set(found["rates"]) == {"cpu"}
    assert len(found["rates"]["cpu"]["rounds"]) == 5
    assert found["tables"]["local"]["rows"] == 2
    assert "gpu_memory" not in found
    assert found["complete"]
    plan = found["plan"]
    (host,) = plan["memory"]
    assert host["measured"] >= 100 << 20
    assert host["ratio"] == host["planned"] / host["measured"]
    assert plan["slots"] is None
    assert [(one["routing"], one["rows"]) for one in plan["decode"]] == [
        (one["routing"], one["rows"]) for one in found["decode"]
    ]
    for one, series in zip(plan["decode"], found["decode"], strict=True):
        assert one["measured_tok_s"] == series["tok_s"]["median"]
        assert one["expected_tok_s"] == pytest.approx(
            1e3 * one["rows"] / sum(term["ms"] for term in one["terms"])
        )
        assert one["expected_tok_s"] < series["bound"]["tok_s"]
    assert "plan: main memory" in done.stdout
    assert "plan: local routing, 2 rows:" in done.stdout


def test_what_was_measured_is_kept_where_a_later_part_fails(
    shape: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Bench, tokens: int) -> dict[str, Any]:
        raise MachineError("no memory for a prompt")

    monkeypatch.setattr(Bench, "prefill", fail)
    out = tmp_path / "out.json"
    done = call(f"synthetic:{shape}", *SHORT, "--prefill", 5, "--json", out)
    assert done.exit_code == 3
    assert "no memory for a prompt" in done.stderr
    found = json.loads(out.read_text())
    assert not found["complete"]
    assert len(found["decode"]) == 1


def test_a_table_can_be_kept_and_replayed(shape: Path, tmp_path: Path) -> None:
    table = tmp_path / "table.npy"
    model = f"synthetic:{shape}"
    done = call(model, *SHORT, "--routing", "local", "--save-routing", table)
    assert done.exit_code == 0, done.output
    assert "2 layers, 12 steps, 1 rows, 3 experts" in done.stderr
    done = call(model, *SHORT, "--routing", f"trace:{table}", "--json", "-")
    assert done.exit_code == 0, done.output
    (one,) = json.loads(done.stdout)["decode"]
    assert one["routing"] == f"trace:{table}"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--routing", "lokal"), "--routing lokal: must be one of router, uniform, local or trace:FILE"),
        (("--routing", "local,local"), "--routing local,local: must be different words with commas"),
        (("--routing", "trace:/none.npy"), "--routing trace:/none.npy: cannot be read: No such file"),
        (("--batch", "1,x"), "--batch 1,x: must be whole numbers with commas"),
        (("--batch", "17"), "--batch 17: must be from 1 to 16"),
        (("--prefill", "0"), "--prefill 0: must be at least 1"),
        (("--tokens", "0"), "--tokens 0: must be from 1"),
        (("--runs", "0"), "--runs 0: must be from 1"),
        (("--context", "4", "--tokens", "4"), "--context 4: has no room for a prompt of 1 and then 4"),
        (("--context", "9", "--prompt", "8", "--tokens", "4"), "no room for a prompt of 8 and then 4"),
        (("--threads", "0"), "--threads 0: must be from 1 to 4096"),
        (("--cpu-gbps-cap", "0"), "--cpu-gbps-cap 0: must be above 0"),
        (("--chunk", "0"), "--chunk 0: must be at least 1"),
        (("--handoff", "smoke"), "--handoff smoke: must be one of auto, memop, spin, hostfunc"),
        (("--wait", "long"), "--wait long: must be one of block, spin, nap"),
        (("--layers", "0"), "--layers 0: must be at least 1"),
        (("--share", "2"), "--share 2: must be auto or numbers from 0 to 1"),
        (("--share", "half"), "--share half: must be auto or numbers from 0 to 1"),
        (("--cache", "much"), "--cache: 'much' must be auto, 0, a size like 12GiB or a part like 30%"),
        (("--vram", "24"), "--vram 24: is no size; a unit is missing"),
        (("--dense", "int8"), "--dense int8: must be one of float32, bfloat16, float16 without a GPU"),
        (("--format", "q4_k"), "--format q4_k: weights cannot be turned into 'q4_k'"),
        (("--format", "int3"), "--format int3: unknown weight format 'int3'"),
        (("--serial", "--share", "0"), "--share, --serial: of a GPU, and there is none"),
        (("--handoff", "spin"), "--handoff: of a GPU, and there is none"),
        (("--modules",), "--modules: contradicts --no-gpu"),
        (("--modules", "--rules", "default-cpu"), "--modules: contradicts --rules"),
        (("--vram", "24GiB"), "--vram: of a GPU, and there is none"),
        (("--defer", "-1"), "--defer -1: must be 0 or more"),
        (("--turns", "no"), "--turns no: must be one of auto, on, off"),
        (("--prefill-by", "gpu"), "--prefill-by gpu: must be one of"),
        (("--rules", "none.yaml"), "none.yaml"),
        (("--set", "experts=int8", "--set", "dense=int8"), "dense"),
        (("--isa", "mmx"), "--isa mmx: must be one of"),
        (("--predict", "cray1"), "--predict cray1: neither a file nor a shipped profile"),
        (("--json", "/none/out.json"), "--json /none/out.json: cannot be written"),
        (("--prompt", "0"), "--prompt 0: must be at least 1"),
        (("--context", "9999999"), "--context 9999999: the model attends to at most"),
        (("--prefill", "9999999"), "--prefill 9999999: the model attends to at most"),
        (("--routing", "trace:"), "--routing trace:: must be one of"),
        (("--save-routing", "t.npy"), "--save-routing: of --routing uniform or local, not router"),
    ],
)
def test_bad_options_are_told(shape: Path, options: tuple[str, ...], said: str) -> None:
    done = call(f"synthetic:{shape}", "--no-gpu", *SHORT, *options)
    assert done.exit_code == 2, done.output
    assert said in done.stderr
    assert "Traceback" not in done.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_options_of_a_gpu_where_there_is_none_are_told(shape: Path) -> None:
    for options, names in (
        (("--vram", "8GiB"), "--vram"),
        (("--modules",), "--modules"),
        (("--handoff", "spin", "--vram", "8GiB"), "--vram, --handoff"),
    ):
        done = call(f"synthetic:{shape}", *options)
        assert done.exit_code == 3, done.output
        assert f"{names}: of a GPU, and torch sees none here" in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_what_does_not_fit_is_refused_before_it_is_filled(shape: Path) -> None:
    done = call("synthetic:qwen3-30b-a3b", "--no-gpu", "--ram", "8GiB", "--tokens", 4, "--context", 64)
    assert done.exit_code == 3, done.output
    assert "qwen3-30b-a3b needs" in done.stderr
    for words in ("of main memory (", "dense layers (float32) 5.", "experts 15.", "fewer --layers"):
        assert words in done.stderr, words
    assert "Traceback" not in done.output


def test_a_gpu_that_is_too_small_is_told_before_it_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    model = resolve_model("synthetic:qwen3.8-flash-next-125b")
    inventory = families.inventory(model.config)
    assert inventory is not None
    rules = str(default_rules_for("qwen4_exp", True))
    told = bench_memory.memory.Available(120 << 30, "a test")
    monkeypatch.setattr(bench_memory.memory, "available", lambda: told)
    monkeypatch.setattr(bench_memory, "_gpu_bytes", lambda options: options.vram)
    options = Options(model, model.config, parse_format("int4"), "int8", True, rules, vram=24 << 30)
    require_memory(options, Series(), inventory)
    # Less than weights and states take; where only allowances do not fit, the run is to find out.
    require_memory(replace(options, vram=6 << 30), Series(), inventory)
    small = replace(options, vram=4 << 30)
    with pytest.raises(
        MachineError, match=r"125b needs .* of GPU memory .*4\.0 GiB is available .*--vram 4\.0"
    ):
        require_memory(small, Series(), inventory)
    # The same as transformers' modules, whose dense layers have 16 bits.
    modules = replace(options, rules="default-gpu", dense="bfloat16", vram=9 << 30)
    with pytest.raises(MachineError, match=r"dense layers \(bfloat16\) 9\.2 GiB"):
        require_memory(modules, Series(), inventory)
    monkeypatch.setattr(bench_memory.memory, "available", lambda: bench_memory.memory.Available(1 << 36, "x"))
    with pytest.raises(MachineError, match=r"of main memory .*experts 63\.3 GiB.*64\.0 GiB is available"):
        require_memory(options, Series(), inventory)


def test_an_unknown_shape_is_told() -> None:
    done = call("synthetic:qwen3-31b", "--no-gpu")
    assert done.exit_code == 2
    assert "did you mean qwen3-30b-a3b" in done.stderr


def test_layers_are_cut_and_that_is_said(shape: Path) -> None:
    done = call(f"synthetic:{shape}", *SHORT, "--layers", 1, "--json", "-")
    found = json.loads(done.stdout)
    assert found["layers"] == 1
    assert found["decode"][0]["bytes_a_step"]["cpu"] == 3 * found["expert_bytes"]["one"]


def test_tables_replace_the_router(monkeypatch: pytest.MonkeyPatch) -> None:
    """In steps alone, for every layer and row, one row of the table after the other."""
    seen: list[torch.Tensor] = []
    forward = CpuExperts.forward

    def spy(self: CpuExperts, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        seen.append(ids.clone())
        assert weights.sum(1) == pytest.approx(1.0, abs=1e-3)  # the router's own
        return forward(self, x, ids, weights)

    monkeypatch.setattr(CpuExperts, "forward", spy)
    loaded = load_synthetic(SMALL, threads=1)
    run = ModulesRun(loaded.runnable.model)
    table = make_table("uniform", layers=2, steps=3, rows=2, experts=16, top_k=3, seed=1)
    forced = ForcedRouting(table, "cpu")
    run.force(forced)
    forced.start(0)
    states = [run.prefill([1, 2, 3, 4])[0] for _ in range(2)]
    assert all(len(ids) == 4 for ids in seen)
    for step in range(5):
        seen.clear()
        run.step(states, [1, 2])
        wanted = torch.from_numpy(table[:, step % 3]).long()
        assert torch.equal(torch.stack(seen), wanted)
    forced.start(1)
    seen.clear()
    run.step(states[:1], [1])
    assert torch.equal(torch.stack(seen), torch.from_numpy(table[:, 1, :1]).long())
    other = make_table("local", layers=2, steps=3, rows=2, experts=16, top_k=3, seed=2)
    forced.use(other)
    forced.start(0)
    seen.clear()
    run.step(states, [1, 2])
    assert torch.equal(torch.stack(seen), torch.from_numpy(other[:, 0]).long())
    forced.start(0)
    forced.live(1)
    with forced.decoding():
        ids, _ = forced(0, torch.zeros(2, 3), torch.zeros(2, 3))
    assert torch.equal(ids[0], torch.from_numpy(other[0, 0, 0]).long())
    assert (ids[1] == -1).all()  # of no sequence
    with forced.decoding(), pytest.raises(ValueError, match="a step of 3 rows, the table has 2"):
        forced(0, torch.zeros(3, 3), torch.zeros(3, 3))
    before = run.counts()
    run.force(None)
    run.step(states[:1], [1])
    assert run.counts().since(before) == Counts(cpu=6)


def test_experts_of_blocks_with_code_of_their_own_cannot_be_forced(tmp_path: Path) -> None:
    loaded = load_synthetic(SMALL, threads=1)
    model: Any = loaded.runnable.model
    run = ModulesRun(model)
    run._blocks.pop()
    with pytest.raises(InputError, match="use --routing router"):
        run.force(ForcedRouting(make_table("local", layers=2, steps=1, rows=1, experts=16, top_k=3), "cpu"))


def test_quartiles() -> None:
    assert spread([3.0]) == {"median": 3.0, "q1": 3.0, "q3": 3.0, "rounds": [3.0]}
    found = spread([5.0, 1.0, 4.0, 2.0, 3.0])
    assert (found["median"], found["q1"], found["q3"]) == (3.0, 2.0, 4.0)


def test_a_step_of_more_rows_than_the_model_takes() -> None:
    run = ModulesRun(load_synthetic(SMALL, threads=1).runnable.model)
    run.most_rows = 1
    assert run.rows_of(3) == 3
    with pytest.raises(InputError, match="--batch 2: this model runs at most 1 sequences a step"):
        Bench(run, Series(batches=(1, 2)), 64)


RATES = Rates(
    cpu=[100.0, 102.0, 104.0], pcie=[50.0], copy=[55.0], cpu_of_both=[78.0], pcie_of_both=[48.0],
    gpu=[3600.0], launch_us=[1.1],
)  # fmt: skip


def flagship(**changes: Any) -> Bound:
    inventory = families.inventory(resolve_model("synthetic:qwen3.8-flash-next-125b").config)
    assert inventory is not None
    given: dict[str, Any] = {
        "inventory": inventory,
        "hardware": hardware_of(RATES, "NVIDIA H200", 141 * 10**9),
        "fmt": parse_format("int4"),
        "dense": "int8",
        "slots": int(0.27 * 48 * 512),
        "vram": 24 << 30,
    }
    return Bound(**(given | changes))


def test_the_bound_takes_what_the_run_measured() -> None:
    bound = flagship()
    assert bound.hardware.ram.read_gb_s.value == 102.0
    assert bound.hardware.cpu.expert_share.value == 1.0
    local, uniform = (bound.decode(name, 1, 1024) for name in ("local", "uniform"))
    assert local.tok_s > 1.3 * uniform.tok_s
    assert uniform.hit_rate == pytest.approx(0.27, abs=0.01)
    terms = {term.name: term for term in uniform.terms}
    # All but the hits, CPU and PCIe in proportion to what both have at once.
    missing = 0.73 * 48 * 10 * 2.765e6
    assert terms["experts, CPU"].ms == pytest.approx(missing / 126e9 * 1e3, rel=0.02)
    assert terms["experts, PCIe"].bytes / terms["experts, CPU"].bytes == pytest.approx(48 / 78, rel=0.01)
    assert bound.decode("router", 1, 1024).tok_s == uniform.tok_s
    slower = flagship(hardware=hardware_of(Rates(cpu=[50.0]), "NVIDIA H200", 141 * 10**9))
    assert slower.decode("uniform", 1, 1024).tok_s < uniform.tok_s


def test_counted_hits_take_the_place_of_those_of_the_plan() -> None:
    bound = flagship()
    best = bound.decode("local", 1, 1024)
    assert bound.decode("local", 1, 1024, hits=best.hit_rate).tok_s == pytest.approx(best.tok_s)
    assert bound.decode("local", 1, 1024, hits=0.4).tok_s < best.tok_s
    assert bound.decode("local", 1, 1024, hits=1.0).tok_s > best.tok_s


def test_a_bound_without_a_share_of_pcie() -> None:
    alone = flagship(shared=False).decode("uniform", 1, 1024)
    both = flagship().decode("uniform", 1, 1024)
    assert alone.tok_s < both.tok_s
    cpu_term = next(term for term in alone.terms if term.name == "experts, CPU")
    assert cpu_term.gb_s == 102.0


def test_the_bound_of_a_cpu_alone() -> None:
    bound = flagship(hardware=hardware_of(RATES, None), slots=0, dense="float32", vram=None)
    found = bound.decode("uniform", 1, 1024)
    assert {term.name for term in found.terms} == {"dense layers, CPU", "keys and values", "experts, CPU"}
    assert bound.prefill(512).way == "CPU"


def test_reads_go_through_all_layers(generator: torch.Generator) -> None:
    run = ModulesRun(load_synthetic(SMALL, threads=1).runnable.model)
    layers = [op.backend for op in run._ops]
    reads = CpuReads(layers)
    total = sum(layer.nbytes for layer in layers)
    assert reads.run(10 * total) == total
    each = layers[0].nbytes // 16
    assert reads.run(3 * each) == 3 * each
    assert reads.run(layers[0].nbytes) == layers[0].nbytes  # over the end of a layer
    assert reads._layer == 1
    assert reads.gb_s() > 0


def test_threads_are_taken_away_until_reads_fit() -> None:
    class Made:
        """Twelve GB/s a thread."""

        def run(self, nbytes: int = 0) -> int:
            return 0

        def gb_s(self) -> float:
            return 12.0 * cpu.threads()

    made: Any = Made()
    assert threads_within(25.0, made, 4) == 2
    assert cpu.threads() == 2
    assert threads_within(5.0, made, 3) == 1
    assert threads_within(100.0, made, 4) == 4


def test_a_gpus_plain_read_reads_everything(generator: torch.Generator) -> None:
    pytest.importorskip("triton")
    from hetero.ops.gpu.read import plain_read

    device = "cuda" if torch.cuda.is_available() else "cpu"
    for words in (1, 1000, 40_000):
        memory = torch.randint(1 << 30, (words,), generator=generator).to(device)
        assert int(plain_read(memory, device).sum()) == int(memory.sum())


@pytest.mark.parametrize(
    ("family", "fused"), [("qwen3_moe", True), ("qwen4_exp", True), ("deepseek_v3", False)]
)
def test_the_options_are_variables_of_the_shipped_rules(family: str, fused: bool) -> None:
    gpu = str(default_rules_for(family, True))
    assert bench_options.fuses(gpu) == fused
    assert not bench_options.fuses(str(default_rules_for(family, False)))
    given: dict[str, Any] = {"cache": "8GiB", "shares": (0.25, 0.5)} if fused else {}
    dense = "int8" if fused else "bfloat16"
    options = Options(
        resolve_model("synthetic:qwen3-30b-a3b"), {}, parse_format("int4"), dense, True, gpu, **given
    )
    bench_options.check_options(options)
    found = bench_load._Benching(options, Series(), None, print, print)._overrides()  # type: ignore[arg-type]
    wanted = {"experts": "int4 g32"}
    more = {"dense": "int8", "cache": "8GiB", "share": "0.25", "defer": "0"}
    assert found == (wanted | more if fused else wanted)
    options = replace(options, overrides={"experts": "int8"}, dense="bfloat16", shares=(None, 0.5))
    if fused:
        found = bench_load._Benching(options, Series(), None, print, print)._overrides()  # type: ignore[arg-type]
        assert found == more | {"experts": "int8", "dense": "bf16", "share": "auto"}
    else:
        with pytest.raises(InputError, match="--share: of fused layers"):
            bench_options.check_options(options)
        with pytest.raises(InputError, match="--dense int8: must be one of bfloat16 with"):
            bench_options.check_options(replace(options, shares=(None,), dense="int8"))


def test_peak_memory_is_looked_at_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    free = [100, 97, 91, 95]  # before, and then

    def told() -> int:
        return free.pop(0) if len(free) > 1 else free[0]

    monkeypatch.setattr(bench_memory, "_POLL_S", 0.005)
    memory = Memory(8, told)
    with memory.watched():
        while len(free) > 1:
            time.sleep(0.001)
    assert memory.peak == 9
    assert memory.look() == 5
    assert memory.source == "NVML"


def test_a_result_of_a_gpu_is_shown() -> None:
    series = {
        "routing": "local", "rows": 1, "tok_s": spread([120.0, 121.0]), "share": None,
        "step_ms": spread([8.2]), "prompt_s": spread([0.5]), "hit_rate": 0.81,
        "bytes_a_step": {"gpu": 1.1e9, "pcie": 1e8, "cpu": 2e8, "moved": 0},
        "bound": {"tok_s": 150.0, "share": 0.8, "binds": "experts, CPU"},
        "cpu_work_us_a_layer": spread([50.0]), "handoff_us_a_layer": spread([8.0]), "launches": 1210,
    }  # fmt: skip
    slow = {**series, "tok_s": spread([90.0])}
    result = {
        "model": "big", "layers": None, "synthetic": True, "hardware": {"cpu": "C", "gpu": "G", "date": "D"},
        "options": {"format": "int4 g32", "dense": "int8"}, "cpu": {"threads": 15},
        "rates": {name: spread(rounds) for name, rounds in vars(RATES).items()},
        "decode": [series], "serial": [slow], "prefill": [], "dense_ms": {"1": 3.1},
        "dense_launches": {"1": 812}, "tables": {},
        "gpu_memory": {"cap": 24 << 30, "peak": 25 << 30, "under_cap": False, "used_by_others_before": 1},
        "notes": ["a note"],
        "predicted": [
            {"hardware": "desk", "layers": 4, "fits": True, "decode": [{"routing": "local", "tok_s": 90.0}],
             "expected": [{"routing": "local", "tok_s": 60.0}]},
            {"hardware": "toy", "layers": None, "fits": False, "decode": [], "expected": []},
        ],
        "plan": {
            "memory": [{"tier": "GPU memory", "planned": 24 << 30, "measured": 25 << 30, "ratio": 0.96}],
            "slots": {"planned": 6000, "measured": 5000},
            "decode": [{"routing": "local", "rows": 1, "expected_tok_s": 100.0, "measured_tok_s": 80.0}],
        },
    }  # fmt: skip
    console = Console(width=220, file=io.StringIO())
    show(result, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for words in (
        "120.5", "80% of 150.0", "81%", "1.10/0.10/0.20", "50.0", "8.0", "1210",
        "dense half alone, 1 rows: 3.10 ms, 812 launches",
        "25.0 GiB of 24.0 GiB: OVER THE CAP", "34% more tokens when all work at once", "note: a note",
        "both at once 78", "on desk, 4 layers: 60 tok/s local (at most 90)", "on toy: does not fit",
        "plan: GPU memory 24.0 GiB, measured 25.0 GiB (-4.0%)",
        "6000 experts in GPU memory, measured 5000 (+20.0%)",
        "plan: local routing, 1 rows: 100.0 tok/s, measured 80.0 (+25.0%)",
    ):  # fmt: skip
        assert words in text, words


def test_predictions_of_machines_that_lack_memory() -> None:
    model = resolve_model("synthetic:qwen3.8-flash-next-125b")
    inventory = families.inventory(model.config)
    assert inventory is not None
    rules = str(default_rules_for("qwen4_exp", True))
    options = Options(model, model.config, parse_format("int4"), "int8", True, rules, vram=24 << 30)

    def told(name: str, **changes: Any) -> list[dict[str, Any]]:
        return predicted("m", load_hardware(name), inventory, replace(options, **changes), Series())

    small, roomy = told("rtx4090-7950x")
    assert (small["hardware"], roomy["hardware"]) == ("rtx4090-7950x", "rtx4090-7950x with 128.0 GiB")
    assert roomy["expected"][0]["tok_s"] > 3 * small["expected"][0]["tok_s"]
    assert [one["hardware"] for one in told("h200-xeon16")] == ["h200-xeon16"]
    (none, more) = told("rtx4090-7950x", vram=4 << 30)
    assert (none["fits"], more["fits"]) == (False, False)
    assert "GPU memory" in none["why_not"]


def test_what_a_cap_of_the_cpu_has_come_to() -> None:
    class Reads:
        def gb_s(self) -> float:
            return 20.0

    reads: Any = Reads()
    assert bench_load._held(3, 65.0, reads).endswith("3 threads, which read 20 GB/s now (--cpu-gbps-cap 65)")
    assert "more than --cpu-gbps-cap 5, but there are no fewer threads" in bench_load._held(1, 5.0, reads)


def test_a_table_of_plans_and_what_was_measured(tmp_path: Path) -> None:
    result = tmp_path / "one.json"
    plan: dict[str, Any] = {
        "memory": [{"tier": "main memory", "planned": 102 << 30, "measured": 100 << 30, "ratio": 1.03}],
        "slots": {"planned": 104, "measured": 100},
        "decode": [{"routing": "local", "rows": 1, "expected_tok_s": 116.0, "measured_tok_s": 100.0}],
    }
    plan["moe_layers"] = 10
    terms = {"dense layers, GPU memory": 1.0, "250 kernels": 0.5}
    plan["decode"][0]["terms"] = [{"name": name, "ms": ms} for name, ms in terms.items()]
    series = {
        f"{part}_us_a_layer": {"median": us}
        for part, us in (("cpu_work", 300), ("cpu_waits", 490), ("handoff", 10))
    }
    result.write_text(
        json.dumps(
            {
                "model": "m", "layers": 4, "plan": plan, "dense_ms": {"1": 1.6},
                "decode": [{**series, "step_ms": {"median": 9.0}}],
            }
        )
    )  # fmt: skip
    (tmp_path / "two.json").write_text("{}")
    script = Path(__file__).parents[2] / "scripts" / "plan_against.py"
    command = [
        sys.executable,
        str(script),
        *map(str, (result, tmp_path / "two.json", tmp_path / "none.json")),
    ]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[2:]
    assert lines[0] == "| m, 4 layers | main memory, GiB | 102 | 100 | +2.0% |"
    assert lines[1].endswith("| +4.0% * |")
    assert lines[2].endswith("| 116 | 100 | +16.0% * |")
    assert "dense half, local routing, 1 rows, ms | 1.5 | 1.6 |" in lines[3]
    assert "in the layers, local routing, 1 rows, ms | 8.621 | 8 |" in lines[4]
    assert "no plan in it" in lines[5]
    assert "cannot be read" in lines[6]


def test_options_of_a_gpu_are_kept_from_a_cpu(shape: Path) -> None:
    ref = resolve_model(f"synthetic:{shape}")
    options = Options(ref, SMALL, parse_format("int4"), "float32", False, "default-cpu", cache="0")
    with pytest.raises(InputError, match="--cache: of a GPU"):
        bench_options.check_options(options)


def test_a_table_for_another_model_is_refused(tmp_path: Path, shape: Path) -> None:
    path = tmp_path / "other.npy"
    save_table(path, make_table("local", layers=2, steps=4, rows=1, experts=64, top_k=3))
    done = call(f"synthetic:{shape}", *SHORT, "--routing", f"trace:{path}")
    assert done.exit_code == 2
    assert "the model has 16 experts" in done.stderr
