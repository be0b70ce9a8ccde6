"""The MoE block and its experts: routing, the shared expert, activations, layouts, overlap."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from hetero import cpu
from hetero.core import Activation, ActKind, ExpertSpec, InputError
from hetero.engine.load import load_model
from hetero.formats import parse_format
from hetero.model.build import build_meta, choose_class, describe, is_experts
from hetero.model.convert import Layout
from hetero.model.moe_types import evaluate, expert_spec, find_activation
from hetero.ops.experts import CpuExpertsOp, Pending
from hetero.ops.moe import MoeBlock
from hetero.ops.recipes import RECIPES
from hetero.ops.reference import TorchExperts, expert_parts
from tests.model.parity import load_ours, load_reference, prompt, relative, save_tiny, trace
from tests.model.quiet import quiet  # noqa: F401  a fixture of every test here
from tests.model.tiny_moe import tiny_config, tiny_model

# Types whose router adds a correction bias to scores for the choice only.
CORRECTED = ["deepseek_v3", "glm4_moe", "dots1", "kimi_linear", "nemotron_h", "minimax_m2", "lfm2_moe"]
GROUPED = ["deepseek_v3", "glm4_moe", "dots1", "kimi_linear", "nemotron_h"]
SHARED = ["qwen2_moe", "qwen3_next", "deepseek_v3", "hunyuan_v1_moe", "ernie4_5_moe", "laguna", "cohere2_moe"]


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


class Recorder(TorchExperts):
    """Experts that also keep what they were sent."""

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        self.ids, self.weights, self.thread = ids, weights, threading.current_thread().name
        return super().forward(x, ids, weights)


def last_block(model_type: str, seed: int, **changes: Any) -> nn.Module:
    """transformers' own last MoE block of a tiny model of this type, with weights."""
    config = tiny_config(model_type, **changes)
    model = tiny_model(choose_class(config).cls, config, seed)
    experts = [name for name, module in model.named_modules() if is_experts(module)]
    return model.get_submodule(experts[-1].rpartition(".")[0])


def fill(backend: Any, experts: nn.Module) -> None:
    """Hand the weights of a transformers experts module to a backend, as the loader does."""
    layout = Layout.of(experts)
    for leaf, parameter in experts.named_parameters(recurse=False):
        for expert, value in enumerate(parameter.detach()):
            for part, tensor in layout.parts(leaf, value):
                backend.put(expert, part, tensor)
    assert not backend.missing()


def ours(block: nn.Module, backend: Any = None, *, overlap: bool = False) -> tuple[MoeBlock, Any]:
    """Our block over a copy of theirs, and its backend."""
    block = copy.deepcopy(block)
    experts: Any = block.experts
    spec = expert_spec(experts, experts.config)
    backend = backend or Recorder(spec)
    fill(backend, experts)
    block.experts = CpuExpertsOp(spec, backend, experts, overlap=overlap)
    return MoeBlock(block, RECIPES[type(block).__name__]), backend


def hidden(generator: torch.Generator, tokens: int = 10) -> torch.Tensor:
    return torch.randn(1, tokens, 64, generator=generator)


def correction(block: Any) -> torch.Tensor:
    """The correction bias [E], wherever a type keeps it."""
    for owner in (block, getattr(block, "gate", None)):
        for name in ("e_score_correction_bias", "expert_bias"):
            if isinstance(getattr(owner, name, None), torch.Tensor):
                return getattr(owner, name)  # type: ignore[no-any-return]
    raise AssertionError(f"{block} has no correction bias")


@pytest.mark.parametrize("model_type", CORRECTED)
def test_correction_bias_chooses_and_does_not_weigh(model_type: str, generator: torch.Generator) -> None:
    """Experts are the top k of score + bias in float32; their weights come from the scores alone."""
    block, experts = ours(last_block(model_type, int(torch.randint(1000, (1,), generator=generator))))
    x = hidden(generator)
    chosen = torch.tensor([5, 6, 7])  # of two groups, for the types that have groups
    before = {}
    for shift in (4.0, 1000.0):
        correction(block).fill_(0.0)[chosen] = shift
        block(x)
        assert torch.equal(experts.ids.sort(dim=-1).values, chosen.expand(10, 3))
        before[shift] = experts.weights.gather(1, experts.ids.argsort(dim=-1))
    assert torch.equal(before[4.0], before[1000.0])
    assert before[4.0].std() > 0


