"""Caches of finished sequences, kept for requests that begin with the same tokens.

An entry is a sequence's cache with the tokens that it holds. Where a cache can be cut (attention over all
tokens), any common beginning serves; where it cannot (recurrent states, windows), only a whole entry does.
The least recently used go first. A cache is a copy of its own, or it holds memory that others hold as well: a
``Keeper`` knows what it counts, and takes back what is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

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


class Keeper(Protocol):
    """Whose memory kept caches are in."""

    def weigh(self, entries: Sequence[Entry]) -> int:
        """Tokens in whole blocks that are held for them alone."""

    def frees(self, cache: Any) -> bool:
        """Whether ``free`` of it alone makes what is held less."""

    def free(self, cache: Any) -> None:
        """A cache is not kept any more."""


class Copies:
    """A ``Keeper`` of caches that share nothing and are gone when nobody knows them."""

    def weigh(self, entries: Sequence[Entry]) -> int:
        return sum(blocks(len(entry.tokens)) for entry in entries)

    def frees(self, cache: Any) -> bool:
        return True

    def free(self, cache: Any) -> None:
        pass


class PrefixStore:
    """At most ``entries`` of them and ``tokens`` in whole blocks."""

    def __init__(self, entries: int, tokens: int, keeper: Keeper | None = None) -> None:
        self._most, self._capacity = entries, tokens
        self._keeper = Copies() if keeper is None else keeper
        self._entries: list[Entry] = []  # least recently used first

    @property
    def tokens(self) -> int:
        """Held, in whole blocks."""
        return self._keeper.weigh(self._entries)

    def find(self, tokens: Sequence[int]) -> tuple[Entry, int] | None:
        """As ``best``; the entry counts as used."""
        found = best(reversed(self._entries), tokens)
        if found is not None:
            self._use(found[0])
        return found

    def lacks(self, tokens: tuple[int, ...]) -> bool:
        """Whether an entry of these tokens would be kept; one that makes it needless counts as used."""
        if blocks(len(tokens)) > self._capacity or len(tokens) < BLOCK:
            return False
        for other in self._entries:
            if other.tokens == tokens or (other.cuttable and other.tokens[: len(tokens)] == tokens):
                self._use(other)
                return False
        return True

    def put(self, entry: Entry, *, first: bool = False) -> None:
        """Keep it, in place of what it makes needless; not when it is needless itself or too large.
        ``first``: it is the first to go, until it has been used."""
        if not self.lacks(entry.tokens):
            self._keeper.free(entry.cache)
            return
        if entry.cuttable:
            for other in [other for other in self._entries if _begins(entry, other)]:
                self.drop(other)
        self._entries.insert(0 if first else len(self._entries), entry)
        while len(self._entries) > self._most or self.tokens > self._capacity:
            self.drop(self._entries[0])

    def drop(self, entry: Entry) -> None:
        self._entries = [other for other in self._entries if other is not entry]
        self._keeper.free(entry.cache)

    def shrink(self, tokens: int, spare: Entry | None = None) -> None:
        """Give up entries, except ``spare``, until at most ``tokens`` are held or none is left; such as make
        no room after all others."""
        while self.tokens > tokens:
            left = [entry for entry in self._entries if entry is not spare]
            if not left:
                return
            self.drop(next((entry for entry in left if self._keeper.frees(entry.cache)), left[0]))

    def give_up(self) -> bool:
        """Give up what was least recently used; False: there is nothing."""
        if not self._entries:
            return False
        self.drop(self._entries[0])
        return True

    def clear(self) -> None:
        """Give up all."""
        while self.give_up():
            pass

    def _use(self, entry: Entry) -> None:
        self._entries = [*(other for other in self._entries if other is not entry), entry]


def _begins(long: Entry, short: Entry) -> bool:
    """Whether one entry's tokens begin with the other's."""
    return long.tokens[: len(short.tokens)] == short.tokens
