"""Formats that write arguments between tags: their types come from the tool's schema."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hetero.server.dialects import Dialect, Tool, ToolArgs
from hetero.server.dialects.xml_formats import kinds, written
from tests.server.dialects.harness import TOOLS, read

QWEN, GLM = Dialect("qwen-xml", "think"), Dialect("glm", "think")
MINIMAX, DSML = Dialect("minimax", "think"), Dialect("dsml", "think")

CODE = "def f(x):\n    return \"<a>\" if x < 3 else 'é\\n'\n"


def qwen(name: str, **arguments: str) -> str:
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


def glm(name: str, gap: str, **arguments: str) -> str:
    pairs = (
        f"<arg_key>{key}</arg_key>{gap}<arg_value>{value}</arg_value>{gap}"
        for key, value in arguments.items()
    )
    return f"<tool_call>{name}{gap}{''.join(pairs)}</tool_call>"


def invoke(block: str, mark: str, name: str, **arguments: str) -> str:
    body = "".join(
        f'<{mark}parameter name="{key}">{value}</{mark}parameter>\n' for key, value in arguments.items()
    )
    call = f'<{mark}invoke name="{name}">\n{body}</{mark}invoke>'
    return f"<{mark}{block}>\n{call}\n</{mark}{block}>"


WRITTEN = {"path": "a b.py", "text": CODE, "mode": "420", "tags": '["x", "y"]', "extra": "1.5"}
WANTED: dict[str, Any] = {"path": "a b.py", "text": CODE, "mode": 420, "tags": ["x", "y"], "extra": 1.5}


@pytest.mark.parametrize(
    ("dialect", "call"),
    [
        (QWEN, qwen("write_file", **WRITTEN)),
        (GLM, glm("write_file", "\n", **WRITTEN)),
        (GLM, glm("write_file", "", **WRITTEN)),
        (MINIMAX, invoke("minimax:tool_call", "", "write_file", **WRITTEN)),
        (DSML, invoke("function_calls", "｜DSML｜", "write_file", **WRITTEN)),
        (DSML, invoke("tool_calls", "｜DSML｜", "write_file", **WRITTEN)),
    ],
)
def test_a_call(dialect: Dialect, call: str) -> None:
    got = read(dialect, f"<think>Hm.</think>\n\nI write.\n{call}\n{call}")
    assert (got.reasoning, got.content) == ("Hm.", "I write.")
    assert [name for name, _ in got.calls] == ["write_file"] * 2
    assert all(json.loads(args) == WANTED for _, args in got.calls)
    cut = read(dialect, call[: call.index("return")])
    assert cut.calls == [["write_file", '{"path": "a b.py", "text": "def f(x):\\n    ']]


def test_a_text_streams_and_a_number_waits() -> None:
    parser = QWEN.parser("", TOOLS)
    parser.feed("<tool_call>\n<function=get_weather>\n<parameter=city>\nPa")
    assert parser.feed("ris\n") == [ToolArgs(0, "ris")]
    assert parser.feed("\n\n") == [ToolArgs(0, "\\n\\n")]
    assert parser.feed("</parameter><parameter=days>1") == [ToolArgs(0, '", "days": ')]
    assert parser.feed("2") == []
    assert parser.feed("</parameter>") == [ToolArgs(0, "12")]


def test_several_in_one_block() -> None:
    text = '<invoke name="get_weather"><parameter name="city">%s</parameter></invoke>'
    got = read(MINIMAX, f"<minimax:tool_call>\n{text % 'a'}\n{text % 'b'}\n</minimax:tool_call>")
    assert [json.loads(args) for _, args in got.calls] == [{"city": "a"}, {"city": "b"}]
    body = "<function=get_weather>\n<parameter=city>\n%s\n</parameter>\n</function>\n"
    got = read(QWEN, f"<tool_call>\n{body % 'a'}{body % 'b'}</tool_call>\nok")
    assert [json.loads(args) for _, args in got.calls] == [{"city": "a"}, {"city": "b"}]
    assert got.content == "ok"
    # Without the outer tag, as Qwen3-Coder sometimes writes it.
    got = read(QWEN, f"I look.\n{body % 'a'}</tool_call>")
    assert (got.content, len(got.calls)) == ("I look.", 1)


@pytest.mark.parametrize(
    ("dialect", "text"),
    [
        (QWEN, "<tool_call>\nno function</tool_call>"),
        (QWEN, "write <function=a b> here"),
        (QWEN, "<function=f"),
        (GLM, "The <tool_call> tag"),
        (GLM, "<tool_call>get_weather"),
        (GLM, "<tool_call></tool_call>"),
        (MINIMAX, "<minimax:tool_call>\n</minimax:tool_call>"),
        (MINIMAX, '<minimax:tool_call><invoke name="f'),
        (MINIMAX, '<minimax:tool_call><invoke name="">'),
        (DSML, "<｜DSML｜function_calls> x"),
    ],
)
def test_what_is_no_call_is_text(dialect: Dialect, text: str) -> None:
    got = read(dialect, text)
    assert (got.calls, got.content) == ([], text)


@pytest.mark.parametrize(
    ("dialect", "text"),
    [
        (QWEN, "<tool_call><function=get_weather>oops</function></tool_call>"),
        (QWEN, "<function=get_weather>{} oops</function>"),
        (GLM, "<tool_call>get_weather<arg_key>oo</arg_key>ps</tool_call>"),
        (MINIMAX, '<minimax:tool_call><invoke name="get_weather">oops</invoke></minimax:tool_call>'),
    ],
)
def test_text_between_the_tags_is_not_lost(dialect: Dialect, text: str) -> None:
    got = read(dialect, text)
    assert got.calls == [["get_weather", "{}"]]
    assert got.content == "oops"


def test_json_in_a_function() -> None:
    got = read(QWEN, '<function=get_weather>{"city": "Paris"}</function>')
    assert got.calls == [["get_weather", '{"city": "Paris"}']]


def test_dsml_says_what_a_string_is() -> None:
    text = '<｜DSML｜parameter name="%s" string="%s">%s</｜DSML｜parameter>'
    body = text % ("city", "true", "12") + text % ("days", "false", "3") + text % ("odd", "true", "[1]")
    call = (
        f'<｜DSML｜function_calls><｜DSML｜invoke name="f">{body}</｜DSML｜invoke></｜DSML｜function_calls>'
    )
    assert json.loads(read(DSML, call).calls[0][1]) == {"city": "12", "days": 3, "odd": "[1]"}


@pytest.mark.parametrize(
    ("text", "allowed", "value"),
    [
        ("12", {"integer"}, 12),
        ("12", {"string", "integer"}, 12),
        ("12", {"number"}, 12),
        ("1.5", {"integer"}, 1.5),
        ("12", set(), 12),
        ("True", {"boolean"}, True),
        ("None", {"null", "string"}, None),
        ("null", {"string", "object"}, "null"),
        ('"a"', set(), '"a"'),
        ('"a"', {"string", "null"}, "a"),
        ("NaN", {"number"}, "NaN"),
        ("{'a': 1}", {"object"}, "{'a': 1}"),
        ("[" * 100_000, {"array"}, "[" * 100_000),
        ("12345678901234567890123", {"integer"}, 12345678901234567890123),
        ("", {"integer"}, ""),
    ],
)
def test_values_by_type(text: str, allowed: set[str], value: Any) -> None:
    assert json.loads(written(text, allowed)) == value


def test_types_in_a_schema() -> None:
    root: dict[str, Any] = {"$defs": {"a/b": {"enum": ["x", 1]}, "loop": {"$ref": "#/$defs/loop"}}}
    assert kinds({"$ref": "#/$defs/a~1b"}, root) == {"string", "integer"}
    assert kinds({"$ref": "#/$defs/loop"}, root) == set()
    assert kinds({"$ref": "elsewhere"}, root) == set()
    assert kinds({"type": ["string", "null"]}, root) == {"string", "null"}
    assert kinds({"anyOf": [{"type": "object"}, {"const": True}]}, root) == {"object", "boolean"}
    assert kinds(True, root) == set()
    # Followed each time, the references would be a thousand to the fourth.
    root["$defs"]["many"] = {"anyOf": [{"$ref": "#/$defs/many"}] * 1000 + [{"type": "null"}]}
    assert kinds({"$ref": "#/$defs/many"}, root) == {"null"}
    odd = Tool("f", {"properties": []})
    assert read(QWEN, qwen("f", a="1"), tools=(odd,)).calls == [["f", '{"a": 1}']]
