"""Operators: their names, users' own classes, and what injection does with them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from hetero import inject, registry
from hetero.core import HeteroError, InputError
from hetero.engine.load import load_model
from hetero.model.build import build_meta, describe, load_config
from hetero.ops.experts import CpuExpertsOp
from hetero.ops.moe import MoeBlock
from hetero.registry import get_op, load_class, op_names, register_op
from hetero.rules import load_rules, match
from hetero.rules.options import schemas_for
from tests.model.parity import load_ours, prompt, save_tiny
from tests.model.quiet import quiet  # noqa: F401  a fixture of every test here

DOCS = Path(__file__).parents[2] / "docs" / "operators.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3_moe")
    save_tiny("qwen3_moe", path)
    return path


@pytest.fixture
def my_ops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on sys.path with the example of the documentation in it; its rule file beside it."""
    code, rules = (
        block(language, start) for language, start in (("python", '"""my_ops'), ("yaml", "extends"))
    )
    (tmp_path / "my_ops.py").write_text(code)
    (tmp_path / "rules.yaml").write_text(rules)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("my_ops", None)


@pytest.fixture
def clean_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))


def block(language: str, start: str) -> str:
    """The code block of docs/operators.md that starts so."""
    blocks = re.findall(rf"```{language}\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    return next(b for b in blocks if b.startswith(start))


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(input_ids=prompt()).logits[0]  # type: ignore[no-any-return]


def test_the_documented_operator_runs(folder: Path, my_ops: Path) -> None:
    model: Any = load_model(
        folder, rules=my_ops / "rules.yaml", overrides={"experts": "f32"}, threads=1
    ).runnable.model
    assert torch.equal(logits(model), logits(load_ours(folder)))
    assert type(model.lm_head).__name__ == "Timed"
    assert (model.lm_head.label, model.lm_head.calls) == ("head", 1)
    assert model.lm_head.seconds > 0
    assert isinstance(model.model.layers[0].mlp, MoeBlock)


def test_the_documented_operator_refuses_an_option(folder: Path, my_ops: Path) -> None:
    rules = my_ops / "rules.yaml"
    rules.write_text(rules.read_text().replace("label:", "lable:"))
    with pytest.raises(InputError, match=r"Timed at lm_head: unknown option 'lable'; it takes 'label'"):
        load_model(folder, rules=rules, threads=1)


def test_the_documented_entry_point(folder: Path, my_ops: Path) -> None:
    """As an installed package would offer it, through the metadata that pip writes."""
    table = block("toml", "[project.entry-points")
    info = my_ops / "my_ops-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my_ops\nVersion: 1.0\n")
    name, value = re.search(r"(\w+) = \"(.*)\"", table).groups()  # type: ignore[union-attr]
    (info / "entry_points.txt").write_text(f"[hetero.ops]\n{name} = {value}\n")
    assert name in op_names()
    rules = my_ops / "rules.yaml"
    rules.write_text(rules.read_text().replace("class: my_ops.Timed", f"op: {name}"))
    model: Any = load_model(folder, rules=rules, threads=1).runnable.model
    assert type(model.lm_head).__name__ == "Timed"


def test_after_load_sees_the_weights(folder: Path, clean_names: None, tmp_path: Path) -> None:
    @register_op("halved")
    class Halved(nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner

        @staticmethod
        def from_module(module: Any, **_: Any) -> nn.Module:
            assert module.weight.device.type == "meta"
            return Halved(module)

        def after_load(self) -> None:
            self.inner.weight.mul_(0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)  # type: ignore[no-any-return]

    rules = tmp_path / "rules.yaml"
    rules.write_text(
        "extends: default-cpu\nrules:\n  - name: half\n    match: {name: '^lm_head$'}\n"
        "    replace: {op: halved, device: cpu}\n"
    )
    model = load_model(folder, rules=rules, overrides={"experts": "f32"}, threads=1).runnable.model
    assert torch.allclose(2 * logits(model), logits(load_ours(folder)), rtol=1e-6, atol=1e-6)


def test_a_name_is_taken_once(clean_names: None) -> None:
    class Mine:
        @staticmethod
        def from_module(module: Any, **_: Any) -> Any:
            return module

    register_op("mine")(Mine)
    register_op("mine")(Mine)
    assert get_op("mine") is Mine
    with pytest.raises(ValueError, match="'moe' is registered already"):
        register_op("moe")(Mine)


def test_names_of_the_package() -> None:
    assert {"moe", "keep"} <= set(op_names())


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("Timed", "must be a dotted path"),
        ("no_such_package.Timed", "no_such_package cannot be imported: ModuleNotFoundError"),
        ("my_ops.Tmied", "my_ops has no 'Tmied'; did you mean 'Timed'"),
        ("my_ops.time", "is no operator: it has no function 'from_module'"),
    ],
)
def test_a_class_that_is_none(path: str, says: str, my_ops: Path) -> None:
    with pytest.raises(InputError, match=re.escape(says)):
        load_class(path)


