"""The server from outside: a real socket, a tiny random model, and clients that behave well or badly."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import torch
import uvicorn

from hetero.core import InputError, MachineError
from hetero.engine.generate import Engine, Runnable
from hetero.engine.request import Request
from hetero.engine.sample import SamplingParams
from hetero.model.tokenizer import Tokenizer
from hetero.server import serve as serving_module
from hetero.server.app import create_app
from hetero.server.serve import Server, open_socket
from tests.model.tiny import tiny, tiny_tokenizer

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
CONTEXT = 512


class Served:
    """An engine, and a client of the server on it. ``passes`` counts the model's forward passes."""

    def __init__(self, engine: Engine, client: httpx.Client, server: uvicorn.Server) -> None:
        self.engine, self.client, self.server, self.passes = engine, client, server, 0
        engine.runnable.model.register_forward_pre_hook(self._count)
        self.delay = 0.0

    def _count(self, *_: object) -> None:
        self.passes += 1
        time.sleep(self.delay)

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        answer = self.client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def refused(self, path: str, status: int = 400, **body: Any) -> dict[str, Any]:
        answer = self.client.post(path, json=body)
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert "Traceback" not in answer.text
        return error

    def stream(self, path: str, **body: Any) -> list[dict[str, Any]]:
        with self.client.stream("POST", path, json=body | {"stream": True}) as answer:
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith("text/event-stream")
            lines = [line for line in answer.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    def wait_idle(self, seconds: float = 15.0) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            health = self.client.get("/health").json()
            if (health["running"], health["waiting"]) == (0, 0):
                return
            time.sleep(0.01)
        pytest.fail(f"still busy: {health}")


@contextmanager
def serving(tokenizer: Tokenizer | None) -> Iterator[Served]:
    torch.set_num_threads(1)
    model = tiny("qwen3_moe", vocab_size=300, max_position_embeddings=CONTEXT)
    # No end-of-text token: answers have the length that a test asks for.
    engine = Engine(Runnable(model, 300, tokenizer, CONTEXT), prefill_chunk=64)
    listener = open_socket("127.0.0.1", 0)
    app = create_app(engine, "tiny")
    server = Server(uvicorn.Config(app, log_level="warning", access_log=False), app.state.stop)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=60) as client:
            yield Served(engine, client, server)
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(Tokenizer(tiny_tokenizer(), "tiny")) as running:
        yield running


@pytest.fixture(autouse=True)
def no_delay(served: Served) -> Iterator[None]:
    yield
    served.delay = 0.0


def ask(text: str = "the whale") -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def test_health_and_models(served: Served) -> None:
    assert served.client.get("/health").json()["status"] == "ok"
    models = served.client.get("/v1/models").json()
    assert models["object"] == "list"
    assert [model["id"] for model in models["data"]] == ["tiny"]
    assert served.client.get("/v1/models/tiny").json() == models["data"][0]
    assert served.client.get("/v1/models/gpt").json()["error"]["code"] == "model_not_found"
    missing = served.client.get("/v1/nothing")
    assert missing.status_code == 404
    assert missing.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("header", "content", "message"),
    [
        ("application/x-www-form-urlencoded", b'{"prompt": "a"}', "content-type: application/json"),
        ("application/json", b"[1]", "a JSON object"),
        ("application/json", b"", "a JSON object"),
        ("application/json", b'{"prompt": "a", "model": "\\ud800"}', "'\\ud800' is not served"),
    ],
)
def test_what_is_wrong_with_a_body_is_told(served: Served, header: str, content: bytes, message: str) -> None:
    answer = served.client.post("/v1/completions", content=content, headers={"content-type": header})
    assert answer.status_code in (400, 404)
    assert message in answer.json()["error"]["message"]


def test_completion_is_what_the_engine_says(served: Served) -> None:
    body = served.post(TEXT, model="tiny", prompt="the sea", max_tokens=24, temperature=0)
    tokenizer = served.engine.runnable.tokenizer
    assert tokenizer is not None
    prompt = tuple(tokenizer.encode("the sea"))
    want = served.engine.complete(Request(prompt, max_tokens=24))
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (want.text, "length")
    assert body["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": 24,
        "total_tokens": len(prompt) + 24,
    }
    by_ids = served.post(TEXT, prompt=list(prompt), max_tokens=24, temperature=0)
    nested = served.post(TEXT, prompt=[list(prompt)], max_tokens=24, temperature=0)
    listed = served.post(TEXT, prompt=["the sea"], max_tokens=24, temperature=0)
    assert {b["choices"][0]["text"] for b in (by_ids, nested, listed)} == {want.text}
    assert served.post(TEXT, prompt="the sea")["usage"]["completion_tokens"] == 16


