"""Which formats a model uses, by the marks that its chat template writes."""

from __future__ import annotations

from hetero.core import InputError
from hetero.server.dialects.dialect import HARMONY, REASONING_FORMATS, TOOL_FORMATS, Dialect

AUTO = "auto"

# The first whose marks all stand in the template. Families share <tool_call>, so the special ones come first.
_TOOL_MARKS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (HARMONY, ("<|channel|>", "<|message|>")),
    ("dsml", ("｜DSML｜",)),
    ("deepseek", ("<｜tool▁calls▁begin｜>",)),
    ("kimi", ("<|tool_calls_section_begin|>",)),
    ("minimax", ("<minimax:tool_call>",)),
    ("glm", ("<arg_key>", "<tool_call>")),
    ("qwen-xml", ("<function=", "<parameter=")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("hermes", ("<tool_call>",)),
    ("llama", ("<|python_tag|>",)),
    ("llama", ("<|start_header_id|>", "tools", '"parameters"')),
    ("llama", ("<|header_start|>", "tools", '"parameters"')),
)
_REASONING_MARKS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (HARMONY, ("<|channel|>", "<|message|>")),
    ("mistral", ("[THINK]",)),
    ("think", ("<think>",)),
    ("think", ("</think>",)),
)


def choose(template: str, tool_format: str = AUTO, reasoning_format: str = AUTO) -> Dialect:
    """The dialect of a model with this chat template; a name other than "auto" overrides.

    Raises InputError for a name that there is not.
    """
    _check("--tool-format", tool_format, list(TOOL_FORMATS))
    _check("--reasoning-format", reasoning_format, list(REASONING_FORMATS))
    if tool_format == AUTO:
        tool_format = _first(_TOOL_MARKS, template)
    if reasoning_format == AUTO:
        reasoning_format = _first(_REASONING_MARKS, template)
    if HARMONY in (tool_format, reasoning_format) and not {tool_format, reasoning_format} <= {
        HARMONY,
        "none",
    }:
        raise InputError(
            f"--tool-format {tool_format} --reasoning-format {reasoning_format}: harmony goes only with "
            "harmony or none"
        )
    return Dialect(tool_format, reasoning_format)


def _first(marks: tuple[tuple[str, tuple[str, ...]], ...], template: str) -> str:
    return next((name for name, all_of in marks if all(mark in template for mark in all_of)), "none")


def _check(option: str, name: str, names: list[str]) -> None:
    if name not in (AUTO, *names):
        raise InputError(f"{option} {name}: must be one of {', '.join((AUTO, *names))}")
