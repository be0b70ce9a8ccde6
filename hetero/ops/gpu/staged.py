"""Experts of a prompt on their way over PCIe: in pieces, by turns into two buffers in GPU memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from hetero.hw.cuda_driver import driver
from hetero.ops.gpu import stamps
from hetero.ops.gpu.chunk_tiles import runs
from hetero.ops.gpu.lanes import UP, Lanes
from hetero.ops.gpu.pinned import PinnedArena
from hetero.trace import STREAM

PIECE = 96 << 20
"""Bytes of a staging buffer, about: whole experts, at least one."""

BUFFERS = 2

_TELLING = 16 << 20  # bytes of a piece whose time tells a rate


@dataclass(slots=True)
class Piece:
    """Experts of a staging buffer. ``ready``: the event that they are there; None before they were sent."""

    experts: list[int]
    buffer: int
    ready: Any = None
    is_sent: bool = False


class Staging:
    """The buffers of one device. ``pcie``: bytes a second, to begin with; then as measured."""

    def __init__(self, lanes: Lanes, piece: int, pcie: float) -> None:
        self._lanes, self._piece = lanes, piece
        self.memory = torch.empty(0, dtype=torch.uint8, device=lanes.device)
        self._free: list[Any] = [None] * BUFFERS  # events: a buffer's last experts were computed
        self._next_buffer = 0
        self.sent: dict[int, list[Piece]] = {}  # layer -> pieces that cross before its routing is known
        self._copied: deque[tuple[int, Any, Any]] = deque()  # bytes of pieces, and events around them
        self._pcie = pcie

    @property
    def pcie(self) -> float:
        """As measured beside the CPU's reads."""
        while self._copied and (self._copied[0][2] is None or self._copied[0][2].query()):
            nbytes, began, ended = self._copied.popleft()
            if ended is not None and nbytes >= _TELLING:
                speed = nbytes / max(began.elapsed_time(ended) * 1e-3, 1e-9)
                self._pcie += (speed - self._pcie) / 8
        return self._pcie

    def hold(self, stride: int) -> None:
        """Be large enough for experts of so many bytes."""
        needed = BUFFERS * max(1, self._piece // stride) * stride
        if needed > self.memory.numel():
            self.memory = torch.empty(needed, dtype=torch.uint8, device=self.memory.device)

    def per_piece(self, stride: int) -> int:
        return self.memory.numel() // BUFFERS // stride

    def start(self, piece: Piece) -> int:
        """Address of its buffer."""
        return self.memory.data_ptr() + piece.buffer * (self.memory.numel() // BUFFERS)

    def pieces(self, stride: int, experts: Sequence[int], sent: Sequence[Piece] = ()) -> list[Piece]:
        """What of ``experts`` was not sent yet, in staging buffers by turns."""
        on_way = {expert for piece in sent for expert in piece.experts}
        rest, size = [expert for expert in experts if expert not in on_way], self.per_piece(stride)
        made = []
        for at in range(0, len(rest), size):
            made.append(Piece(rest[at : at + size], self._next_buffer))
            self._next_buffer = (self._next_buffer + 1) % BUFFERS
        return made

    def bring(self, arena: PinnedArena, piece: Piece, behind: Any) -> None:
        """Start a piece on its way, unless it is: once its buffer is free, behind the event ``behind``."""
        if piece.is_sent:
            return
        lanes, stride = self._lanes, arena.view.shape[1]
        with lanes.stream(UP):
            lanes.wait(self._free[piece.buffer])
            lanes.wait(behind)
            stamps.start()
            began = lanes.event(timed=True)
            self._copy(arena, piece, stride)
            stamps.lap(STREAM, lane="pcie", nbytes=len(piece.experts) * stride)
            piece.ready = lanes.event(timed=True)
        self._copied.append((len(piece.experts) * stride, began, piece.ready))
        piece.is_sent = True

    def _copy(self, arena: PinnedArena, piece: Piece, stride: int) -> None:
        found = runs(piece.experts, arena.pieces)
        if not self._lanes.cuda:
            half = self.memory.numel() // BUFFERS
            room = self.memory[piece.buffer * half : (piece.buffer + 1) * half]
            for at, expert, count in found:
                to = room[at * stride : (at + count) * stride].view(count, stride)
                to.copy_(arena.view[expert : expert + count])
            return
        # By torch's own copies a hundred scattered experts would keep the host busy for milliseconds.
        target, source = self.start(piece), arena.view.data_ptr()
        stream = int(torch.cuda.current_stream(self._lanes.device).cuda_stream)
        copy_up = driver().copy_up
        for at, expert, count in found:
            copy_up(target + at * stride, source + expert * stride, count * stride, stream)

    def computed(self, piece: Piece) -> None:
        """What the current stream holds has all that reads the piece."""
        self._free[piece.buffer] = self._lanes.event()

    def take_sent(self, layer: int) -> list[Piece]:
        """What was sent ahead for a layer. What a chunk that takes turns with this one has sent for a later
        layer is given up: this one needs the buffers."""
        sent = self.sent.pop(layer, [])
        for piece in chain.from_iterable(self.sent.values()):
            # What uses the buffers next, on whatever stream, follows the current one.
            self._lanes.wait(piece.ready)
        self.sent.clear()
        return sent

    def send_ahead(self, layer: int, arena: PinnedArena, absent: Sequence[int], behind: Any) -> None:
        """Fill the buffers with what a layer will very likely need."""
        stride = arena.view.shape[1]
        pieces = self.pieces(stride, absent[: BUFFERS * self.per_piece(stride)])
        for piece in pieces:
            self.bring(arena, piece, behind)
        self.sent[layer] = pieces
