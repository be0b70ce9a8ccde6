"""How fast a backend of the hand-off is with real work: a model's experts, handed over from a captured graph.

Without work backends rank otherwise (docs/perf.md): what a flag costs depends on what the CPU does meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hetero import cpu
from hetero.core import MachineError
from hetero.engine.handoff_backends import Backend, ThreadBackend

_LAYERS = 24
"""Of a trial at most: more bytes than caches hold in models that are large."""

_LIMIT_S = 1.0


class Trial:
    """Layers of one row each, one after the other, whose experts a worker computes. ``experts``: of the
    model's layers; ``slots``: experts a token. Raises MachineError where the device refuses."""

    def __init__(
        self,
        experts: Sequence[cpu.CpuExperts],
        slots: int,
        dtype: torch.dtype,
        ids_dtype: torch.dtype,
        backend: Backend,
    ) -> None:
        self._experts = list(experts[:_LAYERS])
        self._backend = backend
        spec = self._experts[0].spec
        self._layout = cpu.channel_layout(
            lanes=1,
            layers=len(self._experts),
            rows=1,
            slots=slots,
            hidden=spec.hidden,
            depth=2,
            dtype=dtype,
            wide=ids_dtype == torch.int64,
        )
        self._memory = backend.memory(self._layout.nbytes)
        device = backend.device_view(self._memory).device
        self._x = torch.randn(1, spec.hidden).to(device, dtype)
        self._weights = torch.full((1, slots), 1.0 / slots, device=device)
        self._ids = [torch.zeros(1, slots, dtype=ids_dtype, device=device) for _ in range(len(self._experts))]
        self._channel = cpu.open_channel(self._memory.data_ptr(), self._layout, self._experts, _LIMIT_S)
        self._replay = _replayed(backend, self._record)

    def _record(self) -> None:
        base, at = self._memory.data_ptr(), self._layout
        for layer, ids in enumerate(self._ids):
            self._backend.send(
                [
                    (base + at.x(0, layer), self._x),
                    (base + at.ids(0, layer), ids),
                    (base + at.weights(0, layer), self._weights),
                ]
            )
            self._backend.submit(base + at.submit(0, layer))
            self._backend.collect(base + at.done(0, layer), base + at.fault(0), layer)

    def layer_us(self) -> float:
        """Microseconds of a layer, by one replay with other experts than the last. Raises MachineError where
        it does not come through."""
        for ids, one in zip(self._ids, self._experts, strict=True):
            ids.copy_(torch.randperm(one.spec.num_experts)[: ids.shape[1]])
        self._backend.synchronize()
        self._channel.begin(0, 1)
        try:
            seconds = self._replay()
        except BaseException:
            self._channel.end(0, True)
            raise
        if error := self._channel.end(0, False):
            raise MachineError(f"a timed trial: {error}")
        return 1e6 * seconds / len(self._experts)

    def close(self) -> None:
        self._channel.close()


def _replayed(backend: Backend, record: Callable[[], None]) -> Callable[[], float]:
    """What runs a recording once more, and says how many seconds that took."""
    if isinstance(backend, ThreadBackend):
        record()
        twin = backend.twin

        def play() -> float:
            backend.launch()
            backend.synchronize()
            return float(twin.last_ns) / 1e9

        return play
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        record()

    def replay() -> float:
        start.record()
        graph.replay()
        end.record()
        end.synchronize()  # a worker that is stuck is noticed, and answered in advance
        return float(start.elapsed_time(end)) / 1e3

    return replay
