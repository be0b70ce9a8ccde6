"""Formats whose calls are JSON: outputs as the models' documentation shows them, and broken ones."""

from __future__ import annotations

import json

import pytest

from hetero.server.dialects import Dialect, ToolArgs, ToolStart
from tests.server.dialects.harness import TOOLS, WEATHER, answer, read, run

HERMES = Dialect("hermes", "think")

ONE = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>'
TWO = (
    '<tool_call>\n{"name": "write_file", "arguments": '
    '{"path": "a </tool_call> {", "text": "\\"\\\\"}}\n</tool_call>'
)


def test_thinking_text_and_parallel_calls() -> None:
    got = read(HERMES, f"<think>\nLet me see.\n</think>\n\nI look it up.\n{ONE}\n{TWO}")
    assert got.reasoning == "Let me see."
    assert got.content == "I look it up."
    assert got.calls == [
        ["get_weather", '{"city": "Paris", "days": 3}'],
        ["write_file", '{"path": "a </tool_call> {", "text": "\\"\\\\"}'],
    ]
    assert got.order == ["reasoning", "content", "tool", "tool"]


def test_arguments_stream_as_they_come() -> None:
    parser = HERMES.parser("", TOOLS)
    parser.feed('<tool_call>{"name": "get_weather", "arguments": {"ci')
    (delta,) = parser.feed('ty": "Par')
    assert delta == ToolArgs(0, 'ty": "Par')


def test_the_template_begins_the_thinking() -> None:
    got = read(HERMES, f"\nHm.\n</think>\n\n{ONE}", prompt="<|im_start|>assistant\n<think>\n")
    assert (got.reasoning, got.content, len(got.calls)) == ("Hm.", "", 1)
    got = read(HERMES, "a <think> b </think> c", prompt="<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert (got.reasoning, got.content) == ("", "a <think> b </think> c")
    got = read(HERMES, "Hm. <tool_call> and no end \n", prompt="<think>")
    assert (got.reasoning, got.content) == ("Hm. <tool_call> and no end \n", "")


@pytest.mark.parametrize(
    "text",
    [
        " a plain answer\n\n",
        "Use a <tool_call> tag, then </tool_call>.",
        "1 < 2 <tool",
        "<tool_call>",
        '<tool_call>{"name"',
        '<tool_call>{"name": "f", ',
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        '<tool_call>{"nom": "f"}</tool_call> x',
        "<tool_call>[1]</tool_call>",
        "late <think>x</think>",
        "</think> alone",
        " <thin",
        "\n",
    ],
)
def test_what_is_no_call_is_text(text: str) -> None:
    got = read(HERMES, text)
    assert got.content == text
    assert got.calls == []


def test_without_tools_nothing_is_a_call() -> None:
    text = f"say {ONE} \n"
    assert read(HERMES, text, tools=()).content == text
    assert read(Dialect("none", "none"), f"<think>a</think>{text}").content == f"<think>a</think>{text}"


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('{"name": "get_weather"}', "{}"),
        ('{"name": "get_weather", "arguments": null}', "{}"),
        ('{"arguments": {"city": "X"}, "name": "get_weather"}', '{"city": "X"}'),
        ('{"id": "x1", "type": "function", "name": "get_weather", "parameters": {}}', "{}"),
        ('{"name": "get_weather", "arguments": "{\\"city\\": \\"X\\"}"}', '{"city": "X"}'),
        ('{"name": "get_weather", "arguments": {"city": "X"}', '{"city": "X"}'),
        ('{"name": "get_weather", "arguments": {"city": "X"}}}', '{"city": "X"}'),
        ('{"name": "get_weather", "arguments": [1, {"a": []}]}', '[1, {"a": []}]'),
    ],
)
def test_ways_to_write_a_call(written: str, arguments: str) -> None:
    got = read(HERMES, f"<tool_call>\n{written}\n</tool_call>")
    assert got.calls == [["get_weather", arguments]]
    assert got.content in ("", "}")


