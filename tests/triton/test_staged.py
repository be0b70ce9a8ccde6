"""Pieces of experts on their way: what is given up."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from hetero.ops.gpu.lanes import Lanes
from hetero.ops.gpu.staged import Piece, Staging


class Waits(Lanes):
    """Tells what the current stream waited for."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.events: list[Any] = []

    def wait(self, event: Any) -> None:
        self.events.append(event)


def test_buffers_are_not_free_while_given_up_pieces_cross() -> None:
    lanes = Waits()
    staging = Staging(lanes, 4096, 1e9)
    wanted = [Piece([1, 2], 0, "first", True)]
    staging.sent = {3: wanted, 5: [Piece([7], 1, "second", True), Piece([8], 0, "third", True)]}
    assert staging.take_sent(3) == wanted
    assert lanes.events == ["second", "third"]
    assert staging.sent == {}
