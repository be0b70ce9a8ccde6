"""The command line: exit codes, messages without traceback, and what starts without torch."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

from hetero import cli, cli_model, cli_rules, trace_file
from hetero.core import InputError
from hetero.engine.generate import Engine
from hetero.engine.load import load_model
from hetero.engine.request import Request
from hetero.model.shapes import resolve_model
from hetero.model.tokenizer import Tokenizer, no_tokenizer
from hetero.stats import expert_counts
from tests.model.tiny import tiny, tiny_tokenizer

PYTHON = [sys.executable, "-m", "hetero.cli"]
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "HETERO_THREADS": "1", "PYTHONWARNINGS": "ignore"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a tiny random model with tokenizer and chat template."""
    path = tmp_path_factory.mktemp("tiny-model")
    tiny("qwen3_moe", vocab_size=300, eos_token_id=299).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def bare(folder: Path, tmp_path: Path) -> Path:
    """The same without tokenizer, in a folder that a test may change."""
    for name in ("config.json", "model.safetensors", "generation_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    return tmp_path


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    monkeypatch.setenv("HETERO_THREADS", "1")
    yield
    torch.set_num_threads(before)


def call(*args: object) -> Result:
    return CliRunner().invoke(cli.app, [str(arg) for arg in args])


def refused(code: int, *args: object) -> str:
    """The one message of a call that fails with ``code``."""
    result = call(*args)
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert result.stderr.startswith("hetero: ")
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    return result.stderr


def test_more_threads_than_cores_are_told_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli_model.cpu, "physical_cores", lambda _: 6)
    monkeypatch.setattr(cli_model.cpu, "quota", lambda: None)
    cli_model.check_threads(6)
    cli_model.check_threads(None)
    assert capsys.readouterr().err == ""
    cli_model.check_threads(1000)
    assert "note: --threads 1000: this process may use 6 physical cores; " in capsys.readouterr().err
    monkeypatch.setattr(cli_model.cpu, "quota", lambda: 1.5)
    monkeypatch.setenv("HETERO_THREADS", "2")
    cli_model.check_threads(None)
    assert "note: HETERO_THREADS=2: this process may use 1 physical core; " in capsys.readouterr().err
    with pytest.raises(InputError, match=r"--threads 0: must be from 1 to"):
        cli_model.check_threads(0)


def answer(*args: object) -> dict[str, Any]:
    result = call("run", *args, "--json")
    assert result.exit_code == 0, result.output
    body: dict[str, Any] = json.loads(result.stdout)
    return body


@pytest.mark.parametrize("args", [["--help"], ["run", "--help"], ["serve", "--help"], ["rules", "list"]])
def test_starts_without_torch(args: list[str]) -> None:
    code = (
        "import sys\nfrom hetero.cli import app\n"
        f"try:\n    app({args!r}, prog_name='hetero')\n"
        "except SystemExit as e:\n    assert not e.code, e.code\n"
        "assert not {'torch', 'transformers', 'fastapi'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=ENV, stdout=subprocess.DEVNULL, timeout=240)


def test_json_tells_all(folder: Path) -> None:
    body = answer(
        folder, "--prompt-ids", "5,6,7", "--max-tokens", 8, "--set", "experts=int8", "--isa", "scalar"
    )
    assert set(body) == {
        *("token_ids", "text", "finish_reason", "usage", "timings", "kernels", "model", "rules", "seed"),
    }
    assert len(body["token_ids"]) == 8
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 8, "total_tokens": 11}
    assert set(body["timings"]) == {"load_s", "ttft_s", "prefill_tok_s", "decode_tok_s"}
    assert all(value > 0 for value in body["timings"].values())
    assert body["kernels"]
    assert all(name.startswith("int8.scalar") for name in body["kernels"])
    assert body["rules"]["variables"]["experts"] == "int8"
    assert body["model"]["type"] == "qwen3_moe"
    assert (
        answer(folder, "--prompt-ids", "5 6 7", "--max-tokens", 8)["rules"]["variables"]["experts"] != "int8"
    )


