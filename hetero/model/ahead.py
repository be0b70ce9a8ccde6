"""Reading ahead: the kernel fetches what a loader reads next, while it packs what it has read."""

from __future__ import annotations

import contextlib
import os

# How far ahead, bytes: more than any expert has, and nothing beside the memory that a model takes.
AHEAD = 64 << 20


class ReadAhead:
    """Of one file, which is read mostly from its beginning to its end. All of it is advice to the kernel."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._until = 0  # before this, all was asked for

    def read(self, end: int) -> None:
        """Bytes before ``end`` are about to be read."""
        start = max(self._until, end)
        # Half at a time, so that there are few calls.
        if start - end > AHEAD // 2 or not hasattr(os, "posix_fadvise"):
            return
        self._until = end + AHEAD
        with contextlib.suppress(OSError):
            os.posix_fadvise(self._descriptor, start, self._until - start, os.POSIX_FADV_WILLNEED)
