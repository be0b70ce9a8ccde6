"""A server whose model costs nothing, in this process: what is left is the server's own work, by threads.

CPU time and not the clock, so other work on the machine hardly changes the figures. Between two tokens all
cores read more memory than their caches hold, as a model does: the server then runs with cold caches.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from hetero.engine.answer import Runnable
from hetero.engine.generate import Engine
from hetero.engine.request import Request
from hetero.engine.scheduler import Scheduler
from hetero.model.demo import default_model
from hetero.model.tokenizer import load_tokenizer
from hetero.server.safety import Policy
from hetero.server.serve import HttpThread
from hetero.server.state import AppState

VOCABULARY, CONTEXT = 49152, 4096  # as the tokenizer has it
# What is read between two tokens, bytes; and how long a token takes at least, seconds.
SWEPT = 64 << 20
PAUSE_S = 0.01


class Instant(nn.Module):
    """Always chooses the same token. ``spent``: CPU seconds of its own on the thread that calls it."""

    def __init__(self, token: int) -> None:
        super().__init__()
        self.config = SimpleNamespace(model_type="instant", get_text_config=lambda **_: self.config)
        self.embedding = nn.Embedding(1, 1)
        self.spent = 0.0
        self._logits = torch.zeros(1, 1, VOCABULARY)
        self._logits[..., token] = 1.0
        self._memory = torch.ones(SWEPT // 8, dtype=torch.int64)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def forward(self, input_ids: Tensor, past_key_values: object = None, **_: object) -> Any:
        began = time.thread_time()
        self._memory.sum()
        time.sleep(PAUSE_S)
        self.spent += time.thread_time() - began
        return _Output(self._logits)


class _Output(dict[str, Any]):
    def __init__(self, logits: Tensor) -> None:
        super().__init__(past_key_values=None)
        self.logits = logits


def _runnable() -> tuple[Runnable, Instant]:
    tokenizer = load_tokenizer(default_model().path)
    assert tokenizer is not None
    model = Instant(tokenizer.encode(" the")[-1])
    return Runnable(model, VOCABULARY, tokenizer, context=CONTEXT), model


def engine_alone(prompt: str, tokens: int) -> float:
    """CPU milliseconds a token of the engine of ``hetero run``, without the model."""
    runnable, model = _runnable()
    assert runnable.tokenizer is not None
    request = Request(tuple(runnable.tokenizer.encode(prompt)), max_tokens=tokens, ignore_eos=True)
    engine = Engine(runnable)
    engine.complete(request)
    before = time.thread_time() - model.spent
    engine.complete(request)
    return (time.thread_time() - model.spent - before) * 1e3 / tokens


@dataclass(frozen=True, slots=True)
class Use:
    """Of threads since they began."""

    ms: float = 0.0  # CPU time
    sleeps: int = 0

    def __add__(self, other: Use) -> Use:
        return Use(self.ms + other.ms, self.sleeps + other.sleeps)


class Server:
    """An instant model behind HTTP, in this process."""

    def __init__(self, url: str, model: Instant) -> None:
        self.url = url
        self._model = model

    def used(self) -> dict[str, Use]:
        """By threads: "http", "engine" (without the model) and "others", which work for HTTP."""
        found = {"http": Use(), "engine": Use(-self._model.spent * 1e3), "others": Use()}
        for thread in threading.enumerate():
            if thread is not threading.main_thread():
                name = thread.name if thread.name in found else "others"
                found[name] += _use(thread.native_id or 0)
        return found


def _use(thread: int) -> Use:
    folder = Path(f"/proc/self/task/{thread}")
    nanoseconds = int((folder / "schedstat").read_text().split()[0])
    sleeps = (folder / "status").read_text().split("\nvoluntary_ctxt_switches:")[1].split()[0]
    return Use(nanoseconds / 1e6, int(sleeps))


@contextmanager
def instant_server() -> Iterator[Server]:
    """It ends with the context."""
    runnable, model = _runnable()
    engine = Scheduler(runnable, prefix_cache=False)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        state = AppState("instant")
        http = HttpThread(state, Policy(), listener)
        engine.start()
        state.attach(engine)
        try:
            yield Server(f"http://127.0.0.1:{listener.getsockname()[1]}", model)
        finally:
            engine.close()
            http.close()
