"""What an answer must look like: a grammar that forbids every token which would leave it."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Matcher(Protocol):
    """Where one answer stands in its grammar."""

    def mask(self, scores: Tensor) -> Tensor:
        """Scores [V] on the CPU with those of forbidden tokens at minus infinity; never in place."""

    def accept(self, token: int) -> None:
        """Move on by a token that ``mask`` allowed."""

    @property
    def done(self) -> bool:
        """Nothing but the end may follow."""


class Grammar(Protocol):
    """A compiled grammar; any number of answers may use it, each through its own matcher."""

    def matcher(self) -> Matcher:
        """At the start of an answer."""
