"""Formats of tool calls and of thinking, model family by model family."""

from hetero.server.dialects.deltas import (
    Content,
    Delta,
    Parser,
    Reasoning,
    Tool,
    ToolArgs,
    ToolEnd,
    ToolStart,
)
from hetero.server.dialects.dialect import HARMONY, REASONING_FORMATS, TOOL_FORMATS, Dialect
from hetero.server.dialects.select import choose

__all__ = [
    "HARMONY",
    "REASONING_FORMATS",
    "TOOL_FORMATS",
    "Content",
    "Delta",
    "Dialect",
    "Parser",
    "Reasoning",
    "Tool",
    "ToolArgs",
    "ToolEnd",
    "ToolStart",
    "choose",
]
