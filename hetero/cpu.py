"""The routed experts on the CPU: the typed face of the extension. Nothing here computes, each function checks
its arguments and calls. Pool and instruction sets are in ``cpu_pool``, and here by their names too.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hetero import _cpu, tuning
from hetero.core import ExpertSpec, InputError, MachineError
from hetero.cpu_parts import Part, packed_nbytes
from hetero.cpu_pool import (
    Probe,
    isas,
    kernel_counts,
    machine,
    pick_isa,
    probes,
    reset_kernel_counts,
    run_probe,
    set_threads,
    threads,
    tiles_refused,
    use_machine,
)
from hetero.cpu_weights import DTYPES, Arena, PackedExperts, checksum, offered
from hetero.formats import Format
from hetero.hw import memory
from hetero.kernel_choice import kernel_choice
from hetero.quant.pack import Codes, check_codes

__all__ = [
    "MOST_ROWS",
    "WORKSPACE_BYTES",
    "Arena",
    "BulkRead",
    "Channel",
    "ChannelLayout",
    "CpuExperts",
    "Part",
    "Probe",
    "Twin",
    "channel_layout",
    "checksum",
    "isas",
    "kernel_counts",
    "machine",
    "offered",
    "open_channel",
    "pack_matrix",
    "pack_quantised",
    "packed_nbytes",
    "pick_isa",
    "probes",
    "reset_kernel_counts",
    "run_probe",
    "set_threads",
    "threads",
    "tiles_refused",
    "use_machine",
]

WORKSPACE_BYTES = 256 * 2**20
"""What a step's workspace takes at most, shared by all experts of the process."""

MOST_ROWS = 2**62
"""In a band: any number of rows."""

_IDS = {torch.int64: True, torch.int32: False}


