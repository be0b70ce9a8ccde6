"""What a stranger, a broken client or a page on the internet can do to a running server: little."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.outside import CHAT, TEXT, Server, long_answer, refused_start

BODY = 4096
MESSAGES = "/v1/messages"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    options = ("--slots", "2", "--max-queue", "1", "--max-body", str(BODY), "--max-prompt-tokens", "300")
    with Server(*options).ready() as running:
        yield running
        assert running.process.poll() is None
        assert "Traceback" not in running.said()


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One that asks for a key, and lets the pages of one origin in."""
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text("# of two people\nfirst-secret-key\n\nsecond-secret-key\n")
    options = (
        "--api-key-file",
        str(file),
        "--cors-origin",
        "https://app.example",
        "--request-timeout",
        "0.4",
    )
    with Server(*options).ready() as running:
        yield running


def connect(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), 10)


def ask(body: dict[str, Any], *headers: str) -> bytes:
    """A whole request for a completion."""
    content = json.dumps(body).encode()
    head = [f"POST {TEXT} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *headers]
    return "\r\n".join([*head, f"Content-Length: {len(content)}", "", ""]).encode() + content


def closed_within(connection: socket.socket, seconds: float, trickle: bytes = b"") -> bool:
    """Whether the server closes it, while ``trickle`` is sent byte by byte."""
    connection.settimeout(0.25)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if trickle:
            with contextlib.suppress(OSError):
                connection.sendall(trickle[:1])
                trickle = trickle[1:]
        try:
            if not connection.recv(4096):
                return True
        except TimeoutError:
            continue
        except OSError:
            return True
    return False


def test_connections_that_never_ask_are_closed(server: Server) -> None:
    silent, slow, half, after = (connect(server) for _ in range(4))
    slow.sendall(b"GET /health HTTP/1.1\r\n")
    half.sendall(b"GET /hea")
    half.shutdown(socket.SHUT_WR)
    after.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert after.recv(4096).startswith(b"HTTP/1.1 200")
    results: dict[str, bool] = {}

    def watch(name: str, connection: socket.socket, trickle: bytes = b"") -> None:
        results[name] = closed_within(connection, 60, trickle)
        connection.close()

    cases: dict[str, tuple[Any, ...]] = {
        "silent": (silent,),
        "slow": (slow, b"x" * 200),
        "half": (half,),
        "after": (after, b"GET /health HTTP/1.1\r\nx: " + b"y" * 200),
    }
    threads = [threading.Thread(target=watch, args=(name, *case)) for name, case in cases.items()]
    for thread in threads:
        thread.start()
    # Nobody else waits for them, who are given ten seconds.
    assert server.client.get("/health").elapsed.total_seconds() < 8
    for thread in threads:
        thread.join()
    assert results == dict.fromkeys(cases, True)


def test_a_crowd_of_connections(server: Server) -> None:
    crowd = []
    with server.stream(**long_answer(300)) as lines:
        try:
            for _ in range(600):
                crowd.append(connect(server))
                crowd[-1].setblocking(False)
            end = time.monotonic() + 60
            while sum(map(is_closed, crowd)) < 80 and time.monotonic() < end:
                time.sleep(0.05)
            assert sum(map(is_closed, crowd)) >= 80
        finally:
            for connection in crowd:
                connection.close()
        # One that was connected before is served on.
        assert list(lines)[-1] == "data: [DONE]"
    server.idle()


def is_closed(connection: socket.socket) -> bool:
    try:
        return not connection.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        return True


def test_a_stream_that_is_not_read_holds_nobody_up(server: Server) -> None:
    stuck = connect(server)
    stuck.sendall(ask(long_answer(200) | {"stream": True}))
    assert server.post(TEXT, **long_answer(4))["usage"]["completion_tokens"] == 4
    server.idle()
    stuck.close()


def test_bodies_that_are_too_large(server: Server) -> None:
    large = json.dumps({"prompt": "x" * BODY}).encode()

    def pieces() -> Iterator[bytes]:
        for start in range(0, len(large), 1000):
            yield large[start : start + 1000]

    json_type = {"content-type": "application/json"}
    for content in (large, pieces()):
        answer = server.client.post(TEXT, content=content, headers=json_type)
        assert answer.status_code == 413
        assert str(BODY) in answer.json()["error"]["message"]
    answer = server.client.post(MESSAGES, content=large, headers=json_type)
    assert answer.status_code == 413
    assert answer.json()["type"] == "error"
    # A length that is far beyond is answered before a byte of the body.
    with connect(server) as claim:
        claim.sendall(
            f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n".encode()
        )
        assert claim.recv(4096).startswith(b"HTTP/1.1 413")
    fits = {"prompt": "x" * 200, "max_tokens": 1}
    assert server.post(TEXT, **fits)["usage"]["completion_tokens"] == 1


def test_heads_that_are_too_large_or_broken(server: Server) -> None:
    assert server.client.get("/health", headers={"x": "y" * 40_000}).status_code == 431
    heads = (
        b"NONSENSE\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/9.9\r\nHost: a\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n"
        b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100),
    )
    for head in heads:
        with connect(server) as connection:
            connection.sendall(head)
            answer = connection.recv(4096)
        assert answer.startswith(b"HTTP/1.1 4"), (head, answer)
        assert b"Traceback" not in answer


