"""A real ``hetero serve`` process with the small test model, for tests that know it by its socket alone."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import httpx
from typer.testing import CliRunner

from hetero import cli
from hetero.model.demo import TEST_MODEL

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
READY = re.compile(r"serving \S+ on http://\S+:(\d+) ")


class Server:
    """The process and a client. ``stderr`` None keeps what it says for ``said``."""

    def __init__(
        self,
        *options: str,
        model: str | Path = TEST_MODEL,
        stderr: IO[bytes] | None = None,
        env: dict[str, str] | None = None,
    ) -> None:
        self._heard = tempfile.TemporaryFile()  # noqa: SIM115
        self.options = options
        words = [sys.executable, "-m", "hetero.cli", "serve", str(model), *options]
        if "--port" not in options:
            words += ["--port", "0"]
        own = {"OMP_NUM_THREADS": "1", "HETERO_THREADS": "1", **(env or {})}
        inherited = {k: v for k, v in os.environ.items() if k != "HETERO_API_KEY"}
        self.process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr or self._heard,
            env={**inherited, **own},
        )
        self.client = httpx.Client()

    def said(self) -> str:
        return os.pread(self._heard.fileno(), 1 << 20, 0).decode()

    def hears(self, text: str, seconds: float = 30) -> None:
        """Wait until stderr has ``text``."""
        end = time.monotonic() + seconds
        while text not in self.said():
            assert time.monotonic() < end, self.said()
            time.sleep(0.005)

    def ready(self, port: int | None = None, seconds: float = 90, **client: Any) -> Server:
        """Wait until it serves; ``port`` where stderr does not say it."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            assert self.process.poll() is None, f"it ended by {self.process.returncode}: {self.said()}"
            found = READY.search(self.said())
            if found or port is not None:
                address = f"http://127.0.0.1:{port or int(found[1])}"  # type: ignore[index]
                with contextlib.suppress(httpx.TransportError):
                    if httpx.get(f"{address}/health/ready", timeout=5).status_code == 200:
                        self.client = httpx.Client(base_url=address, timeout=60, **client)
                        return self
            time.sleep(0.05)
        raise AssertionError(f"not ready: {self.said()}")

    @property
    def port(self) -> int:
        port = self.client.base_url.port
        assert port is not None
        return port

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        answer = self.client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def refused(self, status: int, path: str, **body: Any) -> dict[str, Any]:
        answer = self.client.post(path, json=body)
        assert answer.status_code == status, answer.text
        return answer.json()["error"]

    @contextlib.contextmanager
    def stream(self, path: str = TEXT, **body: Any) -> Iterator[Iterator[str]]:
        """Lines of a stream that are not empty, the first already there."""
        with self.client.stream("POST", path, json=body | {"stream": True}) as answer:
            assert answer.status_code == 200, answer.read()
            lines = (line for line in answer.iter_lines() if line)
            first = next(lines)
            yield iter_with(first, lines)

    def chunks(self, path: str, **body: Any) -> list[dict[str, Any]]:
        with self.stream(path, **body) as lines:
            whole = list(lines)
        assert whole[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in whole[:-1]]

    def idle(self, seconds: float = 20) -> None:
        """Wait until nothing runs or waits."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            health = self.client.get("/health").json()
            if (health["running"], health["waiting"]) == (0, 0):
                return
            time.sleep(0.02)
        raise AssertionError(f"still busy: {health}")

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        lines = self.client.get("/metrics").text.splitlines()
        found = [float(line.split()[-1]) for line in lines if re.match(rf"hetero:{name}(\{{.*\}})? ", line)]
        assert found, name
        return sum(found)

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def end(self, seconds: float = 90) -> int:
        return self.process.wait(seconds)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(30)
        self._heard.close()


def refused_start(*options: str) -> str:
    """The one line of a server that does not start for what it is told, in this process, since a process of
    its own would take seconds to import what it does not come to use."""
    done = CliRunner().invoke(cli.app, ["serve", str(TEST_MODEL), "--port", "0", *options])
    assert done.exit_code == 2, done.output
    assert done.stdout == ""
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("hetero: ")
    return line


def iter_with(first: str, rest: Iterator[str]) -> Iterator[str]:
    yield first
    yield from rest


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def long_answer(tokens: int) -> dict[str, Any]:
    """The body of a completion that surely has so many tokens."""
    return {"prompt": "The whale", "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
