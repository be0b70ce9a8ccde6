"""/v1/messages by the official client over a real socket."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anthropic
import pytest

from hetero.server.dialects import Content, Delta
from hetero.server.messages import with_pauses
from hetero.server.messages_protocol import CountBody
from tests.server.clients import WEATHER, anthropic_client, call, model
from tests.server.serving import CONTEXT, Script, Served

TOOLS: list[Any] = [{"name": "get_weather", "description": "The weather.", "input_schema": WEATHER}]
ASK: list[Any] = [{"role": "user", "content": "the whale"}]


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic_client(served) as made:
        yield made


def raw_events(served: Served, **body: Any) -> list[tuple[str, dict[str, Any]]]:
    body = {"model": "tiny", "max_tokens": 200, "messages": ASK, "stream": True} | body
    with served.client.stream("POST", "/v1/messages", json=body) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        blocks = "".join(answer.iter_text()).split("\n\n")
    events = []
    for block in filter(None, blocks):
        name, data = block.split("\n")
        parsed = json.loads(data.removeprefix("data: "))
        assert name == f"event: {parsed['type']}"
        events.append((parsed["type"], parsed))
    return events


def test_a_message(served: Served, client: anthropic.Anthropic, monkeypatch: pytest.MonkeyPatch) -> None:
    Script(served, monkeypatch, "Call me Ishmael.")
    got = client.messages.create(model="tiny", max_tokens=50, messages=ASK, system="be brief")
    assert [block.type for block in got.content] == ["text"]
    assert got.content[0].text == "Call me Ishmael."
    assert (got.role, got.type, got.model, got.stop_reason) == ("assistant", "message", "tiny", "end_turn")
    assert got._request_id is not None
    prompt = "<|start|>system\nbe brief<|end|><|start|>user\nthe whale<|end|><|start|>assistant\n"
    size = len(served.tokenizer.encode_rendered(prompt))
    assert got.usage.input_tokens + (got.usage.cache_read_input_tokens or 0) == size
    assert got.usage.output_tokens == len(served.tokenizer.encode_rendered("Call me Ishmael.")) + 1
    counted = client.messages.count_tokens(model="tiny", messages=ASK, system="be brief")
    assert counted.input_tokens == size


def test_the_real_model_answers(served: Served, client: anthropic.Anthropic) -> None:
    options: Any = {"model": "tiny", "max_tokens": 12, "messages": ASK, "extra_body": {"temperature": 0}}
    first, second = (client.messages.create(**options) for _ in range(2))
    assert first.content == second.content
    with client.messages.stream(**options) as stream:
        assert "".join(stream.text_stream) == "".join(block.text for block in first.content)
    drawn = {"temperature": 1, "top_k": 3, "top_p": 0.5}
    assert client.messages.create(**options | {"extra_body": drawn}).usage.output_tokens <= 12


def test_thinking_text_and_parallel_calls_in_the_order_of_the_protocol(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    Script(served, monkeypatch, f"<think>\nHm.\n</think>\n\nI look.\n{call('Paris')}\n{call('Rome', 2)}")
    events = raw_events(served, tools=TOOLS, max_tokens=300)
    names = [name for name, _ in events]
    assert names[:3] == ["message_start", "content_block_start", "ping"]
    assert names[-2:] == ["message_delta", "message_stop"]
    begun = events[0][1]["message"]
    assert (begun["content"], begun["stop_reason"], begun["usage"]["output_tokens"]) == ([], None, 0)
    order = [
        (name, event["index"], event.get("content_block", event.get("delta", {})).get("type"))
        for name, event in events[1:-2]
        if name != "ping"
    ]
    squeezed = [entry for place, entry in enumerate(order) if place == 0 or entry != order[place - 1]]
    assert squeezed == [
        ("content_block_start", 0, "thinking"),
        ("content_block_delta", 0, "thinking_delta"),
        ("content_block_delta", 0, "signature_delta"),
        ("content_block_stop", 0, None),
        ("content_block_start", 1, "text"),
        ("content_block_delta", 1, "text_delta"),
        ("content_block_stop", 1, None),
        ("content_block_start", 2, "tool_use"),
        ("content_block_delta", 2, "input_json_delta"),
        ("content_block_stop", 2, None),
        ("content_block_start", 3, "tool_use"),
        ("content_block_delta", 3, "input_json_delta"),
        ("content_block_stop", 3, None),
    ]
    assert events[-2][1]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2][1]["usage"]["output_tokens"] > 20


def test_calls_whole_and_streamed(
    served: Served, client: anthropic.Anthropic, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"<think>Hm.</think>I look.{call('Paris')}{call('Rome', 2)}"
    Script(served, monkeypatch, text, text)
    whole = client.messages.create(model="tiny", max_tokens=300, messages=ASK, tools=TOOLS)
    with client.messages.stream(model="tiny", max_tokens=300, messages=ASK, tools=TOOLS) as stream:
        streamed = stream.get_final_message()
    for got in (whole, streamed):
        assert got.stop_reason == "tool_use"
        thinking, said, first, second = got.content
        assert (thinking.type, said.type) == ("thinking", "text")
        assert thinking.thinking == "Hm."
        assert first.input == {"city": "Paris", "days": 1}
        assert second.input == {"city": "Rome", "days": 2}
    # The conversation goes on with what was answered and what the tools gave.
    ids = [block.id for block in whole.content if block.type == "tool_use"]
    results: list[Any] = [
        {"type": "tool_result", "tool_use_id": ids[0], "content": "sun"},
        {
            "type": "tool_result",
            "tool_use_id": ids[1],
            "content": [{"type": "text", "text": "no"}],
            "is_error": True,
        },
        {"type": "text", "text": "well?", "cache_control": {"type": "ephemeral"}},
    ]
    more: list[Any] = [
        *ASK,
        {"role": "assistant", "content": whole.content},
        {"role": "user", "content": results},
    ]
    prompt = (
        "get_weather<|start|>user\nthe whale<|end|><|start|>assistant\nI look."
        'get_weather{"city": "Paris", "days": 1}get_weather{"city": "Rome", "days": 2}<|end|>'
        "<|start|>tool\nsun<|end|><|start|>tool\nError: no<|end|>"
        "<|start|>user\nwell?<|end|><|start|>assistant\n"
    )
    counted = client.messages.count_tokens(model="tiny", messages=more, tools=TOOLS)
    assert counted.input_tokens == len(served.tokenizer.encode_rendered(prompt))


def test_what_agents_send_along(served: Served) -> None:
    """Blocks are paragraphs, examples are told, hints and settings that ask for nothing pass."""
    ephemeral = {"type": "ephemeral", "ttl": "1h"}
    tool = {"name": "get_weather", "input_schema": WEATHER, "input_examples": [{"city": "Paris", "days": 1}]}
    body = {
        "model": "tiny",
        "system": [{"type": "text", "text": "a", "cache_control": ephemeral}, {"type": "text", "text": "b"}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "c"}, {"type": "text", "text": "d"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "e", "citations": None}]},
            {"role": "system", "content": "f"},
            {"role": "user", "content": "g"},
        ],
        "tools": [tool | {"type": "custom", "eager_input_streaming": True, "cache_control": ephemeral}],
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "xhigh"},
    }
    answer = served.client.post("/v1/messages/count_tokens?beta=true", json=body)
    assert answer.status_code == 200, answer.text
    turns = (("system", "a\n\nb"), ("user", "c\n\nd"), ("assistant", "e"), ("system", "f"), ("user", "g"))
    text = "".join(f"<|start|>{role}\n{content}<|end|>" for role, content in turns)
    prompt = f"get_weather{text}<|start|>assistant\n"
    assert answer.json() == {"input_tokens": len(served.tokenizer.encode_rendered(prompt))}
    told = CountBody.model_validate(body).chat("").tools or []
    assert told[0].function.description == 'Example: {"city": "Paris", "days": 1}'
    body["context_management"] = {"edits": [{"type": "clear_tool_uses_20250919"}]}
    assert "context_management" in served.client.post("/v1/messages/count_tokens", json=body).text


def test_a_long_silence_is_filled_with_pings() -> None:
    async def slow() -> AsyncIterator[Delta]:
        yield Content("a")
        await asyncio.sleep(0.2)
        yield Content("b")

    async def collect() -> list[Delta | None]:
        return [delta async for delta in with_pauses(slow(), 0.05)]

    got = asyncio.run(collect())
    assert got[0] == Content("a")
    assert got[-1] == Content("b")
    assert set(got[1:-1]) == {None}


def test_a_failure_in_a_stream(
    served: Served, client: anthropic.Anthropic, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script(served, monkeypatch, "one two")
    # Without the end of text, the sampler has nothing more to give.
    script.left[0].pop()
    with (
        pytest.raises(anthropic.APIStatusError, match="api_error"),
        client.messages.stream(model="tiny", max_tokens=50, messages=ASK) as stream,
    ):
        list(stream.text_stream)


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_forced_calls_by_the_real_model(blunt: Served, choice: dict[str, Any]) -> None:
    got = anthropic_client(blunt).messages.create(
        model="tiny",
        max_tokens=400,
        messages=ASK,
        tools=TOOLS,
        tool_choice=choice | {"disable_parallel_tool_use": True},
        extra_body={"temperature": 0},
    )
    calls = [block for block in got.content if block.type == "tool_use"]
    assert len(calls) == len(got.content) == 1
    assert calls[0].name == "get_weather"
    if got.stop_reason == "tool_use":
        assert set(calls[0].input) == {"city", "days"}
    else:
        assert got.stop_reason in ("max_tokens", "model_context_window_exceeded")
        assert set(calls[0].input) == {"INVALID_JSON"}


def test_one_call_only_and_none(
    served: Served, client: anthropic.Anthropic, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"{call('Paris')}{call('Rome')} bye"
    Script(served, monkeypatch, text, text)
    options: Any = {"model": "tiny", "max_tokens": 200, "messages": ASK, "tools": TOOLS}
    got = client.messages.create(**options, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block.type for block in got.content] == ["tool_use"]
    assert got.stop_reason == "tool_use"
    got = client.messages.create(**options, tool_choice={"type": "none"})
    assert [block.type for block in got.content] == ["text"]
    assert got.content[0].text == text
    assert got.stop_reason == "end_turn"


def test_thinking_off_and_hidden(
    served: Served, client: anthropic.Anthropic, monkeypatch: pytest.MonkeyPatch
) -> None:
    Script(served, monkeypatch, *["<think>Hm.</think>Yes."] * 3)
    options: Any = {"model": "tiny", "max_tokens": 2000, "messages": ASK}
    for thinking in ({"type": "disabled"}, {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}):
        got = client.messages.create(**options, thinking=thinking)
        assert [block.type for block in got.content] == ["text"]
    got = client.messages.create(**options, thinking={"type": "adaptive"})
    assert [block.type for block in got.content] == ["thinking", "text"]
    plain, off = (
        client.messages.count_tokens(model="tiny", messages=ASK, thinking=thinking).input_tokens
        for thinking in ({"type": "adaptive"}, {"type": "disabled"})
    )
    assert off == plain + len(served.tokenizer.encode_rendered("quick"))


def test_reasons_to_stop(
    served: Served, client: anthropic.Anthropic, monkeypatch: pytest.MonkeyPatch
) -> None:
    Script(served, monkeypatch, "one two three", "one two three", "o" * 1000, call("Paris"))
    options: Any = {"model": "tiny", "messages": ASK, "tools": TOOLS}
    got = client.messages.create(**options, max_tokens=50, stop_sequences=["never", " two"])
    assert (got.stop_reason, got.stop_sequence) == ("stop_sequence", " two")
    assert got.content[0].text == "one"
    assert client.messages.create(**options, max_tokens=3).stop_reason == "max_tokens"
    got = client.messages.create(**options, max_tokens=4000)
    assert got.stop_reason == "model_context_window_exceeded"
    assert got.usage.output_tokens < CONTEXT
    cut = client.messages.create(**options, max_tokens=70)
    assert cut.stop_reason == "max_tokens"
    assert set(cut.content[0].input) == {"INVALID_JSON"}


def test_output_format(blunt: Served) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    got = anthropic_client(blunt).messages.create(
        model="tiny",
        max_tokens=200,
        messages=ASK,
        output_config={"format": {"type": "json_schema", "schema": schema}, "effort": "high"},
        extra_body={"temperature": 0},
    )
    text = "".join(block.text for block in got.content if block.type == "text")
    assert set(json.loads(text)) == {"ok"}


def test_leaving_a_stream_ends_it(
    served: Served, client: anthropic.Anthropic, monkeypatch: pytest.MonkeyPatch
) -> None:
    Script(served, monkeypatch, "o" * 450)
    with client.messages.stream(model="tiny", max_tokens=450, messages=ASK) as stream:
        next(stream.text_stream)
    end = time.monotonic() + 10
    while served.state.engine.status().running and time.monotonic() < end:
        time.sleep(0.01)
    assert served.state.engine.status().running == 0


BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "assistant", "content": "a"}]}, "messages"),
    ({"messages": [{"role": "user", "content": []}]}, "content"),
    ({"messages": [{"role": ["user"], "content": "a"}]}, "role"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "name"),
    ({"tools": TOOLS * 2}, "twice"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "'image'"),
    ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "'document'"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "'tool_use'"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "mood": 1}]}]}, "mood"),
    (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "x", "content": [{"type": "image"}]}],
                }
            ]
        },
        "'image'",
    ),
    ({"temperature": 1.5}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -1}, "top_k"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
    ({"tools": [{"name": "f", "input_schema": {}, "defer_loading": True}]}, "defer_loading"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "nobody"}}, "nobody"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "name"),
    ({"thinking": {"type": "enabled"}}, "budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "budget_tokens"),
    ({"mcp_servers": [{}]}, "mcp_servers"),
    ({"container": "c"}, "container"),
    ({"service_tier": "priority"}, "service_tier"),
    ({"n": 2}, "n:"),
]


@pytest.mark.parametrize(("body", "named"), BAD, ids=lambda value: value if isinstance(value, str) else "")
def test_refused_by_name(served: Served, body: dict[str, Any], named: str) -> None:
    plain = {"model": "tiny", "max_tokens": 5, "messages": ASK}
    answer = served.client.post("/v1/messages", json=plain | body)
    assert answer.status_code == 400, answer.text
    told = answer.json()
    assert (told["type"], told["error"]["type"]) == ("error", "invalid_request_error")
    assert named in told["error"]["message"]
    assert answer.headers["request-id"].startswith("req_")


def test_errors_by_their_classes(served: Served, client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="not served here"):
        client.messages.create(model="claude", max_tokens=5, messages=ASK)
    with pytest.raises(anthropic.BadRequestError, match="400"):
        client.messages.create(model="tiny", max_tokens=5, messages=[{"role": "user", "content": "a" * 600}])
    with pytest.raises(anthropic.BadRequestError, match="anthropic-version"):
        client.messages.create(
            model="tiny", max_tokens=5, messages=ASK, extra_headers={"anthropic-version": "newest"}
        )
    answer = served.client.post("/v1/messages", content=b"{", headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["type"]) == (400, "error")


def test_a_busy_server_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with model(slots=1, max_queue=1) as running, anthropic_client(running) as client:
        Script(running, monkeypatch, *["o" * 400] * 3)
        options: Any = {"model": "tiny", "max_tokens": 400, "messages": ASK}
        with client.messages.stream(**options) as first, client.messages.stream(**options):
            next(first.text_stream)
            with pytest.raises(anthropic.RateLimitError) as refused:
                client.messages.create(**options)
        assert int(refused.value.response.headers["retry-after"]) >= 1
        assert refused.value.body["error"]["type"] == "rate_limit_error"
