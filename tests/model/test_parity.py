"""Every MoE type of transformers, through the whole path, against transformers' own; writes docs/models.md.

The list of types is computed from the installed transformers, so that a type which a new version brings fails
here until it works or is refused with a reason.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.auto import modeling_auto as auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from hetero import cpu
from hetero.core import Activation, ExpertSpec, InputError
from hetero.cpu import kernel_counts, reset_kernel_counts
from hetero.engine.forward import Stepper
from hetero.engine.generate import Engine
from hetero.engine.load import load_model
from hetero.engine.request import Request
from hetero.engine.sample import SamplingParams
from hetero.inject import is_sink
from hetero.model.build import choose_class
from hetero.model.moe_types import APART, REFUSED, WHOLE_PROMPT, refusal
from hetero.ops.moe import MoeBlock
from tests.model.parity import load_ours, load_reference, prompt, relative, save_tiny, trace
from tests.model.quiet import quiet  # noqa: F401  a fixture of every test here
from tests.model.tiny_moe import SIZES, contains_moe, foreign_moe_types, module_of, moe_modules, moe_types

DOCS = Path(__file__).parents[2] / "docs" / "models.md"
TOLERANCE = 1e-4

MUST_WORK = [
    *("qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe", "qwen4_exp", "deepseek_v2", "deepseek_v3"),
    *("mixtral", "olmoe", "glm4_moe", "gpt_oss", "minimax_m2", "granitemoe", "phimoe", "ernie4_5_moe"),
    *("hunyuan_v1_moe", "dots1", "kimi_linear", "lfm2_moe", "nemotron_h"),
]
WORKING = sorted(t for t in {*moe_types(), *foreign_moe_types()} if refusal(t) is None)


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    model_type: str
    class_name: str
    block: str
    experts: str
    not_run: str
    error: float


@dataclass
class Results:
    rows: dict[str, Row] = field(default_factory=dict)


@pytest.fixture(scope="module")
def results() -> Results:
    return Results()


@pytest.mark.parametrize("model_type", WORKING)
def test_logits(model_type: str, tmp_path: Path, results: Results) -> None:
    model_class = save_tiny(model_type, tmp_path)
    ours = load_ours(tmp_path)
    want = trace(load_reference(model_type, model_class, tmp_path), prompt())
    got = trace(ours, prompt())
    assert want.prefill.std() > 0.05, "logits so flat prove nothing"
    error = max(relative(got.prefill, want.prefill), relative(got.steps, want.steps))
    assert error < TOLERANCE
    assert got.tokens == want.tokens
    results.rows[model_type] = _row(model_type, ours, error)


@pytest.mark.parametrize("model_type", WORKING)
def test_prompt_in_pieces_and_in_a_batch(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunked prefill gives the logits of one pass, except where a type is known for not doing so; a sequence
    in a batch gives those of a sequence alone."""
    # Sparse attention would choose among keys that score alike, where rounding decides.
    monkeypatch.setitem(SIZES, "index_topk", 64)
    save_tiny(model_type, tmp_path)
    model = load_ours(tmp_path)
    ids = torch.cat((prompt(1), prompt(2)), dim=-1)[0].tolist()
    with torch.inference_mode():
        whole = Stepper(model).start().advance(ids)
        pieces = Stepper(model).start()
        for start, end in ((0, 10), (10, 17), (17, 24)):
            last = pieces.advance(ids[start:end])
        assert (relative(last[None], whole[None]) < TOLERANCE) != (model_type in WHOLE_PROMPT)
        batch = model(input_ids=torch.cat((prompt(1), prompt(3)))).logits
        alone = model(input_ids=prompt(3)).logits
    assert relative(batch[1], alone[0]) < TOLERANCE


@pytest.mark.parametrize("model_type", sorted(WHOLE_PROMPT))
def test_the_engine_reads_such_a_prompt_in_one_pass(model_type: str, tmp_path: Path) -> None:
    save_tiny(model_type, tmp_path)
    runnable = load_model(tmp_path, rules="default-cpu", overrides={"experts": "f32"}, threads=1).runnable
    assert runnable.whole_prompt
    request = Request(
        tuple(prompt(4)[0].tolist()), SamplingParams(temperature=0.0), max_tokens=8, ignore_eos=True
    )
    answers = [Engine(runnable, prefill_chunk=chunk).complete(request).token_ids for chunk in (5, 512)]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("model_type", MUST_WORK)
def test_int8(model_type: str, tmp_path: Path) -> None:
    """int8 experts: near the reference, and not the reference (so that the format really was used).

    The median over tokens: where two experts score almost alike, rounding may send one token elsewhere.
    """
    model_class = save_tiny(model_type, tmp_path)
    ours = load_ours(tmp_path, experts="int8")
    got = _prefill(ours)
    want = _prefill(load_reference(model_type, model_class, tmp_path))
    errors = (got - want).norm(dim=-1) / want.norm(dim=-1)
    assert errors.min() > 1e-5
    assert errors.median() < 0.05


@pytest.mark.parametrize("experts", ["int8", "int4 g64"])
@pytest.mark.parametrize("model_type", ["qwen3_next", "gpt_oss", "nemotron_h", "inkling2_text"])
def test_every_instruction_set_gives_the_same_bits(model_type: str, experts: str, tmp_path: Path) -> None:
    """A whole model, up to 16 rows a step; a gate, biases, no gate, and a gate in torch."""
    save_tiny(model_type, tmp_path)
    isas = cpu.isas()
    reset_kernel_counts()
    found = {isa: trace(load_ours(tmp_path, experts, isa=isa), prompt()) for isa in isas}
    ran = " ".join(kernel_counts())
    for isa in isas:
        assert f".{isa}" in ran, f"{isa} did not run: {ran}"
        assert torch.equal(found[isa].prefill, found["scalar"].prefill), isa
        assert torch.equal(found[isa].steps, found["scalar"].steps), isa


