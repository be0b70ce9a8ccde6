"""How a model family writes its thinking and its tool calls, and who can read it."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hetero.server.dialects import harmony
from hetero.server.dialects.deltas import Parser, Reasoning, Tool
from hetero.server.dialects.json_formats import (
    DEEPSEEK,
    HERMES_CLOSE,
    HERMES_OPEN,
    KIMI,
    LLAMA_CLOSE,
    LLAMA_OPENS,
    MISTRAL_ARGS,
    MISTRAL_ID,
    MISTRAL_OPEN,
    Section,
    read_hermes,
    read_llama,
    read_mistral,
)
from hetero.server.dialects.source import Running, Source, Steps
from hetero.server.dialects.xml_formats import (
    DSML,
    GLM_KEY,
    GLM_KEY_END,
    GLM_VALUE,
    GLM_VALUE_END,
    MINIMAX,
    QWEN_CLOSE,
    QWEN_END,
    QWEN_FUNCTION,
    QWEN_OPEN,
    read_glm,
    read_qwen,
)

HARMONY = "harmony"

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
    that may be a special token of the vocabulary. ``bare``: a ``{`` at the beginning is an opener as well."""

    openers: tuple[str, ...]
    tags: tuple[str, ...]
    read: Read
    new_id: Callable[[], str] = _call_id
    bare: bool = False


def _section(section: Section) -> ToolFormat:
    """A section may be forgotten, and its calls stand alone."""
    tags = (section.separator, section.call_end, section.end)
    return ToolFormat((section.begin, section.call), tags, section.read)


REASONING_FORMATS: dict[str, ReasoningFormat | None] = {
    "none": None,
    "think": ReasoningFormat("<think>", "</think>"),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    HARMONY: None,
}

_QWEN_TAGS = (QWEN_CLOSE, QWEN_END)
_GLM_TAGS = (QWEN_CLOSE, GLM_KEY, GLM_KEY_END, GLM_VALUE, GLM_VALUE_END)
TOOL_FORMATS: dict[str, ToolFormat | None] = {
    "none": None,
    "hermes": ToolFormat((HERMES_OPEN,), (HERMES_CLOSE,), read_hermes),
    "qwen-xml": ToolFormat((QWEN_OPEN, QWEN_FUNCTION), _QWEN_TAGS, read_qwen),
    "glm": ToolFormat((QWEN_OPEN,), _GLM_TAGS, read_glm),
    "minimax": ToolFormat(MINIMAX.opens, MINIMAX.closes, MINIMAX.read),
    "deepseek": _section(DEEPSEEK),
    "dsml": ToolFormat(DSML.opens, (*DSML.closes, DSML.mark), DSML.read),
    "kimi": _section(KIMI),
    "mistral": ToolFormat((MISTRAL_OPEN,), (MISTRAL_ARGS, MISTRAL_ID), read_mistral, new_id=_short_id),
    "llama": ToolFormat(LLAMA_OPENS, (LLAMA_CLOSE,), read_llama, bare=True),
    # Not a format of calls but of whole answers.
    HARMONY: None,
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
        if HARMONY in (self.tool_format, self.reasoning_format):
            return harmony.TAGS
        tool, thinking = TOOL_FORMATS[self.tool_format], REASONING_FORMATS[self.reasoning_format]
        tags = () if thinking is None else (thinking.open, thinking.close)
        return tags if tool is None else (*tags, *tool.openers, *tool.tags)

    def parser(self, prompt: str = "", tools: Sequence[Tool] = ()) -> Parser:
        """For one answer to ``prompt``, the text that the template made: it may have begun the thinking.

        Without ``tools`` nothing is a tool call, and tags of calls are text.
        """
        if HARMONY in (self.tool_format, self.reasoning_format):
            calls, thinks = bool(tools) and self.tool_format == HARMONY, self.reasoning_format == HARMONY
            return Running(lambda src: harmony.read(src, calls=calls, thinking=thinks), _call_id)
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
    if tool is not None and tool.bare:
        yield from _bare(src, tool, offered)
    openers = () if tool is None else tool.openers
    while (tag := (yield from src.until(openers, src.content))) is not None:
        assert tool is not None
        src.mark(tag)
        yield from tool.read(src, tag, offered)
    src.flush()


def _bare(src: Source, tool: ToolFormat, offered: Mapping[str, Tool]) -> Steps[None]:
    src.mark("")
    yield from src.blank()
    if src.rest.startswith("{"):
        yield from tool.read(src, "", offered)
    else:
        src.give_back()


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
