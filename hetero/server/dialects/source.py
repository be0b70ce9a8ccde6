"""Reading a text that is still arriving, as if it were all there.

A parser is a generator that reads on, step by step; where it needs text that has not come it yields, and goes
on when more has. What it decides depends on the text alone and never on where that was cut.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from hetero.server.dialects.deltas import Content, Delta, Reasoning, ToolArgs, ToolEnd, ToolStart

_PIECE = 256

T = TypeVar("T")
Steps = Generator[None, None, T]
Put = Callable[[str], None]


class Source:
    """The text that has come and is not consumed (``rest``), and the deltas that are ready (``out``)."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        self.rest = ""
        self.ended = False
        self.out: list[Delta] = []
        self.calls = 0
        self._new_id = new_id
        self._marked: list[str] | None = None
        self._blank = ""
        self._strip = False

    def mark(self, already: str) -> None:
        """Begin to remember what is consumed, after ``already``, in case it must be given back as text."""
        self._marked = [already]

    def give_back(self) -> None:
        """What was consumed since the mark turns out to be plain text."""
        text, self._marked = "".join(self._marked or ()), None
        self.content(text)

    def forget(self) -> None:
        """What was consumed since the mark will not be needed."""
        self._marked = None

    def take(self, count: int) -> str:
        text, self.rest = self.rest[:count], self.rest[count:]
        if self._marked is not None:
            self._marked.append(text)
        return text

    def put_back(self, text: str) -> None:
        """``text`` was consumed just now, and somebody else will want it."""
        self.rest = text + self.rest
        if self._marked is not None:
            self._marked = ["".join(self._marked).removesuffix(text)]

    def more(self, count: int = 1) -> Steps[bool]:
        """Wait for ``count`` characters; False when the text ends before."""
        while len(self.rest) < count:
            if self.ended:
                return False
            yield
        return True

    def until(self, tags: Sequence[str], put: Put) -> Steps[str | None]:
        """Pass what stands before the first of ``tags`` on to ``put``, as it comes; consume the tag.

        Returns the tag, or None when the text ends without one. No tag may be part of another.
        """
        while True:
            found = [(at, tag) for tag in tags if (at := self.rest.find(tag)) >= 0]
            if found:
                at, tag = min(found)
                put(self.take(at))
                self.take(len(tag))
                return tag
            if self.ended:
                put(self.take(len(self.rest)))
                return None
            put(self.take(len(self.rest) - pending(self.rest, tags)))
            yield

    def blank(self) -> Steps[None]:
        """Consume white space."""
        while True:
            self.take(len(self.rest) - len(self.rest.lstrip()))
            if self.rest or self.ended:
                return
            yield

    def accept(self, *texts: str) -> Steps[str | None]:
        """Consume the one of ``texts`` that comes next, if one does. None may begin another."""
        while True:
            for text in texts:
                if self.rest.startswith(text):
                    self.take(len(text))
                    return text
            if self.ended or not any(text.startswith(self.rest) for text in texts):
                return None
            yield

    def content(self, text: str) -> None:
        """Text for the user. White space waits until it is clear that no tag follows which swallows it."""
        self._say(Content, text)

    def stray(self, parts: Sequence[str], closers: Sequence[str]) -> None:
        """Text that stood between the tags of a call is content; a closing tag that is cut off is none."""
        text = "".join(parts)
        if self.ended and not self.rest:
            text = text[: len(text) - pending(text, closers)]
        # A fence around arguments is their package, a comma between two calls as well.
        self.content(text.strip().removesuffix("```").strip(",").strip())

    def reasoning(self, text: str) -> None:
        self._say(Reasoning, text)

    def _say(self, kind: type[Content] | type[Reasoning], text: str) -> None:
        if self._strip:
            text = text.lstrip()
        if not text:
            return
        self._strip = False
        solid = text.rstrip()
        if not solid:
            self._blank += text
            return
        self.out.append(kind(self._blank + solid))
        self._blank = text[len(solid) :]

    def drop_blank(self) -> None:
        """Forget the white space before a tag, and what will follow it."""
        self._blank = ""
        self._strip = True

    def flush(self, kind: type[Content] | type[Reasoning] = Content) -> None:
        """White space at the end of the answer is part of what is said there."""
        if self._blank:
            self.out.append(kind(self._blank))
        self._blank = ""

    def start(self, name: str, given: str | None = None) -> int:
        """A call begins; returns its index. ``given``: its id, when the model wrote one."""
        self.drop_blank()
        self._marked = None
        index, self.calls = self.calls, self.calls + 1
        self.out.append(ToolStart(index, given or self._new_id(), name))
        return index

    def args(self, index: int, fragment: str) -> None:
        if fragment:
            self.out.append(ToolArgs(index, fragment))

    def end(self, index: int) -> None:
        self.out.append(ToolEnd(index))


def pending(text: str, tags: Sequence[str]) -> int:
    """Length of the longest end of ``text`` that begins one of ``tags`` and is shorter than it."""
    longest = max(map(len, tags), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(tag.startswith(text[-size:]) for tag in tags):
            return size
    return 0


class Running:
    """A parser that runs the generator which ``parse`` makes of a source."""

    def __init__(self, parse: Callable[[Source], Steps[None]], new_id: Callable[[], str]) -> None:
        self._source = Source(new_id)
        self._steps = parse(self._source)
        self._over = False

    def feed(self, text: str) -> list[Delta]:
        # Short pieces, since what is consumed is cut off the front of the rest.
        for start in range(0, len(text), _PIECE):
            self._source.rest += text[start : start + _PIECE]
            self._step()
        return self._ready()

    def finish(self) -> list[Delta]:
        self._source.ended = True
        self._step()
        return self._ready()

    def _step(self) -> None:
        if not self._over:
            try:
                next(self._steps)
            except StopIteration:
                self._over = True

    def _ready(self) -> list[Delta]:
        ready, self._source.out = self._source.out, []
        return joined(ready)


def joined(deltas: list[Delta]) -> list[Delta]:
    """Neighbours of one kind as one."""
    out: list[Delta] = []
    for delta in deltas:
        last = out[-1] if out else None
        if isinstance(delta, Content) and isinstance(last, Content):
            out[-1] = Content(last.text + delta.text)
        elif isinstance(delta, Reasoning) and isinstance(last, Reasoning):
            out[-1] = Reasoning(last.text + delta.text)
        elif isinstance(delta, ToolArgs) and isinstance(last, ToolArgs) and delta.index == last.index:
            out[-1] = ToolArgs(last.index, last.fragment + delta.fragment)
        else:
            out.append(delta)
    return out
