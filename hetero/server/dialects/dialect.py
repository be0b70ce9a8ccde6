"""How a model family writes its thinking and its tool calls, and who can read it."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hetero.server.dialects.deltas import Parser, Reasoning, Tool
from hetero.server.dialects.json_formats import HERMES_CLOSE, HERMES_OPEN, read_hermes
from hetero.server.dialects.source import Running, Source, Steps

Read = Callable[[Source, str, Mapping[str, Tool]], Steps[None]]


def _call_id() -> str:
    return "call_" + secrets.token_hex(12)


def _short_id() -> str:
    """Nine letters and digits: Mistral's templates refuse any other id when it comes back."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Tags around the thinking, which stands before everything else."""

    open: str
    close: str


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """``openers``: what begins a call (or several); ``read`` goes on from there. ``tags``: everything else
    that may be a special token of the vocabulary."""

    openers: tuple[str, ...]
    tags: tuple[str, ...]
    read: Read
    new_id: Callable[[], str] = _call_id


REASONING_FORMATS: dict[str, ReasoningFormat | None] = {
    "none": None,
    "think": ReasoningFormat("<think>", "</think>"),
}

TOOL_FORMATS: dict[str, ToolFormat | None] = {
    "none": None,
    "hermes": ToolFormat((HERMES_OPEN,), (HERMES_CLOSE,), read_hermes),
}


@dataclass(frozen=True, slots=True)
class Dialect:
    """The formats of one model, by name."""

    tool_format: str
    reasoning_format: str

    @property
    def tools(self) -> bool:
        """Whether the model can be offered tools."""
        return self.tool_format != "none"

    @property
    def tags(self) -> tuple[str, ...]:
        """Texts that the parser must see even where they are special tokens: see Tokenizer.special."""
        tool, thinking = TOOL_FORMATS[self.tool_format], REASONING_FORMATS[self.reasoning_format]
        tags = () if thinking is None else (thinking.open, thinking.close)
        return tags if tool is None else (*tags, *tool.openers, *tool.tags)

    def parser(self, prompt: str = "", tools: Sequence[Tool] = ()) -> Parser:
        """For one answer to ``prompt``, the text that the template made: it may have begun the thinking.

        Without ``tools`` nothing is a tool call, and tags of calls are text.
        """
        tool = TOOL_FORMATS[self.tool_format] if tools else None
        thinking = REASONING_FORMATS[self.reasoning_format]
        opened = self.thinking(prompt)
        offered = {t.name: t for t in tools}
        return Running(
            lambda src: _answer(src, thinking, opened, tool, offered),
            _call_id if tool is None else tool.new_id,
        )

    def thinking(self, prompt: str) -> bool:
        """Whether the template itself has begun the thinking at the end of ``prompt``."""
        thinking = REASONING_FORMATS[self.reasoning_format]
        return thinking is not None and prompt.rstrip().endswith(thinking.open)


def _answer(
    src: Source,
    thinking: ReasoningFormat | None,
    opened: bool,
    tool: ToolFormat | None,
    offered: Mapping[str, Tool],
) -> Steps[None]:
    if thinking is not None:
        yield from _think(src, thinking, opened)
    openers = () if tool is None else tool.openers
    while (tag := (yield from src.until(openers, src.content))) is not None:
        assert tool is not None
        src.mark(tag)
        yield from tool.read(src, tag, offered)
    src.flush()


def _think(src: Source, tags: ReasoningFormat, opened: bool) -> Steps[None]:
    """The thinking at the beginning, if there is any; its tags are plain text everywhere else."""
    if not opened:
        src.mark("")
        yield from src.blank()
        if not (yield from src.accept(tags.open)):
            src.give_back()
            return
        src.forget()
    else:
        # Some models repeat the tag that the template has written.
        yield from src.blank()
        yield from src.accept(tags.open)
    src.drop_blank()
    if (yield from src.until((tags.close,), src.reasoning)) is None:
        src.flush(Reasoning)
        return
    src.drop_blank()
