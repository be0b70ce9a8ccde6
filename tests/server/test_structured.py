"""Answers held to a grammar: documents that fit, calls that are forced, from a model that writes noise."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest
import torch

from hetero.engine.answer import Answer
from hetero.engine.request import Request
from hetero.model.tokenizer import Tokenizer
from hetero.server.dialects import Tool
from hetero.server.grammars import Calls
from tests.model.tiny import tiny_tokenizer
from tests.server.serving import (
    CHAT,
    END,
    THINK_TEMPLATE,
    TOOL_TEMPLATE,
    VOCABULARY,
    Script,
    Served,
    ask,
    serving,
    tokenizer,
)

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["x", "yy"]}, "maxItems": 3},
        "boss": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/boss"}]},
    },
    "required": ["name", "age", "tags", "boss"],
    "additionalProperties": False,
    "$defs": {
        "boss": {
            "type": "object",
            "properties": {"id": {"type": "integer", "maximum": 99}},
            "required": ["id"],
            "additionalProperties": False,
        }
    },
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 5}, "days": {"enum": [1, 2]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
NOTHING = {"type": "function", "function": {"name": "nothing"}}
SMALL: dict[str, Any] = {"messages": ask(), "max_tokens": 480, "temperature": 0.9}


@pytest.fixture(scope="module")
def plain() -> Iterator[Served]:
    with serving(tokenizer(), frozenset({END})) as running:
        yield running


@pytest.fixture(scope="module")
def calling() -> Iterator[Served]:
    # Tools take many tokens where nearly every byte is one.
    with serving(tokenizer(TOOL_TEMPLATE), frozenset({END}), context=2048) as running:
        yield running


@pytest.fixture(scope="module")
def thinking() -> Iterator[Served]:
    with serving(tokenizer(THINK_TEMPLATE), frozenset({END})) as running:
        yield running


def schema(of: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "person", "schema": of} | more}


def content(body: dict[str, Any]) -> str:
    choice = body["choices"][0]
    assert choice["finish_reason"] == "stop", choice
    return str(choice["message"]["content"])


@pytest.mark.parametrize("seed", range(3))
def test_a_schema_is_fitted(plain: Served, seed: int) -> None:
    text = content(plain.post(CHAT, **SMALL, seed=seed, response_format=schema(PERSON, strict=True)))
    jsonschema_rs.validate(PERSON, json.loads(text))
    chunks = plain.stream(CHAT, **SMALL, seed=seed, response_format=schema(PERSON))
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == text
    greedy = content(plain.post(CHAT, **SMALL | {"temperature": 0}, response_format=schema(PERSON)))
    jsonschema_rs.validate(PERSON, json.loads(greedy))


def test_any_object(plain: Served) -> None:
    # A bias towards the end of an object, since a random model would go on for long.
    bias = {str(plain.tokenizer.encode("}")[0]): 20}
    for seed in range(4):
        text = content(
            plain.post(CHAT, **SMALL, seed=seed, logit_bias=bias, response_format={"type": "json_object"})
        )
        assert isinstance(json.loads(text), dict)


def test_a_limit_cuts_the_document(plain: Served) -> None:
    body = plain.post(CHAT, messages=ask(), max_tokens=3, response_format=schema(PERSON))
    assert body["choices"][0]["finish_reason"] == "length"


def test_choices_have_places_of_their_own(plain: Served) -> None:
    body = plain.post(CHAT, **SMALL, seed=1, n=3, response_format=schema(PERSON))
    documents = [choice["message"]["content"] for choice in body["choices"]]
    for document in documents:
        jsonschema_rs.validate(PERSON, json.loads(document))
    assert len(set(documents)) > 1


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        ({"type": "xml"}, "response_format"),
        ({"type": "json_schema"}, "json_schema"),
        ({"type": "json_object", "json_schema": {"name": "a", "schema": {}}}, "json_schema"),
        (schema({"type": "nosuch"}), "response_format.json_schema.schema: cannot be enforced"),
        (schema({"properties": {"a": {"not": {}}}}), '"not"'),
        (schema({"type": "string", "pattern": "(?=a)b"}), "look-around"),
        (schema({}, name="a b"), "name"),
    ],
)
def test_what_cannot_be_enforced_is_refused(plain: Served, wanted: dict[str, Any], reason: str) -> None:
    for stream in (False, True):
        error = plain.refused(CHAT, messages=ask(), response_format=wanted, stream=stream)
        assert error["param"] == "response_format"
        assert reason in error["message"]


def test_thinking_comes_before_the_document(thinking: Served) -> None:
    # A random model never closes its thinking by itself.
    body = thinking.post(CHAT, messages=ask(), max_tokens=20, response_format={"type": "json_object"})
    assert body["choices"][0]["message"]["content"] == ""
    assert body["choices"][0]["message"]["reasoning_content"]
    grammar = thinking.state.grammars.answer(
        "f", thinking.state.dialect, "... <think>\n", {"type": "object", "maxProperties": 0}
    )
    matcher = grammar.matcher()
    for token in thinking.tokenizer.encode_rendered("hm, {\n</think>\n\n{}"):
        assert not matcher.done
        matcher.accept(token)
    assert matcher.done
    closed = thinking.state.grammars.answer("f", thinking.state.dialect, "...", {"type": "object"}).matcher()
    for token in thinking.tokenizer.encode_rendered("<think>a</think>{"):
        closed.accept(token)


def test_without_a_tokenizer_file_no_grammar() -> None:
    class Slow(type(tokenizer())):  # type: ignore[misc]
        serialized = None

    inner = tokenizer()._inner
    with serving(Slow(inner, "here")) as running:
        error = running.refused(CHAT, messages=ask(), response_format={"type": "json_object"})
        assert "tokenizer.json" in error["message"]


def call_of(body: dict[str, Any]) -> dict[str, Any]:
    choice = body["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert set(call) == {"id", "type", "function"}
    assert call["type"] == "function"
    return dict(call["function"])


def streamed_calls(chunks: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]], str]:
    """Content, calls and the reason of the end, put together as clients do."""
    text, calls, reason = "", [], ""
    for chunk in chunks:
        choice = chunk["choices"][0]
        text += choice["delta"].get("content") or ""
        reason = choice["finish_reason"] or reason
        for part in choice["delta"].get("tool_calls", ()):
            if part["index"] == len(calls):
                assert part["type"] == "function"
                calls.append({"id": part["id"], "name": part["function"]["name"], "arguments": ""})
            else:
                assert "id" not in part
            calls[part["index"]]["arguments"] += part["function"]["arguments"]
    return text, calls, reason


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "choice",
    [
        {"type": "function", "function": {"name": "get_weather"}},
        {
            "type": "allowed_tools",
            "allowed_tools": {
                "mode": "required",
                "tools": [{"type": "function", "function": {"name": "get_weather"}}],
            },
        },
    ],
)
def test_a_named_function_is_called(calling: Served, seed: int, choice: dict[str, Any]) -> None:
    options = SMALL | {"seed": seed, "tools": [NOTHING, WEATHER], "tool_choice": choice}
    options["parallel_tool_calls"] = False
    function = call_of(calling.post(CHAT, **options))
    assert function["name"] == "get_weather"
    jsonschema_rs.validate(WEATHER["function"]["parameters"], json.loads(function["arguments"]))
    text, calls, reason = streamed_calls(calling.stream(CHAT, **options))
    assert (text, reason) == ("", "tool_calls")
    assert [(call["name"], call["arguments"]) for call in calls] == [
        (function["name"], function["arguments"])
    ]


def test_required_calls_something(calling: Served) -> None:
    names = set()
    for seed in range(6):
        options = SMALL | {"seed": seed, "tools": [NOTHING, WEATHER], "tool_choice": "required"}
        # Arguments of any form would run on for long in a random model.
        bias = {str(calling.tokenizer.encode("}")[0]): 20}
        function = call_of(calling.post(CHAT, **options, parallel_tool_calls=False, logit_bias=bias))
        names.add(function["name"])
        assert isinstance(json.loads(function["arguments"]), dict)
    assert names == {"nothing", "get_weather"}


HELLO = (
    'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "漢", "days": 1}}\n</tool_call>'
)
TWO = HELLO + '\n<tool_call>\n{"name": "nothing", "arguments": {}}\n</tool_call>'


def test_calls_that_the_model_makes_by_itself(calling: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    Script(calling, monkeypatch, TWO, TWO, TWO, TWO, TWO, "No need.")
    options: dict[str, Any] = {"messages": ask(), "tools": [WEATHER, NOTHING]}
    message = calling.post(CHAT, **options)["choices"][0]["message"]
    assert message["content"].strip() == "Let me see."
    made = [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message["tool_calls"]
    ]
    assert made == [("get_weather", {"city": "漢", "days": 1}), ("nothing", {})]
    assert len({call["id"] for call in message["tool_calls"]}) == 2

    text, calls, reason = streamed_calls(calling.stream(CHAT, **options))
    assert (text.strip(), reason) == ("Let me see.", "tool_calls")
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == made

    one = calling.post(CHAT, **options, parallel_tool_calls=False)["choices"][0]
    assert one["finish_reason"] == "tool_calls"
    assert [call["function"]["name"] for call in one["message"]["tool_calls"]] == ["get_weather"]
    _, calls, reason = streamed_calls(calling.stream(CHAT, **options, parallel_tool_calls=False))
    assert ([call["name"] for call in calls], reason) == (["get_weather"], "tool_calls")

    hidden = calling.post(CHAT, **options, tool_choice="none")["choices"][0]
    assert hidden["finish_reason"] == "stop"
    assert hidden["message"]["content"] == TWO
    assert "tool_calls" not in hidden["message"]
    none = calling.post(CHAT, **options)["choices"][0]
    assert (none["message"]["content"], none["finish_reason"]) == ("No need.", "stop")


def test_a_call_that_the_limit_cuts_is_a_matter_of_length(
    calling: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    Script(calling, monkeypatch, HELLO)
    choice = calling.post(CHAT, messages=ask(), tools=[WEATHER], max_tokens=70)["choices"][0]
    assert choice["finish_reason"] == "length"


def test_tools_reach_the_template_and_their_answers_too(calling: Served) -> None:
    body = calling.post("/tokenize", messages=ask(), tools=[WEATHER])
    assert "get_weather" in calling.post("/detokenize", tokens=body["tokens"])["prompt"]
    messages = [
        *ask(),
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "nothing", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "sun"}]},
    ]
    usage = calling.post(CHAT, messages=messages, tools=[WEATHER], max_tokens=1)["usage"]
    assert usage["prompt_tokens"] == calling.post("/tokenize", messages=messages, tools=[WEATHER])["count"]
    without = calling.post(CHAT, messages=messages, tools=[WEATHER], tool_choice="none", max_tokens=1)[
        "usage"
    ]
    assert without["prompt_tokens"] < usage["prompt_tokens"]


def test_strict_tools_are_held_to_their_schema(calling: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    spec: dict[str, Any] = WEATHER["function"] | {"strict": True}  # type: ignore[operator]
    offered = [Tool("get_weather", spec["parameters"])]
    held = calling.state.grammars.answer(
        "tools", calling.state.dialect, "", None, Calls(offered, required=False)
    )

    def allows(text: str) -> bool:
        matcher = held.matcher()
        for token in calling.tokenizer.encode_rendered(text):
            if matcher.mask(torch.zeros(VOCABULARY))[token] != 0:
                return False
            matcher.accept(token)
        return bool(matcher.mask(torch.zeros(VOCABULARY))[END] == 0)

    assert allows("No need.")
    assert allows(HELLO + " and so on")
    assert not allows(HELLO.replace("days", "week"))
    assert not allows(HELLO.removesuffix("</tool_call>"))
    # The request is held to it, and only then.
    grammars: list[object] = []
    init = Answer.__init__

    def noting(answer: Answer, run: Any, request: Request, limit: int) -> None:
        grammars.append(request.grammar)
        init(answer, run, request, limit)

    monkeypatch.setattr(Answer, "__init__", noting)
    for strict in (True, False):
        tool = {"type": "function", "function": spec | {"strict": strict}}
        calling.post(CHAT, messages=ask(), tools=[tool], max_tokens=4)
    assert [grammar is not None for grammar in grammars] == [True, False]


def test_a_document_or_a_call(calling: Served) -> None:
    """Both may be asked for together; the answer is one of them."""
    kinds = set()
    for seed in range(8):
        body = calling.post(
            CHAT,
            **SMALL | {"temperature": 1.5},
            seed=seed,
            tools=[WEATHER],
            parallel_tool_calls=False,
            response_format=schema(PERSON),
        )
        choice = body["choices"][0]
        kinds.add(choice["finish_reason"])
        if choice["finish_reason"] == "stop":
            jsonschema_rs.validate(PERSON, json.loads(choice["message"]["content"]))
        else:
            assert call_of(body)["name"] == "get_weather"
    assert kinds == {"stop", "tool_calls"}


BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools"),
    ({"tools": [WEATHER, WEATHER]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
    (
        {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "nosuch"}}}],
            "tool_choice": "required",
        },
        "tools",
    ),
    ({"tools": [WEATHER], "tool_choice": "any"}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "custom"}}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": 3}, "tool_choice"),
    ({"tools": [WEATHER], "parallel_tool_calls": "yes"}, "parallel_tool_calls"),
]


@pytest.mark.parametrize(("body", "field"), BAD, ids=lambda v: v if isinstance(v, str) else "")
def test_refused_by_name(calling: Served, body: dict[str, Any], field: str) -> None:
    error = calling.refused(CHAT, messages=ask(), **body)
    assert error["param"] == field
    assert error["message"].startswith(field)


def test_a_model_without_a_format_of_calls(plain: Served) -> None:
    error = plain.refused(CHAT, messages=ask(), tools=[WEATHER])
    assert error["param"] == "tools"
    assert "--tool-format" in error["message"]
    plain.post(CHAT, messages=ask(), tools=[WEATHER], tool_choice="none", max_tokens=2)


def test_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    """In harmony's channels the document is the final message, and a call is a message of its own."""
    inner = tiny_tokenizer("<|channel|><|message|>{% for m in messages %}{{ m.content }}{% endfor %}")
    inner.eos_token = "<|pad|>"
    think = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    call = (
        '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "a", "days": 1}'
    )
    with serving(Tokenizer(inner, "here"), context=2048) as running:
        dialect, encode = running.state.dialect, running.tokenizer.encode_rendered
        assert dialect.tool_format == dialect.reasoning_format == "harmony"
        offered = [Tool("get_weather", WEATHER["function"]["parameters"])]  # type: ignore[index]

        def whole(text: str, document: bool, required: bool | None) -> bool:
            matcher = running.state.grammars.answer(
                "f",
                dialect,
                "",
                {"type": "object"} if document else None,
                None if required is None else Calls(offered, required),
            ).matcher()
            for token in encode(text):
                if matcher.mask(torch.zeros(VOCABULARY))[token] != 0:
                    return False
                matcher.accept(token)
            return bool(matcher.mask(torch.zeros(VOCABULARY))[0] == 0)

        document = "<|channel|>final<|message|>{}"
        for lead in ("", think, think + think):
            assert whole(lead + document, True, None)
            assert whole(lead + call, False, True)
            assert whole(lead + call, True, False)
            assert whole(lead + document, True, False)
            assert whole(lead + "<|channel|>final<|message|>No {", False, False)
        assert not whole(think, True, None)
        assert not whole("{}", True, None)
        assert not whole(document, False, True)
        assert not whole(call.replace("days", "week"), False, True)

        Script(running, monkeypatch, think + call, think + document)
        options: dict[str, Any] = {"messages": ask(), "max_tokens": len(encode(think + call))}
        choice = running.post(CHAT, **options, tools=[WEATHER], tool_choice="required")["choices"][0]
        assert choice["message"]["reasoning_content"] == "hm"
        function = choice["message"]["tool_calls"][0]["function"]
        assert (function["name"], json.loads(function["arguments"])) == (
            "get_weather",
            {"city": "a", "days": 1},
        )
        options["max_tokens"] = len(encode(think + document))
        wanted = {"type": "json_object"}
        message = running.post(CHAT, **options, response_format=wanted)["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("hm", "{}")


@pytest.mark.parametrize("written", ["call.function.arguments | tojson", "'' + call.function.arguments"])
def test_templates_that_want_arguments_as_an_object_or_as_text(written: str) -> None:
    template = (
        "{% for m in messages %}{% for call in m.tool_calls or [] %}{{ WRITTEN }}{% endfor %}{% endfor %}"
    )
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [*ask(), {"role": "assistant", "tool_calls": [call]}]
    with serving(tokenizer(template.replace("WRITTEN", written))) as running:
        tokens = running.post("/tokenize", messages=messages)["tokens"]
        assert running.post("/detokenize", tokens=tokens)["prompt"] == '{"a": 1}'
        assert running.post(CHAT, messages=messages, max_tokens=1)["usage"]["prompt_tokens"] == len(tokens)