def test_chat_applies_the_template(served: Served) -> None:
    body = served.post(CHAT, messages=ask(), max_tokens=12, temperature=0)
    tokenizer = served.engine.runnable.tokenizer
    assert tokenizer is not None
    want = served.engine.complete(Request(tuple(tokenizer.chat(ask())), max_tokens=12))
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"]["content"] == want.text
    assert body["choices"][0]["message"]["role"] == "assistant"
    assert body["usage"]["prompt_tokens"] == want.usage.prompt_tokens
    parts = [
        {"role": "user", "content": [{"type": "text", "text": "the "}, {"type": "text", "text": "whale"}]}
    ]
    assert served.post(CHAT, messages=parts, max_tokens=12, temperature=0)["choices"] == body["choices"]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("temperature", [0, 1.3])
def test_stream_and_whole_answer_are_equal(served: Served, path: str, temperature: float) -> None:
    """A random model writes random bytes: the hardest text there is to cut into valid pieces."""
    source: dict[str, Any] = {"messages": ask("漢字 🙂")} if path == CHAT else {"prompt": "漢字 🙂"}
    options = source | {"max_tokens": 60, "temperature": temperature, "seed": 7}
    whole = served.post(path, **options)
    chunks = served.stream(path, **options, stream_options={"include_usage": True})
    assert len({chunk["id"] for chunk in chunks}) == 1
    *rest, counted = chunks
    assert counted["choices"] == []
    assert counted["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in rest)
    choices = [chunk["choices"][0] for chunk in rest]
    assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["length"]
    if path == CHAT:
        assert choices[0]["delta"]["role"] == "assistant"
        text = "".join(c["delta"].get("content", "") for c in choices)
        assert text == whole["choices"][0]["message"]["content"]
    else:
        text = "".join(c["text"] for c in choices)
        assert text == whole["choices"][0]["text"]
    assert len(choices) > 10
    plain = served.stream(path, **options)
    assert all("usage" not in chunk for chunk in plain)


def test_seed_repeats_and_differs(served: Served) -> None:
    def text(**more: Any) -> str:
        return served.post(TEXT, prompt="the", max_tokens=30, temperature=1.5, **more)["choices"][0]["text"]

    assert text(seed=1) == text(seed=1)
    assert text(seed=1) != text(seed=2)
    assert text(seed=-5) == text(seed=-5)
    assert text() != text()


@pytest.mark.parametrize("as_list", [False, True])
def test_stop_string_cuts_both_ways(served: Served, as_list: bool) -> None:
    free = served.post(TEXT, prompt="the", max_tokens=60, temperature=0)["choices"][0]["text"]
    stop = free[8:11]
    cut = free[: free.index(stop)]
    options: dict[str, Any] = {"prompt": "the", "max_tokens": 60, "temperature": 0}
    options["stop"] = [stop, "never there"] if as_list else stop
    body = served.post(TEXT, **options)
    assert body["choices"][0]["text"] == cut
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] < 60
    chunks = served.stream(TEXT, **options)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == cut
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_beyond_the_context(served: Served) -> None:
    body = served.post(TEXT, prompt=[5] * 400, max_tokens=4096, temperature=0)
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["total_tokens"] == CONTEXT
    for stream in (False, True):
        error = served.refused(TEXT, prompt=[5] * 600, max_tokens=4096, stream=stream)
        assert "600" in error["message"]
        assert "512" in error["message"]