def test_several_calls_in_one_block_and_a_forgotten_end() -> None:
    call = '{"name": "get_weather", "arguments": {"city": "%s"}}'
    got = read(HERMES, f"<tool_call>{call % 'a'}\n{call % 'b'}, {call % 'c'}</tool_call>ok")
    assert [json.loads(args)["city"] for _, args in got.calls] == ["a", "b", "c"]
    assert got.content == "ok"
    got = read(HERMES, f"<tool_call>{call % 'a'}\n<tool_call>{call % 'b'}")
    assert [json.loads(args)["city"] for _, args in got.calls] == ["a", "b"]


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("{\"city\": 'X'}}", "{\"city\": 'X'}}"),
        ('{"city": "X"]}}', '{"city": "X"]}}'),
        ('{"city": "X', '{"city": "X\n</tool_call>'),
        ("<nothing>}", "<nothing>}"),
    ],
)
def test_broken_arguments_are_delivered_as_they_are(written: str, arguments: str) -> None:
    got = read(HERMES, f'a <tool_call>{{"name": "get_weather", "arguments": {written}\n</tool_call>')
    assert [[name, args.rstrip()] for name, args in got.calls] == [["get_weather", arguments]]
    assert got.content == "a"


def test_cut_off_in_the_arguments() -> None:
    got = read(HERMES, ONE[: ONE.index("ris")])
    assert got.calls == [["get_weather", '{"city": "Pa']]


@pytest.mark.parametrize("size", range(len("</tool_call>")))
def test_cut_off_in_the_closing_tag(size: int) -> None:
    got = read(HERMES, ONE[: len(ONE) - size])
    assert (got.content, got.calls) == ("", [["get_weather", '{"city": "Paris", "days": 3}']])


def test_nested_beyond_all_measure() -> None:
    deep = "[" * 5000 + "]" * 5000
    got = answer(run(HERMES, [f'<tool_call>{{"name": "f", "arguments": {deep}}}</tool_call>']))
    assert got.calls == [["f", deep]]
    text = f'<tool_call>{{"name": {deep}}}</tool_call>'
    assert answer(run(HERMES, [text])).content == text


def test_ids_differ() -> None:
    deltas = run(HERMES, [ONE + ONE], tools=(WEATHER,))
    assert len(answer(deltas).calls) == 2


DEEPSEEK = Dialect("deepseek", "think")
BEGIN, CALL, SEP, CALL_END, END = (
    f"<｜tool▁{what}｜>" for what in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")
)


def test_deepseek_v3_1() -> None:
    text = f'Hm</think>I look.{BEGIN}{CALL}get_weather{SEP}{{"city": "Paris"}}{CALL_END}'
    text += f'{CALL}get_weather{SEP}{{"city": "Rome"}}{CALL_END}{END}'
    got = read(DEEPSEEK, text, prompt="<｜Assistant｜><think>")
    assert (got.reasoning, got.content) == ("Hm", "I look.")
    assert got.calls == [["get_weather", '{"city": "Paris"}'], ["get_weather", '{"city": "Rome"}']]


def test_deepseek_v3_and_r1() -> None:
    one = 'get_weather\n```json\n{"city": "%s"}\n```'
    text = f"<think>Hm</think>\n\n{BEGIN}{CALL}function{SEP}{one % 'Paris'}{CALL_END}\n"
    got = read(DEEPSEEK, text + f"{CALL}function{SEP}{one % 'Rome'}{CALL_END}{END}")
    assert (got.reasoning, got.content) == ("Hm", "")
    assert got.calls == [["get_weather", '{"city": "Paris"}'], ["get_weather", '{"city": "Rome"}']]


def test_deepseek_without_a_section_or_an_end() -> None:
    got = read(DEEPSEEK, f'{CALL}f{SEP}{{"a": 1}}')
    assert got.calls == [["f", '{"a": 1}']]
    got = read(DEEPSEEK, f"{BEGIN}{CALL}f{SEP}{CALL_END}{END}bye")
    assert (got.calls, got.content) == ([["f", "{}"]], "bye")
    for text in (
        f"{BEGIN} but no call",
        f"{CALL}no separator{CALL_END}",
        f"{BEGIN}{CALL}f",
        f"{CALL}{SEP}{CALL_END}",
    ):
        got = read(DEEPSEEK, text)
        assert (got.calls, got.content) == ([], text)


