"""The guard and the log by themselves: what a real process would take minutes, or a full disk, to show."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from hetero.core import InputError
from hetero.server import logs, safety
from hetero.server.options import Options
from hetero.server.safety import Guard, Policy, caller, own_names


async def answered(
    guard: Guard, messages: AsyncIterator[dict[str, Any]], **headers: str
) -> tuple[int, bytes]:
    """(status, body) of one POST whose body comes as ``messages``."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return await anext(messages)

    async def send(message: Any) -> None:
        sent.append(message)

    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "http_version": "1.0", "method": "POST", "path": "/x", "headers": pairs}
    await guard(scope, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """An application that gives the body back, and then what comes next."""
    first, second = await receive(), await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": first["body"] + second["type"].encode()})


async def parts(*bodies: bytes, pause: float = 0.0) -> AsyncIterator[dict[str, Any]]:
    for index, body in enumerate(bodies):
        await asyncio.sleep(pause)
        yield {"type": "http.request", "body": body, "more_body": index + 1 < len(bodies)}
    yield {"type": "http.disconnect"}


def test_a_body_is_handed_on_whole_and_then_what_comes() -> None:
    guard = Guard(echo, Policy(body_bytes=10))
    assert asyncio.run(answered(guard, parts(b"ab", b"", b"cd"))) == (200, b"abcdhttp.disconnect")
    assert asyncio.run(answered(guard, parts(b"x" * 10)))[0] == 200


def test_bodies_beyond_the_limit() -> None:
    guard = Guard(echo, Policy(body_bytes=10))
    assert asyncio.run(answered(guard, parts(b"x" * 6, b"x" * 6)))[0] == 413
    # Far beyond, the rest is not read.
    left = parts(*[b"x" * 10] * 1000)
    assert asyncio.run(answered(guard, left))[0] == 413
    assert asyncio.run(answered(guard, parts(b""), **{"content-length": "41"}))[0] == 413


def test_bodies_together_are_bounded() -> None:
    async def run() -> None:
        full, over = asyncio.Event(), asyncio.Event()
        inside = 0

        async def app(scope: Any, receive: Any, send: Any) -> None:
            nonlocal inside
            inside += 1
            if inside == safety.BODIES:
                full.set()
            await over.wait()
            await echo(scope, receive, send)

        guard = Guard(app, Policy(body_bytes=10))
        held = [asyncio.ensure_future(answered(guard, parts(b"x" * 10))) for _ in range(safety.BODIES)]
        await full.wait()
        status, body = await answered(guard, parts(b"x"))
        assert status == 503
        assert b"overloaded_error" in body
        over.set()
        assert {status for status, _ in await asyncio.gather(*held)} == {200}
        # What is answered or refused holds nothing.
        assert (await answered(guard, parts(b"x" * 6, b"x" * 6)))[0] == 413
        again = [answered(guard, parts(b"x" * 10)) for _ in range(safety.BODIES)]
        assert {status for status, _ in await asyncio.gather(*again)} == {200}

    asyncio.run(run())


def test_a_body_that_trickles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safety, "BODY_S", 0.2)
    guard = Guard(echo, Policy())
    status, body = asyncio.run(answered(guard, parts(*[b"x"] * 100, pause=0.05)))
    assert status == 408
    assert b"did not arrive" in body


def test_a_client_that_leaves_within_its_body() -> None:
    async def leaving() -> AsyncIterator[dict[str, Any]]:
        yield {"type": "http.request", "body": b"ab", "more_body": True}
        yield {"type": "http.disconnect"}

    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((await receive())["type"])
        await send({"type": "http.response.start", "status": 200, "headers": []})

    asyncio.run(answered(Guard(app, Policy()), leaving()))
    assert seen == ["http.disconnect"]


def test_names_and_callers() -> None:
    names = own_names("192.168.1.5", ["Models.Example"])
    assert {"localhost", "192.168.1.5", "models.example"} <= names
    one, other = (caller({"authorization": f"Bearer {key}"}, "::1") for key in ("a" * 9, "b" * 9))
    assert one != other
    assert "a" * 9 not in one
    assert caller({}, "::1") == "::1"


def test_a_log_that_can_be_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "log"
    handler = logs.LogFile(str(file))
    logger = logging.Logger("test")
    logger.addHandler(handler)
    logger.warning("before")
    write = os.write

    def full(_: int, __: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    for _ in range(3):
        logger.warning("lost")
    monkeypatch.setattr(os, "write", write)
    logger.warning("after \udcff")
    handler.close()
    lines = file.read_text().splitlines()
    assert [line.split("WARNING ")[1] for line in lines] == ["before", "after \\udcff"]
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert "No space left on device; the server goes on" in said[0]
    assert "written again; 3 lines were lost" in said[1]


def test_a_log_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may take a part of a line."""
    handler = logs.LogFile(str(tmp_path / "log"))
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:5]))
    handler.emit(logging.LogRecord("x", logging.INFO, "", 0, "a whole line", None, None))
    handler.close()
    assert (tmp_path / "log").read_text().endswith("INFO a whole line\n")


@pytest.mark.parametrize("number", [-1, 0, 513, 10**9, 10**30])
def test_absurd_numbers_of_slots(number: int) -> None:
    with pytest.raises(InputError, match=f"--slots {number}: must be from 1 to 512"):
        Options(slots=number)


@pytest.mark.parametrize("number", [-1, 4097, 10**9])
def test_absurd_queues(number: int) -> None:
    Options(max_queue=0)
    with pytest.raises(InputError, match=f"--max-queue {number}: must be from 0 to 4096"):
        Options(max_queue=number)