class CpuExperts(PackedExperts):
    """Packed experts of one MoE block, and the operator over them.

    Gate and up are in ``fmt``, down in ``down_format`` where that is another; both are ``ordered``, or
    neither.
    ``threads`` sets the pool of the whole process. ``numa`` is "off", "split", "replicate" or "node N", see
    ``hw.placement.place``; where the kernel refuses to bind memory to nodes the experts work all the same,
    and one warning says so. Raises MachineError when memory or the instruction set is lacking, InputError for
    a format and shape that cannot be packed, or a node that does not exist.
    """

    def __init__(
        self,
        spec: ExpertSpec,
        fmt: Format,
        down_format: Format | None = None,
        *,
        isa: str = "auto",
        threads: int | None = None,
        numa: str = "off",
    ) -> None:
        super().__init__(spec, fmt, down_format, isa=isa, threads=threads, numa=numa)
        self._choose_kernels()

    def use(self, isa: str) -> None:
        """Run on another instruction set from the next step on; the packed weights serve all of them."""
        chosen = pick_isa(isa)
        self._experts.set_isa(chosen)
        self.isa = chosen
        self._choose_kernels()

    def _choose_kernels(self) -> None:
        """Kernels by rows as measured; the extension starts from the default plan."""
        if self.isa not in isas():  # the twin, which is there for tests
            return
        up, down = (kernel_choice(self.isa, fmt.packed) for fmt in (self.format, self.down_format))
        if up.times is not None or down.times is not None:
            self.set_plan(up.plan, down.plan)

    def set_plan(self, plan: tuning.Plan, down_plan: tuning.Plan | None = None) -> None:
        """Use these kernels by rows until ``use`` is called. ``down_plan``: for down where its format is
        another."""
        bands = [
            [(b.rows or MOST_ROWS, b.kernel.isa, tuning.CLASSES.index(b.kernel.row_class)) for b in bands]
            for one in (plan, down_plan or plan)
            for bands in (one.exact, one.large)
        ]
        self._experts.set_plan(*bands)

    def plain_read(self, first: int = 0, count: int | None = None) -> int:
        """Read the packed bytes of ``count`` experts (default: all) once with the pool's threads, each node's
        by its own first, doing nothing else; returns how many bytes."""
        count = self.spec.num_experts - first if count is None else count
        if first < 0 or count < 0 or first + count > self.spec.num_experts:
            raise ValueError(f"experts {first} to {first} + {count} of {self.spec.num_experts}")
        return self._experts.read(first, count)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor, out: Tensor | None = None) -> Tensor:
        """Weighted sum of the experts: x [T, hidden], ids [T, k], weights [T, k] -> float32 [T, hidden].

        x is float32, bfloat16 or float16; ids outside [0, experts) contribute zero. ``out``: where the sum
        shall stand, contiguous. The GIL is released.
        """
        x, ids = self._checked(x, ids, (ids.shape[0], self.spec.hidden))
        if weights.shape != ids.shape:
            raise ValueError(f"weights {list(weights.shape)}, ids {list(ids.shape)}")
        if weights.dtype != torch.float32 or not weights.is_contiguous():
            weights = weights.float().contiguous()
        shape = (ids.shape[0], self.spec.hidden)
        if out is None:
            out = torch.empty(shape, dtype=torch.float32)
        elif out.shape != shape or out.dtype != torch.float32 or not out.is_contiguous():
            raise ValueError(f"output {list(out.shape)} of {out.dtype}")
        self._call(self._experts.forward, x, ids, weights.data_ptr(), out.data_ptr())
        return out

    def pairs(self, x: Tensor, ids: Tensor, out: Tensor) -> None:
        """What each expert makes of its tokens, not weighted: x [T, hidden], ids [T, k] -> out float32
        [T, k, hidden]. Rows of skipped ids keep what they hold, so that experts which are never here all at
        once can fill ``out`` group by group; ``weighted_sum`` ends it."""
        x, ids = self._checked(x, ids, (ids.shape[0], self.spec.hidden))
        if out.shape != (*ids.shape, self.spec.hidden) or out.dtype != torch.float32:
            raise ValueError(f"output {list(out.shape)} of {out.dtype}")
        if not out.is_contiguous():
            raise ValueError("output must be contiguous")
        self._call(self._experts.pairs, x, ids, out.data_ptr())

    def weighted_sum(self, results: Tensor, ids: Tensor, weights: Tensor, experts: int) -> Tensor:
        """The sum that ``forward`` makes, to the bit, from what ``pairs`` left: results [T, k, hidden], ids
        and weights [T, k] of the whole step -> float32 [T, hidden]. ``experts``: how many there are in all;
        ids outside [0, experts) contribute zero."""
        results, ids = self._checked(results, ids, (*ids.shape, self.spec.hidden))
        if results.dtype != torch.float32 or weights.shape != ids.shape:
            raise ValueError(f"results of {results.dtype}, weights {list(weights.shape)}")
        weights = weights.float().contiguous()
        tokens, slots = ids.shape
        out = torch.empty(tokens, self.spec.hidden, dtype=torch.float32)
        self._experts.sum(
            results.data_ptr(),
            ids.data_ptr(),
            _IDS[ids.dtype],
            tokens,
            slots,
            experts,
            weights.data_ptr(),
            out.data_ptr(),
        )
        return out

    def gate_up(self, x: Tensor, ids: Tensor) -> Tensor:
        """First half of a staged step: x [T, hidden], ids [T, k] -> float32 [T, k, 2 * intermediate], gate
        then up (up alone, [T, k, intermediate], without a gate), biases included; zero where the id is
        skipped."""
        x, ids = self._checked(x, ids, (ids.shape[0], self.spec.hidden))
        width = self.spec.intermediate * (2 if self.spec.has_gate else 1)
        out = torch.empty(*ids.shape, width, dtype=torch.float32)
        self._call(self._experts.gate_up, x, ids, out.data_ptr())
        return out

    def down(self, h: Tensor, ids: Tensor) -> Tensor:
        """Second half of a staged step: h [T, k, intermediate], ids [T, k] -> float32 [T, k, hidden], bias
        included, not weighted; zero where the id is skipped."""
        h, ids = self._checked(h, ids, (*ids.shape, self.spec.intermediate))
        out = torch.empty(*ids.shape, self.spec.hidden, dtype=torch.float32)
        self._call(self._experts.down, h, ids, out.data_ptr())
        return out

    def _call(self, step: Callable[..., None], x: Tensor, ids: Tensor, *others: int) -> None:
        """A step of the extension on a checked input and ids; ``others`` are the remaining addresses."""
        tokens, slots = ids.shape
        try:
            step(x.data_ptr(), DTYPES[x.dtype], ids.data_ptr(), _IDS[ids.dtype], tokens, slots, *others)
        except MemoryError:
            have = memory.available()
            raise MachineError(
                f"the workspace of a step needs up to {memory.gib(WORKSPACE_BYTES)} of memory, "
                f"{memory.gib(have.bytes)} is available ({have.limit})"
            ) from None

    def _checked(self, x: Tensor, ids: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """x and ids as the extension reads them: contiguous, of a known type, on the CPU."""
        if ids.dim() != 2 or x.shape != shape:
            raise ValueError(f"input {list(x.shape)} with ids {list(ids.shape)}, expected {list(shape)}")
        if len(self._put) != len(self._parts) * self.spec.num_experts:
            raise RuntimeError(f"experts are incomplete: {self.missing()[:4]} ... have not been put")
        if x.device.type != "cpu" or ids.device.type != "cpu":
            raise ValueError(f"input on {x.device}, ids on {ids.device}: must be on the CPU")
        x = x if x.dtype in DTYPES else x.float()
        if ids.dtype not in _IDS:
            ids = ids.long()
        return x.contiguous(), ids.contiguous()


BulkRead = _cpu.BulkRead
"""Reads of whole experts by threads of the extension, see ``store.bulk``."""

Channel, ChannelLayout, Twin = _cpu.Channel, _cpu.ChannelLayout, _cpu.Twin
"""The hand-off's CPU side, where its memory lies, and a thread in a GPU stream's place: ``engine.handoff``
checks what goes into them."""

HOST_SUBMIT, HOST_COLLECT = _cpu.host_submit, _cpu.host_collect
"""Addresses of C functions that a stream may call with a flag's address."""


def channel_layout(
    *, lanes: int, layers: int, rows: int, slots: int, hidden: int, depth: int, dtype: torch.dtype, wide: bool
) -> _cpu.ChannelLayout:
    """Where a channel's parts lie in its memory. ``dtype`` is of the activations; ``wide``: int64 ids."""
    return ChannelLayout(lanes, layers, rows, slots, hidden, depth, DTYPES[dtype], wide)


def open_channel(
    memory: int,
    layout: _cpu.ChannelLayout,
    experts: Sequence[CpuExperts],
    limit_s: float,
    *,
    defer: bool = False,
) -> _cpu.Channel:
    """The CPU side of a hand-off over zeroed memory at an address; experts of each layer, in order.

    With ``defer`` an id in [experts, 2 * experts) is computed after the layer's result is out, and added to
    the next layer's; at the last layer with the others.

    The caller keeps memory and experts alive until ``close``, and after it where that returned False. Raises
    RuntimeError where experts are incomplete.
    """
    for layer, one in enumerate(experts):
        if missing := one.missing():
            raise RuntimeError(
                f"experts of layer {layer} are incomplete: {missing[:4]} ... have not been put"
            )
    return Channel(memory, layout, [one._experts for one in experts], int(limit_s * 1e9), defer)


def pack_matrix(fmt: Format, weight: Tensor) -> Tensor:
    """One matrix [n, k] (float32, bfloat16 or float16 on the CPU, any strides) as uint8 [packed bytes].

    Raises InputError for a weight that is not finite or that the format cannot hold.
    """
    n, k = weight.shape
    kind, strides = DTYPES[weight.dtype], weight.stride()
    try:
        packed = _cpu.kernels.pack_matrix(fmt.code, fmt.group, weight.data_ptr(), kind, n, k, *strides)
    except (ValueError, OverflowError) as error:
        raise InputError(f"a matrix of {n} x {k} in {fmt}: {error}") from None
    return torch.from_numpy(packed)


def pack_quantised(fmt: Format, values: Codes) -> Tensor:
    """One matrix that is quantised in the format already, as ``pack_matrix`` gives it, no value changed.

    Raises InputError on other types or shapes than ``quant.pack.pack_codes`` takes, and codes that are no
    numbers.
    """
    codes, scales, extra = check_codes(fmt, *values, values=False)
    n, k = codes.shape
    sides = [
        None if part is None else part.reshape(len(part), -1).view(torch.uint8).numpy()
        for part in (scales, extra)
    ]
    try:
        packed = _cpu.kernels.pack_codes(fmt.code, fmt.group, codes.numpy(), *sides)
    except ValueError as error:
        raise InputError(f"a matrix of {n} x {k} in {fmt}: {error}") from None
    return torch.from_numpy(packed)


atexit.register(_cpu.shut_down)
