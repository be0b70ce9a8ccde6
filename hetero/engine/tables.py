"""Large tables of embeddings: in main memory where they fit beside all else, else in their files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hetero.cpu import WORKSPACE_BYTES
from hetero.engine.tiers import Site, find_sites
from hetero.hw import memory
from hetero.model.source import Source, TensorInfo
from hetero.model.tables import choose_tiers, leave_out, reads_itself, reads_of
from hetero.ops.embedding import HostEmbedding
from hetero.rules import Placement
from hetero.rules.explain import Line, explain, totals
from hetero.store.rows import BLOCK, gather_time

if TYPE_CHECKING:
    from hetero.engine.experts import Ready


def place_tables(ready: Ready) -> Ready:
    """With a tier for every table that rules leave to the machine; what operators read is not loaded.

    A table is in main memory where all that the rules put there fits, experts whole, with the workspace of a
    step: a token reads far less of a table on disk than of experts there.
    """
    tables = [one for one in ready.placement.assignments if one.op == "embedding"]
    undecided = [one.module for one in tables if one.options["table"]["tier"] == "auto"]
    placement = choose_tiers(ready.placement, dict.fromkeys(undecided, "ram"))
    if undecided:
        sites = find_sites(ready.modules, placement)
        own = {site.name for site in sites}
        lines = explain(placement, ready.modules, ready.dtype)
        dense = totals([line for line in lines if line.module not in own]).get("cpu", 0)
        needed = dense + largest_in_flight(ready.checkpoint, placement) + _experts(sites) + WORKSPACE_BYTES
        if needed > memory.available().bytes:
            placement = choose_tiers(ready.placement, dict.fromkeys(undecided, "disk"))
    leave_out(ready.plan, placement)
    return replace(ready, placement=placement)


def largest_in_flight(source: Source, placement: Placement) -> int:
    """Bytes that reading one tensor takes at most beside what it is loaded into."""
    apart = _not_in_flight(placement)
    return max((_in_flight(info) for name, info in source.tensors.items() if name not in apart), default=0)


def disk_hint(placement: Placement, lines: Sequence[Line]) -> str:
    """What a user may do about too little memory who has put tables there; "" for nothing."""
    here = {
        one.module
        for one in placement.assignments
        if one.op == "embedding" and one.options["table"]["tier"] == "ram" and one.options["table"]["stored"]
    }
    size = sum(line.bytes for line in lines if line.module in here)
    if not size:
        return ""
    return f"; or 'tier: disk' for {', '.join(sorted(here))}, which takes {memory.gib(size)} of it"


def _in_flight(info: TensorInfo) -> int:
    """Bytes that reading a tensor takes: as stored, and beside it the floats of a quantised matrix, of which
    experts are read one by one."""
    if info.format is None and not info.inexact:
        return info.nbytes
    experts = info.shape[0] if len(info.shape) > 2 else 1
    return (info.nbytes + 4 * math.prod(info.shape)) // experts


def _not_in_flight(placement: Placement) -> set[str]:
    """Tensors of tables that are not loaded, or into their places as they are."""
    found: set[str] = set()
    for one in placement.assignments:
        if one.op != "embedding" or (stored := one.options["table"]["stored"]) is None:
            continue
        table = one.options["table"]
        whole = len(stored.runs) == 1 and stored.dtype == table["dtype"]
        if reads_itself(one) or whole:
            found.update(run.tensor for run in stored.runs)
    return found


def speed_notes(model: Any) -> list[str]:
    """Of each table on disk: what a token reads, and how long that takes, measured now.

    Raises MachineError where it cannot be read.
    """
    notes = []
    rng = np.random.default_rng()
    for name, module in model.named_modules():
        if not isinstance(module, HostEmbedding) or module.rows is None:
            continue
        files, reads = module.rows.files, reads_of(model, name)
        seconds = gather_time(files, reads, rng)
        notes.append(
            f"{name}: {memory.gib(files.nbytes)} stay on disk, in {_named(files.files)}. A token reads "
            f"{reads} rows, {reads * files.row_bytes} bytes in blocks of {BLOCK}, in {seconds * 1e3:.2g} ms "
            f"(measured, none in memory); RAM keeps up to {memory.gib(module.rows.ram)} of rows"
        )
    return notes


def _experts(sites: Sequence[Site]) -> int:
    """Bytes of main memory that experts take at most."""
    total = 0
    rules: dict[int, list[Site]] = {}
    for site in sites:
        ram = site.options.get("ram")
        if site.on_disk and ram is not None:
            rules.setdefault(ram, []).append(site)
        else:
            total += site.nbytes
    return total + sum(min(ram, sum(site.nbytes for site in group)) for ram, group in rules.items())


def _named(files: Sequence[Any]) -> str:
    """The first file, and how many more there are."""
    return str(files[0]) if len(files) == 1 else f"{files[0]} and {len(files) - 1} more files"
