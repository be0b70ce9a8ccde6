"""Counts of experts from run to run: merged, fading, bounded, and nothing else in the file."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from hetero import cli, stats
from hetero.model.shapes import resolve_model
from hetero.stats import HALF_LIFE, Recorder, add, config_hash, expert_counts, hit_rates, load
from tests.model.tiny import tiny, tiny_tokenizer

CONFIG = {"model_type": "m", "hidden_size": 8}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("HETERO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HETERO_STATS", "on")
    monkeypatch.setenv("HETERO_THREADS", "1")
    before = torch.get_num_threads()
    yield tmp_path / "cache" / "stats"
    torch.set_num_threads(before)


class Model:
    def __init__(self, name: str = "m", config: dict[str, Any] = CONFIG) -> None:
        self.name, self.config = name, config


def counts_of(model: Model) -> Any:
    found = expert_counts(model)
    # What was there fades by a millionth.
    return None if found is None else found.round(3).tolist()


def test_runs_add_up() -> None:
    assert expert_counts(Model()) is None
    add("m", config_hash(CONFIG), {3: [1, 0, 2], 1: [4, 4, 4]})
    add("m", config_hash(CONFIG), {3: [1, 1, 1]})
    assert counts_of(Model()) == [[0, 0, 0], [4, 4, 4], [0, 0, 0], [2, 1, 3]]
    # Copies of a model are one; another model or another shape is not.
    assert counts_of(Model(config=CONFIG | {"transformers_version": "9", "dtype": "x"})) is not None
    assert expert_counts(Model("other")) is None
    assert expert_counts(Model(config=CONFIG | {"hidden_size": 9})) is None
    add("m", config_hash(CONFIG), {1: [0, 0, 0]})
    known = load("m", config_hash(CONFIG))
    assert known is not None
    assert known.choices == 18


def test_the_past_fades() -> None:
    add("m", "c", {0: [1000, 0]})
    add("m", "c", {0: [0, HALF_LIFE]})
    known = load("m", "c")
    assert known is not None
    assert known.layers == {0: [500, HALF_LIFE]}
    for _ in range(60):
        add("m", "c", {0: [HALF_LIFE, 0]})
    known = load("m", "c")
    assert known is not None
    assert known.layers[0][1] < 1e-3
    assert known.layers[0][0] < 2 * HALF_LIFE + 1
    # Many short runs make it fade as one long one does.
    add("short", "c", {0: [1000, 0]})
    for _ in range(50):
        add("short", "c", {0: [0, HALF_LIFE // 50]})
    known = load("short", "c")
    assert known is not None
    assert known.layers[0][0] == pytest.approx(500, rel=1e-3)
    # Another number of experts: the model has changed in a way that its configuration does not tell.
    add("m", "c", {0: [1, 2, 3]})
    known = load("m", "c")
    assert known is not None
    assert known.layers == {0: [1, 2, 3]}


@pytest.mark.parametrize("name", ["a b", "../../etc/passwd", "lab/x", "", ".", "\ud800", "n" * 400, "CON"])
def test_names_are_never_paths(cache: Path, name: str) -> None:
    add(name, "c", {0: [1]})
    (file,) = cache.glob("*.json")
    assert file.parent == cache
    known = load(name, "c")
    assert known is not None
    assert known.name == name
    add(name + "'", "c", {0: [1]})
    assert len(list(cache.glob("*.json"))) == 2


def test_what_is_in_the_file(cache: Path) -> None:
    add("m", "c", {0: [1, 2]})
    (file,) = cache.glob("*.json")
    assert json.loads(file.read_text()) == {
        "version": 1,
        "name": "m",
        "config": "c",
        "choices": 3,
        "layers": {"0": [1, 2]},
    }


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"version": 2}',
        '{"version": 1, "name": "m", "config": "c", "choices": 1, "layers": {"0": [-1]}}',
        '{"version": 1, "name": "m", "config": "c", "choices": 1, "layers": {"0": [NaN]}}',
        '{"version": 1, "name": "m", "config": "c", "choices": 1, "layers": {"99999999": [1]}}',
        '{"version": 1, "name": "m", "config": "c", "choices": 1, "layers": {"0": 5}}',
        '{"version": 1, "name": "m", "config": "c", "choices": 1e999, "layers": {}}',
        "[" * 100_000,
        "\x00\xff",
    ],
)
def test_a_broken_file_is_nothing_and_written_over(cache: Path, text: str) -> None:
    cache.mkdir(parents=True)
    (cache / "m-c.json").write_text(text)
    assert load("m", "c") is None
    assert stats.load_all() == []
    add("m", "c", {0: [1]})
    assert load("m", "c") is not None


def test_models_are_bounded(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats, "MOST_MODELS", 3)
    for number in range(5):
        add(f"m{number}", "c", {0: [1]})
        os.utime(cache / f"m{number}-c.json", (number, number))
    assert [one.name for one in stats.load_all()] == ["m4", "m3", "m2"]


def test_processes_at_once_lose_nothing(cache: Path) -> None:
    code = "from hetero.stats import add\nfor _ in range(40): add('m', 'c', {0: [1, 2], 7: [3, 0]})"
    running = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(3)]
    assert [process.wait(60) for process in running] == [0, 0, 0]
    known = load("m", "c")
    assert known is not None
    assert known.choices == 3 * 40 * 6
    np.testing.assert_allclose(known.array()[7], [360, 0], rtol=1e-3)
    assert {path.name for path in cache.iterdir()} == {"m-c.json", ".lock"}


def test_a_recorder_adds_what_is_new() -> None:
    now: dict[int, list[float]] = {0: [1, 2]}
    recorder = Recorder(Model(), lambda: now)
    recorder.save()
    recorder.save()
    assert counts_of(Model()) == [[1, 2]]
    now = {0: [5, 2], 1: [1, 0]}
    recorder.save()
    assert counts_of(Model()) == [[5, 2], [1, 0]]


def test_a_folder_that_cannot_be_written_is_told_once(cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text("a file")
    said: list[str] = []
    recorder = Recorder(Model(), lambda: {0: [1]}, said.append)
    recorder.save()
    recorder.save()
    assert len(said) == 1
    assert "cannot be kept" in said[0]


def test_hit_rates() -> None:
    counts = np.array([[4.0, 0, 1], [0, 3, 2]])
    assert hit_rates(counts, [0, 1, 2, 3, 100]) == [0, 0.4, 0.7, 0.9, 1]
    assert hit_rates(np.zeros((0, 0)), [0, 5]) == [0, 0]
    table = np.array([[random.random() for _ in range(16)] for _ in range(4)])
    rates = hit_rates(table, range(65))
    assert rates == sorted(rates)
    assert rates[64] == pytest.approx(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny-model")
    tiny("qwen3_moe", vocab_size=300, eos_token_id=299, mlp_only_layers=[0]).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def call(*args: object, code: int = 0) -> Result:
    result = CliRunner().invoke(cli.app, [str(arg) for arg in args], input="the whale\n/exit\n")
    assert result.exit_code == code, result.output
    return result


def test_commands(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = ("run", folder, "--prompt-ids", "5,6,7", "--max-tokens", 5, "--ignore-eos")
    assert "no statistics yet" in call("stats").stdout
    call(*run, "--no-stats")
    monkeypatch.setenv("HETERO_STATS", "off")
    call(*run)
    assert not cache.exists()
    monkeypatch.setenv("HETERO_STATS", "maybe")
    assert "HETERO_STATS=maybe: must be on or off" in call(*run, code=2).stderr
    monkeypatch.setenv("HETERO_STATS", "on")
    call(*run)
    counts = expert_counts(resolve_model(str(folder)))
    assert counts is not None
    # Four layers, the first without experts; 3 + 4 tokens went through, each with 2 of 8 experts.
    assert counts.shape == (4, 8)
    assert counts.sum(axis=1).tolist() == [0, 14, 14, 14]
    call("chat", folder, "--max-tokens", 3)
    more = expert_counts(resolve_model(str(folder)))
    assert more is not None
    assert more.sum() > counts.sum()

    body = json.loads(call("stats", folder, "--json").stdout)
    (model,) = body["models"]
    assert model["name"] == folder.name
    assert model["experts"] == 24
    assert [row["layer"] for row in model["layers"]] == [1, 2, 3]
    assert model["hit_rates"][-1] == {"experts": 24, "hit_rate": pytest.approx(1)}
    shown = call("stats", folder.name).stdout
    assert "choices in 3 layers of 24 experts" in shown
    assert "100.0%" in shown
    assert folder.name in call("stats").stdout
    assert f"no statistics of 'other'; there are: {folder.name}" in call("stats", "other", code=2).stderr
    assert folder.name in call("stats", folder.name, "--reset").stdout
    assert "no statistics yet" in call("stats").stdout