@pytest.mark.parametrize("model_type", CORRECTED)
def test_correction_bias_stays_float32_in_bf16(model_type: str, tmp_path: Path) -> None:
    """A bias that bf16 would round decides: it is kept as the checkpoint has it where transformers does."""
    model_class = save_tiny(model_type, tmp_path)
    model: Any = load_model(tmp_path, rules="default-cpu", dtype="bfloat16", threads=1).runnable.model
    reference = model_class.from_pretrained(tmp_path, dtype=torch.bfloat16)
    name = next(n for n, _ in model.named_buffers() if n.endswith(("correction_bias", "expert_bias")))
    got, want = model.get_buffer(name), reference.get_buffer(name)
    assert got.dtype == want.dtype
    assert torch.equal(got, want)
    assert torch.isfinite(model(input_ids=prompt()).logits).all()


@pytest.mark.parametrize("model_type", GROUPED)
def test_all_scores_negative_in_groups(model_type: str, generator: torch.Generator) -> None:
    """With every score for the choice below zero, no expert of a dropped group is chosen."""
    block, experts = ours(last_block(model_type, 3, n_group=4, topk_group=2))
    correction(block).copy_(torch.linspace(-9, -5, 8)[torch.randperm(8, generator=generator)])
    block(hidden(generator))
    groups = experts.ids // 2
    assert all(len(set(row.tolist())) <= 2 for row in groups)
    assert all(len(set(row.tolist())) == 3 for row in experts.ids)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("model_type", SHARED)
def test_shared_expert_is_added_once(model_type: str, overlap: bool, generator: torch.Generator) -> None:
    """With the routed experts silenced, what is left is the shared expert, gated once; and all in all the
    block is transformers' own."""
    theirs: Any = last_block(model_type, 5)
    x = hidden(generator)
    block, experts = ours(theirs, overlap=overlap)
    assert relative(block(x)[0], theirs(x)[0]) < 1e-5
    assert experts.thread.startswith("hetero-experts") == overlap

    theirs.experts.down_proj.zero_()
    silent, _ = ours(theirs, overlap=overlap)
    name = next(n for n in ("shared_experts", "shared_expert", "shared_mlp") if hasattr(theirs, n))
    want = getattr(theirs, name)(x)
    if hasattr(theirs, "shared_expert_gate"):
        want = torch.sigmoid(theirs.shared_expert_gate(x)) * want
    want = want / (2 if model_type == "cohere2_moe" else 1)
    assert relative(silent(x)[0], want[0]) < 1e-6


@pytest.mark.parametrize("model_type", SHARED)
def test_overlap_changes_no_bit(model_type: str, generator: torch.Generator) -> None:
    theirs: Any = last_block(model_type, 7)
    x = hidden(generator)
    spec = expert_spec(theirs.experts, theirs.experts.config)
    results = []
    for overlap in (False, True):
        block, _ = ours(theirs, cpu.CpuExperts(spec, parse_format("int8"), threads=1), overlap=overlap)
        results.append(block(x))
    assert torch.equal(*results)


def test_what_the_experts_raise_reaches_the_caller(generator: torch.Generator) -> None:
    class Broken(Recorder):
        def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            raise InputError("experts are broken")

    theirs: Any = last_block("qwen3_moe", 1)
    block, _ = ours(theirs, Broken(expert_spec(theirs.experts, None)), overlap=True)
    with pytest.raises(InputError, match="experts are broken"):
        block(hidden(generator))


