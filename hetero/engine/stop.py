"""Stop strings over a stream of text pieces."""

from __future__ import annotations

from collections.abc import Sequence

from hetero.core import InputError


class StopMatcher:
    """Cuts a stream before the first stop string, wherever the pieces are split.

    The stop string that is complete first wins, and among those that end together the longest: the same text
    comes out for every way of splitting it. Text that may yet become a stop string is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if any(not stop for stop in stops):
            raise InputError("stop: a stop string must not be empty")
        self._stops = tuple(dict.fromkeys(stops))
        self._held = ""
        self.matched: str | None = None

    def feed(self, piece: str) -> str:
        """Text that is certain not to belong to a stop string. After a match: always empty."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return piece
        text = self._held + piece
        ends = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            _, start, self.matched = min(ends)
            self._held = ""
            return text[:start]
        keep = self._pending(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back, when the stream ends without a match."""
        held, self._held = self._held, ""
        return held

    def _pending(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins a stop string."""
        longest = max(len(stop) for stop in self._stops) - 1
        for size in range(min(longest, len(text)), 0, -1):
            tail = text[-size:]
            if any(stop.startswith(tail) for stop in self._stops):
                return size
        return 0
