"""What of a sequence is kept when its slot goes on or is given back, so that others may begin from it.

Keys and values stay in their pages, which are held once more. What a slot has besides (states of recurrent
layers, the last inputs of convolutions) is copied to main memory, where a budget says how many copies there
may be: while a prompt is read, at places within it, at which every layer tells its state as it comes by; or
as it is between two steps.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from hetero.core import MachineError
from hetero.decode.inputs import PAGE, Mark
from hetero.engine.gpu.pages import Pages, settled
from hetero.engine.gpu.parts import Decoder
from hetero.hw import memory
from hetero.hw.memory import gib

log = logging.getLogger("hetero.engine")

_ALIGNED = 256
_PART = 8  # of the main memory that is left, states take one part at most


class Held(Protocol):
    """What a slot may begin from: pages, a state besides, and the last tokens."""

    @property
    def pages(self) -> Sequence[int]: ...
    @property
    def state(self) -> Tensor | None: ...
    @property
    def last(self) -> list[int]: ...


class Kept:
    """A sequence of which ``pages`` hold the keys and values, and ``state`` the rest (None: there is none).
    ``last``: its last tokens, as the runner remembers them."""

    def __init__(self, keeping: Keeping, pages: Sequence[int], state: Tensor | None, last: list[int]) -> None:
        self._keeping, self.state, self.last = keeping, state, last
        self.pages: Sequence[int] = list(pages)
        self._open = True
        keeping.pages.keep(self.pages)

    def close(self) -> None:
        """Nobody begins from it any more. Again: nothing."""
        if self._open:
            self._open = False
            self._keeping.pages.drop(self.pages)
            self._keeping.give(self.state)


class Marked:
    """Where a state goes that layers tell one after the other. ``at``: tokens of the sequence; ``slots``,
    ``places``: the parts of it in the slot, and where each goes."""

    def __init__(self, at: int, slots: Sequence[Tensor], places: Sequence[Tensor], state: Tensor) -> None:
        self.at, self.state = at, state
        self._places = {there.data_ptr(): here for there, here in zip(slots, places, strict=True)}

    def save(self, states: Sequence[Tensor]) -> None:
        for state in states:
            self._places[state.data_ptr()].copy_(state, non_blocking=True)

    @property
    def mark(self) -> Mark:
        return Mark(self.at, self.save)


class Keeping:
    """What a runner keeps of its slots. ``budget``: bytes of main memory for states; less where little is
    left. All that touches the device is in the order of the runner's stream, and waits for nothing."""

    def __init__(self, decoder: Decoder, pages: Pages, device: torch.device, budget: int) -> None:
        self.pages, self._decoder, self._device = pages, decoder, device
        sizes = [(state.shape, state.dtype) for state in decoder.states(0)]
        self._views: list[tuple[int, int, torch.dtype, torch.Size]] = []
        self._size = 0
        for shape, dtype in sizes:
            nbytes = prod(shape) * dtype.itemsize
            self._views.append((self._size, nbytes, dtype, shape))
            self._size += -(-nbytes // _ALIGNED) * _ALIGNED
        self._spare: list[Tensor] = []
        self._made = 0
        self.most = min(budget, _affordable()) // self.state_bytes if sizes else 0

    @property
    def state_bytes(self) -> int:
        """Of main memory, that one state takes: pinned memory comes in powers of two."""
        on_gpu = self._device.type == "cuda"
        return 1 << max(self._size - 1, 0).bit_length() if on_gpu else self._size

    @property
    def cuttable(self) -> bool:
        """Whether others may begin from any beginning of a sequence."""
        return not self._views

    @property
    def able(self) -> bool:
        """Whether anything can be kept."""
        return self.cuttable or self.most > 0

    def told(self) -> str | None:
        """For a person, what states take; None where there are none."""
        if self.cuttable:
            return None
        if not self.able:
            return (
                f"prompts that begin alike are read anew: a state takes {gib(self.state_bytes)} of main "
                "memory, more than HETERO_SNAPSHOTS and what is left allow"
            )
        return (
            f"up to {self.most} states of sequences are kept in main memory for prompts that begin alike, "
            f"{gib(self.state_bytes)} each"
        )

    def prepare(self, count: int) -> None:
        """Take the memory of so many states, or of as many as there may be, before the first is kept: to pin
        it takes milliseconds each, and the device may have to be idle."""
        while self._made < count and (state := self._new()) is not None:
            self._spare.append(state)

    # -- keeping

    def mark(self, slot: int, at: int, spare: bool) -> Marked | None:
        """Of a prompt that is about to be read into a slot. ``spare``: give nothing up for it. None: there is
        no memory for it."""
        state = self._taken(spare)
        return None if state is None else Marked(at, self._decoder.states(slot), self._parts(state), state)

    def marked(self, marked: Marked, slot: int, last: list[int]) -> Kept:
        """What was told, once the prompt is read."""
        return Kept(self, self.pages.held(slot)[: -(-marked.at // PAGE)], marked.state, last)

    def now(self, slot: int, last: list[int]) -> Kept | None:
        """A slot as it is. None: no memory for it."""
        state: Tensor | None = None
        if not self.cuttable:
            state = self._taken(spare=False)
            if state is None:
                return None
            for there, here in zip(self._decoder.states(slot), self._parts(state), strict=True):
                here.copy_(there, non_blocking=True)
        return Kept(self, self.pages.held(slot), state, last)

    def give(self, state: Tensor | None) -> None:
        """Memory of a state that is not needed any more."""
        if state is not None:
            self._spare.append(state)

    # -- beginning from what was kept

    def resume(self, slot: int, pages: Sequence[int], used: int, state: Tensor | None) -> None:
        """Let a slot be what others hold, with ``used`` tokens. Raises HeteroError where no page is left for
        those that it will write to."""
        count = -(-used // PAGE)
        self.pages.share(slot, pages[:count])
        if state is not None:
            places = zip(self._decoder.states(slot), self._parts(state), strict=True)
            for there, here in places:
                there.copy_(here, non_blocking=True)
        for index in range(settled(used, self._decoder.grain), count):
            old = self.pages.own(slot, index)
            if old is not None:
                new = self.pages.held(slot)[index]
                for part in self._decoder.paged:
                    part[new].copy_(part[old])

    def _taken(self, spare: bool) -> Tensor | None:
        while not self._spare and self._made >= self.most and not spare and self.pages.reclaim():
            pass
        if self._spare:
            return self._spare.pop()
        return self._new()

    def _new(self) -> Tensor | None:
        if self._made >= self.most:
            return None
        try:
            made = _memory(self._size, self._device)
        except RuntimeError as error:
            self.most = self._made
            log.warning("no more states of sequences are kept than %d: %s", self._made, error)
            return None
        self._made += 1
        return made

    def _parts(self, state: Tensor) -> list[Tensor]:
        return [
            state[first : first + nbytes].view(dtype).view(shape)
            for first, nbytes, dtype, shape in self._views
        ]


def _memory(nbytes: int, device: torch.device) -> Tensor:
    """Of the host, which ``device`` copies from and to by itself. Raises RuntimeError where there is none."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


def _affordable() -> int:
    try:
        return memory.available().bytes // _PART
    except MachineError:
        return 0