def test_an_unknown_op_has_a_near_name() -> None:
    with pytest.raises(InputError, match="unknown op 'moo'; did you mean 'moe'"):
        get_op("moo")


def test_experts_leave_no_parameter_behind(folder: Path) -> None:
    """Names stay what they were, experts are no parameters, and sinks are named as the loader needs them."""
    model: Any = build_meta(load_config(folder))
    before = set(model.state_dict())
    rules = load_rules("default-cpu", {"experts": "int4"})
    done = inject.apply(model, match(rules, describe(model), ops=schemas_for(op_names())))
    after = set(model.state_dict())
    assert after < before
    assert all(".mlp.experts." in name for name in before - after)
    blocks = [name for name, m in model.named_modules() if isinstance(m, MoeBlock)]
    assert list(done.sinks) == [f"{name}.experts" for name in blocks]
    assert done.replaced == dict.fromkeys(blocks, "moe")
    assert done.expert_bytes == sum(m.backend.nbytes for m in model.modules() if isinstance(m, CpuExpertsOp))
    assert done.expert_bytes > 0
    with pytest.raises(HeteroError, match=r"left without weights: model\.embed_tokens\.weight"):
        inject.finish(model)


def test_a_table_of_experts_by_token_is_never_zeros(tmp_path: Path) -> None:
    """DeepSeek V4 looks experts up by token in its first layers; without the table every token would go to
    expert 0."""
    save_tiny("deepseek_v4", tmp_path)
    file = tmp_path / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(file).items() if not name.endswith("tid2eid")}
    save_file(kept, file, {"format": "pt"})
    with pytest.raises(InputError, match="tid2eid"):
        load_ours(tmp_path)


def test_an_operator_must_return_a_module(folder: Path, clean_names: None, tmp_path: Path) -> None:
    @register_op("nothing")
    class Nothing:
        @staticmethod
        def from_module(module: Any, **_: Any) -> Any:
            return None

    rules = tmp_path / "rules.yaml"
    rules.write_text(
        "extends: default-cpu\nrules:\n  - name: hole\n    match: {name: '^lm_head$'}\n"
        "    replace: {op: nothing, device: cpu}\n"
    )
    with pytest.raises(InputError, match="rule 1 'hole': nothing returned NoneType, not a torch module"):
        load_model(folder, rules=rules, threads=1)


def test_a_module_that_an_operator_above_has_dropped(folder: Path, clean_names: None, tmp_path: Path) -> None:
    @register_op("wrap")
    class Wrap(nn.Module):
        @staticmethod
        def from_module(module: Any, **_: Any) -> Any:
            return nn.Sequential(module)

    rules = tmp_path / "rules.yaml"
    rules.write_text(
        "extends: default-cpu\nrules:\n  - name: outer\n    match: {name: '^model\\.layers\\.0$'}\n"
        "    replace: {op: wrap, device: cpu}\n    recursive: true\n"
    )
    with pytest.raises(InputError) as caught:
        load_model(folder, rules=rules, threads=1)
    message = str(caught.value)
    assert (
        "model.layers.0.mlp is gone: wrap, which rule 1 'outer' has put in place of model.layers.0" in message
    )
    assert "rule 1 'outer' must not say 'recursive: true'" in message
