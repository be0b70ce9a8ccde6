"""Caches of finished sequences, kept for requests that begin with the same tokens.

An entry is a sequence's cache with the tokens that it holds. Where a cache can be cut (attention over all
tokens), any common beginning serves; where it cannot (recurrent states, windows), only a whole entry does.
The least recently used go first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

# Tokens of one block of memory.
BLOCK = 16


def blocks(tokens: int) -> int:
    """``tokens`` rounded up to whole blocks."""
    return -(-tokens // BLOCK) * BLOCK


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two sequences have in common at their beginning."""
    size = min(len(one), len(other))
    if one[:size] == other[:size]:
        return size
    low = 0
    while size - low > 1:  # one[:low] is common, one[:size] is not
        middle = (low + size) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            size = middle
    return low


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """``tokens`` of prompt and answer, all of which ``cache`` holds; ``cuttable``: so are its beginnings."""

    tokens: tuple[int, ...]
    cache: Any
    cuttable: bool

    def serves(self, tokens: Sequence[int]) -> int:
        """With how many of ``tokens`` a sequence of these tokens may start; one is always left to be read."""
        shared = common(self.tokens, tokens)
        if self.cuttable:
            return min(shared, len(tokens) - 1)
        return shared if shared == len(self.tokens) < len(tokens) else 0


def best(entries: Iterable[Entry], tokens: Sequence[int]) -> tuple[Entry, int] | None:
    """The entry that serves most of ``tokens``, and how many; None when none serves a block."""
    found = max(((entry.serves(tokens), -place, entry) for place, entry in enumerate(entries)), default=None)
    return None if found is None or found[0] < BLOCK else (found[2], found[0])


class PrefixStore:
    """At most ``entries`` of them and ``tokens`` in whole blocks."""

    def __init__(self, entries: int, tokens: int) -> None:
        self._most, self._capacity = entries, tokens
        self._entries: list[Entry] = []  # least recently used first

    @property
    def tokens(self) -> int:
        """Held, in whole blocks."""
        return sum(blocks(len(entry.tokens)) for entry in self._entries)

    def find(self, tokens: Sequence[int]) -> tuple[Entry, int] | None:
        """As ``best``; the entry counts as used."""
        found = best(reversed(self._entries), tokens)
        if found is not None:
            self.drop(found[0])
            self._entries.append(found[0])
        return found

    def put(self, entry: Entry) -> None:
        """Keep it, in place of what it makes needless; not when it is needless itself or too large."""
        if blocks(len(entry.tokens)) > self._capacity or len(entry.tokens) < BLOCK:
            return
        for other in list(self._entries):
            if (entry.cuttable or len(other.tokens) == len(entry.tokens)) and _begins(entry, other):
                self.drop(other)
            elif other.cuttable and _begins(other, entry):
                return
        self._entries.append(entry)
        while len(self._entries) > self._most or self.tokens > self._capacity:
            self._entries.pop(0)

    def drop(self, entry: Entry) -> None:
        self._entries = [other for other in self._entries if other is not entry]

    def shrink(self, tokens: int, spare: Entry | None = None) -> None:
        """Give up entries, except ``spare``, until at most ``tokens`` are held or none is left."""
        for entry in [entry for entry in self._entries if entry is not spare]:
            if self.tokens <= tokens:
                return
            self.drop(entry)


def _begins(long: Entry, short: Entry) -> bool:
    """Whether one entry's tokens begin with the other's."""
    return long.tokens[: len(short.tokens)] == short.tokens