def test_text_goes_through_the_template_unless_raw(folder: Path) -> None:
    loaded = load_model(folder, overrides={"experts": "f32"})
    engine, tokenizer = Engine(loaded.runnable), loaded.tokenizer
    assert tokenizer is not None
    chat = tokenizer.chat([{"role": "user", "content": "the sea"}])
    led = tokenizer.chat([{"role": "system", "content": "be"}, {"role": "user", "content": "the sea"}])
    for ids, extra in ((chat, []), (tokenizer.encode("the sea"), ["--raw"]), (led, ["--system", "be"])):
        want = engine.complete(Request(tuple(ids), max_tokens=10))
        body = answer(folder, "-p", "the sea", "--set", "experts=f32", "--max-tokens", 10, *extra)
        assert body["token_ids"] == list(want.token_ids)
        assert body["text"] == want.text
        assert body["usage"]["prompt_tokens"] == len(ids)


def test_streamed_text_is_the_json_text(folder: Path) -> None:
    options = ["-p", "漢字 🙂", "--max-tokens", 40, "--temperature", 1.2, "--seed", 3]
    body = answer(folder, *options)
    streamed = call("run", folder, *options)
    assert streamed.exit_code == 0
    assert streamed.stdout.removesuffix("\n") == body["text"].removesuffix("\n")
    last = streamed.stderr.strip().splitlines()[-1]
    assert "tok/s" in last
    assert "TTFT" in last
    assert all(name in last for name in body["kernels"])
    stop = body["text"][6:9]
    cut = answer(folder, *options, "--stop", stop)
    assert cut["text"] == body["text"][: body["text"].index(stop)]
    assert cut["finish_reason"] == "stop"


def test_without_a_tokenizer(bare: Path) -> None:
    options = ["--prompt-ids", "5,6", "--max-tokens", 4]
    body = answer(bare, *options)
    assert body["text"] is None
    plain = call("run", bare, *options)
    assert [int(word) for word in plain.stdout.split()] == body["token_ids"]
    assert "--prompt-ids" in refused(2, "run", bare, "-p", "hello")
    assert "--prompt-ids" in refused(2, "chat", bare)


def test_without_a_template(bare: Path) -> None:
    tiny_tokenizer(template=None).save_pretrained(bare)
    assert answer(bare, "-p", "the", "--max-tokens", 4)["usage"]["prompt_tokens"] == 1
    assert "chat template" in refused(2, "chat", bare)
    assert "chat template" in refused(2, "run", bare, "-p", "x", "--system", "y")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "-p TEXT"),
        (["-p", "a", "--prompt-ids", "1"], "either"),
        (["--prompt-ids", "1,x"], "--prompt-ids 1,x"),
        (["--prompt-ids", "1_0"], "--prompt-ids 1_0"),
        (["--prompt-ids", ""], "at least one token"),
        (["--prompt-ids", "5,300"], "token id 300"),
        (["--prompt-ids", "5", "--max-tokens", "0"], "max_tokens=0"),
        (["-p", "a", "--temperature", "-1"], "temperature"),
        (["-p", "a", "--stop", ""], "stop"),
        (["-p", "a", "--dtype", "int3"], "--dtype int3"),
        (["-p", "a", "--threads", "0"], "--threads 0"),
        (["-p", "a", "--threads", "100000"], "--threads 100000: must be from 1 to 4096"),
        (["-p", "a", "--isa", "sse9"], "--isa sse9: must be one of auto, scalar, avx2"),
        (["-p", "a", "--set", "experts"], "experts"),
        (["-p", "a", "--set", "expert=int8"], "expert"),
        (["-p", "a", "--set", "experts=int5"], "(given by --set experts=int5)"),
        (["-p", "a", "--rules", "no-such-file.yaml"], "no-such-file"),
        (["--prompt-ids", ",".join(["5"] * 300)], "300 tokens"),
    ],
    ids=str,
)
def test_wrong_options(folder: Path, options: list[str], message: str) -> None:
    assert message in refused(2, "run", folder, *options)


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        ("run", ["-p", "a", "--max-tokens", "0"], "max_tokens=0"),
        ("run", ["-p", "a", "--stop", ""], "stop string"),
        ("run", ["--prompt-ids", ","], "at least one token"),
        ("run", ["-p", "a", "--top-k", "-" + "9" * 400], "top_k"),
        ("run", ["-p", "a", "--seed", "9" * 400], "seed"),
        ("run", ["-p", "a", "--temperature", "nan"], "temperature"),
        ("chat", ["--max-tokens", "-3"], "max_tokens=-3"),
        ("chat", ["--stop", ""], "stop string"),
    ],
    ids=lambda v: v if isinstance(v, str) else v[-2],
)
def test_a_wrong_request_is_told_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, command: str, options: list[str], message: str
) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("the model is being loaded")

    monkeypatch.setattr(cli_model.ModelOptions, "load", load)
    assert message in refused(2, command, "folder", *options)


