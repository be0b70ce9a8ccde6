"""Mistakes of rule files, gathered so that a user sees all of them at once."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import NamedTuple

from hetero.core import InputError


class Mistake(NamedTuple):
    """One message, and the file and line that it is about; the line is None for a file as a whole."""

    file: str
    line: int | None
    text: str


class RuleError(InputError):
    """One mistake or several; the message has one line for each."""

    def __init__(self, found: Iterable[Mistake]) -> None:
        self.found = tuple(found)
        super().__init__("\n".join(one.text for one in self.found))


class Mistakes:
    """Takes what goes wrong in parts that do not depend on each other.

    ``with mistakes:`` ends at the first RuleError within it, keeps that, and the code after it goes on.
    """

    def __init__(self) -> None:
        self._found: list[Mistake] = []

    def __len__(self) -> int:
        return len(self._found)

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if isinstance(error, RuleError):
            self._found += error.found
            return True
        return False

    def add(self, file: str, text: str) -> None:
        """A mistake of a file as a whole."""
        self._found.append(Mistake(file, None, f"{file}: {text}"))

    def tell(self) -> None:
        """Raise RuleError if there is anything to tell: files in the order of their first mistake, each by
        line, what is about a whole file last."""
        if not self._found:
            return
        files = list(dict.fromkeys(one.file for one in self._found))
        order = sorted(
            dict.fromkeys(self._found),
            key=lambda one: (files.index(one.file), one.line is None, one.line or 0),
        )
        raise RuleError(order)
