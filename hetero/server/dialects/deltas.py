"""What a parser makes of an answer's text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the model's thinking."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolStart:
    """The call number ``index`` of this answer, from 0, begins; its name is whatever the model wrote."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolArgs:
    """The next part of the JSON text of a call's arguments."""

    index: int
    fragment: str


@dataclass(frozen=True, slots=True)
class ToolEnd:
    """The call has no more arguments. Every ToolStart gets one, before anything else begins."""

    index: int


Delta = Content | Reasoning | ToolStart | ToolArgs | ToolEnd


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the request offers; ``parameters`` is the JSON schema of its arguments."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)


class Parser(Protocol):
    """Turns one answer into deltas. However the text is cut, the deltas joined are the same."""

    def feed(self, text: str) -> list[Delta]:
        """What this piece makes certain."""

    def finish(self) -> list[Delta]:
        """What was held back, at the end of the answer. Call it once."""
