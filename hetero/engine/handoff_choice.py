"""Which way the operations of the hand-off get into a stream: by name, or by trials on this machine."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable
from typing import Protocol

import torch

from hetero import cpu
from hetero.core import HeteroError, InputError, MachineError
from hetero.engine.handoff_backends import (
    LINE,
    Backend,
    GpuBackend,
    HostFuncBackend,
    MemopBackend,
    SpinBackend,
    ThreadBackend,
)

log = logging.getLogger("hetero.handoff")

GPU_BACKENDS = ("memop", "spin", "hostfunc")

_TRIAL_S = 2.0
_LAYERS, _REPLAYS = 50, 8  # of a timed trial
# In a step memop's second fence waits for experts that move, of which a trial has none: it is to be this much
# faster (docs/perf.md, "A flag and what crosses PCIe").
_FENCE = 1.1

_GPU: dict[str, type[GpuBackend]] = {one.name: one for one in (MemopBackend, SpinBackend, HostFuncBackend)}


class Work(Protocol):
    """A trial of a backend with real work; ``handoff_trial.Trial``."""

    def layer_us(self) -> float: ...
    def close(self) -> None: ...


def make_backend(
    name: str, device: torch.device | str, work: Callable[[Backend], Work] | None = None
) -> Backend:
    """The backend of that name, or for "auto" spin, or memop where that is faster by a tenth, else hostfunc,
    of those that pass a trial. ``work``: what they are timed with; None: layers that have none.

    Raises InputError for a name that does not exist or does not fit the device, MachineError where the
    machine cannot do what was named.
    """
    device = torch.device(device)
    if name not in ("auto", "thread", *GPU_BACKENDS):
        raise InputError(f"no hand-off '{name}'; valid: auto, {', '.join(GPU_BACKENDS)}, thread")
    if device.type == "cpu":
        if name not in ("auto", "thread"):
            raise InputError(f"hand-off '{name}' needs a CUDA device, not {device}")
        return ThreadBackend("asked for" if name == "thread" else "there is no GPU in this run")
    if device.type != "cuda" or name == "thread":
        raise InputError(f"hand-off '{name}' does not work on {device}")
    if not torch.cuda.is_available():
        raise MachineError(f"hand-off on {device}: torch sees no CUDA device")
    if name != "auto":
        return _tried(name, device, "asked for")
    backend = _fastest(device, work)
    log.info("hand-off by %s (%s)", backend.name, backend.why)
    return backend


def _fastest(device: torch.device, work: Callable[[Backend], Work] | None) -> GpuBackend:
    """Of memop and spin, as measured here and with what a step adds; hostfunc only where neither works."""
    refused: list[str] = []
    trials: list[tuple[GpuBackend, Work]] = []
    try:
        for name in GPU_BACKENDS:
            if name == "hostfunc" and trials:
                break
            try:
                backend = _tried(name, device, "; ".join(refused))
                trial: Work = _NoWork(backend) if work is None else work(backend)
                trials.append((backend, trial))
                trial.layer_us()  # what is only slow once
            except (HeteroError, RuntimeError) as error:
                trials = [one for one in trials if one[0].name != name]
                refused.append(f"{name}: {error}")
        if not trials:
            raise MachineError(f"no hand-off works on {device}: {'; '.join(refused)}")
        # In turns, so that what else the machine does meets all of them.
        rounds = [[trial.layer_us() for _, trial in trials] for _ in range(_REPLAYS)]
    finally:
        for _, trial in trials:
            trial.close()
    times = [statistics.median(column) for column in zip(*rounds, strict=True)]
    weighed = [
        us * (_FENCE if one.name == "memop" else 1.0) for us, (one, _) in zip(times, trials, strict=True)
    ]
    best = trials[weighed.index(min(weighed))][0]
    words = [f"{backend.name} {us:.1f} us a layer" for us, (backend, _) in zip(times, trials, strict=True)]
    told = ", ".join(words) + ("" if work is None else " with its experts")
    best.why = "; ".join([told, *refused])
    return best


def _tried(name: str, device: torch.device, why: str) -> GpuBackend:
    """A backend that has captured and replayed its operations once. Raises MachineError where they fail."""
    try:
        backend = _GPU[name](device, why)
        _trial(backend)
    except RuntimeError as error:  # of torch
        raise MachineError(f"hand-off '{name}' on {device}: {error}") from None
    return backend


def _trial(backend: GpuBackend) -> None:
    """A captured graph, replayed twice, that sets one flag, and waits for another and clears it."""
    memory = backend.memory(3 * LINE)
    flags = memory.view(torch.int32)[:: LINE // 4]
    submit, done, fault = (memory.data_ptr() + LINE * i for i in range(3))
    with torch.cuda.device(backend.index):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            backend.submit(submit)
            backend.collect(done, fault, 0)
        for _ in range(2):
            flags[0], flags[1] = 0, 1
            graph.replay()
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            limit = time.monotonic() + _TRIAL_S
            while not event.query():  # type: ignore[no-untyped-call]
                if time.monotonic() > limit:
                    raise MachineError("a captured trial did not come through")
                time.sleep(1e-4)
            if flags.tolist() != [1, 0, 0]:
                raise MachineError(f"a captured trial left the flags {flags.tolist()}, not [1, 0, 0]")


class _NoWork:
    """A captured graph of _LAYERS layers, with a thread that answers at once in the worker's place."""

    def __init__(self, backend: GpuBackend) -> None:
        self._backend = backend
        self._memory = memory = backend.memory((2 * _LAYERS + 1) * LINE)
        submit = [memory.data_ptr() + LINE * i for i in range(_LAYERS)]
        done = [memory.data_ptr() + LINE * (_LAYERS + i) for i in range(_LAYERS)]
        fault = memory.data_ptr() + LINE * 2 * _LAYERS
        self._twin = cpu.Twin()
        for asked, answered in zip(submit, done, strict=True):
            self._twin.wait(asked, 1)
            self._twin.write(asked, 0)
            self._twin.write(answered, 1)
        with torch.cuda.device(backend.index):
            self._start, self._end = (
                torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                for _ in range(2)
            )
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                for layer, (asked, answered) in enumerate(zip(submit, done, strict=True)):
                    backend.submit(asked)
                    backend.collect(answered, fault, layer)

    def layer_us(self) -> float:
        """Raises MachineError where the replay does not come through."""
        with torch.cuda.device(self._backend.index):
            self._twin.launch()
            self._start.record()
            self._graph.replay()
            self._end.record()
            if not self._twin.synchronize(_TRIAL_S):
                words = self._memory.view(torch.int32)[:: LINE // 4]
                words[_LAYERS : 2 * _LAYERS] = 1  # frees the device
                raise MachineError("a timed trial did not come through")
            self._end.synchronize()
            return float(self._start.elapsed_time(self._end)) * 1e3 / _LAYERS

    def close(self) -> None: ...
