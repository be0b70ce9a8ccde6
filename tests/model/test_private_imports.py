"""What hetero uses of transformers beyond its public interface: a move of any of it fails here."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

import hetero
from hetero.model import hf
from hetero.model.build import is_experts
from tests.model.tiny import tiny

PACKAGE = Path(hetero.__file__).parent


def test_every_private_name_is_there() -> None:
    for name in hf.__all__:
        assert getattr(hf, name) is not None


@pytest.mark.parametrize("name", hf.MODEL_ATTRIBUTES)
def test_models_have_what_is_used(name: str) -> None:
    assert hasattr(hf.PreTrainedModel, name)


def test_signatures() -> None:
    renaming = inspect.signature(hf.rename_source_key).parameters
    assert list(renaming)[:5] == [
        "source_key",
        "weight_renamings",
        "weight_converters",
        "base_model_prefix",
        "meta_state_dict",
    ]
    assert next(iter(inspect.signature(hf.get_model_conversion_mapping).parameters)) == "model"
    for operation in (hf.Chunk, hf.Concatenate, hf.Interleave, hf.MergeModulelist):
        assert hasattr(operation(dim=1), "dim")
    transpose = hf.Transpose(1, 2)
    assert (transpose.dim0, transpose.dim1) == (1, 2)


def test_a_converter_runs_as_the_loader_runs_it() -> None:
    converter = hf.WeightConverter(
        source_patterns=["experts.*.w1", "experts.*.w3"],
        target_patterns="experts.gate_up",
        operations=[hf.MergeModulelist(dim=0), hf.Concatenate(dim=1)],
    )
    for name in hf.CONVERTER_ATTRIBUTES:
        assert hasattr(converter, name)
    one, two = torch.randn(1, 3), torch.randn(1, 3)
    converter.add_tensor("experts.gate_up", "experts.0.w1", "experts.*.w1", lambda: one)
    converter.add_tensor("experts.gate_up", "experts.0.w3", "experts.*.w3", lambda: two)
    made = converter.convert("experts.gate_up", model=None, config=None)
    assert torch.equal(made["experts.gate_up"], torch.stack([torch.cat([one, two])]))


def test_experts_carry_their_flags() -> None:
    with torch.device("meta"):
        experts = MixtralExperts(MixtralConfig(hidden_size=8, intermediate_size=4, num_local_experts=2))
    assert is_experts(experts)
    assert [getattr(experts, flag) for flag in hf.EXPERT_FLAGS] == [True, False, False, True]


def test_attention_asks_the_configuration_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows depend on the field, on both interfaces, and on what a module of attention does with them."""
    seen = []

    def attend(module: object, query: torch.Tensor, *_: object, **__: object) -> tuple[torch.Tensor, None]:
        seen.append(type(module).__name__)
        return query.transpose(1, 2).contiguous(), None

    model = tiny("mixtral")
    monkeypatch.setitem(hf.ALL_ATTENTION_FUNCTIONS._global_mapping, "probe", attend)
    monkeypatch.setitem(hf.ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "probe", lambda **_: None)
    monkeypatch.setattr(model.config, "_attn_implementation_internal", "probe")
    with torch.no_grad():
        model(input_ids=torch.tensor([[5, 6]]))
    assert seen == ["MixtralAttention"] * 4
    assert isinstance(model.model.layers[0], hf.GradientCheckpointingLayer)
    assert "get_interface" in type(model.model.layers[0].self_attn).forward.__code__.co_names


def test_private_modules_are_imported_in_one_place_only() -> None:
    """Anything below the top level of transformers counts as private."""
    pattern = re.compile(r"^\s*(?:from|import)\s+transformers\.", re.MULTILINE)
    users = [path for path in PACKAGE.rglob("*.py") if pattern.search(path.read_text(encoding="utf-8"))]
    assert [path.relative_to(PACKAGE).as_posix() for path in users] == ["model/hf.py"]


def test_transformers_stays_in_the_model_package() -> None:
    pattern = re.compile(r"^\s*(?:from|import)\s+transformers\b", re.MULTILINE)
    users = {
        path.parent for path in PACKAGE.rglob("*.py") if pattern.search(path.read_text(encoding="utf-8"))
    }
    assert users <= {PACKAGE / "model", PACKAGE / "kv"}
