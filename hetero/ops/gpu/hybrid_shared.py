"""What the hybrid experts of all layers on one device have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from hetero.ops.gpu.cache import MOVES
from hetero.ops.gpu.hybrid_prefill import PIECE, Prefiller
from hetero.ops.gpu.tiers import Rates

LONGEST = 1024
"""Misses of a step up to which the split tells how many the GPU reads; beyond it as for so many."""

_FEW = 8  # misses of a step of one row

LEAD_S, OWN_S = 13.5e-6, 15e-6
"""Seconds of a layer besides reading experts: of the CPU's side, flags and barriers; of the GPU's, what its
kernels do once the bytes are there. On an H200 beside 12 cores."""


class Beside(Protocol):
    """A second stream: ``run`` puts work behind what the current stream holds and beside what follows,
    ``join`` makes the current stream wait for it."""

    def run(self, work: Callable[[], None]) -> None: ...
    def join(self) -> None: ...


class SideStream:
    """``Beside`` on a stream of its own; on the CPU the work is done at once."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._forked = False

    def run(self, work: Callable[[], None]) -> None:
        if self.stream is None:
            work()
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        self._forked = True
        with torch.cuda.stream(self.stream):
            work()

    def join(self) -> None:
        if self.stream is not None and self._forked:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
        self._forked = False


class HybridShared:
    """``share`` of the experts that are not in GPU memory are read over PCIe, the CPU computes the others;
    at most ``moves`` experts a layer and step are brought in beside it, on ``side``; one, where PCIe also has
    a share of single steps. ``defer``: so many of a
    token's experts that the CPU computes are added one layer later (``deferral``), which the port has to
    know how to do; graphs that were captured keep what they have.

    ``join`` at the end of every captured step: the graph then ends with its moves. ``rates``: what prompts
    are divided by; ``piece``: bytes of each of the two buffers by which they stream experts.
    """

    def __init__(
        self,
        device: str | torch.device,
        *,
        share: float = 0.0,
        moves: int = MOVES,
        side: Beside | None = None,
        defer: int = 0,
        rates: Rates | None = None,
        piece: int = PIECE,
    ) -> None:
        self.device = torch.device(device)
        self.moves, self.defer = moves, defer
        self.side: Beside = side or SideStream(self.device)
        # Layers with moves that no later step may overtake, and what these read: it may not be freed before.
        self._forked: dict[int, Tensor] = {}
        self.split = torch.zeros(LONGEST + 1, dtype=torch.int32, device=self.device)
        self.no_split = torch.zeros_like(self.split)  # of layers that the GPU cannot read
        self.most = torch.full((1,), moves, dtype=torch.int32, device=self.device)
        self.prefiller = Prefiller(self.device, rates=rates, piece=piece)
        self.set_share(share)

    @property
    def nbytes(self) -> int:
        """Bytes of GPU memory, once the layers are there."""
        return 2 * self.split.numel() * 4 + self.prefiller.nbytes

    def set_share(self, share: float) -> None:
        """0 to 1; captured graphs follow. Between steps only."""
        if not 0.0 <= share <= 1.0:
            raise ValueError(f"a share of {share}, must be within 0 and 1")
        self.set_split([int(misses * share + 0.5) for misses in range(LONGEST + 1)])

    def balance(self, cpu: float, pcie: float, lead: float = LEAD_S, own: float = OWN_S) -> None:
        """The split by which the later side of a layer ends soonest, for whole experts: experts a second of
        each side, and seconds that the CPU's and the GPU's take besides; captured graphs follow. Raises
        ValueError for rates that are none."""
        if min(cpu, pcie) <= 0.0 or min(lead, own) < 0.0:
            raise ValueError(f"rates of {cpu} and {pcie} experts/s with {lead} and {own} s")
        taken, table = 0, []
        for misses in range(LONGEST + 1):

            def ends(count: int, misses: int = misses) -> float:
                return max(lead + (misses - count) / cpu, own + count / pcie if count else 0.0)

            while taken < misses and ends(taken + 1) < ends(taken):
                taken += 1
            table.append(taken)
        self.set_split(table)

    def set_split(self, table: Sequence[int]) -> None:
        """``table`` [LONGEST + 1]: of so many misses how many the GPU reads. Between steps only."""
        values = torch.tensor(table, dtype=torch.int32)
        if values.shape != self.split.shape or bool((values < 0).any()):
            raise ValueError(f"a split needs {LONGEST + 1} counts")
        self.split.copy_(values)
        # Where the GPU reads experts in place, moves that do not end with a layer's dense part slow it down.
        self.set_most(min(1, self.moves) if bool(values[: _FEW + 1].any()) else self.moves)

    def set_most(self, moves: int) -> None:
        """Moves of a layer and step from now on, up to those that were asked for in the beginning; captured
        graphs follow. ``set_split`` sets it as well. Between steps only."""
        if not 0 <= moves <= self.moves:
            raise ValueError(f"{moves} moves a step, at most {self.moves}")
        self.most.fill_(moves)

    def shares(self) -> Tensor:
        """The split, int32 [LONGEST + 1], on the CPU."""
        return self.split.cpu()

    def fork(self, layer: int, ids: Tensor, work: Callable[[Tensor], None]) -> None:
        """Start what moves the experts of a layer whose step uses ``ids``."""
        self._forked[layer] = ids
        self.side.run(partial(work, ids))

    def await_moves(self, layer: int) -> None:
        """The current stream waits for those of a layer, if any were started since the last ``join``."""
        if layer in self._forked:
            self.join()

    def join(self) -> None:
        """The current stream waits for the moves so far: at the end of every captured step."""
        self.side.join()
        self._forked.clear()