def test_a_huge_top_k_keeps_all(folder: Path) -> None:
    options = [folder, "--prompt-ids", "5", "--max-tokens", 4, "--temperature", 1, "--seed", 2, "--top-k"]
    assert answer(*options, "9" * 400)["token_ids"] == answer(*options, 300)["token_ids"]


@pytest.mark.parametrize("words", [("run", "-p", "a", "{}"), ("run", "folder", "-p", "a", "--rules", "{}")])
def test_a_path_that_the_system_refuses(folder: Path, words: tuple[str, ...]) -> None:
    long = "x" * 5000
    message = refused(2, *(str(folder) if word == "folder" else word.format(long) for word in words))
    assert message == f"hetero: {long}: File name too long\n"


@pytest.mark.parametrize("value", ["2.5", '"</s>"', '{"a": 1}', "true", "[1, null]"])
def test_a_wrong_end_of_text(bare: Path, value: str) -> None:
    (bare / "generation_config.json").write_text(f'{{"eos_token_id": {value}}}')
    message = refused(2, "run", bare, "--prompt-ids", "1")
    assert "generation_config.json: field 'eos_token_id'" in message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--vram", "lots"], "--vram lots: is no size"),
        (["--handoff", "graph"], "--handoff graph: must be one of auto, memop, spin, hostfunc"),
        (["--ctx", "1"], "--ctx 1: must be at least 2"),
        (["--ctx", "99999999"], "--ctx 99999999: the context of this model holds"),
    ],
)
def test_wrong_options_of_a_gpu(folder: Path, options: list[str], message: str) -> None:
    assert message in refused(2, "run", folder, "--prompt-ids", "5", *options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--vram", "2GiB", "--auto"], "--vram"),
        (["--handoff", "spin"], "--handoff"),
        (["--handoff", "spin", "--vram", "2GiB"], "--vram, --handoff"),
    ],
)
def test_options_of_a_gpu_without_one(folder: Path, options: list[str], names: str) -> None:
    said = refused(3, "run", folder, "--prompt-ids", "5", *options)
    assert f"{names}: of a GPU, and torch sees none here" in said


def test_a_shorter_context(folder: Path) -> None:
    result = call("run", folder, "--prompt-ids", "5,6,7", "--ctx", "6", "--ignore-eos", "--json")
    assert len(json.loads(result.stdout)["token_ids"]) == 3


def test_wrong_models(tmp_path: Path, bare: Path) -> None:
    assert "no-such-model" in refused(2, "run", "no-such-model", "-p", "a")
    assert "config.json" in refused(2, "run", tmp_path / "..", "-p", "a")
    assert "random weights have no tokenizer" in refused(2, "run", "synthetic:qwen3-30b-a3b", "-p", "a")
    (bare / "tokenizer.json").write_text("{")
    assert "tokenizer" in refused(2, "run", bare, "--prompt-ids", "1")
    (bare / "tokenizer.json").unlink()
    (bare / "generation_config.json").write_text("[")
    assert "generation_config.json" in refused(2, "run", bare, "--prompt-ids", "1")
    (bare / "generation_config.json").unlink()
    tensors = load_file(bare / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, bare / "model.safetensors", metadata={"format": "pt"})
    assert "model.norm.weight" in refused(2, "run", bare, "--prompt-ids", "1")
    (bare / "config.json").write_text("{}")
    assert "model_type" in refused(2, "run", bare, "--prompt-ids", "1")