_HEAD = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
_CHUNKED = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n".encode()


@pytest.mark.parametrize(
    ("begin", "answer"),
    [
        (b"", b"HTTP/1.1 4"),
        (_HEAD, b"HTTP/1.1 431"),
        (_HEAD + b"X: ", b"HTTP/1.1 431"),
        (_HEAD + b"\r\n" + _HEAD, b"HTTP/1.1 200"),
        (_CHUNKED + b"0\r\n", b""),
        (_CHUNKED + b"0\r\nx: ", b""),
        (_CHUNKED + b"1;", b""),
        (ask(long_answer(300) | {"stream": True}) + _HEAD, b"HTTP/1.1 200"),
    ],
    ids=["line", "header", "value", "second", "trailer", "its value", "extension", "behind a stream"],
)
def test_what_does_not_end_is_cut_off(server: Server, begin: bytes, answer: bytes) -> None:
    more = b"x" * 4000 if not begin or begin.endswith((b": ", b";")) else b"x: y\r\n" * 500
    with connect(server) as connection:
        connection.sendall(begin)
        sent = 0
        with contextlib.suppress(OSError):
            while sent < 8 << 20:
                sent += connection.send(more)
        assert sent < 8 << 20
        said = b""
        with contextlib.suppress(OSError):
            said = connection.recv(1 << 16)
        assert not said or said.startswith(answer)
    server.idle()


def heard(connection: socket.socket) -> bytes:
    """All until the server closes the connection."""
    said = b""
    with contextlib.suppress(ConnectionResetError):
        while more := connection.recv(1 << 16):
            said += more
    return said


def test_offers_of_another_protocol_are_not_taken(server: Server) -> None:
    """As Java's client makes one with each request."""
    offer = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAEAAEAAAA")
    whole = ask(long_answer(2), *offer)
    with connect(server) as connection:
        connection.sendall(whole + whole[:-10])
        time.sleep(0.05)
        connection.sendall(whole[-10:] + _HEAD + b"Connection: close, Upgrade\r\nUpgrade: h2c\r\n\r\n")
        said = heard(connection)
    assert said.count(b"HTTP/1.1 200 OK") == said.count(b"HTTP/1.1") == 3
    assert said.count(b'"completion_tokens":2') == 2


def test_what_is_wrong_behind_a_request_leaves_its_answer_whole(server: Server) -> None:
    more = _HEAD + b"\r\n"
    for ahead in (0, 2):
        with connect(server) as connection:
            connection.sendall(
                ask(long_answer(50) | {"stream": True}) + ahead * more + b"nonsense\r\n\r\n" + more
            )
            said = heard(connection)
        assert said.count(b"HTTP/1.1 200") == said.count(b"HTTP/1.1") == 1 + ahead
        assert said.count(b"data: [DONE]\n\n\r\n0\r\n\r\n") == 1


def test_one_that_leaves_with_requests_ahead(server: Server) -> None:
    before = server.metric("generation_tokens_total")
    with connect(server) as connection:
        connection.sendall(ask(long_answer(900) | {"stream": True}) + _HEAD + b"\r\n")
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
    server.idle()
    assert server.metric("generation_tokens_total") < before + 800


