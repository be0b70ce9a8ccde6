"""The shipped shapes are those of the models whose names they carry."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hetero.core import InputError
from hetero.model.build import build_meta, describe, find_moe, load_config
from hetero.model.shapes import resolve_model, shape_names

# name -> billions of weights without n-gram embedding and MTP; blocks, experts, top-k, hidden, intermediate
SHAPES = {
    "qwen3.8-flash-next-125b": (125.0, (48, 512, 10, 2560, 640)),
    "qwen3.5-122b-a10b": (122.0, (48, 256, 8, 3072, 1024)),
    "qwen3-next-80b-a3b": (80.0, (48, 512, 10, 2048, 512)),
    "qwen3-30b-a3b": (30.5, (48, 128, 8, 2048, 768)),
    "deepseek-v3": (671.0, (58, 256, 8, 7168, 2048)),
    "gpt-oss-120b": (117.0, (36, 128, 4, 2880, 2880)),
    "glm-4.5-air": (106.0, (45, 128, 8, 4096, 1408)),
    "mixtral-8x7b": (46.7, (32, 8, 2, 4096, 14336)),
}


def test_all_of_them_are_shipped() -> None:
    assert shape_names() == sorted(SHAPES)


@pytest.mark.parametrize("name", SHAPES)
def test_size_agrees_with_the_name(name: str) -> None:
    model = build_meta(load_config(resolve_model(f"synthetic:{name}").config), torch.bfloat16)
    modules = {module.name: module for module in describe(model)}
    ngrams = sum(module.params for module in modules.values() if module.name.endswith(".ngram_embedding"))
    billions, (blocks, experts, top_k, hidden, intermediate) = SHAPES[name]
    assert (modules[""].params - ngrams) / 1e9 == pytest.approx(billions, rel=0.03)
    assert ngrams / 1e9 == pytest.approx(51.2 if name.startswith("qwen3.8") else 0.0, rel=0.01)
    sites = find_moe(model)
    assert len(sites) == blocks
    for site in sites:
        spec = site.spec
        assert (spec.num_experts, spec.top_k) == (experts, top_k)
        assert (spec.hidden, spec.intermediate) == (hidden, intermediate)
        assert site.experts_name.startswith(f"{site.name}.")


def test_the_flagships_tables() -> None:
    """Rows of the n-gram embedding, before they are rounded up to a multiple of 128."""
    model = build_meta(load_config(resolve_model("synthetic:qwen3.8-flash-next-125b").config), torch.bfloat16)
    embedding = model.get_submodule("model.layers.1.ple.ple_embedding")
    assert int(embedding.get_buffer("ngram_heads_vocab_sizes").sum()) == 320_001_446
    assert embedding.get_parameter("ngram_embedding.weight").shape == (320_001_536, 160)


def test_resolving(tmp_path: Path) -> None:
    config = {"model_type": "mixtral", "time_step_limit": {"__float__": "Infinity"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    folder = resolve_model(str(tmp_path))
    assert (folder.kind, folder.path, folder.name) == ("folder", tmp_path, tmp_path.name)
    assert folder.config["time_step_limit"] == float("inf")
    for model in (tmp_path / "config.json", f"synthetic:{tmp_path}", f"synthetic:{tmp_path}/config.json"):
        found = resolve_model(str(model))
        assert found.kind == ("synthetic" if str(model).startswith("synthetic:") else "config")
        assert found.path == tmp_path / "config.json"
        assert found.model_type == "mixtral"
    assert resolve_model("synthetic:mixtral-8x7b").model_type == "mixtral"


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("synthetic:mixtral-8x7", "did you mean mixtral-8x7b?"),
        ("synthetic:", "Known: deepseek-v3,"),
        ("synthetic:zzz", "Known: deepseek-v3,"),
        ("qwen3-30b-a3b", "did you mean synthetic:qwen3-30b-a3b"),
        ("/does/not/exist", "neither a folder"),
        (__file__, "config.json or synthetic:NAME"),
        (str(Path(__file__).parent), "no such file; a model folder holds a config.json"),
    ],
)
def test_what_is_no_model(model: str, words: str) -> None:
    with pytest.raises(InputError) as error:
        resolve_model(model)
    assert words in str(error.value)


def test_resolving_needs_no_torch() -> None:
    code = (
        "import sys; from hetero.model.shapes import resolve_model; resolve_model('synthetic:deepseek-v3');"
        "assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)
