"""gpt-oss: an answer is a row of messages, each with a channel and perhaps a recipient.

Channel ``analysis`` is thinking, a message to ``functions.NAME`` is a call, everything else is content; two
messages of one kind are a paragraph apart. What has no header is content.
"""

from __future__ import annotations

import re

from hetero.server.dialects import jsontext
from hetero.server.dialects.deltas import Content, Reasoning
from hetero.server.dialects.source import Put, Source, Steps

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END = "<|end|>"
_ENDS = (END, "<|call|>", "<|return|>")
TAGS = (START, CHANNEL, MESSAGE, CONSTRAIN, *_ENDS)

_TO = re.compile(r"\bto=([^\s<]+)")
_ON = re.compile(r"<\|channel\|>\s*(\w+)")
# How a header may begin after "<|start|>assistant", which the template has written for the first message.
_HEADS = (CHANNEL, " to=", START, CONSTRAIN, MESSAGE)
_FUNCTIONS = "functions."
_PEOPLE = ("assistant", "user", "all")


def read(src: Source, *, calls: bool, thinking: bool) -> Steps[None]:
    """The whole answer. Without ``calls`` or ``thinking``, these are content."""
    said: set[type[Content] | type[Reasoning]] = set()
    while (yield from src.more()):
        src.mark("")
        header = yield from _header(src)
        if header is None:
            src.give_back()
            kind: type[Content] | type[Reasoning] = Content
            recipient = None
        else:
            src.forget()
            on, to = _ON.search(header), _TO.search(header)
            kind = Reasoning if thinking and on is not None and on[1] == "analysis" else Content
            recipient = to[1] if to is not None and to[1] not in _PEOPLE else None
        closers = (*_ENDS, START, CHANNEL)
        if recipient is not None and calls:
            index = src.start(recipient.removeprefix(_FUNCTIONS))
            tag = yield from jsontext.arguments(src, index, closers)
        else:
            put = src.reasoning if kind is Reasoning else src.content
            tag = yield from src.until(closers, _paragraph(put) if kind in said else put)
            said.add(kind)
            src.flush(kind)
        if tag in (START, CHANNEL):
            src.put_back(tag)


def _header(src: Source) -> Steps[str | None]:
    """Up to the beginning of the message's text; None when there is no header."""
    tag = yield from src.accept(*_HEADS)
    if tag is None or tag == MESSAGE:
        return tag
    parts = [tag]
    end = yield from src.until((MESSAGE, *_ENDS), parts.append)
    return "".join(parts) if end == MESSAGE else None


def _paragraph(put: Put) -> Put:
    first = True

    def apart(text: str) -> None:
        nonlocal first
        if text:
            put("\n\n" + text if first else text)
            first = False

    return apart