def test_a_flood_of_requests_ahead(server: Server) -> None:
    with connect(server) as connection:
        connection.sendall((_HEAD + b"\r\n") * 1000)
        assert 1 <= heard(connection).count(b"HTTP/1.1 200") < 1000


BROKEN = (
    b"",
    b"{",
    b"[1]",
    b"null",
    b'"text"',
    b"\xff\xfe",
    b'{"prompt": "a", "temperature": NaN}',
    b'{"prompt": "\\ud800"}',
    b"[" * 2000,
    b'{"prompt": ' + b"[" * 1500 + b"]" * 1500 + b"}",
    b'{"prompt": "a", "max_tokens": 1e999}',
    b'{"prompt": "a", "top_p": ' + b"9" * 3000 + b"}",
    b'{"prompt": "a", "../../etc/passwd": 1}',
)


@pytest.mark.parametrize("path", [TEXT, CHAT, MESSAGES, "/v1/responses", "/tokenize"])
def test_broken_json(server: Server, path: str) -> None:
    for content in BROKEN:
        answer = server.client.post(path, content=content, headers={"content-type": "application/json"})
        assert 400 <= answer.status_code < 500, (content[:60], answer.status_code, answer.text)
        # Neither our files nor our code are anybody's business.
        assert not any(word in answer.text for word in ("Traceback", ".py", "site-packages", "File ")), (
            content
        )
    for method in ("PUT", "DELETE", "PATCH", "TRACE"):
        assert server.client.request(method, path).status_code in (404, 405)
    assert server.client.request("PREPARE", path).status_code == 400


def test_a_prompt_beyond_the_servers_limit(server: Server) -> None:
    error = server.refused(400, TEXT, prompt=[5] * 301, max_tokens=1)
    assert "301" in error["message"]
    assert "300" in error["message"]
    server.post(TEXT, prompt=[5] * 300, max_tokens=1)


def test_a_full_queue(server: Server) -> None:
    with contextlib.ExitStack() as running:
        for _ in range(2):
            running.enter_context(server.stream(**long_answer(1000)))
        waiting = threading.Thread(target=server.post, args=(TEXT,), kwargs=long_answer(2))
        waiting.start()
        end = time.monotonic() + 10
        while server.client.get("/health").json()["waiting"] != 1 and time.monotonic() < end:
            time.sleep(0.01)
        answer = server.client.post(TEXT, json=long_answer(2))
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
        assert server.metric("request_rejected_total") >= 1
    waiting.join()
    server.idle()
    assert server.metric("kv_cache_tokens_used") == 0


def test_only_with_a_key(locked: Server) -> None:
    for path in ("/v1/models", "/metrics", "/openapi.json", "/no/such"):
        answer = locked.client.get(path)
        assert answer.status_code == 401, path
        assert answer.headers["www-authenticate"] == "Bearer"
        assert "key" in answer.json()["error"]["message"]
    assert locked.client.post(MESSAGES, json={}).json()["type"] == "error"
    for path in ("/", "/health", "/health/live", "/health/ready"):
        assert locked.client.get(path).status_code == 200, path
    for path in ("/health", "/health/ready"):
        assert "model" not in locked.client.get(path).json()
        key = {"x-api-key": "second-secret-key"}
        assert (
            locked.client.get(path, headers=key).json()["model"]
            == locked.client.get("/v1/models", headers=key).json()["data"][0]["id"]
        )
        assert "model" not in locked.client.get(path, headers={"x-api-key": "second-secret-kez"}).json()
    # No trick with the path opens another one.
    for path in ("/health/../v1/models", "/page/../v1/models", "/%76%31/models", "//v1/models"):
        assert locked.client.get(path).status_code in (401, 404), path
    for key in ("first-secret-key", "second-secret-key"):
        for headers in ({"authorization": f"Bearer {key}"}, {"x-api-key": key}):
            assert locked.client.get("/v1/models", headers=headers).status_code == 200
    for key in ("", "first-secret-ke", "first-secret-keyy", "# of two people", "caf\u00e9"):
        for name, value in (("authorization", f"Bearer {key}"), ("x-api-key", key), ("authorization", key)):
            headers = {name: value.strip().encode()}
            assert locked.client.get("/v1/models", headers=headers).status_code == 401, (name, key)