def test_deepseek_broken_arguments() -> None:
    got = read(DEEPSEEK, f"{BEGIN}{CALL}f{SEP}{{'a': 1}}{CALL_END}{END}")
    assert got.calls == [["f", "{'a': 1}"]]
    got = read(DEEPSEEK, f"{BEGIN}{CALL}function{SEP}f\n```json\n[[\n```{CALL_END}{END}")
    assert got.calls == [["f", "[[\n```"]]


def test_kimi() -> None:
    def call(number: int, city: str) -> str:
        head = f"<|tool_call_begin|>functions.get_weather:{number}<|tool_call_argument_begin|>"
        return f'{head}{{"city": "{city}"}}<|tool_call_end|>'

    section = f"<|tool_calls_section_begin|>{call(0, 'Paris')}{call(1, 'Rome')}<|tool_calls_section_end|>"
    kimi = Dialect("kimi", "none")
    assert read(kimi, f"I look.{section}").calls == [
        ["get_weather", '{"city": "Paris"}'],
        ["get_weather", '{"city": "Rome"}'],
    ]
    starts = [delta for delta in run(kimi, [section]) if isinstance(delta, ToolStart)]
    assert [start.id for start in starts] == ["functions.get_weather:0", "functions.get_weather:1"]


MISTRAL = Dialect("mistral", "mistral")


@pytest.mark.parametrize(
    "calls",
    [
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "a"}}, '
        '{"name": "get_weather", "arguments": {"city": "b"}}]',
        '[TOOL_CALLS]get_weather[ARGS]{"city": "a"}[TOOL_CALLS]get_weather[ARGS]{"city": "b"}',
        '[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{"city": "a"}[TOOL_CALLS]get_weather{"city": "b"}',
    ],
)
def test_mistral(calls: str) -> None:
    got = read(MISTRAL, f"[THINK]Hm.[/THINK]I look.{calls}")
    assert (got.reasoning, got.content) == ("Hm.", "I look.")
    assert got.calls == [["get_weather", '{"city": "a"}'], ["get_weather", '{"city": "b"}']]
    ids = [delta.id for delta in run(MISTRAL, [calls]) if isinstance(delta, ToolStart)]
    assert all(len(id_) == 9 and id_.isalnum() for id_ in ids)


def test_mistral_broken() -> None:
    got = read(MISTRAL, "[TOOL_CALLS]f[ARGS]{'a'}[TOOL_CALLS]g[ARGS]{}")
    assert got.calls == [["f", "{'a'}"], ["g", "{}"]]
    for text in ("[TOOL_CALLS]", "[TOOL_CALLS] a b\n", "[TOOL_CALLS][]", '[TOOL_CALLS][{"name": 3}]'):
        assert (read(MISTRAL, text).calls, read(MISTRAL, text).content) == ([], text)


LLAMA = Dialect("llama", "none")


def test_llama() -> None:
    one = '{"name": "get_weather", "parameters": {"city": "%s"}}'
    tagged = f"<|python_start|>{one % 'a'}<|python_end|>"
    for text in (
        one % "a",
        f"<|python_tag|>{one % 'a'}",
        tagged,
        f'\n{{"type": "function", {(one % "a")[1:]}',
    ):
        assert read(LLAMA, text).calls == [["get_weather", '{"city": "a"}']]
    got = read(LLAMA, f"{one % 'a'}; {one % 'b'}")
    assert [json.loads(args)["city"] for _, args in got.calls] == ["a", "b"]


@pytest.mark.parametrize(
    "text",
    [
        '{"answer": 42}',
        '{"name": "Alice", "parameters": {}}',
        'See {"name": "get_weather", "parameters": {}}',
        "<|python_tag|>print(1)",
        ' {"name": "get_weather"',
    ],
)
def test_llama_json_that_is_no_call(text: str) -> None:
    got = read(LLAMA, text)
    assert (got.calls, got.content) == ([], text)
