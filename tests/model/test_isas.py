"""The command's promise: every instruction set gives the same tokens, and says which kernels ran."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from hetero import cli, cpu
from hetero.model.demo import TEST_MODEL, demo_folder, find_gguf

PROMPT = "11,42,63,80,9"


def tokens(monkeypatch: pytest.MonkeyPatch, folder: str, isa: str, count: int) -> list[int]:
    monkeypatch.setenv("HETERO_ISA", isa)
    options = ["--prompt-ids", PROMPT, "--temperature", "0", "--ignore-eos", "--json"]
    options += ["--set", "experts=int8", "--max-tokens", str(count)]
    result = CliRunner().invoke(cli.app, ["run", folder, *options])
    assert result.exit_code == 0, result.output
    body = json.loads(result.stdout)
    # The AMX tables borrow the vector kernels of AVX-512 for few rows.
    families = (f"int8.{isa}",) if isa != "amx" else ("int8.amx", "int8.avx512")
    assert body["kernels"]
    assert all(name.startswith(families) for name in body["kernels"])
    assert len(body["token_ids"]) == count
    return list(body["token_ids"])


def test_the_test_model(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {isa: tokens(monkeypatch, str(TEST_MODEL), isa, 64) for isa in cpu.isas()}
    assert len(set(answers["scalar"])) > 5
    assert all(answer == answers["scalar"] for answer in answers.values())


@pytest.mark.slow
def test_the_demo_model(monkeypatch: pytest.MonkeyPatch) -> None:
    gguf = find_gguf()
    if gguf is None:
        pytest.skip("the demo's weights are not installed")
    folder = str(demo_folder(gguf))
    answers = {isa: tokens(monkeypatch, folder, isa, 20) for isa in cpu.isas()}
    assert len(set(answers["scalar"])) > 5
    assert all(answer == answers["scalar"] for answer in answers.values())
