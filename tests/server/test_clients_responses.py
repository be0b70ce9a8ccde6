"""/v1/responses by the official client over a real socket."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.server.clients import WEATHER, call, openai_client
from tests.server.serving import Script, Served

TOOLS: list[Any] = [{"type": "function", "name": "get_weather", "parameters": WEATHER, "strict": None}]


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai_client(served) as made:
        yield made


def raw_events(served: Served, **body: Any) -> list[dict[str, Any]]:
    with served.client.stream(
        "POST", "/v1/responses", json={"input": "the whale", "stream": True} | body
    ) as answer:
        assert answer.status_code == 200, answer.read()
        blocks = "".join(answer.iter_text()).split("\n\n")
    events = []
    for block in filter(None, blocks):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def test_a_text(served: Served, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    Script(served, monkeypatch, "Call me Ishmael.")
    got = client.responses.create(
        model="tiny", input="the whale", instructions="be brief", metadata={"a": "b"}, temperature=0.5
    )
    assert (got.output_text, got.status, got.object, got.model) == (
        "Call me Ishmael.",
        "completed",
        "response",
        "tiny",
    )
    assert [item.type for item in got.output] == ["message"]
    assert (got.metadata, got.temperature, got.instructions, got.error) == ({"a": "b"}, 0.5, "be brief", None)
    prompt = "<|start|>system\nbe brief<|end|><|start|>user\nthe whale<|end|><|start|>assistant\n"
    assert got.usage is not None
    assert got.usage.input_tokens == len(served.tokenizer.encode_rendered(prompt))
    assert got.usage.total_tokens == got.usage.input_tokens + got.usage.output_tokens
    assert got.usage.output_tokens_details.reasoning_tokens == 0


def test_the_order_of_events(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    Script(served, monkeypatch, f"<think>\nHm.\n</think>\n\nI look.\n{call('Paris')}\n{call('Rome', 2)}")
    events = raw_events(served, tools=TOOLS, max_output_tokens=300)
    order = [(event["type"].removeprefix("response."), event.get("output_index")) for event in events]
    squeezed = [entry for place, entry in enumerate(order) if place == 0 or entry != order[place - 1]]
    assert squeezed == [
        ("created", None),
        ("in_progress", None),
        ("output_item.added", 0),
        ("content_part.added", 0),
        ("reasoning_text.delta", 0),
        ("reasoning_text.done", 0),
        ("content_part.done", 0),
        ("output_item.done", 0),
        ("output_item.added", 1),
        ("content_part.added", 1),
        ("output_text.delta", 1),
        ("output_text.done", 1),
        ("content_part.done", 1),
        ("output_item.done", 1),
        ("output_item.added", 2),
        ("function_call_arguments.delta", 2),
        ("function_call_arguments.done", 2),
        ("output_item.done", 2),
        ("output_item.added", 3),
        ("function_call_arguments.delta", 3),
        ("function_call_arguments.done", 3),
        ("output_item.done", 3),
        ("completed", None),
    ]
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [item["status"] for item in added] == ["in_progress"] * 4
    assert [item["status"] for item in done] == ["completed"] * 4
    assert [item["id"] for item in added] == [item["id"] for item in done]
    assert (added[0]["content"], added[1]["content"], added[2]["arguments"]) == ([], [], "")
    last = events[-1]["response"]
    assert last["output"] == done
    assert last["usage"]["output_tokens_details"]["reasoning_tokens"] > 5
    for index, kind in ((0, "reasoning_text"), (1, "output_text")):
        parts = [e["delta"] for e in events if e["type"] == f"response.{kind}.delta"]
        assert "".join(parts) == last["output"][index]["content"][0]["text"]


def test_a_conversation_with_tools(
    served: Served, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"<think>Hm.</think>I look.{call('Paris')}{call('Rome', 2)}"
    Script(served, monkeypatch, text, text, "Sun.")
    options: Any = {"model": "tiny", "input": "the whale", "tools": TOOLS, "max_output_tokens": 300}
    whole = client.responses.create(**options, include=["reasoning.encrypted_content"])
    with client.responses.stream(**options) as stream:
        streamed = stream.get_final_response()
    for got in (whole, streamed):
        thinking, said, first, second = got.output
        assert (thinking.type, said.type, got.output_text) == ("reasoning", "message", "I look.")
        assert thinking.content[0].text == "Hm."
        assert json.loads(first.arguments) == {"city": "Paris", "days": 1}
        assert json.loads(second.arguments) == {"city": "Rome", "days": 2}
    history: list[Any] = [{"role": "user", "content": "the whale"}]
    history += [item.model_dump(exclude_none=True) for item in whole.output]
    # A client may keep of the thinking only what is sealed.
    assert history[1].pop("content")
    history += [
        {"type": "function_call_output", "call_id": whole.output[2].call_id, "output": "sun"},
        {
            "type": "function_call_output",
            "call_id": whole.output[3].call_id,
            "output": [{"type": "input_text", "text": "rain"}],
        },
    ]
    got = client.responses.create(model="tiny", input=history, tools=TOOLS)
    prompt = (
        "get_weather<|start|>user\nthe whale<|end|><|start|>assistant\nI look."
        'get_weather{"city": "Paris", "days": 1}get_weather{"city": "Rome", "days": 2}<|end|>'
        "<|start|>tool\nsun<|end|><|start|>tool\nrain<|end|><|start|>assistant\n"
    )
    assert got.output_text == "Sun."
    assert got.usage is not None
    assert got.usage.input_tokens == len(served.tokenizer.encode_rendered(prompt))


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "name": "get_weather"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_weather"}]},
    ],
)
def test_forced_calls_by_the_real_model(blunt: Served, choice: Any) -> None:
    got = openai_client(blunt).responses.create(
        model="tiny",
        input="the whale",
        tools=TOOLS,
        tool_choice=choice,
        parallel_tool_calls=False,
        temperature=0,
    )
    assert [item.type for item in got.output] == ["function_call"]
    assert got.output[0].name == "get_weather"
    if got.status == "completed":
        assert set(json.loads(got.output[0].arguments)) == {"city", "days"}
    else:
        assert got.output[0].status == "incomplete"


def test_json_schema_and_object(blunt: Served) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    client = openai_client(blunt)
    got = client.responses.create(
        model="tiny",
        input="the whale",
        temperature=0,
        text={"format": {"type": "json_schema", "name": "verdict", "schema": schema, "strict": True}},
    )
    assert set(json.loads(got.output_text)) == {"ok"}
    assert got.text is not None
    assert got.text.format.type == "json_schema"
    got = client.responses.create(
        model="tiny",
        input="the whale",
        temperature=0,
        max_output_tokens=40,
        text={"format": {"type": "json_object"}},
    )
    assert got.output_text.startswith("{")


def test_cut_off(served: Served, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    Script(served, monkeypatch, *[f"Yes.{call('Paris')}"] * 2)
    options: Any = {"model": "tiny", "input": "the whale", "tools": TOOLS, "max_output_tokens": 70}
    got = client.responses.create(**options)
    assert got.status == "incomplete"
    assert got.incomplete_details is not None
    assert got.incomplete_details.reason == "max_output_tokens"
    assert [item.status for item in got.output] == ["completed", "incomplete"]
    last = raw_events(served, **options)[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["output"][1]["status"] == "incomplete"


def test_a_failure_in_a_stream(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(served, monkeypatch, "one two")
    # Without the end of text, the sampler has nothing more to give.
    script.left[0].pop()
    last = raw_events(served)[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"]["code"] == "server_error"
    assert last["response"]["output"][0]["content"][0]["text"] == "one two"


def test_what_agents_send_along(
    served: Served, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    Script(served, monkeypatch, "Yes.")
    got = client.responses.create(
        model="tiny",
        input=[
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "b"}]},
        ],
        tools=TOOLS,
        tool_choice="auto",
        parallel_tool_calls=True,
        reasoning={"summary": "auto"},
        store=False,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="one",
        extra_body={"client_metadata": {"turn": "1"}},
    )
    assert (got.output_text, got.store) == ("Yes.", False)


def test_thinking_off(served: Served, client: openai.OpenAI) -> None:
    def size(**more: Any) -> int:
        got = client.responses.create(model="tiny", input="the whale", max_output_tokens=1, **more)
        assert got.usage is not None
        return got.usage.input_tokens

    plain = size(reasoning={"effort": "high", "summary": "auto"})
    assert size(reasoning={"effort": "none"}) == plain + len(served.tokenizer.encode_rendered("quick"))


BAD: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input_image"),
    ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]}, "input_file"),
    ({"input": [{"role": "wizard", "content": "a"}]}, "role"),
    ({"input": [{"role": "user"}]}, "content"),
    ({"input": [{"role": "user", "content": "a", "mood": 1}]}, "mood"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "call_id"),
    ({"input": [{"type": "function_call_output", "call_id": "x"}]}, "output"),
    ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "gAAA"}]}, "encrypted_content"),
    ({"store": True}, "store"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"background": True}, "background"),
    ({"conversation": "c"}, "conversation"),
    ({"truncation": "auto"}, "truncation"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"include": ["message.output_text.logprobs"]}, "message.output_text.logprobs"),
    ({"tools": [{"type": "web_search"}]}, "web_search"),
    ({"tools": [{"type": "custom", "name": "x"}]}, "custom"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "name"),
    ({"input": [{"type": "function_call", "call_id": "x", "name": "f", "arguments": "no"}]}, "arguments"),
    (
        {"input": [{"type": "function_call", "call_id": "x", "name": "f", "arguments": "[" * 9999}]},
        "arguments",
    ),
    ({"text": {"format": {"type": "json_schema", "name": "a b", "schema": {}}}}, "name"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "file_search"}}, "file_search"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "nobody"}}, "nobody"),
    ({"text": {"format": {"type": "json_schema"}}}, "name and schema"),
    ({"text": {"verbosity": "high"}}, "verbosity"),
    ({"temperature": 3}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
    ({"n": 2}, "n:"),
]


@pytest.mark.parametrize(("body", "named"), BAD, ids=lambda value: value if isinstance(value, str) else "")
def test_refused_by_name(served: Served, body: dict[str, Any], named: str) -> None:
    error = served.refused("/v1/responses", **({"model": "tiny", "input": "the whale"} | body))
    assert error["type"] == "invalid_request_error"
    assert named in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        '{"input": "a", "metadata": {"a": "\\ud800"}}',
        '{"input": "a", "user": "\\ud800"}',
        '{"input": "a", "tools": [{"type": "function", "name": "f", "parameters": {"minimum": NaN}}]}',
        '{"input": "a\\ud800"}',
        '{"input": "a", "instructions": "\\udfff"}',
    ],
)
def test_what_no_answer_could_repeat(served: Served, body: str) -> None:
    answer = served.client.post("/v1/responses", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text


def test_errors_by_their_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.responses.create(model="gpt", input="a")
    with pytest.raises(openai.BadRequestError, match="context"):
        client.responses.create(model="tiny", input="a" * 600)
