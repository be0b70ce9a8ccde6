"""gpt-oss: messages on channels, as its documentation shows them."""

from __future__ import annotations

import pytest

from hetero.server.dialects import Dialect
from tests.server.dialects.harness import read

HARMONY = Dialect("harmony", "harmony")
THINK = "<|channel|>analysis<|message|>Need weather.<|end|>"
ARGS = '{"city": "Paris"}'


@pytest.mark.parametrize(
    "call",
    [
        "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        f"{ARGS}<|call|>",
        f"<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{ARGS}",
        f"<|start|>assistant<|channel|>commentary to=functions.get_weather<|message|>{ARGS}<|call|>",
    ],
)
def test_thinking_and_a_call(call: str) -> None:
    got = read(HARMONY, THINK + call)
    assert (got.reasoning, got.content) == ("Need weather.", "")
    assert got.calls == [["get_weather", ARGS]]
    assert read(HARMONY, call.removeprefix("<|start|>assistant")).calls == got.calls


def test_an_answer() -> None:
    got = read(HARMONY, f"{THINK}<|start|>assistant<|channel|>final<|message|>It is 20 °C.\n<|return|>")
    assert (got.reasoning, got.content, got.calls) == ("Need weather.", "It is 20 °C.\n", [])


def test_a_preamble_and_two_thoughts() -> None:
    text = f"{THINK}<|start|>assistant{THINK}<|start|>assistant<|channel|>commentary<|message|>First.<|end|>"
    text += (
        f"<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{ARGS}<|call|>"
    )
    got = read(HARMONY, text)
    assert got.reasoning == "Need weather.\n\nNeed weather."
    assert (got.content, got.calls) == ("First.", [["f", ARGS]])
    assert got.order == ["reasoning", "content", "tool"]


def test_parallel_calls() -> None:
    one = f"<|channel|>commentary to=functions.%s <|constrain|>json<|message|>{ARGS}<|call|>"
    got = read(HARMONY, one % "f" + "<|start|>assistant" + one % "g")
    assert got.calls == [["f", ARGS], ["g", ARGS]]


def test_broken_arguments_and_a_cut() -> None:
    head = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
    assert read(HARMONY, head + "{'a': 1}<|call|>").calls == [["f", "{'a': 1}"]]
    assert read(HARMONY, head + '{"a": "b').calls == [["f", '{"a": "b']]
    assert read(HARMONY, head + "<|call|>").calls == [["f", "{}"]]


@pytest.mark.parametrize("text", ["plain", '{"a": 1}', "<|channel|>final", " to", "a <| b"])
def test_no_header_is_text(text: str) -> None:
    got = read(HARMONY, text)
    assert (got.content, got.calls, got.reasoning) == (text, [], "")


def test_without_tools_or_thinking() -> None:
    call = f"<|channel|>commentary to=functions.f<|message|>{ARGS}<|call|>"
    assert read(HARMONY, call, tools=()).content == ARGS
    assert read(Dialect("harmony", "none"), THINK).content == "Need weather."
