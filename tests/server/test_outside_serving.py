"""What servers of the field got wrong, asked of a real process: contexts, mixed answers, shapes."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from hetero.model.demo import TEST_MODEL
from tests.server.outside import CHAT, TEXT, Server

CONTEXT = 512


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    # In the format that computes the same however requests are batched.
    with Server("--ctx", str(CONTEXT), "--set", "experts=f32", "--tool-format", "hermes").ready() as running:
        yield running
        assert "Traceback" not in running.said()


def ask(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def text_of(chunks: list[dict[str, Any]]) -> str:
    return "".join(chunk["choices"][0].get("text", "") for chunk in chunks if chunk["choices"])


def test_a_character_cut_by_max_tokens(server: Server) -> None:
    """A token is a piece of a character here: every cut must be valid text, streamed or whole."""
    prompt = "\U0001f642\u6f22\u5b57" * 6
    for most in range(1, 9):
        body = {"prompt": prompt, "max_tokens": most, "temperature": 1.8, "seed": most, "ignore_eos": True}
        answer = server.client.post(TEXT, json=body)
        answer.content.decode()
        whole = answer.json()
        assert whole["usage"]["completion_tokens"] == most
        streamed = server.chunks(TEXT, **body)
        assert text_of(streamed) == whole["choices"][0]["text"]
        assert streamed[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"] == "length"


def test_split_utf8_in_a_stream(server: Server) -> None:
    """Characters of several tokens, forced by the grammar, arrive whole."""
    want = "\U0001f642\u6f22\u5b57\u00e9\U0001f9d1\u200d\U0001f680"
    schema = {"const": want}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    body = {"messages": ask("say"), "max_tokens": 200, "temperature": 0, "response_format": form}
    with server.client.stream("POST", CHAT, json=body | {"stream": True}) as answer:
        raw = b"".join(answer.iter_raw())
    events = [json.loads(e[6:]) for e in raw.decode().split("\n\n") if e.startswith("data: {")]
    parts = [e["choices"][0]["delta"].get("content") or "" for e in events if e["choices"]]
    assert "\ufffd" not in "".join(parts)
    assert json.loads("".join(parts)) == want
    assert json.loads(server.post(CHAT, **body)["choices"][0]["message"]["content"]) == want


def test_beyond_the_context(server: Server) -> None:
    body = server.post(TEXT, prompt=[5] * 400, max_tokens=4096, temperature=0, ignore_eos=True)
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"] == body["usage"] | {
        "prompt_tokens": 400,
        "completion_tokens": 112,
        "total_tokens": 512,
    }
    for stream in (False, True):
        error = server.refused(400, TEXT, prompt=[5] * 600, max_tokens=4096, stream=stream)
        assert "600" in error["message"]
        assert "512" in error["message"]
    error = server.refused(400, CHAT, messages=ask("the sea " * 600))
    assert "512" in error["message"]
    # The last place that there is.
    body = server.post(TEXT, prompt=[5] * 511, max_tokens=5, temperature=0, ignore_eos=True)
    assert body["usage"]["total_tokens"] == 512


def test_ten_clients_and_memory_for_three() -> None:
    """Unique markers; requests wait or start anew, and no answer has a token of another."""
    prompts = [
        f"Client {i} saw {i * 7919 % 1000} whales, and the captain said: {chr(65 + i) * 3}" for i in range(10)
    ]
    body = {"max_tokens": 75, "temperature": 0, "ignore_eos": True}
    with Server("--kv-tokens", "320", "--slots", "10", "--set", "experts=f32").ready() as server:
        alone = [server.post(TEXT, prompt=prompt, **body)["choices"][0]["text"] for prompt in prompts]
        assert len(set(alone)) == 10

        def client(index: int) -> list[str]:
            with httpx.Client(base_url=server.client.base_url, timeout=120) as own:
                got = []
                for _ in range(2):
                    answer = own.post(TEXT, json=body | {"prompt": prompts[index]})
                    assert answer.status_code == 200, answer.text
                    got.append(answer.json()["choices"][0]["text"])
                return got

        with ThreadPoolExecutor(10) as pool:
            results = list(pool.map(client, range(10)))
        assert results == [[text, text] for text in alone]
        server.idle()
        assert server.metric("kv_cache_tokens_used") == 0
        # A request that could never fit is told so, not queued for ever.
        error = server.refused(400, TEXT, prompt=[5] * 350, max_tokens=4)
        assert "350" in error["message"]
        assert "320" in error["message"]


def test_the_usage_chunk(server: Server) -> None:
    body = {"messages": ask("the sea"), "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    plain = server.chunks(CHAT, **body)
    assert all(chunk["choices"] for chunk in plain)
    assert all("usage" not in chunk for chunk in plain)
    *rest, last = server.chunks(CHAT, **body, stream_options={"include_usage": True})
    assert last["choices"] == []
    assert last["usage"] == server.post(CHAT, **body)["usage"]
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in rest)


def test_tool_calls_end_by_their_own_reason(server: Server) -> None:
    tool = {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Oslo", "Rome"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
    body = {"messages": ask("the weather"), "tools": [tool], "tool_choice": "required", "temperature": 0}
    # The small model likes blank lines, which JSON allows between its parts.
    body |= {"max_tokens": 300, "parallel_tool_calls": False, "frequency_penalty": 2}
    choice = server.post(CHAT, **body)["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"])["city"] in ("Oslo", "Rome")
    chunks = server.chunks(CHAT, **body)
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    parts = [part for chunk in chunks for part in chunk["choices"][0]["delta"].get("tool_calls") or ()]
    assert parts[0]["function"]["name"] == "weather"
    assert parts[0]["id"]
    assert {part["index"] for part in parts} == {0}
    arguments = "".join(part["function"].get("arguments") or "" for part in parts)
    assert arguments == call["function"]["arguments"]
    # Cut short, it is no call.
    cut = server.post(CHAT, **body | {"max_tokens": 3})["choices"][0]
    assert cut["finish_reason"] == "length"


def test_the_shape_of_logprobs(server: Server) -> None:
    body = {"messages": ask("the sea"), "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    body |= {"logprobs": True, "top_logprobs": 3}
    entries = server.post(CHAT, **body)["choices"][0]["logprobs"]["content"]
    assert len(entries) == 5
    for entry in entries:
        assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
        assert entry["logprob"] <= 0
        assert len(entry["top_logprobs"]) == 3
        # The most likely token is the one that temperature 0 takes.
        assert entry["top_logprobs"][0]["token"] == entry["token"]
        assert all(set(top) == {"token", "logprob", "bytes"} for top in entry["top_logprobs"])
    streamed = [
        entry
        for chunk in server.chunks(CHAT, **body)
        for choice in chunk["choices"]
        for entry in (choice["logprobs"] or {}).get("content") or ()
    ]
    assert streamed == entries
    text = {"prompt": "the sea", "max_tokens": 5, "temperature": 0, "logprobs": 2, "ignore_eos": True}
    lists = server.post(TEXT, **text)["choices"][0]["logprobs"]
    assert set(lists) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert {len(values) for values in lists.values()} == {5}


def without_template(folder: Path, template: str | None) -> Path:
    shutil.copytree(TEST_MODEL, folder)
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    del config["chat_template"]
    file.write_text(json.dumps(config | ({} if template is None else {"chat_template": template})))
    return folder


def test_without_a_chat_template(tmp_path: Path) -> None:
    with Server(model=without_template(tmp_path / "model", None)).ready() as server:
        error = server.refused(400, CHAT, messages=ask("the sea"))
        assert "chat template" in error["message"]
        assert TEXT in error["message"]
        assert str(tmp_path) not in error["message"]
        assert server.post(TEXT, prompt="the sea", max_tokens=3)["usage"]["completion_tokens"] == 3


def test_reasoning_is_apart_from_the_content(tmp_path: Path) -> None:
    """The template opens the reasoning; what the model writes before the closing tag is it."""
    template = (
        "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}<think>\n{% endif %}{# </think> #}"
    )
    with Server(model=without_template(tmp_path / "model", template)).ready() as server:
        body = {"messages": ask("the sea"), "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        message = server.post(CHAT, **body)["choices"][0]["message"]
        assert message["reasoning_content"]
        assert not message["content"]
        deltas = [chunk["choices"][0]["delta"] for chunk in server.chunks(CHAT, **body)]
        assert "".join(d.get("reasoning_content") or "" for d in deltas) == message["reasoning_content"]
        assert not any(d.get("content") for d in deltas)
    with Server("--reasoning-format", "none", model=tmp_path / "model").ready() as server:
        message = server.post(CHAT, **body)["choices"][0]["message"]
        assert message["content"]
        assert "reasoning_content" not in message


TEMPLATES = {
    "escape": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "loop": "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_that_means_harm(tmp_path: Path, name: str) -> None:
    """It came with the checkpoint, which may be anybody's: one request is refused, and the server goes on."""
    with Server(model=without_template(tmp_path / "model", TEMPLATES[name])).ready() as server:
        got: dict[str, Any] = {}

        def chat() -> None:
            got.update(server.refused(400, CHAT, messages=ask("the sea")))

        thread = threading.Thread(target=chat)
        thread.start()
        # Others are served meanwhile.
        assert server.post(TEXT, prompt="the sea", max_tokens=3)["usage"]["completion_tokens"] == 3
        thread.join(40)
        assert not thread.is_alive()
        assert "chat template" in got["message"]
        assert str(tmp_path) not in json.dumps(got)
