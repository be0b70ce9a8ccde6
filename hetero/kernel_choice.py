"""The kernels that serve a format on this machine: measured by the extension, chosen by ``hetero.tuning``."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from hetero import _cpu, tuning
from hetero.config import settings
from hetero.formats import Format
from hetero.hw import cpu as hw_cpu


def kernel_choice(isa: str, fmt: Format) -> tuning.Choice:
    """Which kernels an instruction set of this machine uses for a format, by rows, as HETERO_TUNE says.

    Unless told otherwise the kernels of a format are timed once and the times kept in the cache folder.
    Only kernels of ``isa`` and simpler sets run then, none of "scalar". Raises InputError where HETERO_TUNE
    names a file that has no measured times.
    """
    chosen = settings()
    return _choice(isa, fmt, chosen.tune, chosen.cache)


@cache
def _choice(isa: str, fmt: Format, tune: str, folder: Path) -> tuning.Choice:
    """Once a process for each setting, so that all layers of a model use the same plan."""
    own, others = kernels_of(isa, fmt)
    if isa == "scalar":
        tune = "off"

    def measure(kernels: Sequence[tuning.Kernel]) -> tuning.Times:
        ids = [(kernel.isa, tuning.CLASSES.index(kernel.row_class)) for kernel in kernels]
        seconds = _cpu.kernel_seconds(fmt.code, fmt.group, ids, list(tuning.ROWS), tuning.SECONDS)
        return {kernel.name: tuple(row) for kernel, row in zip(kernels, seconds, strict=True)}

    return tuning.choose(
        str(fmt), own, others, tune=tune, folder=folder, identity=_code_identity, measure=measure
    )


def kernels_of(isa: str, fmt: Format) -> tuple[list[tuning.Kernel], list[tuning.Kernel]]:
    """Kernels of a format: those of the set itself, by class, and those of other names of simpler sets."""
    names = _cpu.kernels.select(_cpu.kernels.features())["kernels"]
    isas = _cpu.isa_names(False)
    simpler = [one for one in reversed(isas[: isas.index(isa)]) if one != "scalar"]
    own, *rest = (
        [tuning.Kernel(one, c, names[one][f"{fmt.name}.{c}"]) for c in tuning.CLASSES]
        for one in (isa, *simpler)
    )
    mine = {kernel.name for kernel in own}
    others = {kernel.name: kernel for kernels in reversed(rest) for kernel in reversed(kernels)}
    return own, [kernel for name, kernel in others.items() if name not in mine]


@cache
def _code_identity() -> dict[str, Any]:
    """What measured times are of: the processor, what of it may be used, the code that ran."""
    code = hashlib.sha256(Path(_cpu.__file__).read_bytes()).hexdigest()
    features = sorted(name for name, there in _cpu.kernels.features().items() if there)
    return {"cpu": hw_cpu.signature(), "features": features, "extension": code}