BAD: list[tuple[str, dict[str, Any], str]] = [
    (TEXT, {"prompt": "a", "temprature": 1}, "temprature"),
    (TEXT, {"prompt": "a", "temperature": "hot"}, "temperature"),
    (TEXT, {"prompt": "a", "temperature": -1}, "temperature"),
    (TEXT, {"prompt": "a", "top_p": 0}, "top_p"),
    (TEXT, {"prompt": "a", "max_tokens": 0}, "max_tokens"),
    (TEXT, {"prompt": "a", "max_tokens": 1.5}, "max_tokens"),
    (TEXT, {"prompt": "a", "n": 2}, "n"),
    (TEXT, {"prompt": "a", "n": True}, "n"),
    (TEXT, {"prompt": "a", "best_of": 3}, "best_of"),
    (TEXT, {"prompt": "a", "echo": True}, "echo"),
    (TEXT, {"prompt": "a", "suffix": "z"}, "suffix"),
    (TEXT, {"prompt": "a", "logprobs": 2}, "logprobs"),
    (TEXT, {"prompt": "a", "frequency_penalty": 0.5}, "frequency_penalty"),
    (TEXT, {"prompt": "a", "presence_penalty": 0.5}, "presence_penalty"),
    (TEXT, {"prompt": "a", "logit_bias": {"5": 1}}, "logit_bias"),
    (TEXT, {"prompt": "a", "stop": ""}, "stop"),
    (TEXT, {"prompt": "a", "stop": ["x"] * 17}, "stop"),
    (TEXT, {"prompt": "a", "stop": 3}, "stop"),
    (TEXT, {"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
    (TEXT, {"prompt": "a", "stream": True, "stream_options": {"surprise": 1}}, "stream_options"),
    (TEXT, {}, "prompt"),
    (TEXT, {"prompt": None}, "prompt"),
    (TEXT, {"prompt": {"text": "a"}}, "prompt"),
    (TEXT, {"prompt": ["a", "b"]}, "prompt"),
    (TEXT, {"prompt": ["a", 1]}, "prompt"),
    (TEXT, {"prompt": [1, True]}, "prompt"),
    (TEXT, {"prompt": []}, "prompt"),
    (TEXT, {"prompt": ""}, "prompt"),
    (TEXT, {"prompt": [300]}, "prompt"),
    (TEXT, {"prompt": [-1]}, "prompt"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "hello"}, "messages"),
    (CHAT, {"messages": [{"role": "wizard", "content": "a"}]}, "messages"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": "a", "mood": "good"}]}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
    (CHAT, {"messages": [{"role": "tool", "content": "a"}]}, "messages"),
    (CHAT, {"messages": ask(), "tools": [{"type": "function"}]}, "tools"),
    (CHAT, {"messages": ask(), "response_format": {"type": "json_object"}}, "response_format"),
    (CHAT, {"messages": ask(), "logprobs": True}, "logprobs"),
    (CHAT, {"messages": ask(), "max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
]


@pytest.mark.parametrize(("path", "body", "field"), BAD, ids=lambda v: v if isinstance(v, str) else "")
def test_refused_by_name(served: Served, path: str, body: dict[str, Any], field: str) -> None:
    error = served.refused(path, **body)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == field or field in error["message"]
    assert field in error["message"]


def test_values_that_ask_for_nothing_pass(served: Served) -> None:
    plain = served.post(CHAT, messages=ask(), max_tokens=5, temperature=0)
    idle = {
        "n": 1,
        "frequency_penalty": 0.0,
        "presence_penalty": 0,
        "logit_bias": None,
        "logprobs": False,
        "tools": None,
        "response_format": {"type": "text"},
        "user": "me",
        "stop": None,
        "stream": False,
    }
    body = served.post(CHAT, messages=ask(), max_completion_tokens=5, temperature=0, **idle)
    assert body["choices"] == plain["choices"]


def test_other_mistakes(served: Served) -> None:
    assert served.refused(TEXT, 404, model="gpt-9", prompt="a")["code"] == "model_not_found"
    for content in (b"{", b"", b"[1]", b'"text"', b'{"prompt": "a", "temperature": NaN}'):
        answer = served.client.post(TEXT, content=content, headers={"content-type": "application/json"})
        assert answer.status_code == 400, (content, answer.text)
        assert answer.json()["error"]["type"] == "invalid_request_error"
    assert served.client.get(TEXT).status_code == 405
    for body in (r'{"prompt": "\ud800"}', r'{"messages": [{"role": "user", "content": "a\udfff"}]}'):
        path = TEXT if "prompt" in body else CHAT
        answer = served.client.post(path, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400, answer.text
        assert "Unicode" in answer.json()["error"]["message"]
    assert served.refused(TEXT, prompt="a", top_k=-(10**400))["param"] == "top_k"
    served.post(TEXT, prompt="a", max_tokens=1, top_k=10**400)


def test_leaving_a_stream_ends_it_within_a_step(served: Served) -> None:
    served.delay = 0.02
    body = {"prompt": "the", "max_tokens": 400, "temperature": 0, "stream": True}
    with served.client.stream("POST", TEXT, json=body) as answer:
        next(answer.iter_lines())
    served.wait_idle()
    after = served.passes
    time.sleep(0.2)
    assert served.passes == after
    served.delay = 0.0
    assert served.post(TEXT, prompt="the", max_tokens=4)["usage"]["completion_tokens"] == 4


def test_leaving_a_whole_answer_or_the_queue_frees_both(served: Served) -> None:
    served.delay = 0.02
    body = {"prompt": "the", "max_tokens": 400, "temperature": 0}
    before = served.passes
    threads = []
    for _ in range(3):

        def impatient() -> None:
            with pytest.raises(httpx.ReadTimeout), httpx.Client(base_url=served.client.base_url) as client:
                client.post(TEXT, json=body, timeout=2)

        threads.append(threading.Thread(target=impatient))
        threads[-1].start()
    seen = set()
    while any(thread.is_alive() for thread in threads):
        health = served.client.get("/health").json()
        seen.add((health["running"], health["waiting"]))
        time.sleep(0.01)
    assert (1, 2) in seen
    served.wait_idle()
    # A whole answer is 400 passes, and takes at least 8 s.
    assert served.passes - before < 400


def test_a_stream_that_nobody_reads_is_not_begun(served: Served) -> None:
    """A client that leaves before the first chunk is asked for: the framework never starts the generator."""
    from hetero.server.answers import Writer
    from hetero.server.app import _answer
    from hetero.server.protocol import CompletionBody
    from hetero.server.worker import Worker

    worker = Worker(served.engine)
    body = CompletionBody(prompt=[5], stream=True)
    job = Request((5,), max_tokens=400)
    response = asyncio.run(_answer(None, worker, job, Writer("text", "tiny"), body))  # type: ignore[arg-type]
    assert response.status_code == 200
    assert worker.load() == (0, 0)
    worker.close()


def test_requests_in_parallel_do_not_mix(served: Served) -> None:
    prompts = [f"the {i} sea" for i in range(6)]
    alone = [served.post(TEXT, prompt=p, max_tokens=20, temperature=0)["choices"][0]["text"] for p in prompts]
    got: dict[int, str] = {}

    def one(i: int) -> None:
        with httpx.Client(base_url=served.client.base_url, timeout=60) as client:
            body = {"prompt": prompts[i], "max_tokens": 20, "temperature": 0}
            got[i] = client.post(TEXT, json=body).json()["choices"][0]["text"]

    threads = [threading.Thread(target=one, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [got[i] for i in range(6)] == alone
    assert len(set(alone)) == 6


def test_a_defect_ends_one_request_only(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("secret/path.py")

    hook = served.engine.runnable.model.register_forward_pre_hook(broken)
    try:
        error = served.refused(TEXT, 500, prompt="a")
        assert error["message"] == "internal error"
        with served.client.stream("POST", TEXT, json={"prompt": "a", "stream": True}) as answer:
            text = answer.read().decode()
        assert "internal error" in text
        assert "secret" not in text
    finally:
        hook.remove()
    served.post(TEXT, prompt="a", max_tokens=2)


def test_without_template_or_tokenizer() -> None:
    with serving(Tokenizer(tiny_tokenizer(template=None), "folder/tiny")) as running:
        error = running.refused(CHAT, messages=ask())
        assert "chat template" in error["message"]
        assert TEXT in error["message"]
        running.post(TEXT, prompt="the", max_tokens=3)
    with serving(None) as running:
        assert "tokenizer" in running.refused(CHAT, messages=ask())["message"]
        assert "token ids" in running.refused(TEXT, prompt="the")["message"]
        assert "tokenizer" in running.refused(TEXT, prompt=[5, 6], stop="x")["message"]
        body = running.post(TEXT, prompt=[5, 6], max_tokens=3, temperature=0)
        assert body["usage"]["completion_tokens"] == 3


def test_sampling_fields_reach_the_sampler(served: Served) -> None:
    fields = {
        "temperature": 1.4,
        "top_k": 9,
        "top_p": 0.8,
        "min_p": 0.02,
        "repetition_penalty": 1.3,
        "seed": 3,
    }
    body = served.post(TEXT, prompt=[5, 6, 7], max_tokens=20, **fields)
    request = Request((5, 6, 7), SamplingParams(**fields), max_tokens=20)  # type: ignore[arg-type]
    assert body["choices"][0]["text"] == served.engine.complete(request).text


def test_sockets() -> None:
    taken = open_socket("127.0.0.1", 0)
    port = taken.getsockname()[1]
    with pytest.raises(MachineError, match=f"port {port} .*already in use"):
        open_socket("127.0.0.1", port)
    taken.close()
    for host in ("0.0.0.0", "::"):
        with pytest.raises(InputError, match="--allow-remote"):
            open_socket(host, 0)
    open_socket("0.0.0.0", 0, allow_remote=True).close()
    with pytest.raises(InputError, match="not an address"):
        open_socket("no.such.host.invalid", 0)
    with pytest.raises(InputError, match="--port 70000"):
        open_socket("127.0.0.1", 70000)
    assert isinstance(taken, socket.socket)


def test_an_answer_that_outlasts_the_shutdown_ends_by_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_module, "DRAIN_S", 0.2)
    with serving(Tokenizer(tiny_tokenizer(), "tiny")) as running:
        running.delay = 0.05
        body = {"messages": ask(), "max_tokens": 400, "stream": True}
        with running.client.stream("POST", CHAT, json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            running.server.should_exit = True
            last = [line for line in lines if line][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == "the server is shutting down"
