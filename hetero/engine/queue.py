"""A queue that is fair to clients: they take turns, and each client's own requests keep their order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Not for two threads at once."""

    def __init__(self) -> None:
        # The first client is the one whose turn it is; no client has an empty line.
        self._lines: dict[str, deque[T]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __iter__(self) -> Iterator[T]:
        for line in self._lines.values():
            yield from line

    def push(self, client: str, item: T) -> None:
        self._lines.setdefault(client, deque()).append(item)

    def push_front(self, client: str, item: T) -> None:
        """Give back what was taken: it comes next again."""
        line = self._lines.pop(client, deque())
        line.appendleft(item)
        self._lines = {client: line, **self._lines}

    def peek(self) -> T | None:
        """What ``pop`` would take."""
        return next(iter(self), None)

    def pop(self) -> T:
        """Take the next item; its client's turn comes again after all others'. IndexError when empty."""
        client = next(iter(self._lines), None)
        if client is None:
            raise IndexError("the queue is empty")
        line = self._lines.pop(client)
        item = line.popleft()
        if line:
            self._lines[client] = line
        return item

    def remove(self, unwanted: Callable[[T], bool]) -> list[T]:
        """Take out all that ``unwanted`` holds for."""
        gone = [item for item in self if unwanted(item)]
        if gone:
            kept = {
                client: deque(item for item in line if not any(item is other for other in gone))
                for client, line in self._lines.items()
            }
            self._lines = {client: line for client, line in kept.items() if line}
        return gone
