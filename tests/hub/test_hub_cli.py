"""The commands with a model's name of the Hub."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from hetero import cli
from hetero.model.shapes import resolve_model
from hetero.model.sources import open_source
from tests.hub.small_hub import Hub, Repo
from tests.model import hf_to_gguf
from tests.model.tiny import tiny, tiny_tokenizer

NAME = "lab/tiny-moe"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny-model")
    model = tiny("qwen3_moe", vocab_size=300, eos_token_id=299)
    model.save_pretrained(path, max_shard_size="150KB")
    tiny_tokenizer().save_pretrained(path)
    assert len(list(path.glob("*.safetensors"))) > 1
    return path


@pytest.fixture
def repo(hub: Hub, folder: Path) -> Repo:
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    hub.repos[NAME] = Repo({"main": files | {"README.md": b"x", "pytorch_model.bin": b"x" * 2000}})
    return hub.repos[NAME]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    monkeypatch.setenv("HETERO_THREADS", "1")
    yield
    torch.set_num_threads(before)


def call(*args: object) -> Result:
    return CliRunner().invoke(cli.app, [str(arg) for arg in args])


def ids(*args: object) -> list[int]:
    result = call("run", *args, "-p", "the whale", "--max-tokens", 6, "--json")
    assert result.exit_code == 0, result.output
    return list(json.loads(result.stdout)["token_ids"])


def test_run_fetches_and_runs(hub: Hub, repo: Repo, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = ids(folder)
    hub.cuts = [10_000, 20_000]
    assert ids(NAME) == expected
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.requests.clear()
    assert ids(NAME) == expected
    assert not hub.requests


def test_one_quantisation_of_gguf(hub: Hub, tmp_path: Path) -> None:
    path = tmp_path / "tiny-moe-Q8_0.gguf"
    hf_to_gguf.write(tiny("qwen3_moe", vocab_size=300), path, "qwen3moe")
    files = {path.name: path.read_bytes(), "tiny-moe-Q4_0.gguf": b"GGUF" * 500, "README.md": b"x"}
    hub.repos["lab/tiny-GGUF"] = Repo({"main": files})

    plan = ("plan", "lab/tiny-GGUF:Q8_0", "--ctx", 128, "--hardware", "rtx4090-7950x", "--json")
    assert "the GGUF file, which has one inside, is not in the cache yet" in call(*plan).stderr
    found = resolve_model("lab/tiny-GGUF:Q8_0", weights=True)
    assert (found.kind, found.name, found.config) == ("gguf", path.stem, resolve_model(str(path)).config)
    with open_source(path) as ours, open_source(found.path) as theirs:
        assert list(ours.tensors) == list(theirs.tensors)
        name = "model.layers.0.self_attn.k_proj.weight"
        assert torch.equal(ours.read(name), theirs.read(name))
    assert call(*plan).exit_code == 0
    assert not [path for _, path, _ in hub.requests if "Q4_0" in path]


def test_rules_and_plans_read_the_configuration_alone(hub: Hub, repo: Repo) -> None:
    result = call("rules", "explain", NAME, "--devices", "cpu", "--json", "--revision", "main")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["model_type"] == "qwen3_moe"
    result = call("plan", NAME, "--ctx", 128, "--hardware", "rtx4090-7950x", "--json")
    assert result.exit_code == 0, result.output
    names = {path.rpartition("/")[2] for _, path, _ in hub.requests if "/resolve/" in path}
    assert names == {"config.json"}


@pytest.mark.parametrize("command", ["run", "chat", "serve"])
def test_what_is_wrong_is_one_message(hub: Hub, command: str) -> None:
    more = ("-p", "x") if command == "run" else ("--port", "0") if command == "serve" else ()
    result = call(command, "lab/nothing", "--revision", "v1", *more)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("hetero: no folder 'lab/nothing', and no such repository")
    assert len(result.stderr.splitlines()) == 1


def test_a_model_that_needs_code_of_its_own(hub: Hub) -> None:
    config = {"model_type": "brand_new", "auto_map": {"AutoModel": "modeling_brand_new.Model"}}
    files = {"config.json": json.dumps(config).encode(), "modeling_brand_new.py": b"raise SystemExit"}
    hub.repos[NAME] = Repo({"main": files | {"model.safetensors": b"x" * 2000}})
    result = call("run", NAME, "-p", "x")
    assert result.exit_code == 2, result.output
    assert "code of its own, which hetero never runs" in result.stderr
    assert not [path for _, path, _ in hub.requests if path.endswith((".py", ".safetensors"))]
