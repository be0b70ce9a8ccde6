"""What operators tell of themselves: which experts are used, and the spans of a step that is watched."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from hetero.model import build
from hetero.ops.embedding import HostEmbedding
from hetero.trace import COPY, EXPERTS, SHARED, Lane, Reading, clock, recorder

if TYPE_CHECKING:
    from hetero.store.disk import DiskExperts, DiskReads

# Chosen experts that wait to be counted; folding as many takes a fraction of a millisecond.
_FOLD_AT = 4096
# Most ids that an event keeps for its reader to count; more are counted at once, so that a full ring of long
# prompts takes no gigabytes.
_KEPT = 256


@dataclass(frozen=True, slots=True)
class Use:
    """Of the experts of one layer since they were loaded."""

    counts: tuple[int, ...]  # times that each expert was chosen for a token
    reads: int  # (step, expert) pairs: in a step, an expert is read once for all its tokens


class ExpertUse:
    """Counts the use of one layer's experts. ``note`` only keeps the ids; counting is put off until there are
    thousands, or until somebody asks, so that it costs a step less than a microsecond a layer."""

    def __init__(self, experts: int) -> None:
        self._counts = np.zeros(experts, dtype=np.int64)
        self._reads = 0
        self._waiting: deque[torch.Tensor] = deque()
        self._held = 0
        self._lock = threading.Lock()
        # What a device counts by itself, in steps of one token: int64 [experts].
        self.counted: torch.Tensor | None = None
        self.recording = False  # a step is recorded, whose ids are others every time that it runs

    def note(self, ids: torch.Tensor) -> None:
        """Ids [T, k] of one step; those that are no expert's are left out. They are read later: from a GPU
        when its work is long done."""
        if self.recording:
            self.count_there(ids)
            return
        self._waiting.append(ids)
        self._held += ids.numel()
        if self._held >= _FOLD_AT:
            self._fold()

    @property
    def experts(self) -> int:
        return len(self._counts)

    def count_there(self, ids: torch.Tensor) -> None:
        """Add to ``counted``, in the current stream: ids [1, k] on its device."""
        assert self.counted is not None
        known = (ids >= 0) & (ids < len(self.counted))
        places = ids.long().clamp(0, len(self.counted) - 1)
        self.counted.scatter_add_(0, places.flatten(), known.long().flatten())

    def snapshot(self) -> Use:
        """The counts now, from any thread."""
        with self._lock:
            self._count()
            counts, reads = self._counts, self._reads
            if self.counted is not None:
                there = self.counted.cpu().numpy()
                counts, reads = counts + there, reads + int(there.sum())
            return Use(tuple(counts.tolist()), reads)

    def _fold(self) -> None:
        with self._lock:
            self._count()

    def _count(self) -> None:
        self._held = 0
        calls = [self._waiting.popleft().cpu().numpy().ravel() for _ in range(len(self._waiting))]
        if not calls:
            return
        experts = len(self._counts)
        ids = np.concatenate(calls).astype(np.int64, copy=False)
        call = np.repeat(np.arange(len(calls)), [len(each) for each in calls])
        good = (ids >= 0) & (ids < experts)
        table = np.bincount(call[good] * experts + ids[good], minlength=len(calls) * experts)
        table = table.reshape(len(calls), experts)
        self._counts += table.sum(axis=0)
        self._reads += int(np.count_nonzero(table))


def expert_uses(model: nn.Module) -> dict[int, tuple[int, ...]]:
    """How often each expert was chosen since the model was loaded, by the index of the layer."""
    found: dict[int, tuple[int, ...]] = {}
    for module in model.modules():
        use, layer = getattr(module, "use", None), getattr(module, "layer", None)
        if isinstance(use, ExpertUse) and isinstance(layer, int) and layer >= 0:
            found[layer] = use.snapshot().counts
    return found


class Away:
    """The spans of one call of experts that leaves the block's thread or device, while somebody watches.

    Made before the tokens leave their device. Experts on the block's own thread need one span and no object.
    """

    def __init__(self, layer: int, like: torch.Tensor) -> None:
        self._layer = layer
        self._device = like.device
        self._lane = lane_of(like.device)
        self._at = self._now()

    def moved(self, *tensors: torch.Tensor) -> None:
        """These have come to or gone from the host since the last call of this object."""
        began, self._at = self._at, self._now()
        if self._lane == "gpu":
            size = sum(tensor.nbytes for tensor in tensors)
            recorder.add(("pcie", COPY, self._layer, began, self._at, len(tensors[0]), size))

    def collecting(self) -> None:
        """The block wants the result; what it has done since ``moved`` went on beside the experts."""
        began, self._at = self._at, self._now()
        recorder.add((self._lane, SHARED, self._layer, began, self._at, 0, 0))

    def back(self, result: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """The experts' result, on the device and in the dtype of ``like``."""
        self._at = clock()
        out = result.to(device=like.device, dtype=like.dtype)
        self.moved(result)
        return out

    def _now(self) -> int:
        _finish(self._device)
        return clock()


