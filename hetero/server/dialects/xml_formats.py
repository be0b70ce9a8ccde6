"""Tool formats that write each argument between tags; its type is that of the tool's schema.

A string is passed on as it comes; anything else when it is whole. What does not fit its type is delivered as
the JSON that it is, or else as a string. An argument list that the text cuts off stays open.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hetero.server.dialects import jsontext
from hetero.server.dialects.deltas import Tool
from hetero.server.dialects.source import Source, Steps

_NAME = re.compile(r"[\w.\-:/]+")
_PYTHON = {"True": "true", "False": "false", "None": "null"}
# Schemas may refer to themselves.
_DEEPEST = 8


class Arguments:
    """Writes the JSON object of one call."""

    def __init__(self, src: Source, index: int, tool: Tool | None) -> None:
        self._src = src
        self._index = index
        self._schema: Mapping[str, Any] = {} if tool is None else tool.parameters
        self._any = False

    def read(self, key: str, closer: str, *, trim: bool = False, string: bool | None = None) -> Steps[bool]:
        """Read the value of ``key`` up to ``closer``; False when the text ends before that.

        ``trim``: one line break at each end is packaging. ``string``: what the model says of the type.
        """
        allowed = self._kinds(key) if string is None else {"string"} if string else set()
        self._put((", " if self._any else "{") + json.dumps(key, ensure_ascii=False) + ": ")
        self._any = True
        if allowed == {"string"}:
            return (yield from self._text(closer, trim))
        parts: list[str] = []
        if (yield from self._src.until((closer,), parts.append)) is None:
            # Cut off: a number that is not whole would be another number.
            self._put(json.dumps("".join(parts), ensure_ascii=False)[:-1])
            return False
        text = "".join(parts)
        if trim:
            text = text.removeprefix("\n").removesuffix("\n")
        self._put(written(text, allowed))
        return True

    def end(self, stray: Sequence[str], tag: str | None, closers: Sequence[str]) -> str | None:
        """End the call, at ``tag`` or at the end of the text; what stood between its tags comes after it."""
        if tag is not None:
            self._put("}" if self._any else "{}")
        self._src.end(self._index)
        self._src.stray(stray, closers)
        return tag

    def _put(self, text: str) -> None:
        self._src.args(self._index, text)

    def _text(self, closer: str, trim: bool) -> Steps[bool]:
        held, first = "", trim
        self._put('"')

        def put(text: str) -> None:
            nonlocal held, first
            if not text:
                return
            if first:
                text, first = text.removeprefix("\n"), False
            text, held = held + text, ""
            if trim and text.endswith("\n"):
                text, held = text[:-1], "\n"
            self._put(_escaped(text))

        if (yield from self._src.until((closer,), put)) is None:
            self._put(_escaped(held))
            return False
        self._put('"')
        return True

    def _kinds(self, key: str) -> set[str]:
        properties = self._schema.get("properties")
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        return kinds(schema, self._schema)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def kinds(schema: Any, root: Mapping[str, Any]) -> set[str]:
    """The JSON types that ``schema`` names; references are looked up in ``root``."""
    return _kinds(schema, root, 0, set())


def _kinds(schema: Any, root: Mapping[str, Any], depth: int, seen: set[int]) -> set[str]:
    # What was seen adds nothing; to follow it again would take time without bound.
    if not isinstance(schema, Mapping) or depth > _DEEPEST or id(schema) in seen:
        return set()
    seen.add(id(schema))
    named = schema.get("type")
    if isinstance(named, str):
        return {named}
    if isinstance(named, list):
        return {name for name in named if isinstance(name, str)}
    if isinstance(reference := schema.get("$ref"), str):
        return _kinds(_referred(reference, root), root, depth + 1, seen)
    if "const" in schema:
        return {_kind(schema["const"])}
    if isinstance(values := schema.get("enum"), list):
        return {_kind(value) for value in values}
    found: set[str] = set()
    for word in ("anyOf", "oneOf", "allOf"):
        for part in schema[word] if isinstance(schema.get(word), list) else ():
            found |= _kinds(part, root, depth + 1, seen)
    return found


def _referred(reference: str, root: Mapping[str, Any]) -> Any:
    node: Any = root
    for part in reference.removeprefix("#").strip("/").split("/"):
        node = node.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(node, Mapping) else None
    return node


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    names = {str: "string", int: "integer", float: "number", dict: "object", list: "array"}
    return names.get(type(value), "null")


def written(text: str, allowed: set[str]) -> str:
    """JSON for a value that a model wrote as ``text``. ``allowed``: types of the schema, empty if unknown."""
    bare = text.strip()
    bare = _PYTHON.get(bare, bare)
    try:
        kind = _kind(jsontext.parsed(bare))
    except ValueError:
        return json.dumps(text, ensure_ascii=False)
    fits = kind in allowed or (kind in ("integer", "number") and allowed & {"integer", "number"})
    if fits or not allowed:
        # Without a schema, a string in quotes is more likely a text that has quotes.
        return json.dumps(text, ensure_ascii=False) if kind == "string" and not allowed else bare
    return json.dumps(text, ensure_ascii=False) if "string" in allowed else bare


QWEN_OPEN, QWEN_CLOSE = "<tool_call>", "</tool_call>"
QWEN_FUNCTION, QWEN_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"


def read_qwen(src: Source, opener: str, offered: Mapping[str, Tool]) -> Steps[None]:
    """``<tool_call>``, or the ``<function=`` in it when a model forgets that, is read.

    A body that is a JSON object is taken as well: Llama's custom functions are written so.
    """
    if opener == QWEN_OPEN:
        yield from src.blank()
        if not (yield from src.accept(QWEN_FUNCTION)):
            src.give_back()
            return
    while True:
        parts: list[str] = []
        tag = yield from src.until((">", "<", "\n"), parts.append)
        name = "".join(parts)
        if tag != ">" or not _NAME.fullmatch(name):
            src.give_back()
            return
        index = src.start(name)
        yield from src.blank()
        if src.rest.startswith("{"):
            tag = yield from jsontext.arguments(src, index, (QWEN_END, QWEN_CLOSE))
        else:
            tag = yield from _qwen_parameters(src, index, offered.get(name))
        if tag != QWEN_END:
            return
        yield from src.blank()
        if not (yield from src.accept(QWEN_FUNCTION)):
            yield from src.accept(QWEN_CLOSE)
            return
        src.mark(QWEN_FUNCTION)


def _qwen_parameters(src: Source, index: int, tool: Tool | None) -> Steps[str | None]:
    arguments, stray = Arguments(src, index, tool), list[str]()
    while (tag := (yield from src.until((_PARAMETER, QWEN_END, QWEN_CLOSE), stray.append))) == _PARAMETER:
        key: list[str] = []
        if (yield from src.until((">",), key.append)) is None:
            stray += key
            break
        if not (yield from arguments.read("".join(key), _PARAMETER_END, trim=True)):
            break
    return arguments.end(stray, tag if tag != _PARAMETER else None, (QWEN_END,))


GLM_KEY, GLM_KEY_END, GLM_VALUE, GLM_VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"


def read_glm(src: Source, _: str, offered: Mapping[str, Tool]) -> Steps[None]:
    """``<tool_call>`` is read: ``NAME``, then keys and values in turn, with or without line breaks."""
    yield from src.blank()
    name = ""
    while (yield from src.more()) and (match := _NAME.match(src.rest)):
        name += src.take(match.end())
    yield from src.blank()
    tag = yield from src.accept(GLM_KEY, QWEN_CLOSE)
    if not name or tag is None:
        src.give_back()
        return
    index = src.start(name)
    arguments, stray = Arguments(src, index, offered.get(name)), list[str]()
    while tag == GLM_KEY:
        key: list[str] = []
        between: list[str] = []
        tag = yield from src.until((GLM_KEY_END,), key.append)
        if tag:
            tag = yield from src.until((GLM_VALUE, QWEN_CLOSE), between.append)
        if tag != GLM_VALUE:
            stray += key + between
            break
        stray += between
        if not (yield from arguments.read("".join(key).strip(), GLM_VALUE_END)):
            tag = None
            break
        tag = yield from src.until((GLM_KEY, QWEN_CLOSE), stray.append)
    arguments.end(stray, tag, (QWEN_CLOSE,))


@dataclass(frozen=True, slots=True)
class Invoke:
    """``open (<invoke name="NAME"> (<parameter name="KEY">VALUE</parameter>)* </invoke>)* close``.

    ``mark`` stands after every bracket of a tag.
    """

    opens: tuple[str, ...]
    closes: tuple[str, ...]
    mark: str = ""

    def read(self, src: Source, _: str, offered: Mapping[str, Tool]) -> Steps[None]:
        call, call_end = f'<{self.mark}invoke name="', f"</{self.mark}invoke>"
        yield from src.blank()
        while (yield from src.accept(call)):
            parts: list[str] = []
            tag = yield from src.until(('"', "\n"), parts.append)
            name = "".join(parts)
            if tag != '"' or not name or (yield from src.until((">",), lambda _: None)) is None:
                break
            index = src.start(name)
            tag = yield from self._parameters(src, index, offered.get(name), call_end)
            if tag != call_end:
                return
            yield from src.blank()
            if (yield from src.accept(*self.closes)):
                return
            src.mark("")
        src.give_back()

    def _parameters(self, src: Source, index: int, tool: Tool | None, call_end: str) -> Steps[str | None]:
        begin, value_end = f'<{self.mark}parameter name="', f"</{self.mark}parameter>"
        arguments, stray = Arguments(src, index, tool), list[str]()
        while (tag := (yield from src.until((begin, call_end, *self.closes), stray.append))) == begin:
            key, more = list[str](), list[str]()
            if (yield from src.until(('"',), key.append)) is None:
                stray += key
                break
            if (yield from src.until((">",), more.append)) is None:
                stray += key + more
                break
            says = re.search(r'string="(true|false)"', "".join(more))
            string = None if says is None else says[1] == "true"
            if not (yield from arguments.read("".join(key), value_end, string=string)):
                break
        return arguments.end(stray, tag if tag != begin else None, (call_end,))


MINIMAX = Invoke(("<minimax:tool_call>",), ("</minimax:tool_call>",))
_DSML = "｜DSML｜"
# Their words for the block differ from version to version.
DSML = Invoke(
    (f"<{_DSML}function_calls>", f"<{_DSML}tool_calls>"),
    (f"</{_DSML}function_calls>", f"</{_DSML}tool_calls>"),
    _DSML,
)
