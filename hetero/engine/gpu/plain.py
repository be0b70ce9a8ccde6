"""Decode steps of models without fused layers as graphs: transformers' own modules, one sequence at a time.

The model runs over a cache that stays where it is; experts on the CPU are handed over as those of fused
layers are. What cannot be captured runs eagerly, and one warning says why.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from hetero.core import HeteroError, InputError, MachineError
from hetero.cpu import CpuExperts
from hetero.engine.gpu.graphs import CaptureError, CudaMeans, Graph, Means, told
from hetero.engine.handoff import Handoff
from hetero.model.static import HeldCache, unsuited
from hetero.ops.experts import CpuExpertsOp
from hetero.ops.watch import ExpertUse
from hetero.trace import recorder

log = logging.getLogger("hetero.engine")

LONGEST = 4096
"""Tokens up to which sequences run by graphs, which attend to all places whether they are taken or not."""

_WARM_UPS = 2


class AnySequence(Protocol):
    """``forward.Sequence``, as far as graphs are concerned."""

    length: int

    @property
    def held(self) -> Any:
        """Its cache."""


class Handing(Protocol):
    """How the experts of a step are given to the CPU, by their number; ``Handed``."""

    def begin(self) -> None: ...
    def end(self, *, abort: bool = False) -> None: ...
    def submit(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> None: ...
    def collect(self, layer: int, out: Tensor) -> None: ...
    def close(self) -> None: ...


class Handed:
    """By a hand-off of one row."""

    def __init__(self, experts: Sequence[CpuExperts], dtype: torch.dtype, device: torch.device) -> None:
        slots = max(one.spec.top_k for one in experts)
        self._handoff = Handoff(experts, rows=1, slots=slots, dtype=dtype, device=device)

    def begin(self) -> None:
        self._handoff.begin(0, 1)

    def end(self, *, abort: bool = False) -> None:
        self._handoff.end(0, abort=abort)

    def submit(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        self._handoff.record_submit(0, layer, x, ids, weights)

    def collect(self, layer: int, out: Tensor) -> None:
        self._handoff.record_collect(0, layer, out)

    def close(self) -> None:
        self._handoff.close()


class _Away:
    """Experts at work for a step that is recorded; in place of ``ops.experts.Pending``."""

    def __init__(self, handing: Handing, layer: int, like: Tensor) -> None:
        self._handing, self._layer, self._like = handing, layer, like

    def collect(self) -> Tensor:
        out = torch.empty(self._like.shape, dtype=torch.float32, device=self._like.device)
        self._handing.collect(self._layer, out)
        return out.to(self._like.dtype)


Make = Callable[[Sequence[CpuExperts], torch.dtype, torch.device], Handing]


class PlainGraphs:
    """Of one model, whose dense modules are all on ``device``. ``step`` is only for sequences for which
    ``serves`` holds. ``means`` and ``make``: in a GPU's place, for tests. Not for two threads at once."""

    def __init__(
        self,
        model: Any,
        device: torch.device,
        fixed: dict[str, Any],
        *,
        means: Means | None = None,
        make: Make = Handed,
    ) -> None:
        self._model, self._device, self._fixed, self._make = model, device, fixed, make
        self._means: Means = means or CudaMeans(device, "nap", 1)
        self._length = min(LONGEST, int(getattr(model.config, "max_position_embeddings", 0) or LONGEST))
        self._experts = [module for module in model.modules() if isinstance(module, CpuExpertsOp)]
        # Of all experts, those on the device as well, which count themselves.
        uses = (getattr(module, "use", None) for module in model.modules())
        self._uses = [use for use in uses if isinstance(use, ExpertUse)]
        self._cache: HeldCache | None = None
        self._handing: Handing | None = None
        self._graph: Graph | None = None
        self._ids = torch.zeros(1, 1, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._there = self._ids.to(device) if device.type == "cuda" else self._ids
        self._owner: weakref.ref[AnySequence] | None = None
        self._order: list[int] = []  # of experts, as a step comes to them
        self.why_eager = "" if self._one_device() else "its layers are on several devices"

    def _one_device(self) -> bool:
        return all(weight.device == self._device for weight in self._model.parameters())

    def serves(self, sequence: AnySequence) -> bool:
        """Whether the sequence's next token may come by a graph."""
        return not self.why_eager and not recorder.active and 0 < sequence.length < self._length

    def owns(self, sequence: AnySequence) -> bool:
        return self._owner is not None and self._owner() is sequence

    def step(self, sequence: AnySequence, token: int) -> Tensor | None:
        """Logits [V] after one more token, which hold until the next step; None where it cannot be captured:
        the sequence is as before.
        Raises HandoffError where the CPU side failed, after which the sequence is worth nothing."""
        try:
            with torch.inference_mode(), self._means.stream():
                self._take(sequence)
                if self._graph is None:
                    self._capture(sequence.length)
                assert self._graph is not None
                self._ids.fill_(token)
                logits = self._replayed(self._graph)
        except (CaptureError, InputError, MachineError) as error:
            self._give_up(sequence, error)
            return None
        except torch.OutOfMemoryError as error:  # beside the sequence's own keys and values
            self._give_up(sequence, MachineError(told(error)))
            return None
        sequence.length += 1
        return logits

    def release(self, sequence: AnySequence) -> None:
        """Let the sequence have its cache in memory of its own."""
        if self.owns(sequence) and self._cache is not None:
            with torch.inference_mode():
                self._cache.show(sequence.held, sequence.length, apart=True)
            self._owner = None

    def forget(self, sequence: AnySequence) -> None:
        """The sequence is no more."""
        if self.owns(sequence):
            self._owner = None

    def close(self) -> None:
        """The graph goes; who owned the cache has it apart."""
        owner = None if self._owner is None else self._owner()
        if owner is not None:
            self.release(owner)
        self._means.synchronize()
        self._graph = None
        if self._handing is not None:
            self._handing.close()
            self._handing = None

    def _take(self, sequence: AnySequence) -> None:
        if self.owns(sequence):
            return
        before = None if self._owner is None else self._owner()
        if before is not None:
            self.release(before)
        if reason := unsuited(sequence.held):
            raise CaptureError(reason)
        if self._cache is None:
            self._cache = HeldCache(sequence.held, self._length)
        self._cache.load(sequence.held, sequence.length)
        # What it was copied from is of another stream, where its memory may be used again at once.
        self._means.mark(0)
        self._means.wait(0, 0)
        self._cache.show(sequence.held, sequence.length)
        self._owner = weakref.ref(sequence)

    def _capture(self, held: int) -> None:
        assert self._cache is not None
        if self._experts:
            self._handing = self._make(*self._handed())
        counts = [self._counts_of(use) for use in self._uses]
        kept = [one.clone() for one in counts]
        for _ in range(_WARM_UPS):
            self._try()
            self._cache.rewind(held)
        if self._order != list(range(len(self._experts))):
            raise CaptureError("its experts do not run in the order in which they stand")
        for now, before in zip(counts, kept, strict=True):
            now.copy_(before)  # nobody has asked for the steps so far
        self._graph = self._means.graph(self._record, self._means.pool())

    def _counts_of(self, use: ExpertUse) -> Tensor:
        """How often each expert of a layer was chosen in steps by graphs, on the device."""
        if use.counted is None:
            use.counted = torch.zeros(use.experts, dtype=torch.int64, device=self._device)
        return use.counted

    def _try(self) -> None:
        """One step without a graph. Raises CaptureError where the model's code does not run so."""
        try:
            with self._step_of_cpu():
                self._record()
                self._means.mark(0)
                self._means.wait(0, 0)
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
            raise CaptureError(told(error)) from error

    def _handed(self) -> tuple[list[CpuExperts], torch.dtype, torch.device]:
        backends = [module.backend for module in self._experts]
        native = [one for one in backends if type(one) is CpuExperts]
        if len(native) != len(backends):
            raise CaptureError("its experts are not all of backend 'native' in main memory")
        dtype = self._model.get_input_embeddings().weight.dtype
        return native, dtype, self._device

    def _record(self) -> Tensor:
        """Into the current stream: a step of one token, and its logits [V]."""
        assert self._cache is not None
        self._order.clear()
        if self._there is not self._ids:
            self._there.copy_(self._ids, non_blocking=True)
        for layer, module in enumerate(self._experts):
            module.handed = lambda x, ids, weights, layer=layer: self._hand(layer, x, ids, weights)
        for use in self._uses:
            use.recording = True
        try:
            out = self._model(input_ids=self._there, past_key_values=self._cache.cache, **self._fixed)
        finally:
            for module in self._experts:
                module.handed = None
            for use in self._uses:
                use.recording = False
        logits: Tensor = out.logits
        return logits[0, -1]

    def _hand(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> _Away:
        assert self._handing is not None
        self._order.append(layer)
        ids = ids.long().contiguous()
        self._handing.submit(layer, x.contiguous(), ids, weights.float().contiguous())
        self._experts[layer].use.count_there(ids)
        return _Away(self._handing, layer, x)

    def _replayed(self, graph: Graph) -> Tensor:
        with self._step_of_cpu():
            graph.replay()
            self._means.mark(0)
            self._means.wait(1, 0)
        return graph.out

    @contextmanager
    def _step_of_cpu(self) -> Iterator[None]:
        handing = self._handing
        if handing is None:
            yield
            return
        handing.begin()
        try:
            yield
        except BaseException:
            handing.end(abort=True)
            raise
        handing.end()

    def _give_up(self, sequence: AnySequence, error: HeteroError) -> None:
        self.why_eager = str(error)
        self.close()
        self._cache = None
        log.warning("a step of this model cannot be captured as a graph and runs eagerly: %s", error)