def worked(layer: int, start: int, ids: torch.Tensor, reading: Reading) -> None:
    """Experts ``ids`` [T, k] of a layer have worked from ``start`` until now."""
    end = clock()
    if ids.numel() <= _KEPT:
        recorder.add(("cpu", EXPERTS, layer, start, end, ids, reading))
    else:
        recorder.add(("cpu", EXPERTS, layer, start, end, len(ids), reading.nbytes(ids)))


def timed(
    call: Callable[[], torch.Tensor], layer: int, ids: torch.Tensor, reading: Reading
) -> Callable[[], torch.Tensor]:
    """``call``, the work of experts ``ids``, recorded on the thread that it runs on."""

    def run() -> torch.Tensor:
        start = clock()
        out = call()
        worked(layer, start, ids, reading)
        return out

    return run


def lane_of(device: torch.device) -> Lane:
    return "cpu" if device.type == "cpu" else "gpu"


def _finish(device: torch.device) -> None:
    """Wait for the work that a GPU has been given: the host's clock knows no other end of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def layer_of(name: str) -> int:
    """Index of the layer that a dotted module name is in, -1 outside layers."""
    found = build.layer_of(name)
    return -1 if found is None else found


def watch_steps(model: Any) -> None:
    """Let forward passes of ``model`` be recorded as steps."""
    device: torch.device = model.get_input_embeddings().weight.device
    lane = lane_of(device)

    def begin(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if recorder.active:
            ids = kwargs.get("input_ids", args[0] if args else None)
            recorder.begin_step(0 if ids is None else ids.numel())

    def end(*_: object) -> None:
        if recorder.active:
            _finish(device)
            recorder.end_step(lane)

    model.register_forward_pre_hook(begin, with_kwargs=True)
    model.register_forward_hook(end)


def dense_bytes(model: Any) -> dict[str, int]:
    """Bytes of weights outside routed experts that every step reads, by type of device ("cpu", "cuda").

    A table of embeddings counts where it is the output layer as well; else a step reads a few rows of it, as
    of those of op "embedding".
    """
    tables = {id(one.weight) for one in model.modules() if isinstance(one, HostEmbedding)}
    table = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    # A packed head has no weight of its own.
    tied = getattr(head, "weight", None) is table
    packed = [buffer for name, buffer in model.named_buffers() if name.rpartition(".")[2] == "packed"]
    total: dict[str, int] = {}
    for weight in [*model.parameters(), *packed]:
        if id(weight) not in tables and (tied or weight is not table):
            total[weight.device.type] = total.get(weight.device.type, 0) + weight.nbytes
    return total


def disk_experts(model: Any) -> list[DiskExperts]:
    """The backends of a model that hold some experts in RAM and read the rest from disk."""
    from hetero.store.disk import DiskExperts

    found = (getattr(module, "backend", None) for module in model.modules())
    return [backend for backend in found if isinstance(backend, DiskExperts)]


def disk_reads(tiered: Sequence[DiskExperts]) -> DiskReads:
    """What all of them have read since the start."""
    from hetero.store.disk import DiskReads

    return sum((experts.reads for experts in tiered), DiskReads())
