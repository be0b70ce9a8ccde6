"""What the loader hands experts to while they are packed into a file: a few are in memory at a time."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from hetero.core import ExpertSpec, InputError
from hetero.cpu import CpuExperts
from hetero.formats import Format, parse_format
from hetero.store.packfile import PackWriter
from hetero.store.reads import buffer

WINDOW_BYTES = 64 << 20
"""Packed experts of one block that wait to be written, about."""


class PackingSink:
    """Takes one block's experts, in any order of parts, and writes each when it is whole.

    ``make`` gives experts of a spec with fewer of them. ``whole``: the loader brings the parts of all experts
    one part after the other, so all are held until the last.
    """

    def __init__(
        self,
        writer: PackWriter,
        block: int,
        spec: ExpertSpec,
        make: Callable[[ExpertSpec], CpuExperts],
        *,
        whole: bool = False,
    ) -> None:
        self._writer = writer
        self._block = block
        self._spec = spec
        self._make = make
        size = writer.manifest.blocks[block].stride
        self._window = spec.num_experts if whole else min(spec.num_experts, max(4, WINDOW_BYTES // size))
        self._held: CpuExperts | None = None
        self._slot_of: dict[int, int] = {}
        self._writing: list[tuple[int, Future[Any]]] = []  # slots, oldest first
        self._free = list(range(self._window))
        self._left = set(range(spec.num_experts))

    def format_of(self, part: str) -> Format:
        """As ``CpuExperts.format_of``."""
        if part.endswith("_bias"):
            return Format("f32")
        formats = self._writer.manifest.blocks[self._block].formats
        return parse_format(formats[part == "down"])

    def put(self, expert: int, part: str, *values: Any) -> None:
        """As ``CpuExperts.put``."""
        self._take("put", expert, part, *values)

    def put_codes(self, expert: int, part: str, *values: Any) -> None:
        """As ``CpuExperts.put_codes``."""
        self._take("put_codes", expert, part, *values)

    def put_ggml(self, expert: int, part: str, *values: Any) -> None:
        """As ``CpuExperts.put_ggml``."""
        self._take("put_ggml", expert, part, *values)

    def missing(self) -> list[tuple[int, str]]:
        """One part of each expert that has not come whole."""
        return [(expert, "up") for expert in sorted(self._left)]

    def _take(self, method: str, expert: int, part: str, *values: Any) -> None:
        if self._held is None:
            self._held = self._make(replace(self._spec, num_experts=self._window))
        if expert not in self._left:
            known = 0 <= expert < self._spec.num_experts
            raise InputError(
                f"expert {expert} {part}: {'given twice' if known else f'there are {self._spec.num_experts}'}"
            )
        slot = self._slot_of.get(expert)
        if slot is None:
            slot = self._slot_of[expert] = self._next_slot()
        try:
            getattr(self._held, method)(slot, part, *values)
        except InputError as error:
            # The message is of the slot; the reader knows experts.
            raise InputError(str(error).replace(f"expert {slot} ", f"expert {expert} ", 1)) from None
        if self._held.complete(slot):
            self._write(expert, slot)

    def _next_slot(self) -> int:
        while self._writing and (not self._free or self._writing[0][1].done()):
            slot, future = self._writing.pop(0)
            self._writer.settle([future])
            assert self._held is not None
            self._held.vacate(slot)
            self._free.append(slot)
        if not self._free:
            raise InputError(
                f"more than {self._window} experts of {self._writer.manifest.blocks[self._block].name} are "
                "incomplete at a time: they come in an order that cannot be packed"
            )
        return self._free.pop()

    def _write(self, expert: int, slot: int) -> None:
        assert self._held is not None
        data = self._held.view(slot)
        if data is None:
            data = buffer(self._held.whole_bytes)
            self._held.save(slot, data)
        self._writing.append((slot, self._writer.put(self._block, expert, data)))
        del self._slot_of[expert]
        self._left.remove(expert)
        if not self._left:
            self._writer.settle([future for _, future in self._writing])
            self._writing.clear()
            self._writer.close_block(self._block)
            self._held = None
