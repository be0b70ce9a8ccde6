"""The experts of one layer that sit in GPU memory, over all of them in pinned host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from hetero.ops.gpu import cache_kernels

HALF_LIFE = 64.0
"""Steps after which a use counts half in an expert's frequency."""

MEMORY = 12.0
"""Steps after which what was seen of a class of experts counts half: few, so that moves soon end where
routing stops being local."""

PRIOR = 32.0
"""Experts of the usual chance that are added to what was seen of a class."""

GAIN = 0.04
"""By how much the chance of a use must be higher for an expert to take another one's slot."""

MOVES, RESERVE = 2, 3
"""Experts that a step may bring beside its own work; slots kept free for those that it reads over PCIe."""

_FIRST = 16.0
_OLD = 1 << 20
# Words that a program of ``fetch`` has on their way, and programs. With half of the bytes an expert of 2.8 MB
# took 75 us on an H200, 37 GB/s.
_WORDS, _FETCHERS = 4096, 24
_BRINGERS = 32
"""Programs of ``bring``, of twice the words, for which a step waits: a megabyte on its way keeps PCIe busy
without a gap."""


class ExpertCache:
    """``slots`` of the experts in ``host``, uint8 [experts, stride], which on a GPU must be pinned where
    experts are to come after ``seed``. ``moves``: most of a step.

    Begins with the first experts. Nothing here waits for the device, and all state is on it, so that ``move``
    can be captured in a graph; ``seed``, ``unlearn``, ``observe`` and ``counts`` are for outside.
    """

    def __init__(
        self,
        host: Tensor,
        slots: int,
        device: str | torch.device,
        *,
        moves: int = MOVES,
        top_k: int = 1,
    ) -> None:
        experts, stride = host.shape
        if not 0 <= slots <= experts:
            raise ValueError(f"{slots} slots for {experts} experts")
        self.host, self.slots, self.device = host, slots, torch.device(device)
        self.experts, self.stride, self.top_k = experts, stride, top_k
        # With a handful of slots each one counts; with all experts here nothing is ever read.
        self.reserve = RESERVE if 8 <= slots < experts else 0
        self.moves = min(moves, slots)
        # Never empty: kernels take it as a pointer that they know the type of.
        self.memory = torch.empty(max(slots, 1), stride, dtype=torch.uint8, device=device)

        def state(count: int, fill: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.full((count,), fill, dtype=dtype, device=device)

        self.slot_of = state(experts, -1)
        self.free, self.incoming = state(max(self.reserve, 1), -1), state(max(self.reserve, 1), -1)
        self._moves = state(2 * max(self.moves, 1), -1)
        self._most = state(1, self.moves)
        self._age, self._often = state(experts, _OLD), state(experts, 0, torch.float32)
        cells = cache_kernels.CELLS.value
        # As if each class had been seen a little, and its frequency had told the chance.
        rates = 2.0 ** (torch.arange(cells) % cache_kernels.OFTEN.value - 8.0)
        self._seen = torch.full((cells,), _FIRST, device=device)
        self._usual = (rates * _FIRST).to(device)
        self._used = self._usual.clone()
        self.totals = state(5, 0, torch.int64)
        self.chosen = state(experts, 0, torch.int64)  # how often each, for statistics
        self._decay, self._fade = 2.0 ** (-1.0 / HALF_LIFE), 2.0 ** (-1.0 / MEMORY)
        self.sizes: dict[str, Any] = {
            "EXPERTS": experts,
            "WIDTH": triton.next_power_of_2(experts),
            "RESERVE": self.reserve,
        }
        self._fill(torch.arange(experts))

    @property
    def nbytes(self) -> int:
        """Bytes of the slots."""
        return self.slots * self.stride

    @property
    def cache_at(self) -> int:
        """Address of slot 0."""
        return self.memory.data_ptr()

    @property
    def host_at(self) -> int:
        """Address of expert 0 in host memory, which the device shares (``PinnedArena`` checks it)."""
        return self.host.data_ptr()

    def seed(self, counts: Sequence[float]) -> None:
        """Fill the slots with the experts of the highest ``counts`` [experts], which also become their
        frequencies."""
        weights = torch.as_tensor(counts, dtype=torch.float64)
        if weights.shape != (self.experts,):
            raise ValueError(f"{list(weights.shape)} counts for {self.experts} experts")
        rates = (weights / weights.sum().clamp(min=1e-30) * self.top_k).clamp(max=1.0)
        self._often.copy_((rates / (1.0 - self._decay)).float())
        self._age.fill_(_OLD)
        self._fill(weights.argsort(descending=True, stable=True))

    def _fill(self, order: Tensor) -> None:
        """Slots take the first experts of ``order``, but for the reserve."""
        held = self.slots - self.reserve
        chosen = order[:held]
        for slot, expert in enumerate(chosen.tolist()):
            self.memory[slot].copy_(self.host[expert])
        self.slot_of.fill_(-1)
        self.slot_of[chosen.to(self.device)] = torch.arange(held, dtype=torch.int32, device=self.device)
        self.incoming.fill_(-1)
        if self.reserve:
            self.free.copy_(torch.arange(held, self.slots, dtype=torch.int32))

    def observe(self, uses: Tensor, steps: int) -> None:
        """Count ``uses`` [experts] of that many tokens, on the device, as if decode had made them: a prompt
        tells what its answer will use."""
        self.chosen.add_(uses)
        recent = min(steps, int(2 * HALF_LIFE))
        kept = self._decay**recent
        steady = uses.to(torch.float32) / steps * ((1.0 - kept) / (1.0 - self._decay))
        self._often.mul_(kept).add_(steady)

    def unlearn(self) -> None:
        """Forget all uses so far, which were of no text; what is held stays. Between steps only."""
        self._age.fill_(_OLD)
        self._often.zero_()
        self._seen.fill_(_FIRST)
        self._used.copy_(self._usual)
        self.chosen.zero_()

    def choose(self, ids: Tensor, most: Tensor | None = None, *, soon: bool = False) -> None:
        """In a step that uses ``ids`` int64 [T, k], once it was looked up: learn from it, and choose the
        experts that ``fetch`` shall bring, behind this, and behind the step's own experts unless ``soon``.
        ``most`` int32 [1] on the device: no more than so many."""
        cache_kernels.choose[(1,)](
            *self._learning(ids, most), **self.sizes, MOVES=self.moves, SOON=soon, num_warps=8
        )

    def bring(self, coming: Tensor, ids: Tensor | None = None, most: Tensor | None = None) -> None:
        """Copy the experts that a step's look-up has put into ``coming`` (``cache_kernels.find``). With
        ``ids``: ``choose`` soon, in the same kernel."""
        learns = ids is not None
        programs = 1 if self.device.type == "cpu" else _BRINGERS
        cache_kernels.bring[(programs + learns,)](
            coming, self.memory, self.stride, *self._learning(coming if ids is None else ids, most),
            **self.sizes, MOVES=self.moves, LEARN=learns, WORDS=2 * _WORDS, num_warps=8,
        )  # fmt: skip

    def _learning(self, ids: Tensor, most: Tensor | None) -> tuple[Any, ...]:
        """Arguments of ``choose``."""
        return (
            ids, self.slot_of, self.free, self.incoming, self._age, self._often, self._seen, self._used,
            self.chosen, self._moves, self._most if most is None else most, self.totals, ids.numel(),
            self._decay, self._fade, PRIOR, GAIN,
        )  # fmt: skip

    def fetch(self) -> None:
        """Bring the experts that ``choose`` has told."""
        programs = 1 if self.device.type == "cpu" else _FETCHERS
        cache_kernels.fetch[(programs,)](
            self._moves, self.memory, self.cache_at, self.host_at, self.stride, MOVES=self.moves, WORDS=_WORDS
        )
