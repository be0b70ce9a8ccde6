"""Packing a model's experts into a file, and filling arenas from one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from hetero.core import ExpertSpec, MachineError
from hetero.cpu import CpuExperts
from hetero.engine.tiers import Site
from hetero.formats import parse_format
from hetero.hw import memory
from hetero.model.convert import is_expertwise
from hetero.model.loader import LoadPlan, load
from hetero.model.source import Source
from hetero.store.bulk import EarlyReads
from hetero.store.cache import discard
from hetero.store.manifest import Manifest
from hetero.store.packfile import DamagedError, PackFile, PackWriter
from hetero.store.packing import PackingSink

_TELL_S = 0.1  # from one call of a progress to the next

Progress = Callable[[int, int], None]
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Packed:
    """What ``pack`` did."""

    path: Path
    nbytes: int  # of the experts in the file
    blocks: int
    resumed: int  # blocks that an interrupted run had left
    source_bytes: int  # read from the checkpoint
    seconds: float
    reused: bool = False  # the file was there already, or another process has written it


@dataclass(frozen=True, slots=True)
class PackTarget:
    """A file to write, what it shall hold, and the experts that it is of."""

    path: Path
    manifest: Manifest
    sites: Sequence[Site]


def pack(
    to: PackTarget,
    model: Any,
    checkpoint: Source,
    plan: LoadPlan,
    *,
    progress: Progress | None = None,
    tell: Tell = lambda text: None,
) -> Packed:
    """Write experts to a file. ``model`` is the tree before operators replace its blocks.

    A few experts are in memory at a time. What is interrupted goes on by whole blocks the next time. Raises
    MachineError for a full disk, which leaves nothing behind, and OSError for another fault of the folder.
    """
    began = time.perf_counter()
    path, manifest, sites = to.path, to.manifest, to.sites
    writer = PackWriter(path, manifest, tell)
    if writer.ready:
        return Packed(path, manifest.nbytes, len(sites), 0, 0, time.perf_counter() - began, reused=True)
    resumed = sum(writer.done(block) for block in range(len(sites)))
    if resumed:
        tell(f"{path.name}: going on after {resumed} of {len(sites)} blocks that are packed already")
    try:
        sinks = {
            site.name: PackingSink(
                writer, block, site.spec, _maker(site), whole=_comes_whole(site.name, plan)
            )
            for block, site in enumerate(sites)
            if not writer.done(block)
        }
        report = load(model, checkpoint, sinks, progress=progress, plan=plan, experts_only=True)
        writer.finish()
    except BaseException as error:
        writer.stop(keep=True)
        if isinstance(error, KeyboardInterrupt):
            tell(_left(writer, len(sites)))
        raise
    seconds = time.perf_counter() - began
    return Packed(path, manifest.nbytes, len(sites), resumed, report.nbytes, seconds)


def _left(writer: PackWriter, blocks: int) -> str:
    """What an interruption leaves."""
    done = sum(writer.done(block) for block in range(blocks))
    if not done:
        return "stopped before the first block was packed; nothing is kept"
    return f"stopped; {done} of {blocks} blocks are kept in {writer.part}, and the next one goes on there"


def _maker(site: Site) -> Callable[[ExpertSpec], CpuExperts]:
    options = site.options

    def make(spec: ExpertSpec) -> CpuExperts:
        first, down = (parse_format(each) for each in site.block.formats)
        return CpuExperts(spec, first, down, isa=options.get("isa", "auto"))

    return make


def _comes_whole(experts: str, plan: LoadPlan) -> bool:
    """Whether some parameter of a module is converted for all experts at once."""
    own = [target for target in plan.names.targets if target.name.rpartition(".")[0] == experts]
    return any(not is_expertwise(target) for target in own)


class Filling:
    """Blocks of a file on their way into arenas, while other work goes on.

    As a context: what has not been read when it is left does not come any more.
    """

    def __init__(
        self,
        file: PackFile | None,
        backends: Mapping[str, Any],
        progress: Progress | None = None,
        early: EarlyReads | None = None,
    ) -> None:
        """Begin to read into ``backends``, by name of experts module; those that the file does not have, and
        all without a file, are left alone. ``progress`` is called by another thread. ``early``: reads of the
        file that have begun, which go on where they are into these backends' memory."""
        self._file, self._backends = file, backends
        blocks = list(enumerate(file.manifest.blocks)) if file is not None else []
        self._blocks = {block.name: index for index, block in blocks if block.name in backends}
        self._total = sum(block.nbytes for _, block in blocks if block.name in backends)
        self._cleanup = ExitStack()
        if file is None:
            return
        into = {index: backends[name] for name, index in self._blocks.items()}
        reads = early.take(into) if early is not None else None
        if reads is None:
            if early is not None:
                early.drop()
            reads = file.read_blocks(into)
        self._reads = reads
        self._cleanup.callback(reads.stop)
        if progress is not None:
            self._watch(progress)

    @property
    def names(self) -> set[str]:
        """Of the modules whose experts come."""
        return set(self._blocks)

    def finish(self) -> tuple[set[str], str | None]:
        """Wait. Returns the names that are filled, and what was wrong with the first block that could not be
        read. A file of damaged experts is removed, since it would be as wrong the next time."""
        filled: set[str] = set()
        damage: str | None = None
        damaged = False
        if self._file is None:
            return filled, None
        for name, index in self._blocks.items():
            try:
                self._reads.finish(index, self._backends[name])
            except MachineError as error:
                damage = damage or str(error)
                damaged = damaged or isinstance(error, DamagedError)
                continue
            filled.add(name)
        self._cleanup.close()
        if damaged:
            discard(self._file.path)
        return filled, damage

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()

    def _watch(self, progress: Progress) -> None:
        """Tell ``progress`` of what has come, from now on to the end."""
        over = threading.Event()

        def tell() -> None:
            while not over.wait(_TELL_S):
                progress(self._reads.nbytes, self._total)
            progress(self._reads.nbytes, self._total)

        thread = threading.Thread(target=tell, name="hetero-progress", daemon=True)
        thread.start()
        self._cleanup.callback(thread.join)
        self._cleanup.callback(over.set)


def keep(path: Path, manifest: Manifest, backends: Mapping[str, CpuExperts], tell: Tell) -> str:
    """Write what is in the arenas to ``path``; returns a sentence that says so, or why it could not be.

    A run goes on without the file, so that nothing of it is an error here.
    """
    began = time.perf_counter()
    try:
        writer = PackWriter(path, manifest, tell)
        if writer.ready:
            return f"packed experts are in {path} already"
        try:
            for index, block in enumerate(manifest.blocks):
                if not writer.done(index):
                    writer.put_block(index, backends[block.name])
            writer.finish()
        except BaseException:
            writer.stop(keep=True)
            raise
    except MachineError as error:
        return f"packed experts are not kept: {error}"
    except OSError as error:
        return f"packed experts are not kept: {error.filename or path}: {error.strerror}"
    seconds = time.perf_counter() - began
    return f"packed experts are kept in {path} ({memory.gib(manifest.nbytes)}, {seconds:.1f} s)"


def close_quietly(file: PackFile | None) -> None:
    """Close a file that is not needed any more."""
    if file is not None:
        with suppress(OSError):
            file.close()
