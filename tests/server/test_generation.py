"""From a request to its events: clients that leave, requests side by side, defects."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from hetero.core import InputError
from hetero.engine.request import QueueFull, Request, Result
from hetero.server.direct import SHORT, worked
from hetero.server.generation import EventStream, Generation, begin, merged
from hetero.server.state import NotReadyError
from tests.server.serving import CHAT, TEXT, Served, ask, serving, tokenizer

LONG: dict[str, Any] = {"prompt": "the", "max_tokens": 400, "temperature": 0}


@pytest.fixture
def served() -> Iterator[Served]:
    with serving(tokenizer(), slots=2, max_queue=3) as running:
        yield running


class Gate:
    """Holds the model before every forward pass until it is opened; counts the passes."""

    def __init__(self, served: Served) -> None:
        self.open = threading.Event()
        self.reached = threading.Event()
        self.passes = 0
        served.runnable.model.register_forward_pre_hook(self._wait)

    def _wait(self, *_: object) -> None:
        self.passes += 1
        self.reached.set()
        assert self.open.wait(60)


def idle(served: Served) -> None:
    """Wait until nothing runs or waits."""
    while True:
        status = served.state.engine.status()
        if (status.running, status.waiting) == (0, 0):
            return
        threading.Event().wait(0.01)


def until(condition: Any) -> None:
    while not condition():
        threading.Event().wait(0.01)


def test_leaving_a_stream_ends_it(served: Served) -> None:
    gate = Gate(served)
    gate.open.set()
    with served.client.stream("POST", TEXT, json=LONG | {"stream": True}) as answer:
        next(answer.iter_lines())
    idle(served)
    assert gate.passes < 400
    assert served.post(TEXT, prompt="the", max_tokens=4)["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_frees_slots_and_queue(served: Served, stream: bool) -> None:
    gate = Gate(served)
    clients = [httpx.Client(base_url=served.client.base_url, timeout=60) for _ in range(4)]

    def impatient(client: httpx.Client) -> None:
        with pytest.raises(httpx.HTTPError), client.stream("POST", TEXT, json=LONG | {"stream": stream}) as r:
            r.read()

    threads = [threading.Thread(target=impatient, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    status = served.state.engine.status
    # One or two of them run, as they come before or after the model's first step.
    until(lambda: status().running + status().waiting == 4)
    for client in clients:
        # Closing a client from another thread does not wake it; shutting its socket down does.
        for connection in client._transport._pool.connections:  # type: ignore[attr-defined]
            connection._connection._network_stream.get_extra_info("socket").shutdown(2)
    for thread in threads:
        thread.join(60)
    # Those that wait leave the queue though the model stands still.
    until(lambda: status().waiting == 0)
    gate.open.set()
    idle(served)
    assert gate.passes < 100


def test_all_choices_of_a_call_end_when_its_client_leaves(served: Served) -> None:
    gate = Gate(served)
    gate.open.set()
    body = {"messages": ask(), "max_tokens": 400, "n": 3, "stream": True}
    with served.client.stream("POST", CHAT, json=body) as answer:
        next(answer.iter_lines())
    idle(served)
    assert gate.passes < 3 * 400


def test_a_full_queue_is_told_before_the_answer_begins(served: Served) -> None:
    gate = Gate(served)
    first = served.state.submit(Request((5,), max_tokens=400), lambda event: None)
    for stream in (False, True):
        answer = served.client.post(CHAT, json={"messages": ask(), "n": 5, "stream": stream})
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["type"] == "rate_limit_error"
    # None of the five is left behind.
    first.cancel()
    gate.open.set()
    idle(served)


def test_more_answers_than_the_server_ever_holds_are_a_mistake(served: Served) -> None:
    for path, body in ((CHAT, {"messages": ask(), "n": 6}), (TEXT, {"prompt": ["a", "b"], "n": 3})):
        error = served.refused(path, 400, **body)
        assert error["param"] == "n"
        assert "6 answers" in error["message"]
        assert "at most 5" in error["message"]
    assert len(served.post(CHAT, messages=ask(), n=5, max_tokens=2)["choices"]) == 5


def test_requests_side_by_side_do_not_mix(served: Served) -> None:
    prompts = [f"the {i} sea" for i in range(5)]
    options: dict[str, Any] = {"max_tokens": 20, "temperature": 0}
    alone = [served.post(TEXT, prompt=p, **options)["choices"][0]["text"] for p in prompts]
    got: dict[int, str] = {}

    def one(place: int) -> None:
        with httpx.Client(base_url=served.client.base_url, timeout=60) as client:
            body = client.post(TEXT, json=options | {"prompt": prompts[place]}).json()
            got[place] = body["choices"][0]["text"]

    threads = [threading.Thread(target=one, args=(place,)) for place in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [got[place] for place in range(5)] == alone
    assert len(set(alone)) == 5


def test_a_defect_ends_one_request_only(served: Served) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("secret/path.py")

    hook = served.runnable.model.register_forward_pre_hook(broken)
    try:
        assert served.refused(TEXT, 500, prompt="a")["message"] == "internal error"
        for path, body in ((TEXT, {"prompt": "a"}), (CHAT, {"messages": ask(), "n": 2})):
            with served.client.stream("POST", path, json=body | {"stream": True}) as answer:
                lines = [line for line in answer.iter_lines() if line]
            error = json.loads(lines[-1].removeprefix("data: "))["error"]
            assert error["message"] == "internal error"
            assert error["type"] == "server_error"
            assert not any("secret" in line for line in lines)
    finally:
        hook.remove()
    served.post(TEXT, prompt="a", max_tokens=2)


def test_a_stream_that_nobody_reads_is_cancelled(served: Served) -> None:
    """The framework never asks for the content of a response whose client has left by then."""
    gate = Gate(served)

    async def leave() -> None:
        generations = begin(served.state, [Request((5,), max_tokens=400)])

        async def content() -> Any:
            yield "never"

        async def send(_: object) -> None:
            raise OSError("gone")

        async def receive() -> dict[str, str]:
            return {"type": "http.disconnect"}

        await EventStream(generations, content())({"type": "http"}, receive, send)

    asyncio.run(leave())
    gate.open.set()
    idle(served)
    assert gate.passes <= 2


def test_events_of_many_come_merged_and_a_stop_is_told(served: Served) -> None:
    async def run() -> None:
        requests = [Request((5, place), max_tokens=5 + place) for place in range(3)]
        seen: dict[int, int] = {}
        async for came in merged(begin(served.state, requests)):
            for place, _ in came:
                seen[place] = seen.get(place, 0) + 1
        assert seen == {place: 5 + place + 1 for place in range(3)}
        (cut,) = begin(served.state, [Request((5,), max_tokens=400)])
        cut.cancel()
        _, result = await cut.result()
        assert result.finish_reason == "cancelled"

        (stopped,) = begin(served.state, [Request((5,), max_tokens=400)])
        served.state.engine.close()
        with pytest.raises(NotReadyError, match="shutting down"):
            await stopped.result()

    asyncio.run(run())


def test_none_is_begun_when_one_is_refused(served: Served) -> None:
    async def run() -> None:
        with pytest.raises(InputError, match="400"):
            begin(served.state, [Request((5,), max_tokens=9), Request((400,), max_tokens=9)])
        four = begin(served.state, [Request((5,), max_tokens=400)] * 4)
        with pytest.raises(QueueFull):
            begin(served.state, [Request((6,), max_tokens=400)] * 4)
        for generation in four:
            generation.cancel()
            await generation.result()
        (one,) = begin(served.state, [Request((5,), max_tokens=2)])
        assert isinstance(one, Generation)
        assert len((await one.result())[0]) == 2

    asyncio.run(run())
    idle(served)


def test_what_comes_while_the_loop_is_busy_comes_by_one_wake(served: Served) -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        real, woken = loop.call_soon_threadsafe, []

        def counted(*args: Any, **more: Any) -> asyncio.Handle:
            woken.append(args)
            return real(*args, **more)

        loop.call_soon_threadsafe = counted  # type: ignore[method-assign]
        two = begin(served.state, [Request((5, place), max_tokens=6) for place in range(2)])
        idle(served)  # which blocks the loop
        assert len(woken) == 1
        came = [events async for events in merged(two)]
        assert [len(events) for events in came] == [2 * (6 + 1)]
        for place in range(2):
            assert isinstance([event for at, event in came[0] if at == place][-1], Result)

    asyncio.run(run())


def test_short_work_stays_on_the_loop(served: Served) -> None:
    async def run() -> None:
        here = threading.get_ident()
        assert await worked(SHORT, threading.get_ident) == here
        assert await worked(SHORT + 1, threading.get_ident) != here

    asyncio.run(run())
    # Both ways read the same.
    body: dict[str, Any] = {"prompt": "the whale " * (SHORT // 10), "max_tokens": 4, "temperature": 0}
    assert len(body["prompt"]) <= SHORT
    text = served.post(TEXT, **body)["choices"][0]["text"]
    assert [c["text"] for c in served.post(TEXT, **body | {"n": 2})["choices"]] == [text, text]
