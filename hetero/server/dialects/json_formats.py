"""Tool formats whose calls are JSON objects.

``arguments`` that are not JSON are delivered as they were written, up to the end of the call; a call without
a name is delivered as the text that it is, tags included.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hetero.server.dialects import jsontext
from hetero.server.dialects.deltas import Tool
from hetero.server.dialects.source import Source, Steps

HERMES_OPEN, HERMES_CLOSE = "<tool_call>", "</tool_call>"


def read_hermes(src: Source, _: str, __: Mapping[str, Tool]) -> Steps[None]:
    """``<tool_call>`` is read; one object or several up to ``</tool_call>``, which some models forget."""
    yield from src.blank()
    found = yield from jsontext.call(src, (HERMES_CLOSE,))
    if found == "none":
        src.give_back()
    while found == "whole":
        rest: list[str] = []
        tag = yield from src.until(("{", HERMES_OPEN, HERMES_CLOSE), rest.append)
        src.stray(rest, (HERMES_CLOSE,))
        if tag in (None, HERMES_CLOSE):
            return
        src.mark("")
        if tag == "{":
            src.put_back("{")
        yield from src.blank()
        found = yield from jsontext.call(src, (HERMES_CLOSE,))
        if found == "none":
            src.give_back()


@dataclass(frozen=True, slots=True)
class Section:
    """Calls in a section of special tokens: ``begin (call HEAD separator ARGUMENTS call_end)* end``."""

    begin: str
    call: str
    separator: str
    call_end: str
    end: str
    # Kimi's head is "functions.NAME:NUMBER", which is also the call's id.
    head_is_id: bool = False

    def read(self, src: Source, opener: str, _: Mapping[str, Tool]) -> Steps[None]:
        """``begin`` or, without a section, ``call`` is read."""
        if opener == self.begin:
            yield from src.blank()
            if not (yield from src.accept(self.call)):
                src.give_back()
                return
        while (yield from self._call(src)):
            yield from src.blank()
            if not (yield from src.accept(self.call)):
                yield from src.accept(self.end)
                return
            src.mark(self.call)
        src.give_back()

    def _call(self, src: Source) -> Steps[bool]:
        """One call, after its first tag; False when it is none."""
        parts: list[str] = []
        if (yield from src.until((self.separator, self.call_end), parts.append)) != self.separator:
            return False
        name, given = "".join(parts).strip(), None
        yield from src.blank()
        if self.head_is_id:
            name, given = re.sub(r"^functions\.|:\d+$", "", name), name
        elif (yield from src.accept(self.call_end)):
            src.put_back(self.call_end)
        elif not src.rest.startswith("{"):
            # DeepSeek's older form: a type, then the name on a line of its own and a fenced block.
            parts = []
            if (yield from src.until(("\n", self.call_end), parts.append)) != "\n":
                return False
            name = "".join(parts).strip()
            yield from src.blank()
            if (yield from src.accept("```")):
                yield from src.until(("\n",), lambda _: None)
        if not name:
            return False
        yield from jsontext.arguments(src, src.start(name, given), (self.call_end,))
        return True


DEEPSEEK = Section(
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
KIMI = Section(
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
    head_is_id=True,
)

MISTRAL_OPEN, MISTRAL_ARGS, MISTRAL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_NAME = re.compile(r"[\w.\-:/]+")


def read_mistral(src: Source, _: str, __: Mapping[str, Tool]) -> Steps[None]:
    """``[TOOL_CALLS]`` is read; a JSON array of calls, or ``NAME[ARGS]{...}`` with the tag before each."""
    while True:
        yield from src.blank()
        if (yield from src.accept("[")):
            tag = yield from _mistral_array(src)
        else:
            tag = yield from _mistral_call(src)
        if tag is None:
            return
        src.mark(tag)


def _mistral_array(src: Source) -> Steps[str | None]:
    while True:
        yield from src.blank()
        found = yield from jsontext.call(src, (MISTRAL_OPEN,))
        if found == "none":
            src.give_back()
            return None
        yield from src.blank()
        if found == "broken" or not (yield from src.accept(",")):
            yield from src.accept("]")
            yield from src.blank()
            return (yield from src.accept(MISTRAL_OPEN))
        src.mark(",")


def _mistral_call(src: Source) -> Steps[str | None]:
    parts: list[str] = []
    tag = yield from src.until((MISTRAL_ARGS, MISTRAL_ID, "{", "\n"), parts.append)
    name, given = "".join(parts).strip(), None
    if tag == MISTRAL_ID:
        parts = []
        tag = yield from src.until((MISTRAL_ARGS, "{", "\n"), parts.append)
        given = "".join(parts).strip()
    if tag not in (MISTRAL_ARGS, "{") or not _NAME.fullmatch(name):
        src.give_back()
        return None
    if tag == "{":
        src.put_back("{")
    index = src.start(name, given)
    yield from src.blank()
    if not (yield from jsontext.value(src, lambda text: src.args(index, text))):
        tag = yield from src.until((MISTRAL_OPEN,), lambda text: src.args(index, text))
        src.end(index)
        return tag
    src.end(index)
    yield from src.blank()
    return (yield from src.accept(MISTRAL_OPEN))


LLAMA_OPENS, LLAMA_CLOSE = ("<|python_tag|>", "<|python_start|>"), "<|python_end|>"


def read_llama(src: Source, _: str, offered: Mapping[str, Tool]) -> Steps[None]:
    """Objects with semicolons between them, at the beginning of the answer or after a tag.

    An answer may be JSON for its own sake, so only names of tools that were offered make a call.
    """
    yield from src.blank()
    while True:
        found = yield from jsontext.call(src, (), known=lambda name: name in offered)
        if found != "whole":
            break
        src.mark("")
        yield from src.blank()
        yield from src.accept(";", LLAMA_CLOSE)
        yield from src.blank()
        if not src.rest.startswith("{"):
            break
    if found != "broken":
        src.give_back()