def test_an_answer_ends_when_its_time_is_over(locked: Server) -> None:
    headers = {"authorization": "Bearer first-secret-key"}
    answer = locked.client.post(TEXT, json=long_answer(1000), headers=headers).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert 0 < answer["usage"]["completion_tokens"] < 1000


def test_names_that_are_not_ours(server: Server) -> None:
    """A page whose name was rebound to 127.0.0.1 sends that name."""
    good = ("localhost", "127.0.0.1", "[::1]", "LOCALHOST", "x.localhost", socket.gethostname())
    for name in good:
        assert server.client.get("/health", headers={"host": f"{name}:{server.port}"}).status_code == 200, (
            name
        )
    for name in (
        "evil.example",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "evil.example:80",
        "0x7f.1",
    ):
        answer = server.client.get("/health", headers={"host": name})
        assert answer.status_code == 421, name
        assert "--allow-host" in answer.text


def test_pages_of_other_origins(server: Server, locked: Server) -> None:
    evil = {"origin": "https://evil.example", "content-type": "text/plain"}
    body = json.dumps(long_answer(1))
    assert server.client.post(TEXT, content=body, headers=evil).status_code == 403
    assert server.client.post(TEXT, content=body, headers=evil | {"origin": "null"}).status_code == 403
    preflight = {**evil, "access-control-request-method": "POST"}
    answer = server.client.options(TEXT, headers=preflight)
    assert not any(name.startswith("access-control-") for name in answer.headers)
    own = {"origin": f"http://127.0.0.1:{server.port}"}
    assert server.client.post(TEXT, json=long_answer(1), headers=own).status_code == 200
    # The one origin that the other server lets in.
    app = {"origin": "https://app.example", "authorization": "Bearer first-secret-key"}
    answer = locked.client.options(TEXT, headers={**app, "access-control-request-method": "POST"})
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "https://app.example"
    answer = locked.client.post(TEXT, json=long_answer(1), headers=app)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "https://app.example"
    answer = locked.client.options(TEXT, headers={**preflight, "origin": "https://evil.example"})
    assert "access-control-allow-origin" not in answer.headers


def test_a_key_from_the_environment() -> None:
    with Server("--host", "0.0.0.0", env={"HETERO_API_KEY": "from-the-environment"}).ready() as running:
        assert running.client.get("/v1/models").status_code == 401
        headers = {"x-api-key": "from-the-environment"}
        assert running.client.get("/v1/models", headers=headers).status_code == 200
        # Whoever has the key may come by any name: a proxy's, or that of the machine elsewhere.
        named = headers | {"host": "models.example"}
        assert running.client.get("/v1/models", headers=named).status_code == 200


def test_keys_that_are_none(tmp_path: Path) -> None:
    for text, words in (
        ("", "holds no key"),
        ("short\n", "at least 8"),
        ("with a space in it\n", "no space"),
    ):
        file = tmp_path / "keys"
        file.write_text(text)
        said = refused_start("--api-key-file", str(file))
        assert words in said
        assert "with a space" not in said


def test_metrics_tell_what_happened(server: Server) -> None:
    before = server.metric("generation_tokens_total")
    server.post(TEXT, **long_answer(7))
    assert server.metric("generation_tokens_total") == before + 7
    text = server.client.get("/metrics").text
    for name in (
        "time_to_first_token_seconds_count",
        "inter_token_latency_seconds_count",
        "e2e_request_latency_seconds_count",
        "request_decode_tokens_per_second_count",
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        'expert_read_bytes_total{tier="cpu"}',
        "prompt_tokens_total",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        'weights_bytes{tier="cpu"}',
        'http_requests_total{method="POST",route="/v1/completions",status="200"}',
    ):
        assert f"hetero:{name} " in text, name
    assert server.client.get("/metrics").headers["content-type"].startswith("text/plain")


def test_official_errors_are_json(server: Server) -> None:
    for answer in (server.client.get("/nothing"), server.client.get(TEXT), server.client.post("/health")):
        assert answer.status_code in (404, 405)
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert httpx.get(f"{server.client.base_url}/health").headers.get("server") is None
