"""Running a parser on a text cut in any way, and reading its deltas as one answer."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from hetero.server.dialects import (
    Content,
    Delta,
    Dialect,
    Reasoning,
    Tool,
    ToolArgs,
    ToolEnd,
    ToolStart,
)
from hetero.server.dialects.source import joined

STRING = {"type": "string"}
WEATHER = Tool(
    "get_weather",
    {
        "type": "object",
        "properties": {"city": STRING, "days": {"type": "integer"}, "metric": {"type": "boolean"}},
        "required": ["city"],
    },
)
WRITE = Tool(
    "write_file",
    {
        "type": "object",
        "properties": {
            "path": STRING,
            "text": STRING,
            "mode": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "tags": {"type": "array", "items": STRING},
        },
    },
)
TOOLS = (WEATHER, WRITE)


@dataclass
class Answer:
    """``calls``: [name, text of the arguments] in order. ``order``: the kinds of deltas as they came."""

    content: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)
    order: list[str] = field(default_factory=list)


def answer(deltas: Iterable[Delta]) -> Answer:
    """Checks the order of the deltas on the way."""
    out, ids, running = Answer(), set(), None
    for delta in joined(list(deltas)):
        match delta:
            case Content(text):
                assert running is None
                assert text
                out.content += text
                out.order.append("content")
            case Reasoning(text):
                assert running is None
                assert text
                out.reasoning += text
                out.order.append("reasoning")
            case ToolStart(index, id_, name):
                assert running is None
                assert index == len(out.calls)
                ids.add(id_)
                running = index
                out.calls.append([name, ""])
                out.order.append("tool")
            case ToolArgs(index, fragment):
                assert running == index
                assert fragment
                out.calls[index][1] += fragment
            case ToolEnd(index):
                assert running == index
                running = None
    assert running is None
    assert len(ids) == len(out.calls)
    return out


def pieces(text: str, cuts: Iterable[int]) -> list[str]:
    bounds = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[a:b] for a, b in pairwise(bounds)]


def run(
    dialect: Dialect, parts: Sequence[str], prompt: str = "", tools: Sequence[Tool] = TOOLS
) -> list[Delta]:
    parser = dialect.parser(prompt, tools)
    deltas = [delta for part in parts for delta in parser.feed(part)]
    return deltas + parser.finish()


def read(dialect: Dialect, text: str, prompt: str = "", tools: Sequence[Tool] = TOOLS) -> Answer:
    """The answer for this text, which must be the same for the whole, single characters and random cuts."""
    whole = answer(run(dialect, [text], prompt, tools))
    rng = random.Random(len(text))
    for parts in (list(text), *(pieces(text, rng.choices(range(len(text) + 1), k=k)) for k in (1, 3, 9))):
        assert answer(run(dialect, parts, prompt, tools)) == whole
    return whole
