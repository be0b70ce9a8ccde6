"""What the hybrid experts of all layers on one device have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hetero.config import settings
from hetero.ops.gpu.cache import MOVES
from hetero.ops.gpu.hybrid_prefill import Prefiller
from hetero.ops.gpu.staged import PIECE
from hetero.ops.gpu.tiers import Rates

LONGEST = 1024
"""Misses of a step up to which the split tells how many the GPU reads; beyond it as for so many."""

SIZES = (1, 2, 4, 8, 16)
"""Rows of steps that have a split of their own; other numbers take that of the next one."""

_FEW = 8  # misses of a step of one row

MOST_STAGED = 64
"""Experts that a step brings and does not keep, at most."""

LEAD_S, OWN_S = 13.5e-6, 15e-6
"""Seconds of a layer besides reading experts, where nobody has measured them: of the CPU's side, flags and
barriers; of the GPU's, what its kernels do once the bytes are there. On an H200 beside 12 cores."""


class Sides(NamedTuple):
    """What the two sides of a layer take in a step of so many rows: seconds of each further expert, and
    besides (``lead`` of the CPU's, ``own`` of the GPU's)."""

    cpu: float
    pcie: float
    lead: float = LEAD_S
    own: float = OWN_S

    def split(self, longest: int = LONGEST) -> list[int]:
        """[longest + 1]: of so many misses how many the GPU reads so that the later side ends soonest, for
        whole experts."""
        if min(self.cpu, self.pcie) <= 0.0 or min(self.lead, self.own) < 0.0:
            raise ValueError(f"{self}: an expert takes some time on either side")
        taken, table = 0, []
        for misses in range(longest + 1):

            def ends(count: int, misses: int = misses) -> float:
                theirs = self.lead + (misses - count) * self.cpu if count < misses else 0.0
                return max(theirs, self.own + count * self.pcie if count else 0.0)

            while taken < misses and ends(taken + 1) < ends(taken):
                taken += 1
            table.append(taken)
        return table


class Beside(Protocol):
    """A second stream: ``run`` puts work behind what the current stream holds and beside what follows,
    ``join`` makes the current stream wait for it. ``mark`` names what it holds so far, for ``wait``, by which
    the current stream waits for no more than that."""

    def run(self, work: Callable[[], None]) -> None: ...
    def join(self) -> None: ...
    def mark(self) -> Any: ...
    def wait(self, mark: Any) -> None: ...


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

    def mark(self) -> Any:
        return None if self.stream is None else self.stream.record_event()

    def wait(self, mark: Any) -> None:
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_event(mark)


