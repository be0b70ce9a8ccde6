"""Terms of a plan against sums by hand; what does not fit is refused with numbers."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from math import isclose
from typing import Any

import pytest

from hetero.core import InputError, MachineError
from hetero.formats import expert_bytes, parse_format
from hetero.plan import workspace
from hetero.plan.as_json import as_dict
from hetero.plan.hardware import hardware_names, load_hardware, parse_hardware
from hetero.plan.planner import family_format, make_plan
from hetero.plan.prefill import prefill
from hetero.plan.roofline import both_rates, decode, expected_tokens
from hetero.plan.routing import Routing, distinct, misses, touched
from hetero.plan.rulefile import rule_file
from hetero.plan.tiers import (
    CUDA_CONTEXT,
    EXPERT_WORKSPACE,
    GRAPHS,
    PROCESS,
    activations,
    all_expert_bytes,
    dense_bytes,
    lay_out,
    sequences_bytes,
)
from hetero.plan.today import GRAPHED_TOKENS, plan_today
from hetero.plan.workspace import (
    CHUNK,
    CONTEXT,
    LATER,
    fused_dense_bytes,
    fuses,
    host_bytes,
    workspace_bytes,
)
from hetero.rules.embedding_options import DEFAULT_ROWS_RAM
from tests.plan.example import GIB, asked, flagship, machine, shape, small

LOCAL, UNIFORM = Routing("local"), Routing("uniform")


def terms(found: Any) -> dict[str, float]:
    return {t.name: t.ms for t in found.terms}


def test_experts_of_the_flagship() -> None:
    model = flagship()
    one = expert_bytes(parse_format("int4"), 2560, 640, has_gate=True, has_bias=False)
    assert one == 3 * 2560 * 640 * 4.5 / 8
    assert all_expert_bytes(model, parse_format("int4")) == 48 * 512 * one
    assert round(all_expert_bytes(model, parse_format("int4")) / GIB, 1) == 63.3


def test_dense_bytes_in_eight_bits() -> None:
    model = small()
    matrices = model.matrix_params
    # Queries, keys, values, output of two layers, and the head.
    assert matrices == 2 * (64 * 64 + 2 * 32 * 64 + 64 * 64) + 1000 * 64
    assert dense_bytes(model, "int8") == matrices * 8.5 / 8 + 2 * (model.dense_params - matrices)
    assert dense_bytes(model, "float32") == 2 * dense_bytes(model, "bfloat16")


def test_gpu_memory_is_filled_with_experts() -> None:
    model, request = flagship(), asked(vram=24 * GIB, context=1024)
    layout = lay_out(model, machine(ram=128 * GIB), request, "bfloat16")
    assert layout.gpu is not None
    before = (
        CONTEXT
        + workspace_bytes(model, 1024)
        + LATER
        + fused_dense_bytes(model, "bfloat16")
        + sequences_bytes(model, request, 2)
    )
    one = all_expert_bytes(model, request.expert_format) / (48 * 512)
    assert layout.slots == (24 * GIB - before) // one
    assert (layout.fused, layout.chunk) == (True, 1024)
    assert next(i.bytes for i in layout.ram.items if i.name == "embeddings") == host_bytes(model) == 2 * GIB
    assert layout.on_gpu == layout.slots / (48 * 512)
    assert 24 * GIB - one < layout.gpu.used <= 24 * GIB
    assert (layout.in_ram, layout.copies, layout.on_disk) == (1.0, True, 0.0)


def test_dense_weights_as_the_rules_have_them() -> None:
    model = flagship()
    # Without the embeddings, of which a token reads a row in main memory.
    assert fused_dense_bytes(model, "bfloat16") == 2 * (model.dense_params - 248320 * 2560)
    by_kind = model.by_kind()
    kept = by_kind["router"] + by_kind["norms"] + by_kind["hyper-connections"]
    # Those, and what says how fast a state decays or how much a shared expert counts, are not packed.
    packed = fused_dense_bytes(model, "int8")
    assert packed > 2 * kept + (model.dense_params - 248320 * 2560 - kept) * 8.5 / 8
    assert packed < 1.01 * (2 * kept + (model.dense_params - 248320 * 2560 - kept) * 8.5 / 8)
    assert workspace.streams(model) == 4
    assert workspace.streams(small()) == 1
    sizes = [fused_dense_bytes(model, dense) for dense in ("int4", "fp8", "int8", "bfloat16")]
    assert sizes == sorted(sizes)
    assert not fuses(model, "float32")
    assert not fuses(replace(model, model_type="another"), "int8")


def test_what_a_run_under_a_cap_had_left_for_experts() -> None:
    """The 125B model within 24 GiB of an H200 (docs/perf.md): of the driver's peak, all but experts, and the
    cap less that less the margin."""
    model, request = flagship(), asked(vram=24 * GIB, context=8208, dense="int8")
    layout = lay_out(model, machine(ram=128 * GIB), request, "int8")
    besides = 24_108_400_640 - 5503 * 2_764_800
    assert layout.slots == pytest.approx((24 * GIB - LATER - besides) / 2_764_800, rel=0.03)


def test_experts_that_no_gpu_reads_stay_on_the_cpu() -> None:
    layout = lay_out(flagship(), machine(ram=1024 * GIB), asked("f32", vram=24 * GIB), "int8")
    assert (layout.fused, layout.slots, layout.on_gpu, layout.in_ram) == (True, 0, 0.0, 1.0)


def test_prompts_are_read_in_smaller_chunks_where_memory_is_short() -> None:
    model = flagship()
    tight = lay_out(model, machine(ram=128 * GIB), asked(vram=8 * GIB), "int8")
    assert tight.chunk < CHUNK
    assert tight.gpu is not None
    assert tight.gpu.used <= 8 * GIB
    assert lay_out(model, machine(ram=128 * GIB), asked(vram=16 * GIB), "int8").chunk == CHUNK


def test_experts_that_main_memory_lacks_are_not_copied_and_then_on_disk() -> None:
    model = flagship()
    tight = lay_out(model, machine(ram=64 * GIB), asked(vram=24 * GIB), "int8")
    assert not tight.copies
    assert tight.on_disk == 0.0
    assert isclose(tight.in_ram, 1 - tight.on_gpu)
    low = lay_out(model, machine(ram=32 * GIB), asked(vram=24 * GIB), "int8")
    assert low.on_disk > 0.2
    assert low.ram.used <= 32 * GIB
    experts = sum(i.bytes for t in (low.ram, low.disk) for i in t.items if i.name == "experts")
    assert isclose(experts, low.expert_bytes * (1 - low.on_gpu), rel_tol=1e-6)
    assert any(
        "do not fit memory" in w for w in make_plan("m", model, machine(ram=32 * GIB), asked()).warnings
    )


def test_a_small_model_lies_on_the_gpu_whole() -> None:
    layout = lay_out(small(), machine(), asked(), "bfloat16")
    assert (layout.on_gpu, layout.slots) == (1.0, 16)
    assert decode(small(), machine(), asked(), layout, UNIFORM).hit_rate == 1.0


def test_terms_of_a_step() -> None:
    model, hardware = flagship(), machine(ram=128 * GIB)
    request = asked(vram=24 * GIB, context=1024)
    layout = lay_out(model, hardware, request, "bfloat16")
    found = decode(model, hardware, request, layout, UNIFORM)
    step = 48 * 10 * 3 * 2560 * 640 * 4.5 / 8
    # Half of 100 GB/s and 25 GB/s together.
    missed = step * (1 - layout.on_gpu)
    assert both_rates(hardware) == (50.0, 25.0)
    assert isclose(terms(found)["experts, CPU"], missed / 75e9 * 1e3, rel_tol=1e-6)
    assert isclose(terms(found)["experts, PCIe"], missed / 75e9 * 1e3, rel_tol=1e-6)
    assert isclose(terms(found)["experts, GPU memory"], step * layout.on_gpu / 1e12 * 1e3, rel_tol=1e-6)
    assert isclose(terms(found)["dense layers, GPU memory"], model.read_params * 2 / 1e12 * 1e3, rel_tol=1e-6)
    assert isclose(terms(found)["1200 launches"], 6.0)
    assert isclose(terms(found)["hand-off"], 48 * 0.02)
    # Those that run at the same time count once.
    alone = [t.ms for t in found.terms if not t.beside]
    assert isclose(found.step_ms, sum(alone) + missed / 75e9 * 1e3, rel_tol=1e-6)
    assert isclose(found.tok_s, 1e3 / found.step_ms)
    assert found.binds in ("experts, CPU", "experts, PCIe")
    assert found.hit_rate == layout.on_gpu


def test_today_of_a_family_without_fused_layers_has_no_cache_and_no_graph() -> None:
    model, hardware = replace(flagship(), model_type="another"), machine(ram=256 * GIB)
    request = asked(vram=24 * GIB, context=1024)
    layout = lay_out(model, hardware, request, "int8")
    now = plan_today(model, hardware, request, layout, [LOCAL, UNIFORM])
    assert [step.routing for step in now.steps] == ["local", "uniform"]
    one = 3 * 2560 * 640 * 4.5 / 8
    # Dense layers in bfloat16 leave room for the experts of some layers; all layers have as many.
    before = CUDA_CONTEXT + GRAPHS + activations(model, 512, 2) + sequences_bytes(model, request, 2)
    count = int((24 * GIB - before - dense_bytes(model, "bfloat16")) // (512 * one))
    assert now.gpu_layers == tuple(range(count))
    assert (now.dtype, now.tier, now.ram_share, now.why_not) == ("bfloat16", "ram", 1.0, None)
    found = terms(now.decode)
    assert isclose(found["experts, CPU"], (48 - count) * 10 * one / 50e9 * 1e3, rel_tol=1e-6)
    assert isclose(found["experts, GPU"], count * 10 * one / 1e12 * 1e3, rel_tol=1e-6)
    assert isclose(found["copies to the CPU and back"], (48 - count) * 0.06)
    assert isclose(found["dense layers, GPU memory"], model.read_params * 2 / 1e12 * 1e3, rel_tol=1e-6)
    operations = 12 * (68 + 41) + 36 * (117 + 41)
    assert isclose(found[f"{operations} eager operations"], operations * 0.01)


def test_modules_with_plain_keys_and_values_are_a_graph_for_one_sequence() -> None:
    plain = pytest.importorskip("hetero.engine.gpu.plain")
    assert GRAPHED_TOKENS == plain.LONGEST
    model = replace(small(), model_type="another")
    names: dict[tuple[int, int], set[str]] = {}
    for context, streams in ((1024, 1), (8192, 1), (1024, 2)):
        request = asked(context=context, concurrency=streams)
        plan = make_plan("m", model, machine(), request)
        names[context, streams] = {term.name for term in plan.expected[0].terms}
        assert plan.today.fused is None
    operations = 2 * 68
    assert f"{operations} kernels of modules in a graph" in names[1024, 1]
    assert f"{operations} eager operations" in names[8192, 1] & names[1024, 2]
    # Layers with recurrent states are not, nor is anything on the CPU alone.
    hybrid = make_plan("m", replace(flagship(), model_type="another"), machine(ram=256 * GIB), asked())
    assert "6996 eager operations" in {term.name for term in hybrid.expected[0].terms}
    alone = make_plan("m", model, machine(gpu=False), asked())
    assert f"{operations} eager operations" in {term.name for term in alone.expected[0].terms}


def test_fused_layers_are_the_plan_itself() -> None:
    hardware, request = machine(ram=256 * GIB), asked(vram=24 * GIB, context=1024)
    plan = make_plan("m", flagship(), hardware, request)
    assert (plan.today.fused, plan.waits, plan.fits) == ("qwen-gpu", (), True)
    for bound, expected in zip(plan.decode, plan.expected, strict=True):
        assert bound.routing == expected.routing
        assert 0.4 * bound.tok_s < expected.tok_s < bound.tok_s
    assert (plan.today.dtype, plan.today.tier, plan.today.why_not) == ("bfloat16", "ram", None)
    text = rule_file(plan)
    assert "extends: qwen-gpu" in text
    assert f"dense: {'int8' if plan.layout.dense == 'int8' else 'bf16'}" in text
    # Drafts are still to come, and neither experts on disk nor other types of dense layers are fused.
    drafts = make_plan("m", flagship(), hardware, replace(request, draft=2))
    assert drafts.expected == plan.expected
    assert drafts.waits == ("drafts: there is no speculative decoding",)
    assert make_plan("m", flagship(), machine(ram=64 * GIB), request).today.fused is None
    assert make_plan("m", flagship(), hardware, replace(request, dense="float16")).today.fused is None
    assert make_plan("m", flagship(), machine(gpu=False, ram=256 * GIB), asked()).today.fused is None


def test_today_experts_beyond_memory_are_on_disk() -> None:
    model = flagship()
    plain = replace(model, weights=tuple(w for w in model.weights if w.kind != "n-gram table"))
    plan = make_plan("m", plain, machine(gpu=False, ram=48 * GIB), asked())
    assert (plan.today.tier, plan.today.why_not) == ("disk", None)
    assert 0.2 < plan.today.ram_share < 0.9
    assert "experts, disk" in terms(plan.today.decode)
    assert "tier: disk" in rule_file(plan)
    assert "tier: disk" not in rule_file(make_plan("m", plain, machine(gpu=False, ram=128 * GIB), asked()))
    # A format without kernels on the GPU stays on the CPU.
    other = make_plan("m", plain, machine(ram=128 * GIB), asked("mxfp4", vram=24 * GIB))
    assert other.today.gpu_layers == ()


def test_cpu_alone() -> None:
    hardware, model = machine(gpu=False), small()
    layout = lay_out(model, hardware, asked(ram=GIB + GIB // 2), "float32")
    assert layout.gpu is None
    items = {i.name: i.bytes for i in layout.ram.items}
    assert items["process"] == PROCESS
    assert items["dense layers (float32)"] == 4 * model.dense_params
    assert items["experts"] == all_expert_bytes(model, parse_format("int4"))
    assert items["workspace"] >= EXPERT_WORKSPACE
    found = terms(decode(model, hardware, asked(), layout, LOCAL))
    assert set(found) == {"dense layers, CPU", "keys and values", "experts, CPU"}
    assert isclose(found["dense layers, CPU"], 4 * model.read_params / 1e11 * 1e3, rel_tol=1e-4)


def test_packed_dense_layers_are_bfloat16_where_no_layers_are_fused() -> None:
    model, hardware = flagship(), machine(gpu=False, ram=256 * GIB)
    tiers = {
        dense: make_plan("m", model, hardware, asked(dense=dense)).today.tiers
        for dense in ("bfloat16", "int8", "fp8")
    }
    assert tiers["int8"] == tiers["bfloat16"] == tiers["fp8"]
    assert "dense layers (bfloat16)" in [item.name for item in tiers["int8"][0].items]


def test_measured_rates_of_both_at_once_are_taken() -> None:
    both = {"cpu_gb_s": 78.0, "pcie_gb_s": 48.0, "source": "a test"}
    pcie = {"copy_gb_s": {"measured": 55, "source": "t"}, "read_gb_s": {"measured": 51, "source": "t"}}
    hardware = machine(pcie={**pcie, "both": both})
    assert both_rates(hardware) == (39.0, 48.0)
    # Memory that has nothing left for PCIe is not split.
    tight = machine(pcie={**pcie, "ram_limit_gb_s": 50.0})
    assert both_rates(tight) == (0.0, 51.0)
    slow = machine(
        pcie={
            "copy_gb_s": {"measured": 9, "source": "t"},
            "read_gb_s": {"measured": 8, "source": "t"},
            "ram_limit_gb_s": 60.0,
        }
    )
    assert both_rates(slow) == (50.0, 0.0)


def test_windows_share_experts_as_published() -> None:
    # 512 experts, top-10, routed at random: 1.98, 2.94, 3.88, 5.71 times the experts of one token.
    sizes = [touched(UNIFORM, 512, 10, rows=n) / 10 for n in (2, 3, 4, 6)]
    assert [round(s, 2) for s in sizes] == [1.98, 2.94, 3.88, 5.71]
    assert isclose(distinct(8, 2, 2), 8 * (1 - 0.75**2))
    assert touched(LOCAL, 512, 10, rows=2) < 10 * 1.6
    assert touched(LOCAL, 512, 10) == pytest.approx(10)
    assert touched(UNIFORM, 512, 10, streams=8) == pytest.approx(distinct(512, 10, 8))


@pytest.mark.parametrize("routing", [LOCAL, UNIFORM])
def test_misses_fall_with_the_cache_and_grow_with_rows(routing: Routing) -> None:
    shares = [i / 20 for i in range(21)]
    for rows, streams in ((1, 1), (4, 1), (1, 8), (4, 8)):
        found = [misses(routing, s, 512, 10, rows=rows, streams=streams) for s in shares]
        assert all(a >= b - 1e-9 for a, b in pairwise(found))
        assert found[-1] == 0.0
        assert found[0] <= min(512, 10 * rows * streams) + 1e-9
    assert misses(routing, 0.2, 512, 10, rows=4) >= misses(routing, 0.2, 512, 10)


def test_hit_rates_by_the_published_reuse() -> None:
    assert LOCAL.hit_rate(1.0, 512, 10) == pytest.approx(1.0)
    assert LOCAL.hit_rate(0.0, 512, 10) == 0.0
    assert LOCAL.hit_rate(10 / 512, 512, 10) == pytest.approx(0.45 + 0.2 * 10 / 512)
    assert LOCAL.hit_rate(24 / 512, 512, 10) == pytest.approx(0.80 + 0.2 * 24 / 512)
    # Eight streams need eight times the room.
    assert LOCAL.hit_rate(80 / 512, 512, 10, 8) == pytest.approx(0.45 + 0.2 * 80 / 512)
    assert UNIFORM.hit_rate(0.27, 512, 10) == 0.27


def test_measured_counts_rank_the_experts() -> None:
    counts = ((6.0, 2.0, 1.0, 1.0), (5.0, 3.0, 1.0, 1.0))
    routing = Routing("counts", counts)
    assert routing.hit_rate(2 / 8, 4, 2) == pytest.approx(11 / 20)
    assert routing.hit_rate(0.0, 4, 2) == 0.0
    assert routing.hit_rate(1.0, 4, 2) == 1.0
    model = flagship()
    skewed = tuple(tuple(1.0 / (e + 1) for e in range(512)) for _ in range(48))
    plan = make_plan("m", model, machine(ram=128 * GIB), asked(vram=24 * GIB, counts=skewed))
    assert [d.routing for d in plan.decode] == ["counts", "local", "uniform"]
    assert 0.7 < plan.decode[0].hit_rate < 0.95
    with pytest.raises(
        InputError, match=r"counts of 1 layers with \[2\] experts; the model has 48 with \[512\]"
    ):
        make_plan("m", model, machine(), asked(counts=((1.0, 2.0),)))


def test_drafts_pay_with_hits_and_not_without() -> None:
    model, hardware = flagship(), machine(ram=128 * GIB)
    assert expected_tokens(0, 0.7) == 1
    assert isclose(expected_tokens(3, 0.5), 1.875)
    for routing, gains in ((LOCAL, True), (UNIFORM, False)):
        layout = lay_out(model, hardware, asked(vram=24 * GIB), "int8")
        plain = decode(model, hardware, asked(vram=24 * GIB), layout, routing)
        drafted = decode(model, hardware, asked(vram=24 * GIB, draft=3), layout, routing)
        assert (drafted.tok_s > plain.tok_s) is gains
        assert "3 drafts" in terms(drafted)


def test_prefill_streams_every_expert_in_the_time_of_a_copy() -> None:
    model, hardware = flagship(), load_hardware("h200-xeon16")
    request = asked(vram=24 * GIB)
    layout = lay_out(model, hardware, request, "int8")
    assert layout.chunk == CHUNK
    twice = prefill(model, hardware, request, layout, 8192)
    layout = replace(layout, chunk=8192)
    ways = {w.way: w for w in prefill(model, hardware, request, layout, 8192)}
    assert max(w.ms for w in twice) > 1.9 * ways["all experts over PCIe, layer by layer"].ms
    whole = ways["all experts over PCIe, layer by layer"]
    assert round(whole.ms / 1e3, 2) == 1.24
    assert round(whole.tok_s, -2) == 6600
    # A short prompt touches nearly every expert too, and is bound by CPU and PCIe together.
    short = prefill(model, hardware, request, layout, 512)[0]
    assert short.way == "experts split between CPU and PCIe"
    assert 0.3 < short.ms / 1e3 < 0.7
    alone = prefill(
        small(), machine(gpu=False), asked(), lay_out(small(), machine(gpu=False), asked(), "float32"), 600
    )
    assert [w.way for w in alone] == ["CPU"]


def test_what_does_not_fit_is_refused_with_numbers() -> None:
    model = flagship()
    with pytest.raises(MachineError, match=r"needs .* GiB of GPU memory .*; 6\.0 GiB is available") as caught:
        make_plan("m", model, machine(), asked(vram=6 * GIB, context=1024, dense="int8"))
    assert caught.value.exit_code == 3
    with pytest.raises(MachineError, match=r"tenth of its experts .*; 6\.0 GiB is available"):
        make_plan("m", model, machine(ram=6 * GIB), asked(vram=8 * GIB))
    with pytest.raises(MachineError, match=r"main memory \(process .*dense layers"):
        make_plan("m", model, machine(gpu=False, ram=8 * GIB), asked())
    with pytest.raises(MachineError, match="keys, values and states"):
        make_plan("m", model, machine(), asked(vram=24 * GIB, context=262144, concurrency=8))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context": 0}, "--ctx 0: must be from 1"),
        ({"context": -5}, "--ctx -5"),
        ({"context": 300_000}, "--ctx 300000: the model attends to at most 262144 tokens"),
        ({"concurrency": 0}, "--concurrency 0"),
        ({"draft": -1}, "--draft -1: must be from 0"),
        ({"accept": 1.5}, "--accept 1.5: must be from 0 to 1"),
        ({"dense": "int2"}, "--dense int2: must be one of auto, .*, int4, fp8"),
        ({"prompt": 0}, "--prompt 0"),
    ],
)
def test_requests_without_sense(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_plan("m", flagship(), machine(), asked(**changes))


def test_a_machine_without_gpu_has_no_gpu_memory() -> None:
    with pytest.raises(InputError, match="--vram: paper has no GPU"):
        make_plan("m", small(), machine(gpu=False), asked(vram=8 * GIB))


def test_a_smaller_format_where_it_must_be() -> None:
    # In int8 the experts of the flagship take 119.5 GiB.
    model, hardware = flagship(), machine(gpu=False, ram=96 * GIB)
    request = asked("int8")
    assert make_plan("m", model, hardware, request).layout.on_disk > 0
    chosen = make_plan("m", model, hardware, request, any_format=True)
    assert (str(chosen.request.expert_format), chosen.layout.on_disk) == ("int4 g32", 0.0)
    # Fused layers need all experts in main memory, and those in groups of 32 do not fit.
    desktop = machine(ram=64 * GIB)
    fused = make_plan("m", model, desktop, asked("int4", vram=24 * GIB), any_format=True)
    assert (str(fused.request.expert_format), fused.today.fused) == ("int4 g128", "qwen-gpu")
    none = make_plan("m", model, machine(ram=56 * GIB), asked("int4", vram=24 * GIB), any_format=True)
    assert (str(none.request.expert_format), none.today.fused) == ("int4 g32", None)
    roomy = make_plan("m", model, machine(gpu=False, ram=256 * GIB), request, any_format=True)
    assert (str(roomy.request.expert_format), roomy.layout.dense) == ("int8 g32", "float32")


def test_dense_layers_in_eight_bits_where_that_gains() -> None:
    model = flagship()
    plan = make_plan("m", model, load_hardware("rtx4090-7950x"), asked())
    assert (plan.layout.dense, plan.dtype) == ("int8", "bfloat16")
    assert make_plan("m", small(), machine(), asked()).layout.dense == "bfloat16"
    fixed = make_plan("m", model, load_hardware("rtx4090-7950x"), asked(dense="bfloat16"))
    assert fixed.layout.dense == "bfloat16"
    assert fixed.decode[0].tok_s < plan.decode[0].tok_s


def test_what_the_rules_lack_is_told() -> None:
    plan = make_plan("m", flagship(), machine(ram=64 * GIB), asked(draft=2))
    told = " ".join(plan.waits)
    for word in ("cache", "PCIe", "graph", "hand-off", "dense layers in int8", "drafts", "which lacks"):
        assert word in told
    alone = make_plan("m", small(), machine(gpu=False), asked())
    assert (alone.waits, alone.today.why_not) == ((), None)


@pytest.mark.parametrize("ram", [40, 64])
def test_with_the_memory_that_is_lacking_layers_are_fused(ram: int) -> None:
    model, card = flagship(), load_hardware("rtx4090-7950x")
    plan = make_plan("m", model, card, asked(ram=ram * GIB), alternatives=False)
    told = next(wait for wait in plan.waits if "which lacks" in wait)
    lacking = float(told.split("which lacks ")[1].split(" GiB")[0])
    for off, fused in ((-0.1, None), (0.1, "qwen-gpu")):
        more = asked(ram=int((ram + lacking + off) * GIB))
        assert make_plan("m", model, card, more, alternatives=False).today.fused == fused


def test_experts_on_disk_are_counted_as_the_run_has_them() -> None:
    plan = make_plan("m", flagship(), machine(ram=32 * GIB), asked(), alternatives=False)
    told = next(w for w in plan.warnings if "do not fit memory" in w)
    assert told.startswith(f"{1 - plan.today.ram_share:.0%} of the CPU's experts ")


def test_what_helps_too_little_memory_is_not_what_is_done_already() -> None:
    for dense, helps in (("bfloat16", False), ("float32", True)):
        with pytest.raises(MachineError) as failed:
            make_plan("m", flagship(), machine(gpu=False, ram=2 * GIB), asked(dense=dense))
        assert ("--dense bfloat16" in str(failed.value)) == helps


def test_a_table_that_memory_has_no_room_for_is_on_disk() -> None:
    """With 64 GiB the experts alone fit; with 96 GiB layers are fused, since all experts do beside the rows
    of the table that memory keeps."""
    desktop = make_plan("m", flagship(), machine(ram=64 * GIB), asked(vram=24 * GIB))
    assert (desktop.fits, desktop.today.table, desktop.today.tier, desktop.today.fused) == (
        True, "disk", "ram", None,
    )  # fmt: skip
    assert "table: {tier: disk}" in rule_file(desktop)
    more = make_plan("m", flagship(), machine(ram=96 * GIB), asked(vram=24 * GIB))
    assert (more.fits, more.today.table, more.today.fused) == (True, "disk", "qwen-gpu")
    assert "  table: disk" in rule_file(more)
    assert {"n-gram table, disk"} <= {term.name for term in more.expected[0].terms}
    (ram,) = (tier for tier in more.today.tiers if tier.name == "main memory")
    assert {item.name: item.bytes for item in ram.items}["rows of the n-gram table"] == DEFAULT_ROWS_RAM
    roomy = make_plan("m", flagship(), machine(ram=192 * GIB), asked(vram=24 * GIB))
    assert (roomy.today.table, roomy.layout.table) == ("ram", "ram")
    assert "  table: ram" in rule_file(roomy)


def test_rules_that_do_not_fit_are_no_plan() -> None:
    """The bound's layers fit GPU memory in 8 bits, transformers' modules do not, and main memory is too small
    for fused layers."""
    plan = make_plan("m", flagship(), machine(ram=48 * GIB, vram=10 * GIB), asked())
    assert not plan.fits
    assert plan.today.why_not is not None
    assert "GPU memory" in plan.today.why_not


def test_alternatives_are_other_plans() -> None:
    plan = make_plan("m", flagship(), machine(ram=64 * GIB), asked(vram=24 * GIB))
    by_change = {a.change: a for a in plan.alternatives}
    more = make_plan("m", flagship(), machine(ram=64 * GIB), asked(vram=32 * GIB))
    assert by_change["32.0 GiB of GPU memory"].local_tok_s == more.decode[0].tok_s
    assert by_change["experts in int8 g32"].on_disk > 0
    assert by_change["128.0 GiB of main memory"].why is None
    poor = make_plan("m", flagship(), machine(ram=16 * GIB), asked(vram=24 * GIB))
    assert any(a.why is not None and "main memory" in a.why for a in poor.alternatives)


def test_json_has_the_same_fields_always() -> None:
    told = as_dict(make_plan("m", small(), machine(), asked()))
    assert json.loads(json.dumps(told)) == told
    assert list(told) == [
        "kind",
        "version",
        "model",
        "model_type",
        "hardware",
        "figures",
        "request",
        "parameters",
        "dense",
        "dense_of_run",
        "dense_instead",
        "tiers",
        "bound_tiers",
        "experts",
        "fits",
        "decode",
        "expected",
        "today",
        "prefill",
        "expected_prefill",
        "prefill_ways",
        "alternatives",
        "waits",
        "warnings",
    ]
    assert told["tiers"][0]["items"][0] == {"name": "CUDA context and kernels", "bytes": CONTEXT}
    assert set(told["decode"][0]) == {
        "routing",
        "hit_rate",
        "step_ms",
        "tokens_per_step",
        "tok_s",
        "binds",
        "terms",
    }
    assert told["figures"]["ram.read_gb_s"] == {"value": 100.0, "basis": "measured", "source": "a test"}


@pytest.mark.parametrize("name", hardware_names())
def test_shipped_profiles(name: str) -> None:
    hardware = load_hardware(name)
    assert hardware.name == name
    for field, figure in hardware.figures():
        assert figure.source
        assert figure.basis in ("measured", "sheet", "estimate"), field
    assert hardware.cpu.expert_share.value <= 1
    for model in ("qwen3-30b-a3b", "qwen3.8-flash-next-125b"):
        from hetero.plan.families import inventory

        found = inventory(shape(model))
        assert found is not None
        assert make_plan(model, found, hardware, asked()).decode[0].tok_s > 0.1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "something"}, "'kind' must be 'hetero-hardware'"),
        ({"ram": {"bytes": -1, "read_gb_s": {"measured": 1, "source": "t"}}}, "ram.bytes"),
        ({"ram": {"bytes": 8, "read_gb_s": {"measured": 1}}}, "ram.read_gb_s.source"),
        ({"ram": {"bytes": 8, "read_gb_s": {"measured": 1, "estimate": 2, "source": "t"}}}, "give one of"),
        ({"ram": {"bytes": 8, "read_gb_s": {"peak": 1, "source": "t"}}}, "belong together"),
        ({"pcie": None}, "needs 'pcie' and 'handoff_us'"),
        ({"colour": "red"}, "colour: Extra inputs"),
    ],
)
def test_broken_profiles(change: dict[str, Any], message: str) -> None:
    data = machine().model_dump(mode="json", exclude_none=True)
    with pytest.raises(InputError, match=message):
        parse_hardware({**data, **change}, "file.json")


def test_formats_of_families() -> None:
    assert str(family_format("qwen3_moe", True)) == "int4 g32"
    assert str(family_format("mixtral", False)) == "int8 g32"
    assert replace(asked(), draft=1).draft == 1
