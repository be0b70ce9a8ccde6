"""How much of a prompt is read between two tokens of running answers.

Reading may take as long as making the tokens does, so that the time between two tokens at most doubles. How
long a piece takes is measured, by its size in powers of two. Below the smallest piece reading would waste
whole passes over the weights; where even that takes longer than a step, the steps that follow read nothing
until it is made up for. Time between tokens then doubles at most on average.
"""

from __future__ import annotations

LEAST = 16
# Weight of a new measurement in the moving means.
_NEW = 0.3


class Pace:
    """``most``: the largest piece."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._step_s: float | None = None
        self._piece_s: dict[int, float] = {}  # by size, a power of two
        self._credit_s = 0.0

    def piece(self) -> int:
        """Tokens that may be read now, while answers are running; 0 when none."""
        if self._credit_s < 0:
            return 0
        size = min(LEAST, self._most)
        while size < self._most and self._step_s is not None and self._expected(2 * size) <= self._step_s:
            size *= 2
        return min(size, self._most)

    def read(self, tokens: int, seconds: float, beside: bool) -> None:
        """A piece was read; ``beside`` running answers, who waited for it."""
        bucket = 1 << (tokens - 1).bit_length()
        known = self._piece_s.get(bucket, seconds)
        self._piece_s[bucket] = known + _NEW * (seconds - known)
        if beside:
            self._credit_s -= seconds

    def made(self, seconds: float) -> None:
        """A step made a token of every running answer."""
        known = seconds if self._step_s is None else self._step_s
        self._step_s = known + _NEW * (seconds - known)
        # Credit for one step and no more: nobody may read for long because nobody read before.
        self._credit_s = min(self._credit_s + seconds, 0.0)

    def _expected(self, size: int) -> float:
        """Seconds of a piece; of a size never read, by the line through the two largest below it."""
        below = sorted(bucket for bucket in self._piece_s if bucket <= size)
        if not below:
            return float("inf")
        last = below[-1]
        seconds = self._piece_s[last]
        if last == size:
            return seconds
        if len(below) == 1:
            return seconds * (size / last)  # as if nothing were fixed: too much
        each = (seconds - self._piece_s[below[-2]]) / (last - below[-2])
        return seconds + max(each, 0.0) * (size - last)