@pytest.mark.parametrize("isa", cpu.isas(include_twin=True))
@pytest.mark.parametrize(("fmt", "bound"), [("f32", 1e-5), ("int8", 0.03)])
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_gpt_oss_gate(isa: str, fmt: str, bound: float, tokens: int, generator: torch.Generator) -> None:
    """alpha, clamps, the one added to up, biases, interleaving and transposition, against transformers."""
    config = SimpleNamespace(
        intermediate_size=96, hidden_size=64, num_local_experts=4, num_experts_per_tok=2, swiglu_alpha=1.702,
        swiglu_limit=7.0, _experts_implementation="eager",
    )  # fmt: skip
    theirs: Any = GptOssExperts(config)
    for parameter in theirs.parameters():
        parameter.copy_(
            torch.randn(parameter.shape, generator=generator) * (0.6 if parameter.ndim == 3 else 2.0)
        )
    spec = expert_spec(theirs, config)
    assert (spec.activation.alpha, spec.activation.gate_max, spec.activation.up_offset) == (1.702, 7.0, 1.0)
    backend = cpu.CpuExperts(spec, parse_format(fmt), isa=isa, threads=1)
    fill(backend, theirs)
    x = torch.randn(tokens, 64, generator=generator)
    ids = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(tokens)])
    weights = torch.rand(tokens, 2, generator=generator)
    projected = torch.einsum("th,ehi->tei", x, theirs.gate_up_proj) + theirs.gate_up_proj_bias
    assert (projected.abs() > 7.0).float().mean() > 0.05, "the clamps do nothing"

    want = theirs.double()(x.double(), ids, weights.double())
    assert relative(backend.forward(x, ids, weights)[None].flatten(1), want[None].flatten(1)) < bound


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "mixtral", "aria_text"])
def test_square_projections(model_type: str, tmp_path: Path) -> None:
    """hidden = 2 x intermediate: gate_up is square, so that a transposed one has the right shape."""
    key = "moe_intermediate_size" if model_type == "qwen3_moe" else "intermediate_size"
    model_class = save_tiny(model_type, tmp_path, **{key: 32})
    model = load_ours(tmp_path)
    spec = next(m.spec for m in model.modules() if isinstance(m, CpuExpertsOp))
    assert spec.hidden == 2 * spec.intermediate
    want = trace(load_reference(model_type, model_class, tmp_path), prompt())
    assert relative(trace(model, prompt()).prefill, want.prefill) < 1e-4


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_gate", [False, True])
def test_torch_experts_agree_with_the_extension(
    has_gate: bool, has_bias: bool, generator: torch.Generator
) -> None:
    """Both backends, whole and staged, with ids that lead nowhere."""
    spec = ExpertSpec(5, 48, 40, 3, Activation(ActKind.GELU_TANH), has_gate=has_gate, has_bias=has_bias)
    backends: list[Any] = [TorchExperts(spec), cpu.CpuExperts(spec, parse_format("f32"), threads=1)]
    for part, shape in expert_parts(spec).items():
        for expert in range(5):
            value = torch.randn(shape, generator=generator) / 6
            for backend in backends:
                backend.put(expert, part, value)
    x = torch.randn(6, 48, generator=generator)
    ids = torch.randint(-1, 6, (6, 3), generator=generator)
    ids[0] = torch.tensor([-1, 5, 7])
    weights = torch.randn(6, 3, generator=generator)
    reference, native = (backend.forward(x, ids, weights) for backend in backends)
    assert torch.equal(native[0], torch.zeros(48))
    assert relative(native[1:].flatten()[None], reference[1:].flatten()[None]) < 1e-6
    halves = [backend.gate_up(x, ids) for backend in backends]
    assert relative(halves[1].flatten()[None], halves[0].flatten()[None]) < 1e-6
    h = torch.randn(6, 3, 40, generator=generator)
    down = [backend.down(h, ids) for backend in backends]
    assert relative(down[1].flatten()[None], down[0].flatten()[None]) < 1e-6


def test_staged_experts_skip_ids_that_lead_nowhere(generator: torch.Generator) -> None:
    """Inkling 2 soft-caps its gate, which no kernel does: torch does it between the two halves."""
    config = choose_class(tiny_config("inkling2_text"))
    theirs: Any = tiny_model(config.cls, config.config, 2).model.layers[-1].mlp.experts
    theirs.config._experts_implementation = "eager"  # the one that knows such ids
    spec = expert_spec(theirs, theirs.config)
    assert spec.staged
    backend = cpu.CpuExperts(spec, parse_format("f32"), threads=1)
    fill(backend, theirs)
    op = CpuExpertsOp(spec, backend, theirs)
    x = torch.randn(4, 64, generator=generator)
    ids = torch.tensor([[0, 1], [2, 8], [3, 3], [8, 8]])  # 8 is one beyond the last
    weights = torch.rand(4, 2, generator=generator)
    got, want = op(x, ids, weights), theirs(x, ids, weights)
    assert torch.equal(got[3], torch.zeros(64))
    assert relative(got[:3], want[:3]) < 1e-6


