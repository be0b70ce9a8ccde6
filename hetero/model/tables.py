"""Tables of embeddings that rules give to op ``embedding``: where their rows stand, and what decodes them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hetero.core import InputError, MachineError
from hetero.model import hf
from hetero.model.loadplan import LoadPlan
from hetero.model.names import Target
from hetero.model.source import Source
from hetero.quant.ggml import ggml_floats
from hetero.quant.ggml_types import PLAIN
from hetero.rules.placement import Assignment, Placement
from hetero.store.rows import Run, state_of

_RANDOM_ROWS = 1 << 16


@dataclass(frozen=True, slots=True)
class StoredTable:
    """A table whose rows can be read one by one. ``kind``: as ``StoredRows`` has it.

    One of blocks stays in these in main memory too, and is not loaded as others are.
    """

    runs: tuple[Run, ...]
    row_bytes: int
    kind: str
    width: int  # values of a row

    @property
    def nbytes(self) -> int:
        """In the files."""
        return sum(run.rows for run in self.runs) * self.row_bytes

    @property
    def in_blocks(self) -> bool:
        return self.kind not in PLAIN

    @property
    def dtype(self) -> str:
        """Name of the files' type of floats, or of blocks, as ``q8_0``."""
        return self.kind.lower() if self.in_blocks else str(PLAIN[self.kind]).removeprefix("torch.")

    def decode(self, rows: Tensor) -> Tensor:
        """uint8 [n, row_bytes] -> [n, width] in the file's type of floats; float32 of a type of blocks."""
        if not self.in_blocks:
            return rows.view(PLAIN[self.kind])
        if not len(rows):
            return torch.empty(0, self.width)
        return ggml_floats(self.kind, rows.view(-1), len(rows), self.width)


def resolve_tables(placement: Placement, model: Any, plan: LoadPlan, source: Source) -> Placement:
    """The placement with what a checkpoint tells of every table of op ``embedding``.

    ``options["table"]`` gets ``stored`` (a StoredTable; None: its rows cannot be read one by one, so that
    ``tier: auto`` has become ``ram``), ``nbytes`` in the files, and ``dtype``, the name of the type that main
    memory would hold it in. Raises InputError, naming the rule, for a table that is shared with another
    module, for one on disk whose rows cannot be read, and for the embedding of the tokens where rules fuse
    layers.
    """
    fused = any(one.op == "fused" for one in placement.assignments)
    targets = {name: target for target in plan.names.targets for name in target.names}

    def change(one: Assignment) -> Assignment:
        if one.op != "embedding":
            return one
        where, name = one.rule.where, f"{one.module}.weight" if one.module else "weight"
        module = model.get_submodule(one.module)
        if name in plan.tied or name in plan.tied.values():
            where.fail(f"op 'embedding': {one.module} shares its table with another module: write 'op: keep'")
        if fused and module is model.get_input_embeddings():
            where.fail(f"op 'embedding': fused layers read rows of {one.module} themselves: write 'op: keep'")
        tier = one.options["table"]["tier"]
        found = _stored(targets.get(name), source)
        stored = found if isinstance(found, StoredTable) else None
        if stored is None:
            if tier == "disk":
                where.fail(f"'tier: disk' cannot be: {one.module}: {found}")
            tier = "ram"
        weight: Tensor = module.weight
        held = _held(stored, weight)
        return _with_table(
            one,
            {
                "tier": tier,
                "stored": stored,
                "nbytes": weight.nbytes if stored is None else stored.nbytes,
                "dtype": held,
            },
        )

    return replace(placement, assignments=tuple(map(change, placement.assignments)))


