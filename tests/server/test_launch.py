"""``hetero launch``: what tools are told of the server, with a stand-in for each tool on the PATH."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from hetero.cli_launch import NO_KEY, TOOLS

SECRET = "a-secret-of-a-person"
FAKE = f"""#!{sys.executable}
import json, os, sys
names = ("ANTHROPIC_", "OPENAI_", "OPENCODE_", "AIDER_", "HETERO_API", "CLAUDE_")
print(json.dumps([sys.argv[1:], {{k: v for k, v in os.environ.items() if k.startswith(names)}}]))
"""


class Stub(BaseHTTPRequestHandler):
    """Answers as a server does; ``mode`` says in which state."""

    mode = "ready"

    def do_GET(self) -> None:
        key = self.headers.get("authorization")
        status, body = 200, {"data": [{"id": "qwen"}]}
        if self.mode == "locked" and key != f"Bearer {SECRET}":
            status = 401
        elif self.mode == "loading" and self.path == "/health/ready":
            status = 503
        elif self.mode == "moved":
            self.send_response(302)
            self.send_header("location", "http://127.0.0.1:9/v1/models")
            self.end_headers()
            return
        elif self.mode == "other":
            body = {"hello": "world"}  # type: ignore[dict-item]
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.delenv("HETERO_API_KEY", raising=False)
    monkeypatch.setattr(Stub, "mode", "ready")
    with ThreadingHTTPServer(("127.0.0.1", 0), Stub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A PATH on which every tool is a program that prints what it was given."""
    for tool in TOOLS:
        program = tmp_path / tool
        program.write_text(FAKE)
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return str(tmp_path)


def hetero(*words: str, path: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    whole = {k: v for k, v in os.environ.items() if k != "HETERO_API_KEY"} | env
    whole["PATH"] = f"{path}:{whole['PATH']}" if path else whole["PATH"]
    command = [sys.executable, "-m", "hetero.cli", "launch", *words]
    return subprocess.run(command, capture_output=True, text=True, env=whole, timeout=240, check=False)


EXPECTED = {
    "claude": {"ANTHROPIC_BASE_URL": "{url}", "ANTHROPIC_AUTH_TOKEN": "{key}", "ANTHROPIC_MODEL": "qwen"},
    "codex": {"HETERO_API_KEY": "{key}"},
    "opencode": {"HETERO_API_KEY": "{key}"},
    "aider": {"OPENAI_API_BASE": "{url}/v1", "OPENAI_API_KEY": "{key}", "AIDER_MODEL": "openai/qwen"},
    "openai": {"OPENAI_BASE_URL": "{url}/v1", "OPENAI_API_KEY": "{key}", "OPENAI_MODEL": "qwen"},
}


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("key", ["", SECRET])
def test_runs_the_tool(url: str, path: str, tool: str, key: str) -> None:
    env = {"HETERO_API_KEY": key} if key else {}
    own = ["--", "openai", "--print", "hi there"] if tool == "openai" else ["--", "--print", "hi there"]
    done = hetero(tool, "--url", f"{url}/v1/", *own, path=path, **env)
    assert done.returncode == 0, done.stderr
    words, given = json.loads(done.stdout)
    assert words[-2:] == ["--print", "hi there"]
    want = {name: value.format(url=url, key=key or NO_KEY) for name, value in EXPECTED[tool].items()}
    assert want.items() <= given.items()
    if tool == "opencode":
        config = json.loads(given["OPENCODE_CONFIG_CONTENT"])
        assert config["model"] == "hetero/qwen"
        assert config["provider"]["hetero"]["options"]["baseURL"] == f"{url}/v1"
    if tool == "codex":
        assert f'model_providers.hetero.base_url="{url}/v1"' in words
        assert 'model="qwen"' in words
        assert {'web_search="disabled"', "features.multi_agent=false"} <= set(words)
    if tool != "openai":
        bare = hetero(tool, "--exec", "--url", url, path=path, **env)
        assert json.loads(bare.stdout)[0] == words[:-2]


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("key", ["", SECRET])
def test_what_is_printed_does_the_same(url: str, path: str, tool: str, key: str) -> None:
    env = {"HETERO_API_KEY": key} if key else {}
    printed = hetero(tool, "--url", url, **env)
    assert printed.returncode == 0
    # A key goes into no scrollback.
    assert SECRET not in printed.stdout
    shell = f"{printed.stdout}\n{shutil.which(tool, path=path)}"
    done = subprocess.run(
        ["sh", "-c", shell], capture_output=True, text=True, env={**os.environ, **env}, check=True
    )
    _, given = json.loads(done.stdout)
    run = hetero(
        tool, "--url", url, *(["--", "openai"] if tool == "openai" else ["--exec"]), path=path, **env
    )
    assert json.loads(run.stdout)[1] == given
    if tool == "codex":
        assert "# then: codex -c " in printed.stdout


def test_asks_the_server_first(url: str, path: str) -> None:
    def ends(code: int, words: str, *more: str, **env: str) -> None:
        done = hetero("claude", *(more or ("--url", url)), "--exec", path=path, **env)
        assert (done.returncode, done.stdout) == (code, ""), done.stderr
        assert words in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1

    ends(3, "no server answers at http://127.0.0.1:9 ", "--url", "http://127.0.0.1:9")
    ends(2, "--url ftp://x: must begin with", "--url", "ftp://x")
    ends(2, "--model gpt: the server", "--url", url, "--model", "gpt")
    Stub.mode = "locked"
    ends(2, "set HETERO_API_KEY")
    ends(2, "asks for an API key", HETERO_API_KEY="another")
    assert hetero("claude", "--url", url, HETERO_API_KEY=SECRET).returncode == 0
    Stub.mode = "loading"
    ends(3, "not ready yet")
    Stub.mode = "moved"
    ends(2, "sends on to 'http://127.0.0.1:9/v1/models', where a key would go too", HETERO_API_KEY=SECRET)
    Stub.mode = "other"
    ends(2, "does not answer as a hetero server does")


def test_tools_that_are_not_there(url: str) -> None:
    done = hetero("emacs", "--url", url)
    assert done.returncode == 2
    assert "claude, codex, opencode, aider" in done.stderr
    done = hetero("aider", "--url", url, "--exec")
    assert done.returncode == 2
    assert "no such program on the PATH" in done.stderr
