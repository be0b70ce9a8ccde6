"""A server over a tiny random model on a real socket, and a client of it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import torch
import uvicorn

from hetero.engine.answer import Answer, Runnable
from hetero.engine.generate import Engine
from hetero.engine.scheduler import Scheduler
from hetero.model.tokenizer import Tokenizer
from hetero.server.app import create_app
from hetero.server.state import AppState
from tests.model.tiny import TEMPLATE, tiny, tiny_tokenizer

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
CONTEXT, VOCABULARY = 512, 300
# The end of text: a random model draws it now and then, so most tests serve without.
END = 2
# What marks a model that writes Hermes calls, and one that thinks first.
TOOL_TEMPLATE = "{% for t in tools or [] %}{{ t | tojson }}<tool_call></tool_call>{% endfor %}" + TEMPLATE
THINK_TEMPLATE = TOOL_TEMPLATE + "{# </think> #}<think>\n"


class Served:
    """The parts of a running server, and calls that check what every answer must be."""

    def __init__(self, state: AppState, client: httpx.Client, server: uvicorn.Server) -> None:
        self.state, self.client, self.server = state, client, server
        self.runnable = state.engine.runnable

    @property
    def tokenizer(self) -> Tokenizer:
        assert self.runnable.tokenizer is not None
        return self.runnable.tokenizer

    @property
    def alone(self) -> Engine:
        """The model without a server; only while no request runs."""
        return Engine(self.runnable)

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
            assert answer.status_code == 200, answer.read()
            assert answer.headers["content-type"].startswith("text/event-stream")
            lines = [line for line in answer.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


@contextmanager
def serving(
    tokenizer: Tokenizer | None,
    eos: frozenset[int] = frozenset(),
    context: int = CONTEXT,
    runner: Any = None,
    **engine: Any,
) -> Iterator[Served]:
    torch.set_num_threads(1)
    model = tiny("qwen3_moe", vocab_size=VOCABULARY, max_position_embeddings=context)
    scheduler = Scheduler(
        Runnable(model, VOCABULARY, tokenizer, context, eos, runner=runner), **{"prefill_chunk": 64} | engine
    )
    scheduler.start()
    state = AppState("tiny")
    state.attach(scheduler)
    config = uvicorn.Config(create_app(state), port=0, log_level="warning", access_log=False)
    server = uvicorn.Server(config)
    listener = config.bind_socket()
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
            yield Served(state, client, server)
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()
        scheduler.close()
        assert not thread.is_alive()


def tokenizer(template: str | None = TEMPLATE) -> Tokenizer:
    return Tokenizer(tiny_tokenizer(template), "folder/tiny")


class Script:
    """Stands in for the sampler: every answer is the next of ``texts``, then the end of text."""

    def __init__(self, served: Served, monkeypatch: pytest.MonkeyPatch, *texts: str) -> None:
        self.left = [[*served.tokenizer.encode_rendered(text), END] for text in texts]
        init = Answer.__init__

        def scripted(answer: Answer, *args: Any, **more: Any) -> None:
            init(answer, *args, **more)
            tokens = iter(self.left.pop(0))
            monkeypatch.setattr(answer._sampler, "pick", lambda logits: next(tokens), raising=True)

        monkeypatch.setattr(Answer, "__init__", scripted)


def counts(body: dict[str, Any]) -> dict[str, int]:
    """The usage of an answer, but for what an earlier one had left in the cache."""
    usage = dict(body["usage"])
    cached = usage.pop("prompt_tokens_details")["cached_tokens"]
    assert 0 <= cached < usage["prompt_tokens"]
    return usage


def near(value: Any) -> Any:
    """``value`` for a comparison with another run: what is read from the cache rounds by another order."""
    if isinstance(value, dict):
        return {name: near(part) for name, part in value.items()}
    if isinstance(value, list):
        return [near(part) for part in value]
    return pytest.approx(value, abs=1e-4) if isinstance(value, float) else value


def ask(text: str = "the whale") -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]
