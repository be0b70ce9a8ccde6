"""Routed experts in GPU memory, in the packed layout that the CPU's experts have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hetero.core import ExpertSpec, InputError, MachineError
from hetero.cpu import CpuExperts
from hetero.formats import Format
from hetero.hw.memory import gib
from hetero.ops.gpu.launch import ExpertLaunch, Sorted, check_format, sorted_places, tiling

EXACT_ROWS = 16
"""Up to so many tokens a step no token's result depends on another's; larger steps use tensor cores."""

# Of a large step so many are computed at a time: there is a float32 result for each.
_MOST_PAIRS = 16384


class GpuExperts:
    """Packed experts of one MoE block on ``device``, and the operator over them.

    The interface of ``hetero.cpu.CpuExperts``, but that tensors stay on the device and what is staged (a
    foreign activation, a norm after each expert) is refused. Raises InputError for a format that the kernels
    do not read, MachineError where the device has too little memory.
    """

    def __init__(
        self,
        spec: ExpertSpec,
        fmt: Format,
        device: str | torch.device,
        down_format: Format | None = None,
    ) -> None:
        check_format(spec, fmt, device, down_format)
        self.spec, self.format, self.device = spec, fmt, torch.device(device)
        self.down_format = down_format or fmt
        # The CPU's packer fills one expert at a time; those whose parts have not all arrived wait here.
        self._packers: dict[int, CpuExperts] = {}
        self._free = [self._packer()]
        self._stride = self._free[0].whole_bytes
        self._done: set[int] = set()
        try:
            self._memory = torch.empty(spec.num_experts, self._stride, dtype=torch.uint8, device=self.device)
        except torch.OutOfMemoryError:
            free = torch.cuda.mem_get_info(self.device)[0]
            what = f"{spec.num_experts} experts of {spec.hidden} x {spec.intermediate} in {fmt}"
            needed = gib(spec.num_experts * self._stride)
            raise MachineError(f"{what} need {needed} on {device}, {gib(free)} is free") from None
        self._launch = ExpertLaunch(spec, fmt, self.device, self.down_format)

    @property
    def nbytes(self) -> int:
        """Bytes of the packed experts."""
        return self._memory.numel()

    def format_of(self, part: Any) -> Format:
        """The format of a part; a bias is float32."""
        if part.endswith("_bias"):
            return Format("f32")
        return self.down_format if part == "down" else self.format

    def put(self, expert: int, part: Any, tensor: Tensor) -> None:
        """Pack a part of an expert, as ``CpuExperts.put`` does; a whole expert moves to the device."""
        self._packer_of(expert, part).put(0, part, tensor)
        self._move(expert)

    def put_codes(self, expert: int, part: Any, codes: Tensor, scales: Tensor, extra: Tensor | None) -> None:
        """The same of values that are quantised already, as ``CpuExperts.put_codes``."""
        self._packer_of(expert, part).put_codes(0, part, codes, scales, extra)
        self._move(expert)

    def put_ggml(self, expert: int, part: Any, type_name: str, data: Any) -> None:
        """The same of the blocks of a GGUF file, as ``CpuExperts.put_ggml``."""
        self._packer_of(expert, part).put_ggml(0, part, type_name, data)
        self._move(expert)

    def _packer(self) -> CpuExperts:
        return CpuExperts(replace(self.spec, num_experts=1), self.format, self.down_format)

    def _packer_of(self, expert: int, part: Any) -> CpuExperts:
        if not 0 <= expert < self.spec.num_experts:
            raise InputError(f"expert {expert} {part}: there are {self.spec.num_experts} experts")
        if expert in self._done:
            raise InputError(f"expert {expert} {part}: given twice")
        if expert not in self._packers:
            self._packers[expert] = self._free.pop() if self._free else self._packer()
        return self._packers[expert]

    def _move(self, expert: int) -> None:
        packer = self._packers[expert]
        if packer.complete(0):
            host = torch.empty(self._stride, dtype=torch.uint8)
            packer.save(0, host.numpy().data)
            self._memory[expert].copy_(host)
            self._done.add(expert)
            packer.vacate(0)
            self._free.append(self._packers.pop(expert))
            if len(self._done) == self.spec.num_experts:
                self._free.clear()

    def missing(self) -> list[tuple[int, str]]:
        """Parts that have not been put, by expert."""
        parts = [p for p in ("gate", "up", "down") if self.spec.has_gate or p != "gate"]
        parts += [f"{part}_bias" for part in parts] if self.spec.has_bias else []
        parts += ["order"] if self.format.ordered else []
        here = {expert: {part for _, part in packer.missing()} for expert, packer in self._packers.items()}
        return [
            (expert, part)
            for expert in range(self.spec.num_experts)
            if expert not in self._done
            for part in parts
            if part in here.get(expert, parts)
        ]

    def addresses(self, ids: Tensor) -> Tensor:
        """int64 like ``ids``: where each expert begins; 0 for ids outside [0, experts)."""
        here = (ids >= 0) & (ids < self.spec.num_experts)
        return torch.where(here, self._memory.data_ptr() + ids.long() * self._stride, 0)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Weighted sum of the experts: x [T, hidden], ids and weights [T, k] -> float32 [T, hidden], all on
        the device. ids outside [0, experts) contribute zero."""
        x, ids, weights = x.contiguous(), ids.contiguous(), weights.float().contiguous()
        if x.shape[0] <= EXACT_ROWS:
            launch = self._launch
            return launch.few(self._memory, launch.rows(x), self.addresses(ids), weights)
        tokens = max(1, _MOST_PAIRS // ids.shape[1])
        chunks = [slice(at, at + tokens) for at in range(0, x.shape[0], tokens)]
        return torch.cat([self._many(x[rows], ids[rows], weights[rows]) for rows in chunks])

    def _many(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Pairs sorted by expert, a tile of rows at a time."""
        experts, pairs = self.spec.num_experts, ids.numel()
        shape = tiling(pairs / experts)
        flat = ids.flatten().long()
        keys = torch.where((flat >= 0) & (flat < experts), flat, experts)
        order, places = sorted_places(keys)
        tiles, of_tile = _tiles(keys, experts, shape.rows)
        out = torch.empty(x.shape[0], self.spec.hidden, dtype=torch.float32, device=self.device)
        # Pairs that nobody computes come last; their rows of y are not read.
        places = torch.where(keys < experts, places, -1)
        self._launch.many(
            self._memory, x.bfloat16(), weights, Sorted(order, places, tiles, self.addresses(of_tile)),
            rows=(0, pairs), tiles=(0, len(tiles)), out=out, room=self._launch.rooms(pairs), shape=shape,
            first=True,
        )  # fmt: skip
        return out


def _tiles(keys: Tensor, experts: int, rows: int) -> tuple[Tensor, Tensor]:
    """Pairs sorted by expert, cut into tiles of so many rows: (first and last + 1 of each int32 [tiles, 2],
    its expert [tiles]); keys [pairs] from ``experts`` on are none. As many tiles as there may ever be, so
    that nothing is read back: the last are empty."""
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=keys.device)
    counts.scatter_add_(0, keys, torch.ones_like(keys))
    counts = counts[:experts]
    of_each = (counts + rows - 1) // rows
    most = keys.numel() // rows + min(experts, keys.numel())
    ends = of_each.cumsum(0)
    tile = torch.arange(most, device=keys.device)
    expert = torch.searchsorted(ends, tile, right=True)
    known = expert.clamp(max=experts - 1)
    within = tile - (ends - of_each)[known]
    first = (counts.cumsum(0) - counts)[known] + within * rows
    last = torch.minimum(first + rows, counts.cumsum(0)[known])
    empty = expert >= experts
    return torch.stack([torch.where(empty, 0, first), torch.where(empty, 0, last)], 1).int(), known
