"""A second stream beside the step's, for moves between tiers."""

from __future__ import annotations

from collections.abc import Callable

import torch


class Side:
    """Work that a step need not wait for until its end. On the CPU it is done at once."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._forked = False

    def run(self, work: Callable[[], None]) -> None:
        """After everything in the current stream so far, and beside what follows until ``join``."""
        if self._stream is None:
            work()
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        self._forked = True
        with torch.cuda.stream(self._stream):
            work()

    def join(self) -> None:
        """The current stream waits for all of it."""
        if self._stream is not None and self._forked:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        self._forked = False
