"""The experts of one layer that sit in GPU memory, over all of them in pinned host memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from hetero.ops.gpu import cache_kernels

HALF_LIFE = 64.0
"""Steps after which a use counts half."""

MARGIN = 1.5
"""How much better an expert must be than the one whose slot it takes."""

_WORDS = 4096


class ExpertCache:
    """``slots`` of the experts in ``host``, uint8 [experts, stride], which on a GPU must be pinned.

    Nothing here waits for the device, and all state is on it, so that every method but ``seed`` and
    ``counts`` can be captured in a graph.
    """

    def __init__(self, host: Tensor, slots: int, device: str | torch.device) -> None:
        experts, stride = host.shape
        if not 1 <= slots <= experts:
            raise ValueError(f"{slots} slots for {experts} experts")
        self.host, self.slots, self.device = host, slots, torch.device(device)
        self.memory = torch.empty(slots, stride, dtype=torch.uint8, device=device)
        self._slot_of, self._expert_in, self._move = (
            torch.full((count,), -1, dtype=torch.int32, device=device) for count in (experts, slots, 2)
        )
        self._scores = torch.zeros(experts, dtype=torch.float32, device=device)
        self._place = torch.zeros(experts, dtype=torch.int64, device=device)
        self._counts = torch.zeros(3, dtype=torch.int64, device=device)
        self._decay = 2.0 ** (-1.0 / HALF_LIFE)
        sizes = {"EXPERTS": experts, "WIDTH": triton.next_power_of_2(experts)}
        self._sizes = sizes
        self._room = sizes | {"SLOTS": slots, "ROOM": triton.next_power_of_2(slots)}

    def seed(self, counts: Sequence[float]) -> None:
        """Fill the slots with the experts of the highest ``counts`` [experts], which become their scores as
        of an expert that was used for long."""
        weights = torch.as_tensor(counts, dtype=torch.float32)
        if weights.shape != (self.host.shape[0],):
            raise ValueError(f"{list(weights.shape)} counts for {self.host.shape[0]} experts")
        steady = 1.0 / (1.0 - self._decay)
        self._scores.copy_(weights / weights.max().clamp(min=1e-30) * steady)
        order = weights.argsort(descending=True, stable=True)[: self.slots]
        self.memory.copy_(self.host[order.to(self.host.device)])
        self._expert_in.copy_(order)
        self._slot_of.fill_(-1)
        self._slot_of[order.to(self.device)] = torch.arange(self.slots, dtype=torch.int32, device=self.device)

    def look_up(self, ids: Tensor, share: float) -> tuple[Tensor, Tensor]:
        """(addresses, ids for the CPU), both int64 like ``ids`` [T, k]; see ``cache_kernels.look_up``.
        ``share`` of the experts that are not in GPU memory are read from host memory by the GPU."""
        ids = ids.long().contiguous()
        addresses, cpu_ids = torch.empty_like(ids), torch.empty_like(ids)
        cache_kernels.look_up[(1,)](
            ids, self._slot_of, self._scores, self._place, addresses, cpu_ids, self._counts,
            self.memory.data_ptr(), self.host.data_ptr(), self.host.shape[1], ids.numel(), self._decay, share,
            PAIRS=triton.next_power_of_2(ids.numel()), **self._sizes,
        )  # fmt: skip
        return addresses, cpu_ids

    def move(self, margin: float = MARGIN) -> None:
        """Bring in the best expert that is not here, if it is worth a slot. The bytes of one expert at
        most."""
        cache_kernels.choose[(1,)](
            self._slot_of, self._expert_in, self._scores, self._move, margin, **self._room
        )
        words = self.host.shape[1] // 4
        cache_kernels.fetch[(-(-words // _WORDS),)](
            self._move, self.host.view(torch.int32), self.memory.view(torch.int32), words, WORDS=_WORDS
        )
        cache_kernels.publish[(1,)](self._move, self._slot_of)

    def counts(self) -> tuple[int, int, int]:
        """Experts found in GPU memory, read from host memory, left to the CPU, since the start; waits."""
        here, host, cpu = self._counts.tolist()
        return int(here), int(host), int(cpu)