def test_too_little_memory_is_told_before_weights_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hetero.hw import memory
    from hetero.model.source import Checkpoint

    def read(*_: object) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr(memory, "available", lambda *_: memory.Available(100_000, "a small cgroup"))
    monkeypatch.setattr(Checkpoint, "read", read)
    monkeypatch.setattr(Checkpoint, "read_slice", read)
    message = refused(3, "run", folder, "--prompt-ids", "1")
    assert "100000 bytes" in message
    assert "a small cgroup" in message


def test_an_isa_that_the_machine_lacks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hetero import cpu

    if "amx" in cpu.isas():

        def lacks(_: str) -> None:
            raise RuntimeError("AMX tiles")

        monkeypatch.setattr("hetero._cpu.check_isa", lacks)
    assert "amx" in refused(3, "run", folder, "--prompt-ids", "1", "--isa", "amx")
    monkeypatch.setenv("HETERO_ISA", "amx")
    assert "amx" in refused(3, "run", folder, "--prompt-ids", "1")


def test_a_defect_is_one_line_with_its_traceback_on_demand(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise KeyError("lost")

    monkeypatch.setattr("hetero.engine.load.load_model", broken)
    assert "KeyError" in refused(1, "run", folder, "-p", "a")
    monkeypatch.setenv("HETERO_DEBUG", "1")
    assert "Traceback" in call("run", folder, "-p", "a").stderr


def test_default_model_says_what_it_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hetero.model import demo

    monkeypatch.setattr(demo, "default_model", lambda: demo.DefaultModel(folder, "note: a stand-in"))
    result = call("run", "--prompt-ids", "5", "--max-tokens", 2)
    assert result.exit_code == 0
    assert result.stderr.startswith("note: a stand-in\n")


def test_chat_remembers_resets_and_leaves(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    check = Engine.check

    def spy(self: Engine, request: Request) -> int:
        asked.append(len(request.prompt))
        return check(self, request)

    monkeypatch.setattr(Engine, "check", spy)
    lines = "hello\nhello\n/what\n\n/reset\nhello\n" + "a" * 400 + "\nhello\n/exit\nnever\n"
    result = CliRunner().invoke(
        cli.app, ["chat", str(folder), "--max-tokens", "3", "--temperature", "0"], input=lines
    )
    assert result.exit_code == 0, result.output
    first, second, third, long, last = asked
    assert second > first
    assert third == first
    assert long > 256
    # The turn that did not fit is forgotten, the conversation before it is not.
    assert last == second
    assert "/what: no such command" in result.stderr
    assert "context" in result.stderr
    assert result.stderr.count("tok/s") == 4
    # What was said is not read again: after "/reset" it is what the first turn has read that counts.
    read = re.findall(r"s, ([0-9 of]+) tokens read", result.stderr)
    assert read[0] == str(first)
    assert all(int(count.split(" of ")[0]) < int(count.split(" of ")[1]) for count in read[1:]), read


def test_chat_survives_bytes_that_are_no_text(folder: Path) -> None:
    done = subprocess.run(
        [*PYTHON, "chat", str(folder), "--max-tokens", "2"],
        input=b"caf\xe9\nhello\n",
        env=ENV,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert b"not valid Unicode" in done.stderr
    assert done.stderr.count(b"tok/s") == 1


def spawn(*args: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*PYTHON, *map(str, args)],
        env=ENV,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        bufsize=1,
    )


def test_serve_from_start_to_sigterm(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("HETERO_STATS", "on"), ("HETERO_CACHE", str(tmp_path))):
        monkeypatch.setitem(ENV, name, value)
        monkeypatch.setenv(name, value)
    with spawn("serve", folder, "--port", 0) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert line.startswith("serving "), line + process.stderr.read()
        port = int(line.split(" (")[0].rsplit(":", 1)[1])
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            model = client.get("/v1/models").json()["data"][0]["id"]
            assert model == folder.name
            body = {"model": model, "messages": [{"role": "user", "content": "a"}], "max_tokens": 3}
            assert client.post("/v1/chat/completions", json=body).status_code == 200
            taken = call("serve", folder, "--port", port)
            assert taken.exit_code == 3
            assert f"port {port}" in taken.stderr
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=240)
    assert process.returncode == 0
    assert "Traceback" not in errors
    counts = expert_counts(resolve_model(str(folder)))
    assert counts is not None
    assert (counts.sum(axis=1) > 0).all()
    assert "--allow-remote" in refused(2, "serve", folder, "--host", "0.0.0.0")


def test_ctrl_c_and_a_reader_that_leaves(folder: Path) -> None:
    endless = ["run", folder, "--prompt-ids", "5", "--max-tokens", 250, "--temperature", 2]
    with spawn(*endless, "--ignore-eos") as process:
        assert process.stdout is not None
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=240)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    with spawn(*endless) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(60) == cli.BROKEN_PIPE
        assert process.stderr is not None
        assert process.stderr.read() == ""


