"""What goes into a step and what comes out, one copy each: pinned buffers and their twins on the device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

_ALIGNED = 256


class Staging:
    """The inputs of steps of ``rows`` rows. ``inputs``: of the decoder; its small tensors become parts of one
    buffer; ``pages``: the table that all numbers of rows share.

    On the CPU the decoder reads the host's tensors themselves.
    """

    def __init__(self, inputs: Any, rows: int, pages: Tensor) -> None:
        self.rows = rows
        device: torch.device = inputs.tokens.device
        ple: Tensor | None = inputs.ple
        numbers = -(-3 * rows * 8 // _ALIGNED) * _ALIGNED
        size = numbers + (0 if ple is None else ple.numel() * ple.element_size())
        self._host = _pinned(size, device)
        self._device = self._host if device.type == "cpu" else self._host.to(device)
        host, there = (_numbers(one, rows) for one in (self._host, self._device))
        self._numbers = host.numpy()  # tokens, slots, positions
        self.ple = None if ple is None else self._host[numbers:].view(ple.dtype).view(ple.shape)
        self.inputs = replace(
            inputs,
            tokens=there[0],
            slots=there[1],
            positions=there[2],
            pages=pages,
            ple=None if ple is None else self._device[numbers:].view(ple.dtype).view(ple.shape),
        )
        self.idle()

    def idle(self, first: int = 0) -> None:
        """Rows from ``first`` on are of no sequence."""
        self._numbers[0, first:] = 0
        self._numbers[1, first:] = -1
        self._numbers[2, first:] = 0

    def fill(self, rows: list[tuple[int, int, int]]) -> None:
        """(token, slot, position) of the first rows; the others are idle."""
        self._numbers[:, : len(rows)] = list(zip(*rows, strict=True))
        self.idle(len(rows))

    def send(self) -> None:
        """Into the current stream: the host's buffer to the device."""
        if self._device is not self._host:
            self._device.copy_(self._host, non_blocking=True)


class Results:
    """The most likely token of each row and its logit, found on the device."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self._host = _pinned(rows * 12, device)
        self._device = self._host if device.type == "cpu" else torch.empty_like(self._host, device=device)
        self._out = _pair(self._device, rows)
        ids, best = _pair(self._host, rows)
        self._ids, self._best = ids.numpy(), best.numpy()

    def take(self, logits: Tensor) -> None:
        """Into the current stream: the largest of logits [R, V], and its copy to the host."""
        ids, best = self._out
        if self._device is self._host:
            torch.max(logits, dim=1, out=(best, ids))
            return
        from hetero.ops.gpu.route import argmax

        argmax(logits, ids)
        torch.gather(logits, 1, ids.unsqueeze(1), out=best.unsqueeze(1))
        self._host.copy_(self._device, non_blocking=True)

    def read(self, rows: int) -> tuple[list[int], list[float]]:
        """Once the stream is through."""
        return self._ids[:rows].tolist(), self._best[:rows].tolist()


def _pinned(nbytes: int, device: torch.device) -> Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


def _numbers(buffer: Tensor, rows: int) -> Tensor:
    return buffer[: 3 * rows * 8].view(torch.int64).view(3, rows)


def _pair(buffer: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    return buffer[: rows * 8].view(torch.int64), buffer[rows * 8 :].view(torch.float32)