@contextmanager
def random_tables(placement: Placement, model: Any) -> Iterator[Placement]:
    """For a tree of random weights: the placement with a file for every table that rules put on disk, which
    has random rows in its beginning and holes after it. The files lose their names at the end of the block,
    and stay as long as whoever has opened them. Raises MachineError where none can be made."""
    with ExitStack() as stack:

        def change(one: Assignment) -> Assignment:
            if one.op != "embedding" or one.options["table"]["tier"] != "disk":
                return one
            weight: Tensor = model.get_submodule(one.module).weight
            try:
                file = stack.enter_context(tempfile.NamedTemporaryFile(prefix="hetero-table-"))
                some = torch.randn(min(len(weight), _RANDOM_ROWS), weight.shape[1]).to(torch.bfloat16)
                file.write(some.view(torch.uint8).numpy().data)
                file.truncate(2 * weight.numel())
                file.flush()
            except OSError as error:
                raise MachineError(f"{tempfile.gettempdir()}: a table's file: {error.strerror}") from None
            run = Run(Path(file.name), f"{one.module}.weight", 0, len(weight))
            stored = StoredTable((run,), 2 * weight.shape[1], "BF16", weight.shape[1])
            return _with_table(one, {"stored": stored, "nbytes": stored.nbytes, "dtype": stored.dtype})

        yield replace(placement, assignments=tuple(map(change, placement.assignments)))


def choose_tiers(placement: Placement, tiers: Mapping[str, str]) -> Placement:
    """The placement with the tables of these modules on their tiers, for ``auto`` ones."""

    def change(one: Assignment) -> Assignment:
        if one.module not in tiers or one.op != "embedding":
            return one
        return _with_table(one, {"tier": tiers[one.module]})

    return replace(placement, assignments=tuple(map(change, placement.assignments)))


def _with_table(one: Assignment, more: Mapping[str, Any]) -> Assignment:
    return replace(one, options={**one.options, "table": {**one.options["table"], **more}})


def reads_itself(one: Assignment) -> bool:
    """Whether the operator of a module reads its table from the files, now or when a step wants rows."""
    table = one.options["table"] if one.op == "embedding" else {}
    stored: StoredTable | None = table.get("stored")
    return stored is not None and (table["tier"] == "disk" or stored.in_blocks)


def leave_out(plan: LoadPlan, placement: Placement) -> None:
    """Let a load pass over the tables that their operators read themselves."""
    names = {f"{one.module}.weight" for one in placement.assignments if reads_itself(one)}
    plan.names.targets = [target for target in plan.names.targets if not names & set(target.names)]


def reads_of(model: Any, module: str) -> int:
    """Rows of a table that one token needs."""
    owner = model.get_submodule(module.rpartition(".")[0])
    return int(getattr(owner, "ngram_heads", 1))


def _held(stored: StoredTable | None, weight: Tensor) -> str:
    """The type that main memory holds a table in: of the files where that says the same in fewer bytes."""
    wide = weight.dtype == torch.float32
    if stored is not None and (stored.in_blocks or wide):
        return stored.dtype
    return str(weight.dtype).removeprefix("torch.")


def _stored(target: Target | None, source: Source) -> StoredTable | str:
    """Where a table's rows stand, or why they cannot be read one by one."""
    if target is None or len(target.names) > 1:
        return "its values are made of several tensors"
    names = target.tensors
    if target.converter is not None:
        operations = target.converter.operations
        if len(operations) != 1 or not isinstance(operations[0], hf.Concatenate) or operations[0].dim != 0:
            return "its values are made of several tensors"
        names = [
            name for pattern in target.converter.source_patterns for name in target.sources.get(pattern, ())
        ]
    found = []
    for name in names:
        rows = source.rows(name)
        if rows is None:
            return f"tensor {name} is quantised, and its rows cannot be read one by one"
        found.append((name, rows))
    first = found[0][1]
    width = source.tensors[names[0]].shape[1]
    if any((rows.kind, rows.row_bytes) != (first.kind, first.row_bytes) for _, rows in found):
        return "its parts are of several types"
    try:
        states = {file: state_of(os.stat(file)) for file in {rows.file for _, rows in found}}
    except OSError as error:
        raise InputError(f"{error.filename}: cannot be read: {error.strerror}") from None
    runs = tuple(Run(rows.file, name, rows.start, rows.rows, states[rows.file]) for name, rows in found)
    return StoredTable(runs, first.row_bytes, first.kind, width)
