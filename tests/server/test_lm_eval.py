"""lm-eval's ``local-completions`` against a real server: its scores; log-likelihoods as in transformers."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hetero.model.demo import TEST_MODEL
from tests.server.outside import TEXT, Server

TASKS = Path(__file__).with_name("lm_eval")
NEEDED = ("lm_eval", "aiohttp", "tenacity")  # of lm_eval[api]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in NEEDED),
        reason="lm-eval is not installed (pip install 'lm_eval[api]')",
    ),
]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("--set", "experts=f32").ready(seconds=120) as running:
        yield running


def run(server: Server, folder: Path, *words: str, **arguments: Any) -> dict[str, Any]:
    """What the harness writes of a run: ``results``, and the samples of each task."""
    address = f"http://127.0.0.1:{server.port}{TEXT}"
    told = {"model": "test-model", "base_url": address} | arguments
    command = [sys.executable, "-m", "lm_eval", "--model", "local-completions", "--include_path", "."]
    command += ["--model_args", ",".join(f"{name}={value}" for name, value in told.items())]
    command += ["--output_path", str(folder), "--log_samples", *words]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hf")}
    done = subprocess.run(
        command,
        cwd=TASKS,
        env=os.environ | offline | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (results,) = folder.rglob("results_*.json")
    written: dict[str, Any] = {"results": json.loads(results.read_text())["results"]}
    for file in folder.rglob("samples_*.jsonl"):
        task = file.name.removeprefix("samples_").rpartition("_")[0]
        written[task] = [json.loads(line) for line in file.read_text().splitlines()]
    return written


@pytest.mark.parametrize(
    "arguments",
    [{}, {"tokenized_requests": False}, {"num_concurrent": 4}],
    ids=["ids", "texts", "concurrent"],
)
def test_loglikelihoods(server: Server, tmp_path: Path, arguments: dict[str, Any]) -> None:
    words = ["--tasks", "hetero_choices", "--batch_size", "3"]
    got = run(server, tmp_path, *words, tokenizer=TEST_MODEL, **arguments)
    tokenizer = AutoTokenizer.from_pretrained(TEST_MODEL)
    model = AutoModelForCausalLM.from_pretrained(TEST_MODEL, dtype=torch.float32).eval()
    right = 0
    for sample in got["hetero_choices"]:
        sums = []
        for part, (said, greedy) in zip(sample["arguments"].values(), sample["filtered_resps"], strict=True):
            context = tokenizer(part["arg_0"]).input_ids
            whole = tokenizer(part["arg_0"] + part["arg_1"]).input_ids
            with torch.no_grad():
                logprobs = model(torch.tensor([whole])).logits[0].log_softmax(-1)[len(context) - 1 : -1]
            answer = torch.tensor(whole[len(context) :])
            sums.append(float(logprobs.gather(1, answer[:, None]).sum()))
            assert float(said) == pytest.approx(sums[-1], abs=2e-3)
            assert str(greedy) == str(bool((logprobs.argmax(-1) == answer).all()))
        right += sums.index(max(sums)) == sample["doc"]["answer"]
    assert got["results"]["hetero_choices"]["acc,none"] == pytest.approx(right / 12)


@pytest.mark.parametrize(
    "arguments",
    [{"tokenizer": TEST_MODEL}, {"tokenizer_backend": None, "tokenized_requests": False}],
    ids=["ids", "texts"],
)
def test_answers(server: Server, tmp_path: Path, arguments: dict[str, Any]) -> None:
    got = run(server, tmp_path, "--tasks", "hetero_answers", max_length=1024, **arguments)
    assert 0 <= got["results"]["hetero_answers"]["exact_match,first-word"] <= 1
    assert len(got["hetero_answers"]) == 6
    for sample in got["hetero_answers"]:
        ((said,),) = sample["resps"]
        asked = {"max_tokens": 16, "temperature": 0, "stop": ["\n", "."]}
        direct = server.post(TEXT, prompt=sample["doc"]["question"], **asked)
        assert said == direct["choices"][0]["text"]