class HybridShared:
    """``share`` of the experts that are not in GPU memory are read over PCIe, the CPU computes the others;
    at most ``moves`` experts a layer and step are brought in beside it, on ``side``; fewer where PCIe also
    has a share of the step (``set_split``). ``defer``: so many of a token's experts that the CPU computes are
    added one layer later (``deferral``), which the port has to know how to do; graphs that were captured keep
    what they have.

    ``early``: what crosses PCIe for a step does so from its submit on, into GPU memory, each expert once, and
    is computed from there; else the kernels that compute it read it where it lies. ``soon``: moves follow
    that at once, before the step's sum is there; else they begin when the GPU's own share has ended. None: as
    HETERO_PCIE says. Both are read when a step is captured. What is brought and does not stay lies in the
    buffers of prompts meanwhile: a step and a chunk of a prompt follow each other on one stream.

    ``turns``: whether what is recorded from now on is halves of a step that take turns. They read late and
    move after the second one: else that one's look-up would wait for all that the first one brings.

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
        early: bool | None = None,
        soon: bool | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.moves, self.defer = moves, defer
        said = settings().pcie == "early"
        self.early = said if early is None else early
        self.soon = said if soon is None else soon
        self.side: Beside = side or SideStream(self.device)
        # Layers with moves that no later step may overtake, and what these read: it may not be freed before.
        self._forked: dict[int, Tensor] = {}
        self.turns = False
        self._staged = False  # a step that was not collected has experts in the buffers of prompts
        self._tables = [[0] * (LONGEST + 1) for _ in SIZES]
        self._split = torch.zeros(len(SIZES), LONGEST + 1, dtype=torch.int32, device=self.device)
        self.no_split = torch.zeros(
            LONGEST + 1, dtype=torch.int32, device=self.device
        )  # of what no GPU reads
        self._most = torch.full((len(SIZES), 1), moves, dtype=torch.int32, device=self.device)
        self.prefiller = Prefiller(self.device, rates=rates, piece=piece, ahead=said)
        self.set_share(share)

    @property
    def nbytes(self) -> int:
        """Bytes of GPU memory, once the layers are there."""
        return self._split.nbytes + self.no_split.nbytes + self._most.nbytes + self.prefiller.nbytes

    # -- the split of a step

    def set_share(self, share: float) -> None:
        """0 to 1; captured graphs follow. Between steps only."""
        if not 0.0 <= share <= 1.0:
            raise ValueError(f"a share of {share}, must be within 0 and 1")
        self.set_split([int(misses * share + 0.5) for misses in range(LONGEST + 1)])

    def balance(self, sides: Sequence[Sides]) -> None:
        """The split of steps of each of ``SIZES`` rows by what they take; captured graphs follow. Between
        steps only. Raises ValueError for times that are none."""
        self.set_split([one.split() for one in sides])

    def set_split(self, table: Sequence[int] | Sequence[Sequence[int]]) -> None:
        """``table`` [LONGEST + 1], or one for each of ``SIZES``: of so many misses how many the GPU reads.
        Between steps only.

        Sets how many moves there may be, too: where nothing is read, all that were asked for. Else one, since
        moves that do not end with a layer's dense part slow the next one's reads; but two in steps of four
        rows or more, which are long enough, if they begin soon (benchmarks/step_model.py).
        """
        values = torch.tensor(table, dtype=torch.int32)
        if values.dim() == 1:
            values = values.expand(len(SIZES), -1)
        if values.shape != self._split.shape or bool((values < 0).any()):
            raise ValueError(f"a split needs {LONGEST + 1} counts")
        self._split.copy_(values)
        self._tables = values.tolist()
        for at, rows in enumerate(SIZES):
            reads = any(self._tables[at][: rows * _FEW + 1])
            self._set_most(at, min(2 if self.soon and rows > 2 else 1, self.moves) if reads else self.moves)

    def set_most(self, moves: int) -> None:
        """Moves of a layer and step from now on, up to those that were asked for in the beginning; captured
        graphs follow. ``set_split`` sets it as well. Between steps only."""
        if not 0 <= moves <= self.moves:
            raise ValueError(f"{moves} moves a step, at most {self.moves}")
        for at in range(len(SIZES)):
            self._set_most(at, moves)

    def _set_most(self, at: int, moves: int) -> None:
        self._most[at].fill_(moves)

    def shares(self) -> Tensor:
        """The splits, int32 [SIZES, LONGEST + 1], on the CPU."""
        return self._split.cpu()

    def split_of(self, rows: int) -> Tensor:
        """int32 [LONGEST + 1] on the device: of a step of so many rows."""
        return self._split[_size(rows)]

    def most_of(self, rows: int) -> Tensor:
        """int32 [1] on the device: moves of a step of so many rows."""
        return self._most[_size(rows)]

    # -- what crosses PCIe beside a step

    @property
    def at_once(self) -> bool:
        """Whether the moves of what is recorded now are ``soon``."""
        return self.soon and not self.turns

    def stages(self, rows: int, stride: int) -> int:
        """How many experts of ``stride`` bytes that do not stay a step of so many rows may bring; 0: it reads
        in place."""
        if not self.early or self.turns or self._staged or not any(self._tables[_size(rows)]):
            return 0
        return min(self.staging.numel() // stride, MOST_STAGED)

    @property
    def staging(self) -> Tensor:
        """Where a step's experts are brought that do not stay, uint8 on the device."""
        return self.prefiller.staging

    def stage(self, bring: Callable[[], None]) -> Any:
        """Start bringing what the step that was just submitted reads; a mark for ``staged``."""
        self._staged = True
        self.side.run(bring)
        return self.side.mark()

    def staged(self, mark: Any) -> None:
        """The current stream waits until that is there."""
        self.side.wait(mark)

    def unstage(self) -> None:
        """What was brought has been computed, or never will be."""
        self._staged = False

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


def _size(rows: int) -> int:
    return next((at for at, size in enumerate(SIZES) if size >= rows), len(SIZES) - 1)