def test_torch_threads_do_not_spin() -> None:
    """The variable counts only if it is set before torch starts."""
    code = (
        "import os, sys\nimport hetero.cli as cli\n"
        "cli.app = lambda **_: print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules)\n"
        "cli.main()\n"
    )
    for given, want in ((None, "passive"), ("active", "active")):
        env = {name: value for name, value in ENV.items() if name != "OMP_WAIT_POLICY"}
        env |= {"OMP_WAIT_POLICY": given} if given else {}
        done = subprocess.run(
            [sys.executable, "-c", code], check=True, env=env, capture_output=True, text=True
        )
        assert done.stdout.split() == [want, "False"]


def test_ctrl_c_while_loading_is_quiet() -> None:
    code = (
        "import os, signal\nimport hetero.cli as cli\n"
        "cli.checkpoint = lambda *_: os.kill(os.getpid(), signal.SIGINT)\n"
        "cli.app(['run', '--prompt-ids', '1'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, env=ENV, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 130
    assert "Traceback" not in done.stderr


def test_a_full_disk_behind_stdout() -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "hetero.cli", "rules", "list"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        3,
        "hetero: the output cannot be written: No space left on device\n",
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("run", "-p", ""), "-p '': the prompt is empty"),
        (("run", "--ram", "0", "-p", "x"), "--ram 0: must be above 0"),
        (("run", "--ram", "5", "-p", "x"), "--ram 5: is no size; a unit is missing"),
        (("serve", "--ram", "many"), "--ram many: is no size"),
        (("plan", "synthetic:mixtral-8x7b", "--ram", "24"), "--ram 24: is no size; a unit is missing"),
        (("plan", "synthetic:mixtral-8x7b", "--format", "int5"), "--format int5: unknown weight format"),
    ],
)
def test_the_option_at_fault_is_named_before_anything_is_loaded(words: tuple[str, ...], told: str) -> None:
    refused = call(*words)
    assert refused.exit_code == 2
    assert told in refused.output


def test_a_full_disk_is_the_machines_fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "file"))

    with monkeypatch.context() as patched:
        patched.setattr(trace_file.Path, "open", full)
        refused = call("run", "--trace", tmp_path / "t.json", "-p", "x")
    assert refused.exit_code == 3
    assert "t.json: cannot be written: No space left" in refused.output
    # Also where nobody has foreseen it.
    monkeypatch.setattr(cli_rules, "default_rules_for", full)
    refused = call("rules", "explain", "synthetic:mixtral-8x7b")
    assert refused.exit_code == 3
    assert "file: cannot be written: No space left" in refused.output


def test_advice_fits_gguf_files(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert "put its tokenizer.json there" in no_tokenizer(tmp_path / "folder")
    assert "a file whose metadata has one" in no_tokenizer(tmp_path / "m.gguf")
    asked = [{"role": "user", "content": "a"}]
    for where, way in (("folder", "chat_template.jinja"), ("m.gguf", "tokenizer.chat_template")):
        with pytest.raises(InputError, match=rf"{where} has no chat template.*--raw.*{way}"):
            Tokenizer(tiny_tokenizer(None), where).render(asked)
