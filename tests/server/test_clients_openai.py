"""/v1/chat/completions, /v1/completions and /v1/models by the official client over a real socket."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.server.clients import WEATHER, call, model, openai_client
from tests.server.serving import Script, Served

TOOLS: list[Any] = [{"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}}]
ASK: list[Any] = [{"role": "user", "content": "the whale"}]
GREEDY: dict[str, Any] = {"model": "tiny", "messages": ASK, "temperature": 0}


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai_client(served) as made:
        yield made


def test_models(client: openai.OpenAI) -> None:
    assert [entry.id for entry in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").object == "model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt")


def test_a_chat_and_its_stream(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**GREEDY, max_tokens=20)
    stream = client.chat.completions.create(
        **GREEDY, max_tokens=20, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens == whole.usage.prompt_tokens + 20
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    plain = client.completions.create(model="tiny", prompt="the", max_tokens=5, temperature=0)
    parts = client.completions.create(model="tiny", prompt="the", max_tokens=5, temperature=0, stream=True)
    assert "".join(part.choices[0].text for part in parts) == plain.choices[0].text


def test_thinking_and_parallel_calls(
    served: Served, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"<think>Hm.</think>I look.{call('Paris')}{call('Rome', 2)}"
    Script(served, monkeypatch, text, text, text, "Sun.")
    options: dict[str, Any] = GREEDY | {"tools": TOOLS, "max_tokens": 300}
    message = client.chat.completions.create(**options).choices[0].message
    with client.chat.completions.stream(**options) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert streamed.finish_reason == "tool_calls"
    for got in (message, streamed.message):
        assert got.content == "I look."
        assert [json.loads(tool.function.arguments) for tool in got.tool_calls or ()] == [
            {"city": "Paris", "days": 1},
            {"city": "Rome", "days": 2},
        ]
    assert message.reasoning_content == "Hm."
    one = client.chat.completions.create(**options, parallel_tool_calls=False).choices[0]
    assert (one.finish_reason, len(one.message.tool_calls or ())) == ("tool_calls", 1)
    results = [
        {"role": "tool", "tool_call_id": tool.id, "content": "sun"} for tool in message.tool_calls or ()
    ]
    history = [*ASK, message, *results]
    last = client.chat.completions.create(**options | {"messages": history})
    assert last.choices[0].message.content == "Sun."
    prompt = (
        "get_weather<|start|>user\nthe whale<|end|><|start|>assistant\nI look."
        'get_weather{"city": "Paris", "days": 1}get_weather{"city": "Rome", "days": 2}<|end|>'
        "<|start|>tool\nsun<|end|><|start|>tool\nsun<|end|><|start|>assistant\n"
    )
    assert last.usage is not None
    assert last.usage.prompt_tokens == len(served.tokenizer.encode_rendered(prompt))


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_forced_calls_by_the_real_model(blunt: Served, choice: Any) -> None:
    client = openai_client(blunt)
    options = GREEDY | {
        "tools": TOOLS,
        "tool_choice": choice,
        "max_tokens": 400,
        "parallel_tool_calls": False,
    }
    whole = client.chat.completions.create(**options).choices[0]
    (tool,) = whole.message.tool_calls or ()
    assert tool.function.name == "get_weather"
    fragments: list[str] = []
    for chunk in client.chat.completions.create(**options, stream=True):
        for part in chunk.choices[0].delta.tool_calls or ():
            fragments.append((part.function and part.function.arguments) or "")
    assert "".join(fragments) == tool.function.arguments
    if whole.finish_reason == "tool_calls":
        assert set(json.loads("".join(fragments))) == {"city", "days"}
    else:
        assert whole.finish_reason == "length"


def test_json_schema_and_object(blunt: Served) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    client = openai_client(blunt)
    shape: Any = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": schema, "strict": True}}
    got = client.chat.completions.create(**GREEDY, max_tokens=100, response_format=shape)
    assert set(json.loads(got.choices[0].message.content or "")) == {"ok"}
    got = client.chat.completions.create(**GREEDY, max_tokens=30, response_format={"type": "json_object"})
    assert (got.choices[0].message.content or "").startswith("{")


def test_logprobs(client: openai.OpenAI) -> None:
    got = client.chat.completions.create(**GREEDY, max_tokens=6, logprobs=True, top_logprobs=3)
    logprobs = got.choices[0].logprobs
    assert logprobs is not None
    assert len(logprobs.content or ()) == 6
    for entry in logprobs.content or ():
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob == entry.logprob <= 0
    text = client.completions.create(model="tiny", prompt="the", max_tokens=4, temperature=0, logprobs=2)
    assert text.choices[0].logprobs is not None
    assert len(text.choices[0].logprobs.tokens or ()) == 4


def test_choices_and_seeds(client: openai.OpenAI) -> None:
    options: Any = {"model": "tiny", "messages": ASK, "temperature": 1.5, "max_tokens": 16}

    def texts(**more: Any) -> list[str | None]:
        got = client.chat.completions.create(**options, **more)
        assert [choice.index for choice in got.choices] == list(range(len(got.choices)))
        return [choice.message.content for choice in got.choices]

    both = texts(seed=7, n=2)
    assert both == texts(seed=7, n=2)
    assert both[0] != both[1]
    assert texts(seed=7) == both[:1]
    assert texts(seed=8) == both[1:]
    streamed: dict[int, str] = {0: "", 1: ""}
    for chunk in client.chat.completions.create(**options, seed=7, n=2, stream=True):
        choice = chunk.choices[0]
        streamed[choice.index] += choice.delta.content or ""
    assert list(streamed.values()) == both


def test_stop(served: Served, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    Script(served, monkeypatch, *["one two three"] * 2)
    got = client.chat.completions.create(**GREEDY, stop=["never", " two"]).choices[0]
    assert (got.message.content, got.finish_reason) == ("one", "stop")
    parts = client.chat.completions.create(**GREEDY, stop=" t", stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == "one"


def test_cancel_frees_the_slot(
    served: Served, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    Script(served, monkeypatch, *["o" * 450] * 2)
    with client.chat.completions.create(**GREEDY, stream=True) as stream:
        next(iter(stream))
    _wait_idle(served)

    async def leave() -> None:
        base = f"{served.client.base_url}".rstrip("/") + "/v1"
        async with openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0) as remote:
            asked = asyncio.ensure_future(remote.chat.completions.create(**GREEDY))
            while not served.state.engine.status().running:
                await asyncio.sleep(0.01)
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked

    asyncio.run(leave())
    _wait_idle(served)


def _wait_idle(served: Served) -> None:
    end = time.monotonic() + 10
    while served.state.engine.status().running and time.monotonic() < end:
        time.sleep(0.01)
    assert served.state.engine.status().running == 0


def test_errors_by_their_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="not served here") as missing:
        client.chat.completions.create(**GREEDY | {"model": "gpt"})
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError, match="temperature") as bad:
        client.chat.completions.create(**GREEDY | {"temperature": -1})
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    image = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    with pytest.raises(openai.BadRequestError, match="image_url"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": image}])
    with pytest.raises(openai.BadRequestError, match="context"):
        client.completions.create(model="tiny", prompt=[5] * 600)


def test_a_busy_server_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with model(slots=1, max_queue=1) as running, openai_client(running) as client:
        Script(running, monkeypatch, *["o" * 400] * 3)
        first = client.chat.completions.create(**GREEDY, stream=True)
        next(iter(first))
        second = client.chat.completions.create(**GREEDY, stream=True)
        with pytest.raises(openai.RateLimitError) as refused:
            client.chat.completions.create(**GREEDY)
        assert int(refused.value.response.headers["retry-after"]) >= 1
        first.close()
        second.close()
