"""The CPU side of this process: instruction sets, the pool of threads that all experts share, its probes."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from typing import Literal

from hetero import _cpu
from hetero.config import settings
from hetero.core import InputError, MachineError
from hetero.hw import cpu as hw_cpu
from hetero.hw import placement, topology
from hetero.hw.topology import Topology

log = logging.getLogger("hetero.cpu")

_machine: Topology | None = None
_pool_is_set = False


def isas(*, include_twin: bool = False) -> list[str]:
    """Instruction sets that this machine can run, simplest first.

    ``include_twin`` adds "amx_twin", the AMX kernels over software tiles, which only tests use.
    """
    return _cpu.isa_names(include_twin)


def pick_isa(name: str = "auto") -> str:
    """The instruction set to use. "auto": HETERO_ISA if set, else the best here.

    Raises InputError for a name that does not exist, MachineError saying what this machine lacks.
    """
    chosen = settings().isa if name == "auto" else name
    if chosen == "auto":
        best = _cpu.best_isa()
        _tell_refused_tiles(best)
        return best
    try:
        _cpu.check_isa(chosen)
    except ValueError:
        raise InputError(f"no instruction set '{chosen}'; valid: auto, scalar, avx2, avx512, amx") from None
    except RuntimeError as error:
        raise MachineError(
            f"instruction set '{chosen}': this machine lacks {error}; it has {', '.join(isas())}"
        ) from None
    return chosen


def tiles_refused() -> bool:
    """Whether the operating system refuses this process the AMX tiles that the processor has."""
    return _cpu.kernels.features()["amx_denied"]


@cache
def _tell_refused_tiles(best: str) -> None:
    """One log line in a process that has no tiles though the processor does."""
    if tiles_refused():
        log.warning("the operating system refuses this process AMX tiles (arch_prctl); %s is used", best)


def kernel_counts() -> dict[str, int]:
    """Executed kernels since the last reset: name -> calls, one call an (expert, projection) of a step."""
    return _cpu.kernel_counts()


def reset_kernel_counts() -> None:
    """Set every count of ``kernel_counts`` to zero."""
    _cpu.reset_kernel_counts()


def set_threads(count: int) -> None:
    """Threads of the pool that all experts of this process share. Raises InputError below 1."""
    if count < 1:
        raise InputError(f"threads must be at least 1, not {count}")
    global _pool_is_set  # noqa: PLW0603 (the pool belongs to the process, like the context that owns it)
    seats = placement.seats(machine(), count, hw_cpu.quota())
    _cpu.set_seats([(seat.node, list(seat.cpus)) for seat in seats])
    _pool_is_set = True


def threads() -> int:
    """Threads of the pool now. Unless set: HETERO_THREADS, else physical cores of the affinity mask within
    the quota."""
    start_pool()
    return _cpu.threads()


@dataclass(frozen=True, slots=True)
class Probe:
    """A loop over registers alone that shows the peak of one instruction."""

    instruction: str  # "vpdpbusd zmm"
    isa: str  # instruction set that it is a peak of
    kind: Literal["int8", "bf16", "f32"]  # products that it adds up
    ops: int  # multiplications and additions of one round


def probes() -> list[Probe]:
    """The probes that this machine can run, of every instruction set."""
    return [Probe(*fields) for fields in _cpu.probes()]


def run_probe(instruction: str, rounds: int, chunks: int = 1) -> tuple[float, float]:
    """Seconds that the pool takes for ``chunks`` times ``rounds`` rounds of a probe, and Hz of the fastest
    core right after them. An empty name measures the clock of idle vector units (seconds 0)."""
    start_pool()
    return _cpu.run_probe(instruction, rounds, chunks)


def machine() -> Topology:
    """The memory nodes and cores that threads and experts are placed on; read once."""
    global _machine  # noqa: PLW0603 (a cache of what does not change)
    if _machine is None:
        _machine = topology.read()
    return _machine


def use_machine(other: Topology | None) -> None:
    """Place threads and experts, from now on, as on another machine; None: this one. For tests."""
    global _machine  # noqa: PLW0603 (see machine)
    _machine = other
    set_threads(threads())


def start_pool() -> None:
    """Give the pool its default size, once and not at import: a bad HETERO_THREADS is a user's error."""
    if not _pool_is_set:
        set_threads(settings().threads or hw_cpu.usable_threads())