def test_experts_matter(tmp_path: Path) -> None:
    """The comparison sees a single wrong weight of a single expert."""
    save_tiny("qwen3_moe", tmp_path)
    want = trace(load_ours(tmp_path), prompt())
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = next(n for n in sorted(tensors) if re.search(r"layers\.3\.mlp\.experts\.\d+\.down_proj", n))
    for other in tensors:
        if re.sub(r"experts\.\d+", "", other) == re.sub(r"experts\.\d+", "", name):
            tensors[other][0] *= 1.01
    save_file(tensors, file, {"format": "pt"})
    got = trace(load_ours(tmp_path), prompt())
    assert relative(got.prefill, want.prefill) > TOLERANCE


def test_no_type_is_left_out() -> None:
    covered = {module_of(t) for t in WORKING} | {module_of(t) for t in REFUSED}
    assert moe_modules() <= covered
    assert len(moe_modules()) >= 64
    assert set(MUST_WORK) <= set(WORKING)


def test_refusals_are_few_and_true() -> None:
    """Each reason is checked against transformers."""
    assert len(REFUSED) <= 10
    for model_type, reason in REFUSED.items():
        assert model_type in CONFIG_MAPPING_NAMES, model_type
        with pytest.raises(InputError, match=re.escape(reason)):
            choose_class(CONFIG_MAPPING[model_type]())
        if "encoder-decoder" in reason:
            assert CONFIG_MAPPING[model_type]().is_encoder_decoder
        elif "causal" in reason:
            assert model_type not in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        else:
            assert "outside transformers' experts interface" in reason
            assert not contains_moe(model_type)


def test_table(results: Results) -> None:
    """docs/models.md says what this run measured; only the measured numbers may differ."""
    absent = [t for t in WORKING if t not in results.rows]
    if absent:
        pytest.skip(f"the table needs a run of all types; {len(absent)} were not run or failed")
    text = _table([results.rows[t] for t in WORKING])
    committed = DOCS.read_text(encoding="utf-8") if DOCS.is_file() else ""
    if _masked(text) != _masked(committed):
        DOCS.write_text(text, encoding="utf-8")
    assert _masked(text) == _masked(committed), "docs/models.md was out of date and is written anew"


@torch.no_grad()
def _prefill(model: Any) -> torch.Tensor:
    return model(input_ids=prompt(), use_cache=False).logits[0].double()  # type: ignore[no-any-return]


def _row(model_type: str, model: Any, error: float) -> Row:
    blocks = sorted({m.block_class for m in model.modules() if isinstance(m, MoeBlock)})
    sinks: list[Any] = [m for m in model.modules() if is_sink(m)]
    assert sinks, "no experts were replaced"
    towers = ", ".join(f"`{name}`" for name in model.dropped_towers)
    return Row(
        model_type,
        type(model).__name__,
        ", ".join(f"`{b}`" for b in blocks) or "experts in place",
        _describe(sinks[-1].spec),
        towers or "-",
        error,
    )


def _describe(spec: ExpertSpec) -> str:
    a, plain = spec.activation, Activation()
    parts = ["own gate or norm between staged calls" if spec.staged else a.kind.value.replace("_", " ")]
    if not spec.has_gate:
        parts.append("no gate")
    if a.alpha != plain.alpha:
        parts.append(f"alpha {a.alpha:g}")
    if (a.gate_max, a.up_limit, a.act_max) != (plain.gate_max, plain.up_limit, plain.act_max):
        parts.append("clamped")
    if a.up_offset:
        parts.append(f"up + {a.up_offset:g}")
    if spec.has_bias:
        parts.append("bias")
    return ", ".join(parts)


def _table(rows: list[Row]) -> str:
    version = ".".join(transformers.__version__.split(".")[:2])
    lines = [
        "# Models",
        "",
        f"Every model type of transformers {version} with routed experts. `tests/model/test_parity.py` makes",
        "a small random checkpoint of each, loads it as `hetero run` does with experts in format f32, and",
        "compares prefill and 16 greedy steps with transformers in float32. It writes this file.",
        "",
        "The error is the largest relative norm over rows of logits. What stands under 'not run' only other",
        "inputs than text need.",
        "",
        f"## Works ({len(rows)})",
        "",
        "| model type | class | block | experts | not run | error |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.model_type} | `{r.class_name}` | {r.block} | {r.experts} | {r.not_run} | {_bound(r.error)} |"
        for r in rows
    ]
    whole = " and ".join(sorted(WHOLE_PROMPT))
    lines += ["", f"transformers' code of {whole} cannot read a prompt in pieces: it is read in one pass."]
    *first, last = sorted(APART)
    lines += [
        "",
        "Answers that are made at once share every step of the model (`tests/model/test_rows.py` compares",
        f"each type with its sequences alone), except of {', '.join(first)} and {last}: theirs take turns.",
        "qwen4_exp's n-gram table may stay on disk ([tiers.md](tiers.md)).",
    ]
    lines += ["", f"## Refused ({len(REFUSED)})", "", "| model type | reason |", "|---|---|"]
    lines += [f"| {t} | {reason} |" for t, reason in sorted(REFUSED.items())]
    return "\n".join([*lines, ""])


def _bound(error: float) -> str:
    return next(f"< {bound:.0e}".replace("e-0", "e-") for bound in (1e-6, 1e-5, 1e-4) if error < bound)


def _masked(text: str) -> str:
    return re.sub(r"< \de-\d", "< N", text)
