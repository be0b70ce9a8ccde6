"""The small trained model behind a real socket, in this process: operators that are recorded, and a page."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import httpx
import torch
import uvicorn

from hetero.engine.answer import Runnable
from hetero.engine.load import load_model
from hetero.engine.scheduler import Scheduler
from hetero.model.demo import TEST_MODEL
from hetero.server.app import create_app
from hetero.server.safety import Policy
from hetero.server.state import AppState

NAME = "test-model"


@cache
def runnable() -> Runnable:
    torch.set_num_threads(1)
    return load_model(TEST_MODEL, threads=1).runnable


class PageServer:
    """``delay``: seconds that every forward pass takes at least."""

    def __init__(self, state: AppState, url: str, client: httpx.Client) -> None:
        self.state, self.url, self.client = state, url, client
        self.delay = 0.0

    def complete(self, tokens: int) -> None:
        body = {"prompt": "Call me", "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        answer = self.client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text


@contextmanager
def page_server(policy: Policy | None = None, *, ready: bool = True, **engine: Any) -> Iterator[PageServer]:
    state = AppState(NAME)
    scheduler = Scheduler(runnable(), **engine)
    scheduler.start()
    if ready:
        state.attach(scheduler)
    config = uvicorn.Config(create_app(state, policy), port=0, log_level="warning", access_log=False)
    server = uvicorn.Server(config)
    listener = config.bind_socket()
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
        served = PageServer(state, url, client)
        hook = runnable().model.register_forward_pre_hook(lambda *_: time.sleep(served.delay))
        try:
            yield served
        finally:
            hook.remove()
            state.draining = True
            scheduler.close()
            server.should_exit = True
            thread.join(20)
            listener.close()
            assert not thread.is_alive()


def wait_for(what: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.02)
