"""The experts of one load: on which tier each is, and the file that they are read from or kept in."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetero.config import settings
from hetero.core import HeteroError, InputError, MachineError, ModuleInfo
from hetero.cpu import offered
from hetero.engine.packing import Filling, Packed, PackTarget, close_quietly, keep, pack
from hetero.engine.tables import disk_hint, largest_in_flight
from hetero.engine.tiers import Site, Tiers, apply_slots, decide, find_sites, manifest_of, slow_note
from hetero.hw import memory
from hetero.model.loader import LoadPlan
from hetero.model.source import Source
from hetero.rules import Placement
from hetero.rules.explain import explain, totals
from hetero.store.bulk import EarlyReads
from hetero.store.cache import AUTO, PackCache, discard, find, find_likely
from hetero.store.disk import disk_speed
from hetero.store.packfile import PackFile, PackUnusable
from hetero.wholefile import unwritable

log = logging.getLogger("hetero.load")


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """What a user says of packed experts on disk: ``--pack-cache`` and ``--tier``."""

    pack_cache: str = AUTO
    tier: str | None = None


@dataclass(frozen=True, slots=True)
class Ready:
    """A model of which all is known but its weights."""

    folder: Path
    config: Any
    model: Any
    modules: Sequence[ModuleInfo]
    placement: Placement
    checkpoint: Source
    plan: LoadPlan
    dtype: str


class ExpertsOnTiers:
    """Of one load: which experts are on which tier, and the file that they are read from or kept in."""

    def __init__(
        self,
        ready: Ready,
        store: StoreOptions,
        progress: Callable[[int, int], None] | None,
        tell: Callable[[str], None],
        early: EarlyReads | None = None,
    ) -> None:
        """``early``: reads of a file of experts that may turn out to be these; else they end here."""
        self._early = early
        self._progress, self._tell = progress, tell
        self.notes: list[str] = []
        self._sites = find_sites(ready.modules, ready.placement)
        self._tiers = _decide(ready, self._sites)
        self.placement = apply_slots(ready.placement, self._tiers)
        self._cache = PackCache.of(store.pack_cache, ready.folder)
        self._file: PackFile | None = None
        if not self._sites:
            self._drop_early()
            return
        self._manifest = manifest_of(self._sites, ready.checkpoint.tensors)
        self._file_name = self._manifest.file_name(_model_name(ready.folder))
        found = find(self._cache.look, self._file_name, self._manifest)
        self._file = found.file
        self.notes += found.notes
        if self._file is None or self._tiers.slots or not (early and early.file.same_file(self._file)):
            self._drop_early()

    @property
    def memory(self) -> AbstractContextManager[None]:
        """A context in which experts are to be made: they take memory that is being filled already."""
        return offered([] if self._early is None else self._early.arenas)

    def _drop_early(self) -> None:
        if self._early is not None:
            self._early.drop()
            self._early = None

    @property
    def has_file(self) -> bool:
        """Whether a file is there to be read; else weights of the checkpoint are."""
        return self._file is not None

    def pack(self, ready: Ready) -> None:
        """Make the file that the disk tier cannot do without, where there is none.

        ``ready.model`` is the tree before operators replace its blocks.
        """
        if self._tiers.slots and self._file is None:
            self._file = self._pack(ready)

    def _pack(self, ready: Ready) -> PackFile:
        folder = self._cache.write or settings().cache / "packed"
        path = folder / self._file_name
        self._tell(
            "the disk tier needs a file of packed experts: writing "
            f"{memory.gib(self._manifest.nbytes)} to {path}"
        )
        try:
            to = PackTarget(path, self._manifest, self._sites)
            pack(to, ready.model, ready.checkpoint, ready.plan, progress=self._progress, tell=self._tell)
            return PackFile(path)
        except OSError as error:
            raise unwritable(error, str(error.filename or path)) from None
        except PackUnusable as error:
            raise MachineError(f"{path} {error}") from None

    def reading(self, sinks: Mapping[str, Any]) -> Filling:
        """Begin to give the experts of ``sinks`` what the file has; ``finish`` ends it."""
        ram = {}
        for index, site in enumerate(self._sites):
            backend = sinks[site.name].backend
            if site.name not in self._tiers.slots:
                ram[site.name] = backend
            elif self._file is not None:
                backend.attach(self._file, index)
        return Filling(self._file, ram, self._progress, self._early)

    @property
    def attached(self) -> set[str]:
        """Experts modules whose experts stay in the file."""
        return set(self._tiers.slots) if self._file is not None else set()

    def finish(self, reading: Filling) -> set[str]:
        """Wait for what ``reading`` began; returns the names whose experts have come."""
        read, damage = reading.finish()
        self._drop_early()  # what it took is the experts' now, and is available to nobody else
        if self._file is None:
            return read
        if damage is not None:
            self.notes.append(f"{damage}; these experts were packed anew")
        elif read:
            self.notes.append(f"packed experts were read from {self._file.path}")
        if self._tiers.slots:
            speed = disk_speed(self._file)
            self.notes.append(slow_note(self._tiers, speed, self._file.path))
        elif damage is not None:
            close_quietly(self._file)
            self._file = None
        return read

    def keep(self, sinks: Mapping[str, Any]) -> None:
        """Write the file where the user wants one and there is none."""
        if self._file is None and self._sites and self._cache.write is not None:
            backends = {site.name: sinks[site.name].backend for site in self._sites}
            path = self._cache.write / self._file_name
            self.notes.append(keep(path, self._manifest, backends, self._tell))
        if not self._tiers.slots:
            close_quietly(self._file)


@contextmanager
def early_reads(folder: Path, store: StoreOptions) -> Iterator[EarlyReads | None]:
    """Reads of the one file of packed experts that this model has, if it has one: they go on while it is
    found out whether that is what is wanted, and have ended when the context is left.

    Nothing is wrong here: what is wrong with the file or its options is found again, and told, later.
    """
    early = None
    if store.tier != "disk":
        with suppress(InputError, OSError):
            file = find_likely(PackCache.of(store.pack_cache, folder).look, _model_name(folder), folder)
            early = _begin(file)
    if early is None:
        yield None
        return
    try:
        with memory.taken_ahead(lambda: early.taken):
            yield early
    finally:
        early.drop()


def _begin(file: PackFile | None) -> EarlyReads | None:
    """Reads of a file, where half of the memory holds it; else it is closed."""
    if file is None:
        return None
    with suppress(HeteroError, MemoryError):
        if 2 * file.manifest.nbytes <= memory.available().bytes:
            return EarlyReads(file)
    close_quietly(file)
    return None


def _model_name(model: Path) -> str:
    """A folder's name as it is, dots and all; a file's without its ending."""
    path = model.resolve()
    return path.stem if path.is_file() else path.name


def _decide(ready: Ready, sites: Sequence[Site]) -> Tiers:
    """Whether all that goes into RAM fits, and how many experts of the disk tier do."""
    lines = explain(ready.placement, ready.modules, ready.dtype)
    own = {site.name for site in sites}
    other = totals([line for line in lines if line.module not in own]).get("cpu", 0)
    largest = largest_in_flight(ready.checkpoint, ready.placement)
    try:
        return decide(sites, other, largest, f"loading {ready.folder}")
    except MachineError as error:
        raise MachineError(f"{error}{disk_hint(ready.placement, lines)}") from None


def pack_experts(
    ready: Ready,
    output: Path,
    *,
    force: bool = False,
    progress: Callable[[int, int], None] | None = None,
    tell: Callable[[str], None] = log.info,
) -> Packed:
    """Write the packed experts of a checkpoint to a file in the folder ``output``, unless it is there.

    Raises InputError for what is wrong with folder, rules or output, and where the rules leave nothing to
    pack; MachineError for a full disk, which leaves nothing behind.
    """
    folder = ready.folder
    sites = find_sites(ready.modules, ready.placement)
    if not sites:
        raise InputError(f"{folder}: the rules give no experts to the CPU's own operator; nothing to pack")
    manifest = manifest_of(sites, ready.checkpoint.tensors)
    path = output / manifest.file_name(_model_name(folder))
    if force:
        discard(path)
    found = find((output,), path.name, manifest)
    for note in found.notes:
        tell(note.replace("it is not used", "it is written anew"))
    if found.file is not None:
        found.file.close()
        return Packed(path, manifest.nbytes, len(sites), 0, 0, 0.0, reused=True)
    try:
        to = PackTarget(path, manifest, sites)
        return pack(to, ready.model, ready.checkpoint, ready.plan, progress=progress, tell=tell)
    except OSError as error:
        raise unwritable(error, str(error.filename or path)) from None
