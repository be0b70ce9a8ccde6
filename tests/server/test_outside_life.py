"""Start, signals, full disks, taken ports, vanishing folders: each has its clear line and its exit code."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from hetero.model.demo import TEST_MODEL
from hetero.server.serve import CLOSE_S
from tests.server.outside import TEXT, Server, free_port, long_answer, refused_start


def one_line(server: Server) -> str:
    lines = server.said().strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("hetero: ")
    return lines[0]


def test_answers_while_it_loads() -> None:
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    with Server("--port", str(port)) as server:
        seen = set()
        end = time.monotonic() + 180
        while (200, "ok") not in seen and time.monotonic() < end:
            try:
                answer = httpx.get(f"{address}/health", timeout=30)
                seen.add((answer.status_code, answer.json()["status"]))
                if answer.status_code == 503 and len(seen) == 1:
                    assert httpx.get(f"{address}/health/live", timeout=30).status_code == 200
                    early = httpx.post(f"{address}{TEXT}", json={"prompt": "a"}, timeout=30)
                    assert early.status_code in (200, 503)
                    if early.status_code == 503:
                        assert int(early.headers["retry-after"]) >= 1
                        assert "loaded" in early.json()["error"]["message"]
            except httpx.ConnectError:
                time.sleep(0.01)
        assert seen == {(503, "loading"), (200, "ok")}
        server.signal()
        assert server.end() == 0


def test_a_killed_client_frees_its_slot() -> None:
    with Server("--slots", "1").ready() as server:
        code = (
            "import httpx, sys\n"
            f"with httpx.stream('POST', '{server.client.base_url}{TEXT}', json={long_answer(900)!r} | "
            "{'stream': True}, timeout=60) as a:\n"
            "    for line in a.iter_lines():\n"
            "        print(line, flush=True)\n"
        )
        client = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert client.stdout is not None
        assert client.stdout.readline().startswith(b"data: ")
        assert server.client.get("/health").json()["running"] == 1
        client.kill()
        client.wait()
        server.idle()
        client.stdout.close()
        assert server.metric("kv_cache_tokens_used") == 0
        assert server.metric("generation_tokens_total") < 900
        assert server.post(TEXT, **long_answer(4))["usage"]["completion_tokens"] == 4


def test_sigterm_drains() -> None:
    with Server().ready() as server:
        with server.stream(**long_answer(400), stream_options={"include_usage": True}) as lines:
            server.signal()
            # Before the line, a request that comes in is still taken.
            server.hears("hetero: stopping; 1 requests may end within 10 s")
            refused = None
            while refused is None:
                try:
                    answer = server.client.post(TEXT, json=long_answer(1))
                    refused = answer if answer.status_code == 503 else None
                except httpx.TransportError:
                    break
            if refused is not None:
                assert "shutting down" in refused.json()["error"]["message"]
                assert server.client.get("/health/ready").status_code == 503
            *_, usage, done = lines
        assert done == "data: [DONE]"
        assert json.loads(usage.removeprefix("data: "))["usage"]["completion_tokens"] == 400
        assert server.end() == 0


def test_a_second_signal_stops_at_once() -> None:
    with Server("--drain", "60").ready() as server, server.stream(**long_answer(1000)):
        server.signal()
        server.hears("hetero: stopping; 1 requests may end within 60 s")
        server.signal()
        assert server.end(50) == 128 + signal.SIGTERM
        assert server.said().strip().splitlines()[-1] == "hetero: stopped at once"


def test_what_outlasts_the_drain_is_told() -> None:
    with Server("--drain", "0.3").ready() as server:
        with server.stream(**long_answer(1000)) as lines:
            server.signal()
            *_, last = lines
        assert json.loads(last.removeprefix("data: "))["error"]["message"] == "the server is shutting down"
        assert server.end() == 0


def test_a_signal_while_idle() -> None:
    began = time.monotonic()
    with Server().ready() as server:
        # An idle connection is open, as clients keep them.
        assert server.client.get("/health").status_code == 200
        asked = time.monotonic()
        server.signal(signal.SIGINT)
        assert server.end() == 0
        # Nobody waits for the connection. What is else to be done is less than a start is.
        assert time.monotonic() - asked < max(CLOSE_S, asked - began)
        assert len(server.said().strip().splitlines()) == 1


def test_a_signal_while_loading(tmp_path: Path) -> None:
    # An operator of the user's own keeps the model from being ready for as long as the test needs.
    (tmp_path / "slow.py").write_text(
        "import sys, time\n"
        "class Slow:\n"
        "    @classmethod\n"
        "    def from_module(cls, module, **_):\n"
        "        print('it is being made', file=sys.stderr, flush=True)\n"
        "        time.sleep(300)\n"
    )
    rules = tmp_path / "rules.yaml"
    rules.write_text(
        "extends: default\n"
        "rules:\n"
        "  - name: never done\n"
        "    match: {name: '^model\\.norm$'}\n"
        "    replace: {class: slow.Slow}\n"
    )
    with Server("--rules", str(rules), env={"PYTHONPATH": str(tmp_path)}) as server:
        server.hears("it is being made", 90)
        server.signal()
        assert server.end() == 130, server.said()
        assert "stopped while the model was being loaded" in server.said()
        assert "Traceback" not in server.said()


def test_a_full_disk_under_the_log() -> None:
    with Server("--log-file", "/dev/full").ready() as server:
        for _ in range(3):
            server.post(TEXT, **long_answer(2))
        server.signal()
        assert server.end() == 0
        told = [line for line in server.said().splitlines() if "/dev/full" in line]
        assert told == [
            "hetero: --log-file /dev/full: No space left on device; the server goes on, lines are lost until "
            "it can be written"
        ]


def test_a_full_disk_under_stderr() -> None:
    port = free_port()
    with Path("/dev/full").open("wb") as full, Server("--port", str(port), stderr=full).ready(port) as server:
        server.post(TEXT, **long_answer(2))
        server.signal()
        assert server.end() == 0


def test_the_log_has_a_line_a_request(tmp_path: Path) -> None:
    file = tmp_path / "serve.log"
    with Server("--log-file", str(file)).ready() as server:
        server.post(TEXT, **long_answer(2))
        file.rename(tmp_path / "serve.log.1")
        assert server.client.get("/no/such/route").status_code == 404
        server.signal()
        assert server.end() == 0
        assert len(server.said().strip().splitlines()) == 1
    assert " POST /v1/completions 200 " in (tmp_path / "serve.log.1").read_text()
    assert " GET other 404 " in file.read_text()


def test_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with Server("--port", str(port)) as server:
            assert server.end() == 3
            assert f"port {port} of 127.0.0.1 is already in use" in one_line(server)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--host", "0.0.0.0"), "--allow-remote"),
        (("--tool-format", "smoke-signals"), "--tool-format smoke-signals: must be one of auto, "),
        (("--slots", "0"), "--slots 0: must be from 1 to 512"),
        (("--ctx", "512", "--kv-tokens", "256"), "--ctx 512: the KV cache holds 256 tokens"),
        (("--request-timeout", "-1"), "--request-timeout -1: must be above 0"),
        (("--cors-origin", "https://a.example/"), "--cors-origin https://a.example/: must be * or scheme"),
        (("--allow-host", "http://a.example"), "--allow-host http://a.example: must be a name alone"),
        (("--api-key-file", "/no/such/file"), "--api-key-file /no/such/file: cannot be read: No such file"),
        (("--log-file", "/no/such/folder/log"), "--log-file /no/such/folder/log: cannot be written"),
    ],
)
def test_options_that_are_wrong(options: tuple[str, ...], words: str) -> None:
    assert words in refused_start(*options)


def test_an_option_that_the_model_does_not_bear() -> None:
    """What only a server that has begun to load can know."""
    with Server("--ctx", "5000") as server:
        assert server.end() == 2
        assert "--ctx 5000: the context of this model holds 1024 tokens" in one_line(server)


def test_the_folder_vanishes(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(TEST_MODEL, folder)
    with Server(model=folder).ready() as server:
        want = server.post(TEXT, **long_answer(8))["choices"]
        shutil.rmtree(folder)
        assert server.post(TEXT, **long_answer(8))["choices"] == want
        server.hears(f"{folder} is gone; the model stays in memory")
        server.signal()
        assert server.end() == 0
    with Server(model=folder) as server:
        assert server.end() == 2
        assert str(folder) in one_line(server)


def test_the_weights_vanish_before_the_load(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(TEST_MODEL, folder)
    (folder / "model.safetensors").unlink()
    with Server(model=folder) as server:
        assert server.end() == 2
        assert "Traceback" not in server.said()
        assert str(folder) in one_line(server)