def test_output_has_the_type_of_the_input(generator: torch.Generator) -> None:
    theirs: Any = last_block("qwen2_moe", 4)
    block, _ = ours(theirs)
    x = hidden(generator).bfloat16()
    out = block.to(torch.bfloat16)(x)
    assert out.dtype == torch.bfloat16
    assert relative(out[0], theirs.to(torch.bfloat16)(x)[0]) < 0.03


def test_an_unknown_block_keeps_its_own_code(generator: torch.Generator) -> None:
    """A class that the recipes do not know is not guessed at: only its experts are replaced."""
    theirs: Any = last_block("qwen3_moe", 6)

    class Doubling(type(theirs)):  # type: ignore[misc]
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(hidden_states)  # type: ignore[no-any-return]

    theirs.__class__ = Doubling
    x = hidden(generator)
    want = theirs(x)
    replaced: Any = copy.deepcopy(theirs)
    replaced = MoeBlock.from_module(
        replaced, name="b", config=None, device="cpu", options={"experts": {"backend": "torch"}}
    )
    assert type(replaced) is Doubling
    fill(replaced.experts, theirs.experts)
    assert relative(replaced(x)[0], want[0]) < 1e-6


def test_moe_needs_experts() -> None:
    with pytest.raises(InputError, match=r"layers\.0\.mlp \(Linear\), which holds no routed experts"):
        MoeBlock.from_module(nn.Linear(2, 2), name="layers.0.mlp", config=None, device="cpu", options={})


def test_pending_keeps_type_and_value() -> None:
    result = torch.randn(2, 3)
    assert torch.equal(Pending(result, torch.empty(2, 3)).collect(), result)
    assert Pending(result, torch.empty(2, 3, dtype=torch.float16)).collect().dtype == torch.float16


def gated(function: Any, **attributes: Any) -> nn.Module:
    """An experts module with this gate and nothing else."""
    module = nn.Module()
    module.__dict__.update(has_gate=True, is_concatenated=True, _apply_gate=function, **attributes)
    return module


def test_activations_are_found_by_value() -> None:
    """Clamps before and after the activation, alpha and offset; what fits no formula is staged."""

    def split(joined: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = joined.chunk(2, dim=-1)
        return gate, up

    def after(joined: torch.Tensor) -> torch.Tensor:
        gate, up = split(joined)
        return nn.functional.silu(gate).clamp(max=3.0) * up.clamp(-3.0, 3.0)

    def cubed(joined: torch.Tensor) -> torch.Tensor:
        gate, up = split(joined)
        return gate**3 * up

    def almost(joined: torch.Tensor) -> torch.Tensor:
        gate, up = split(joined)
        return nn.functional.silu(gate) * up * (1 + 1e-4)

    found = find_activation(gated(after, limit=3.0))
    assert found == Activation(ActKind.SILU, up_limit=3.0, act_max=3.0)
    assert find_activation(gated(cubed)) is None
    assert find_activation(gated(almost)) is None


@pytest.mark.parametrize("kind", list(ActKind))
def test_activation_formula_agrees_with_the_extension(kind: ActKind, generator: torch.Generator) -> None:
    """The torch formula that types are compared with is the one that the kernels compute."""
    limits = Activation(kind, 1.3 if kind is ActKind.SILU else 1.0, 0.9, 0.8, 0.7, 0.5)
    spec = ExpertSpec(1, 32, 32, 1, limits)
    backend = cpu.CpuExperts(spec, parse_format("f32"), threads=1)
    eye = torch.eye(32)
    for part, matrix in (("gate", 2 * eye), ("up", -1.5 * eye), ("down", eye)):
        backend.put(0, part, matrix)  # type: ignore[arg-type]
    x = torch.randn(7, 32, generator=generator)
    got = backend.forward(x, torch.zeros(7, 1, dtype=torch.long), torch.ones(7, 1))
    want = evaluate(limits, True, 2 * x.double(), -1.5 * x.double())
    assert torch.allclose(got.double(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("top_k", [0, 9])
def test_as_many_choices_as_experts_at_most(top_k: int) -> None:
    config = tiny_config("qwen3_moe", num_experts=8, num_experts_per_tok=top_k)
    with pytest.raises(InputError, match=f"chooses {top_k} experts for a token .*from 1 to its 8 experts"):
        describe(build_meta(config, torch.float32))
