"""Packed experts of one MoE block in memory, and the ways of weights into and out of them.

The operator over them is ``cpu.CpuExperts``. What is here checks its arguments and calls the extension.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar

import numpy as np
import torch
from torch import Tensor

from hetero import _cpu
from hetero.core import ActKind, ExpertSpec, InputError, MachineError
from hetero.cpu_parts import PARTS, Part, has_part, packed_nbytes, part_shape, stored
from hetero.cpu_pool import machine, pick_isa, set_threads, start_pool
from hetero.formats import Format
from hetero.hw import memory, placement
from hetero.hw.pages import Pages
from hetero.quant.ggml_types import PLAIN, Bytes, checked_bytes, ggml_type, tables
from hetero.quant.pack import check_codes

log = logging.getLogger("hetero.cpu")

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_KINDS = {kind: number for number, kind in enumerate(ActKind)}  # the order of cpu_ext/kernels.h


Arena = _cpu.Arena
"""Memory for the experts of one block, by its bytes. It is there while this object is, or experts that have
taken it, or reads into it."""

_offered: ContextVar[list[Arena]] = ContextVar("_offered", default=[])  # noqa: B039  never changed in place


@contextlib.contextmanager
def offered(arenas: Sequence[Arena]) -> Iterator[None]:
    """Experts that are made within it take these as their memory, where they want as much without a node of
    their own: each the first that fits."""
    token = _offered.set(list(arenas))
    try:
        yield
    finally:
        _offered.reset(token)


def _take_offered(nbytes: int) -> Arena | None:
    left = _offered.get()
    fits = next((arena for arena in left if arena.nbytes == nbytes), None)
    if fits is not None:
        _offered.set([arena for arena in left if arena is not fits])
    return fits


_PAGE = 4096  # what an expert begins at a multiple of

_unbound_is_told = False
_live: weakref.WeakSet[PackedExperts] = weakref.WeakSet()


def _warn_unbound(error: int) -> None:
    """Say once that the kernel refused to bind memory: containers often forbid it; results do not change."""
    global _unbound_is_told  # noqa: PLW0603 (once a process)
    if not _unbound_is_told:
        _unbound_is_told = True
        log.warning(
            "the kernel refused to bind the experts' memory to NUMA nodes (mbind: %s); pages stay where "
            "their first writer runs, results are the same, reads may be slower",
            os.strerror(error),
        )


class PackedExperts:
    """Packed weights of ``cpu.CpuExperts``, which says what they are made of and has the operators."""

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
        self.spec = spec
        self.format = fmt
        self.down_format = down_format or fmt
        if self.down_format.ordered != fmt.ordered:
            raise InputError(f"experts in {self._formats}: both are in an order of their own, or neither")
        self.isa = pick_isa(isa)
        if threads is not None:
            set_threads(threads)
        start_pool()
        act = spec.activation
        self._where = where = placement.place(numa, machine())
        needed = packed_nbytes(spec, fmt, down_format) * where.copies
        what = f"{spec.num_experts} experts of {spec.hidden} x {spec.intermediate} in {self._formats}"
        # Pages are taken when experts arrive, so what other operators still wait for counts as used.
        promised = sum(other.promised_bytes for other in _live)
        if promised:
            what = f"{memory.gib(promised)} of other experts and {what}"
        memory.require(needed + promised, what)
        bound = [node for node in where.nodes if node >= 0]
        for node in bound:
            memory.require_on_node(node, (needed + promised) // len(bound), what)
        alone = where.spread is placement.Spread.WHOLE and not bound
        stride = -(-(needed // where.copies // spec.num_experts) // _PAGE) * _PAGE
        try:
            self._experts = _cpu.Experts(
                isa=self.isa,
                format=fmt.code,
                group=fmt.group,
                down_format=self.down_format.code,
                down_group=self.down_format.group,
                experts=spec.num_experts,
                hidden=spec.hidden,
                intermediate=spec.intermediate,
                bias=spec.has_bias,
                kind=_KINDS[act.kind],
                gate=spec.has_gate,
                alpha=act.alpha,
                gate_max=act.gate_max,
                up_limit=act.up_limit,
                act_max=act.act_max,
                up_offset=act.up_offset,
                spread=int(where.spread),
                nodes=list(where.nodes),
                only=where.only,
                stored=stored(fmt),
                down_stored=stored(self.down_format),
                ordered=fmt.ordered,
                memory=_take_offered(spec.num_experts * stride) if alone else None,
            )
        except MemoryError:
            have = memory.available()
            raise MachineError(
                f"{what}: the system refused {memory.gib(needed)}, "
                f"{memory.gib(have.bytes)} is available ({have.limit})"
            ) from None
        if error := self._experts.bind_error():
            _warn_unbound(error)
        self._parts = [p for p in PARTS if has_part(spec, p, fmt)]
        self._pages = Pages(self._experts.address, spec.num_experts * self._experts.stride)
        self._put: set[tuple[int, Part]] = set()
        _live.add(self)

    @property
    def _formats(self) -> str:
        same = self.down_format == self.format
        return str(self.format) if same else f"{self.format}, down in {self.down_format}"

    def format_of(self, part: Part) -> Format:
        """The format of a part; a bias is float32."""
        if part.endswith("_bias"):
            return Format("f32")
        return self.down_format if part == "down" else self.format

    @property
    def nbytes(self) -> int:
        """Bytes of the packed experts."""
        return self._experts.nbytes

    @property
    def arena(self) -> Arena | None:
        """The memory of all experts, each at the next page after the one before; None where a placement cuts
        or copies them."""
        return self._experts.memory if self._where.spread is placement.Spread.WHOLE else None

    @property
    def promised_bytes(self) -> int:
        """Bytes that the arena will still take from the system while its experts arrive, about."""
        total = len(self._parts) * self.spec.num_experts
        return self.nbytes * (total - len(self._put)) // total

    def put(self, expert: int, part: Part, tensor: Tensor) -> None:
        """Pack a matrix [N, K] (gate, up: [intermediate, hidden]; down: [hidden, intermediate]) or bias [N].
        An expert's "order" is int32 [hidden]: column j of its gate and up belongs to input order[j].

        ``tensor``: float32, bfloat16 or float16 on the CPU, any strides. Raises InputError on another shape
        or type, a part that the spec lacks or that was put before, a weight that the format cannot hold.
        """
        what = self._check_part(expert, part, tensor)
        if part == "order":
            self._put_order(expert, tensor, what)
            return
        if tensor.dtype not in DTYPES or tensor.device.type != "cpu":
            raise InputError(
                f"{what}: {tensor.dtype} on {tensor.device}, must be float32, bfloat16 or float16 on the CPU"
            )
        strides = (*tensor.stride(), 1)
        try:
            self._experts.put(
                expert, PARTS.index(part), tensor.data_ptr(), DTYPES[tensor.dtype], strides[0], strides[1]
            )
        except ValueError as error:
            raise InputError(f"{what} in {self.format_of(part)}: {error}") from None
        self._put.add((expert, part))

    def _put_order(self, expert: int, order: Tensor, what: str) -> None:
        if order.dtype != torch.int32 or order.device.type != "cpu":
            raise InputError(f"{what}: {order.dtype} on {order.device}, must be int32 on the CPU")
        order = order.contiguous()
        try:
            self._experts.put_order(expert, order.data_ptr())
        except ValueError as error:
            raise InputError(f"{what}: {error}") from None
        self._put.add((expert, "order"))

    def put_codes(
        self, expert: int, part: Part, codes: Tensor, scales: Tensor, extra: Tensor | None = None
    ) -> None:
        """Store a matrix that is quantised in the part's format already, without changing a value.

        ``codes`` [N, K] with ``scales`` and ``extra`` as ``hetero.quant.pack.pack_codes`` takes them. Raises
        InputError on other types or shapes, codes that are not numbers, or a part that cannot come now.
        """
        what = self._check_part(expert, part, codes)
        if part not in ("gate", "up", "down"):
            raise InputError(f"{what}: no matrix, which alone has codes")
        try:
            # The extension looks at the values itself, many times faster.
            checked = check_codes(self.format_of(part).packed, codes, scales, extra, values=False)
            self._experts.put_codes(
                expert,
                PARTS.index(part),
                checked.codes.data_ptr(),
                checked.scales.data_ptr(),
                0 if checked.extra is None else checked.extra.data_ptr(),
            )
        except (ValueError, InputError) as error:
            raise InputError(f"{what}: {error}") from None
        self._put.add((expert, part))

    def put_ggml(self, expert: int, part: Part, type_name: str, data: Bytes) -> None:
        """Store a matrix from its blocks in a GGUF file: what ``put_codes`` stores of ``ggml_codes``, to the
        bit, without its codes in memory; or the blocks themselves, where the part's format is of these.

        ``data``: the bytes of its rows, one after the other. A plain type (F32, F16, BF16) is packed as
        ``put`` does. Raises InputError where the part's format does not keep the type's values, on an unknown
        type, another number of bytes, a scale that is NaN or infinite, or a part that cannot come now.
        """
        what = self._check_place(expert, part)
        if part not in ("gate", "up", "down"):
            raise InputError(f"{what}: no matrix of blocks")
        try:
            kind = ggml_type(type_name)
            fmt = self.format_of(part)
            if kind.format not in (None, fmt.packed) or fmt.ordered:
                raise InputError(f"{kind.name} is kept by {kind.format}, these weights are {fmt}")
            n, k = part_shape(self.spec, part)
            raw, number = checked_bytes(kind, data, n, k), PARTS.index(part)
            if kind.format is None:
                self._experts.put(expert, number, raw.ctypes.data, DTYPES[PLAIN[kind.name]], k, 1)
            else:
                self._experts.put_ggml(expert, number, kind.number, raw, **tables(kind))
        except (ValueError, InputError) as error:
            raise InputError(f"{what}: {error}") from None
        self._put.add((expert, part))

    def _check_part(self, expert: int, part: Part, tensor: Tensor) -> str:
        """What is put, in words. Raises InputError where it has no place, came before or does not fit."""
        what = self._check_place(expert, part)
        shape = part_shape(self.spec, part)
        if tuple(tensor.shape) != shape:
            raise InputError(f"{what}: shape {list(tensor.shape)}, must be {list(shape)}")
        return what

    def _check_place(self, expert: int, part: Part) -> str:
        """What is put, in words. Raises InputError where it has no place or came before."""
        what = f"expert {expert} {part}"
        if not 0 <= expert < self.spec.num_experts:
            raise InputError(f"{what}: there are {self.spec.num_experts} experts")
        if part not in self._parts:
            raise InputError(f"{what}: these experts have only {', '.join(self._parts)}")
        if (expert, part) in self._put:
            raise InputError(f"{what}: given twice")
        return what

    def copy_expert(self, source: int, target: int) -> None:
        """Give ``target`` the packed bytes of ``source``: synthetic weights without the cost of packing.

        Raises InputError where the source is incomplete or the target has parts already.
        """
        absent = [part for part in self._parts if (source, part) not in self._put]
        if absent or not 0 <= target < self.spec.num_experts:
            raise InputError(
                f"cannot copy expert {source} to {target}: missing {', '.join(absent) or 'target'}"
            )
        if any((target, part) in self._put for part in self._parts):
            raise InputError(f"expert {target}: given twice")
        self._experts.copy(source, target)
        self._put.update((target, part) for part in self._parts)

    def replicate(self, sources: int) -> None:
        """Give every expert from ``sources`` on a mixture of the packed bytes of those before: synthetic
        weights at the speed of memory, by all threads of the pool, which so are the first to touch the pages.

        Raises InputError where a source is incomplete or another expert has parts already.
        """
        count = self.spec.num_experts
        if not 1 <= sources <= count or not all(map(self.complete, range(sources))):
            raise InputError(f"cannot make {count} experts of the first {sources}: they are not complete")
        if any(expert >= sources for expert, _ in self._put):
            raise InputError(f"experts from {sources} on: given twice")
        if sources < count:
            self._experts.replicate(sources)
        self.filled(range(sources, count))

    @property
    def whole_bytes(self) -> int:
        """Bytes of one whole expert, packed, in the layout that every placement shares."""
        return self._experts.whole_bytes

    def view(self, expert: int, count: int = 1) -> memoryview | None:
        """The packed bytes of ``count`` experts where they lie, writable, each to its next page: for reads
        and writes without a copy. None where a placement cuts or copies experts: see ``save``, ``restore``.

        The view keeps this object, and so its memory.
        """
        if not 0 <= expert < expert + count <= self.spec.num_experts:
            raise ValueError(f"experts {expert} to {expert + count} of {self.spec.num_experts}")
        if self._where.spread is not placement.Spread.WHOLE:
            return None
        stride = self._experts.stride
        start = self._experts.address + expert * stride
        memory = (ctypes.c_uint8 * (count * stride)).from_address(start)
        memory.owner = self  # type: ignore[attr-defined]
        return memoryview(memory).cast("B")

    def bring(self, expert: int, count: int = 1) -> None:
        """Have the pages of ``count`` experts before they are written, from the node of their placement. Any
        thread may call it; experts that a placement cuts or copies get theirs when they are written."""
        if not 0 <= expert < expert + count <= self.spec.num_experts:
            raise ValueError(f"experts {expert} to {expert + count} of {self.spec.num_experts}")
        if self._where.spread is placement.Spread.WHOLE:
            stride = self._experts.stride
            self._pages.bring(expert * stride, count * stride)

    def save(self, expert: int, buffer: memoryview) -> None:
        """Copy the packed bytes of one expert into ``buffer``, ``whole_bytes`` long at least."""
        self._experts.save_whole(expert, self._address(expert, buffer))

    def restore(self, expert: int, buffer: memoryview) -> None:
        """Take the packed bytes of one expert from ``buffer``, as ``save`` gives them."""
        self._experts.load_whole(expert, self._address(expert, buffer))

    def filled(self, experts: Iterable[int]) -> None:
        """Take these experts as put: what ``view`` or ``restore`` have written is whole."""
        self._put.update((expert, part) for expert in experts for part in self._parts)

    def vacate(self, expert: int) -> None:
        """Let an expert be put again, in place of the one that is there."""
        self._put.difference_update((expert, part) for part in self._parts)

    def complete(self, expert: int) -> bool:
        """Whether all parts of an expert have been put."""
        return all((expert, part) in self._put for part in self._parts)

    def _address(self, expert: int, buffer: memoryview) -> int:
        if not 0 <= expert < self.spec.num_experts:
            raise ValueError(f"expert {expert} of {self.spec.num_experts}")
        if buffer.nbytes < self.whole_bytes:
            raise ValueError(f"{buffer.nbytes} bytes for an expert of {self.whole_bytes}")
        return _address_of(buffer)

    def shares(self, expert: int) -> list[tuple[int, int]]:
        """What each part of an expert holds: (units of 32 rows of gate and up, blocks of 16 rows of down)."""
        return self._experts.shares(expert)

    def page_nodes(self) -> list[tuple[int, dict[int, int]]]:
        """For each arena the node that was asked for (-1: none), and where the kernel says that its pages
        are: node -> pages, of at most 4096 pages taken evenly. Negative numbers are errors of single pages:
        -2 those that were never written. Raises MachineError where the kernel does not tell."""
        try:
            return self._experts.page_nodes(4096)
        except RuntimeError as error:
            raise MachineError(f"cannot ask the kernel where pages are: {error}") from None

    def missing(self) -> list[tuple[int, Part]]:
        """Parts that have not been put, by expert."""
        return [(e, p) for e in range(self.spec.num_experts) for p in self._parts if (e, p) not in self._put]


def checksum(buffer: memoryview) -> int:
    """64 bits of some contiguous memory, against faults and mistakes; runs at the speed of memory."""
    return _cpu.checksum(_address_of(buffer), buffer.nbytes) if buffer.nbytes else 0


def _address_of(buffer: memoryview) -> int:
    return np.frombuffer(buffer, dtype=np.uint8).ctypes.data
