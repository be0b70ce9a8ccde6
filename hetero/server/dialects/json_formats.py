"""Tool formats whose calls are JSON objects.

``arguments`` that are not JSON are delivered as they were written, up to the end of the call; a call without
a name is delivered as the text that it is, tags included.
"""

from __future__ import annotations

from collections.abc import Mapping

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
        src.content("".join(rest).strip().strip(","))
        if tag in (None, HERMES_CLOSE):
            return
        src.mark("")
        if tag == "{":
            src.rest = "{" + src.rest
        yield from src.blank()
        found = yield from jsontext.call(src, (HERMES_CLOSE,))
        if found == "none":
            src.give_back()
