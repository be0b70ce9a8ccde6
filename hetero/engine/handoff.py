"""The hand-off: a recorded stream of a GPU and the CPU experts take turns, layer by layer, without Python.

Record once, inside a capture as a rule; then, for each replay::

    with handoff.step({0: rows}):
        graph.replay()
        torch.cuda.synchronize()

The protocol, and why nothing hangs: docs/handoff.md, whose words are used here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hetero import cpu
from hetero.core import HeteroError, InputError
from hetero.engine.handoff_backends import Backend
from hetero.engine.handoff_choice import make_backend
from hetero.engine.handoff_trial import Trial
from hetero.trace import DEFERRED, EXPERTS, Counted, recorder

log = logging.getLogger("hetero.handoff")

LIMIT_S = 1.0
"""Without a sign of life for so long the worker counts as stuck."""

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_IDS = (torch.int64, torch.int32)

# Channels whose worker is stuck: it may come back, so their memory and experts stay.
_left_behind: list[Any] = []


class HandoffError(HeteroError):
    """A step that the CPU side could not serve. Its results are worthless; the next step may run."""


class Payload(NamedTuple):
    """What crosses at one layer, as tensors of the device: kernels may write into the first three."""

    x: Tensor  # [R, H]
    ids: Tensor  # [R, k]; those outside [0, experts) are not the CPU's
    weights: Tensor  # float32 [R, k]
    result: Tensor  # float32 [R, H]


class LayerTimes(NamedTuple):
    """When the worker did what at one layer, nanoseconds of ``trace.clock``; all zero where it was not
    served. ``experts``: distinct experts that it computed. ``later_``: of its deferred ones, zero where it
    had none.
    """

    looked: int
    seen: int
    began: int
    ended: int
    published: int
    experts: int
    later_began: int = 0
    later_ended: int = 0
    later_experts: int = 0


class Totals(NamedTuple):
    """Sums over the layers of a step, in seconds: waiting for the GPU, experts' work, and what the CPU side
    adds to the work (taking the ids, copying the result, flags). Deferred experts count as work."""

    layers: int
    wait_s: float
    work_s: float
    handoff_s: float


class Handoff:
    """Channel, worker and recorder for the MoE blocks of one model on one device.

    ``experts``: of each block in order, none staged, all of one hidden size. ``rows``: the most that a graph
    was or will be captured for. ``slots``: experts a token. ``dtype`` and ``ids_dtype``: of activations and
    of ids. ``lanes``: micro-batches. ``depth``: how many layers may be submitted and not yet collected.
    ``device``: where streams run; "cpu" means twins, see ``ThreadBackend``. ``defer``: an id e + experts
    means expert e of a layer, computed after the layer's result is out and added to that of the next layer;
    the last layer's are computed with the others. ``numbers``: of the blocks' layers in the model, for the
    trace. Raises InputError for what cannot be handed off, MachineError where the device cannot do it.
    ``close`` it, or use it as a context.
    """

    def __init__(
        self,
        experts: Sequence[cpu.CpuExperts],
        *,
        rows: int,
        slots: int,
        dtype: torch.dtype = torch.bfloat16,
        ids_dtype: torch.dtype = torch.int64,
        lanes: int = 1,
        depth: int = 2,
        device: torch.device | str = "cpu",
        backend: str = "auto",
        limit_s: float = LIMIT_S,
        defer: bool = False,
        numbers: Sequence[int] | None = None,
    ) -> None:
        if not experts or min(rows, slots, lanes, depth) < 1:
            raise InputError("a hand-off needs at least one layer, row, slot, lane and a depth of 1")
        if dtype not in _FLOATS or ids_dtype not in _IDS:
            raise InputError(f"activations in {dtype} with ids in {ids_dtype} cannot be handed off")
        if defer and depth < 2:
            raise InputError("deferred experts need a depth of 2")
        _check_experts(experts, dtype)
        self.experts = list(experts)
        self.numbers = list(range(len(experts)) if numbers is None else numbers)
        self.rows, self.slots, self.lanes, self.depth = rows, slots, lanes, depth
        self.layers = len(self.experts)
        self.hidden = self.experts[0].spec.hidden
        self.dtype, self.ids_dtype = dtype, ids_dtype
        work = partial(Trial, self.experts, slots, dtype, ids_dtype)
        self.backend: Backend = make_backend(backend, device, work)
        self._layout = cpu.channel_layout(
            lanes=lanes,
            layers=self.layers,
            rows=rows,
            slots=slots,
            hidden=self.hidden,
            depth=depth,
            dtype=dtype,
            wide=ids_dtype == torch.int64,
        )
        self._memory = self.backend.memory(self._layout.nbytes)
        self._base = self._memory.data_ptr()
        self._view = self.backend.device_view(self._memory)
        self._channel = cpu.open_channel(self._base, self._layout, self.experts, limit_s, defer=defer)
        self._recorded: dict[int, list[int]] = {}  # lane -> layers that wait for their collect
        self._rows = [0] * lanes  # of the last step
        self._closed = False

    @property
    def nbytes(self) -> int:
        """Bytes of pinned memory."""
        return self._layout.nbytes

    def payload(self, lane: int, layer: int, *, host: bool = False) -> Payload:
        """The tensors of a layer's slot; layers ``depth`` apart share one. ``host``: as the CPU sees them,
        for use while no replay runs; kernels alone should touch those of the device, since torch takes them
        for device memory when it copies."""
        self._check_place(lane, layer)
        view = self._memory if host else self._view
        at, rows = self._layout, self.rows
        return Payload(
            _part(view, at.x(lane, layer), (rows, self.hidden), self.dtype),
            _part(view, at.ids(lane, layer), (rows, self.slots), self.ids_dtype),
            _part(view, at.weights(lane, layer), (rows, self.slots), torch.float32),
            _part(view, at.result(lane, layer), (rows, self.hidden), torch.float32),
        )

    # -- recording

    def record_submit(
        self,
        lane: int,
        layer: int,
        x: Tensor | None = None,
        ids: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> None:
        """Into the current stream: hand x [T, H], ids [T, k] and weights [T, k] to the CPU (T up to ``rows``,
        contiguous, on the device, of the channel's types). Without tensors the ``payload`` was filled by
        kernels before. Raises ValueError where the slot's last result is still to be collected."""
        self._check_place(lane, layer)
        waiting = self._recorded.setdefault(lane, [])
        blocking = [other for other in waiting if other % self.depth == layer % self.depth]
        if blocking:
            raise ValueError(f"layer {layer} before the collect of layer {blocking[0]}: both use one slot")
        if x is not None:
            assert ids is not None
            assert weights is not None
            self._check_tensors(x, ids, weights)
            at = self._layout
            self.backend.send(
                [
                    (self._base + at.x(lane, layer), x),
                    (self._base + at.ids(lane, layer), ids),
                    (self._base + at.weights(lane, layer), weights),
                ]
            )
        self.backend.submit(self._base + self._layout.submit(lane, layer))
        waiting.append(layer)

    def record_collect(self, lane: int, layer: int, out: Tensor | None = None) -> Tensor:
        """Into the current stream: wait for the CPU's sum; it is copied to ``out`` (float32 [T, H] on the
        device) or lies in ``payload(lane, layer).result``, until that slot's next submit. Returns where it
        is. Raises ValueError where the layer was not submitted."""
        self._check_place(lane, layer)
        waiting = self._recorded.setdefault(lane, [])
        if layer not in waiting:
            raise ValueError(f"collect of layer {layer} of lane {lane}, which was not submitted")
        at = self._layout
        self.backend.collect(self._base + at.done(lane, layer), self._base + at.fault(lane), layer)
        waiting.remove(layer)
        if out is None:
            return self.payload(lane, layer).result
        if out.dtype != torch.float32 or out.dim() != 2 or out.shape[1] != self.hidden:
            raise ValueError(f"out {list(out.shape)} of {out.dtype}, must be float32 [T, {self.hidden}]")
        if out.shape[0] > self.rows or not out.is_contiguous():
            raise ValueError(f"out must be contiguous, of at most {self.rows} rows")
        self.backend.receive(out, self._base + at.result(lane, layer))
        return out

    def forget(self, lane: int) -> None:
        """The recording of the lane was given up: layers that were submitted will not be collected."""
        self._recorded.pop(lane, None)

    def _check_place(self, lane: int, layer: int) -> None:
        if not (0 <= lane < self.lanes and 0 <= layer < self.layers):
            raise ValueError(f"lane {lane}, layer {layer} of {self.lanes} lanes, {self.layers} layers")

    def _check_tensors(self, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        rows = x.shape[0]
        wanted = {
            "x": (x, (rows, self.hidden), self.dtype),
            "ids": (ids, (rows, self.slots), self.ids_dtype),
            "weights": (weights, (rows, self.slots), torch.float32),
        }
        for name, (tensor, shape, dtype) in wanted.items():
            if tuple(tensor.shape) != shape or tensor.dtype != dtype or not tensor.is_contiguous():
                raise ValueError(
                    f"{name}: {tensor.dtype} {list(tensor.shape)}, must be contiguous {dtype} {list(shape)}"
                )
            if tensor.device.type != self._view.device.type:
                raise ValueError(f"{name} is on {tensor.device}, must be on {self._view.device}")
        if not 1 <= rows <= self.rows:
            raise ValueError(f"{rows} rows, the channel has room for {self.rows}")

    # -- steps

    def begin(self, lane: int, rows: int) -> None:
        """A replay of the lane's graph follows, of which the first ``rows`` rows count. Before its launch.

        Raises HandoffError where no worker can be had, ValueError where the lane's last step has not ended.
        """
        if not 0 <= lane < self.lanes or not 1 <= rows <= self.rows:
            raise ValueError(f"lane {lane} with {rows} rows, of {self.lanes} lanes with up to {self.rows}")
        try:
            self._channel.begin(lane, rows)
        except RuntimeError as error:
            raise HandoffError(f"hand-off: {error}") from None
        self._rows[lane] = rows

    def end(self, lane: int, *, abort: bool = False) -> None:
        """The stream is through with the lane's replay, or with ``abort`` something kept it from running all
        of it. Raises HandoffError where the CPU side failed; what the replay computed is then worthless."""
        error = self._channel.end(lane, abort)
        if error and not abort:
            raise HandoffError(f"hand-off, lane {lane}, {error}")
        if recorder.active and not error:
            self._tell(lane)

    @contextmanager
    def step(self, rows: Mapping[int, int]) -> Iterator[None]:
        """Lane -> rows. Within it: launch the replays and wait for them. Lanes end in any case; the error of
        what stands within comes before that of the hand-off."""
        begun: list[int] = []
        try:
            for lane, count in rows.items():
                self.begin(lane, count)
                begun.append(lane)
            yield
        except BaseException:
            for lane in begun:
                self.end(lane, abort=True)
            if begun:
                # What the device says is of the same error; the lanes are free once it is idle.
                with suppress(RuntimeError, HeteroError):
                    self.backend.synchronize()
            raise
        errors: list[HandoffError] = []
        for lane in begun:
            try:
                self.end(lane)
            except HandoffError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def times(self, lane: int) -> list[LayerTimes]:
        """Of the lane's last step, by layer."""
        return [LayerTimes(*one) for one in self._channel.times(lane)]

    def totals(self, lane: int) -> Totals:
        """Sums of ``times``."""
        served = [one for one in self.times(lane) if one.published]
        wait = sum(one.seen - one.looked for one in served)
        work = sum(one.ended - one.began for one in served)
        whole = sum(one.published - one.seen for one in served)
        later = sum(one.later_ended - one.later_began for one in served)
        return Totals(len(served), wait / 1e9, (work + later) / 1e9, (whole - work) / 1e9)

    def _tell(self, lane: int) -> None:
        rows = self._rows[lane]
        for layer, experts, one in zip(self.numbers, self.experts, self.times(lane), strict=True):
            size = experts.nbytes // experts.spec.num_experts
            recorder.add(("cpu", EXPERTS, layer, one.began, one.ended, rows, Counted(one.experts, size)))
            if one.later_ended:
                read = Counted(one.later_experts, size)
                recorder.add(("cpu", DEFERRED, layer, one.later_began, one.later_ended, rows, read))

    @property
    def workers(self) -> int:
        """Worker threads that were started so far; more than one after failures."""
        return self._channel.workers

    def close(self) -> None:
        """End the worker. Steps in flight get an error; graphs must not be replayed any more."""
        if self._closed:
            return
        self._closed = True
        if not self._channel.close():
            log.warning("a worker of the hand-off is stuck; its memory is kept")
            _left_behind.append((self._channel, self._memory, self._view, self.experts))

    def __enter__(self) -> Handoff:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self.close()


def _part(memory: Tensor, offset: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    nbytes = shape[0] * shape[1] * dtype.itemsize
    return memory[offset : offset + nbytes].view(dtype).view(shape)


def _check_experts(experts: Sequence[cpu.CpuExperts], dtype: torch.dtype) -> None:
    """Raises InputError where these cannot be handed off."""
    for layer, one in enumerate(experts):
        if not isinstance(one, cpu.CpuExperts):
            raise InputError(f"experts of layer {layer}: only the native backend can be handed off")
        if one.spec.staged:
            raise InputError(f"experts of layer {layer}: their activation runs in torch, between two steps")
        if one.spec.hidden != experts[0].spec.hidden:
            raise InputError(f"layer {layer} has {one.spec.hidden} columns, layer 0 {experts[0].spec.hidden}")
        if one.spec.hidden % 2 and dtype != torch.float32:
            raise InputError(f"{one.spec.hidden} columns of {dtype}: rows must be whole 32-bit words")
