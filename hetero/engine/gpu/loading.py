"""What a load has to do with GPUs: their memory, and the layers that rules fuse. Imports no kernels."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hetero import stats
from hetero.config import settings
from hetero.core import InputError, MachineError
from hetero.engine.gpu.vram import Vram
from hetero.model.build import is_experts
from hetero.plan.workspace import CHUNK, MOST_CHUNK
from hetero.rules import Assignment, Placement

if TYPE_CHECKING:
    from hetero.engine.gpu.runner import GpuRunner

HANDOFFS = ("auto", "memop", "spin", "hostfunc")

ROWS = (1, 2, 4, 8, 16)
"""Of steps that graphs are made for."""

FUSED_DTYPE = "bfloat16"
"""Of dense layers in fused steps."""


@dataclass(frozen=True, slots=True)
class GpuOptions:
    """What a run says of fused layers. ``vram``: most bytes of GPU memory, everything included; None: what is
    free. ``slots``: sequences at once. ``context``: tokens of one, at most; None: what there is room for.
    ``kv_tokens``: of keys and values that all sequences together hold; None: as many as they may need.
    ``handoff``: its backend. ``rows``: sizes of graphs; None: as many as ``slots`` need. ``wait``: how the
    host waits for a step. ``eager``: no graphs. ``chunk``: tokens of a prompt that are read at once."""

    vram: int | None = None
    slots: int = 1
    context: int | None = None
    kv_tokens: int | None = None
    handoff: str = "auto"
    rows: tuple[int, ...] | None = None
    wait: str = "nap"
    eager: bool = False
    chunk: int = CHUNK


def gpu_options(
    vram: int | None, *, slots: int, context: int | None, kv_tokens: int | None, handoff: str
) -> GpuOptions:
    """As the command line has them. Raises InputError for a hand-off that does not exist."""
    if handoff not in HANDOFFS:
        raise InputError(f"--handoff {handoff}: must be one of {', '.join(HANDOFFS)}")
    given = "HETERO_PREFILL_CHUNK" in os.environ
    chunk = min(settings().prefill_chunk, MOST_CHUNK) if given else CHUNK
    return GpuOptions(
        vram=vram, slots=slots, context=context, kv_tokens=kv_tokens, handoff=handoff, chunk=chunk
    )


class Graphs:
    """The GPU side of one load. ``notes``: what was decided, a sentence each.

    Make it before a weight is read. Raises InputError for rules that cannot be fused, MachineError for a cap
    that is more than the device has.
    """

    def __init__(self, model: Any, placement: Placement, dtype: str, options: GpuOptions | None) -> None:
        self._model, self._placement = model, placement
        self._options = options or GpuOptions()
        self.notes: list[str] = []
        self._device = fused_device(placement, model, dtype)
        devices = sorted({one.device for one in placement.assignments if one.device != "cpu"})
        if not devices and self._options.vram is not None:
            raise InputError("--vram: the rules place nothing on a GPU")
        if self._device is None and self._options.handoff != "auto":
            raise InputError(
                f"--handoff {self._options.handoff}: of fused layers, and the rules fuse none ('op: fused')"
            )
        capped = devices if self._options.vram is not None else [self._device] if self._device else []
        self._memory = {one: Vram(one, self._options.vram) for one in capped}
        for memory in self._memory.values():
            memory.hold()

    @contextmanager
    def enough_memory(self) -> Iterator[None]:
        """Around what brings weights to devices. Raises MachineError where one has too little memory."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            memory = " ".join(one.told() for one in self._memory.values()) or str(error).partition(". ")[0]
            raise MachineError(f"the weights that rules place on the GPU do not fit: {memory}") from None

    def fuse(self, limit: int | None, config: Mapping[str, Any] | None = None) -> GpuRunner | None:
        """The runner of fused layers, once their weights are there; None where no rule fuses any. ``limit``:
        tokens that the model can attend to. ``config``: of the model, whose statistics tell what a cache
        begins with; None: nothing does."""
        if self._device is None:
            return None
        try:
            from hetero.engine.gpu.fuse import fuse
        except ModuleNotFoundError as error:
            raise _missing(error) from None
        known: stats.Stats | None = None
        if config is not None:
            # Whatever the model was called; copies of it count as one.
            wanted = stats.config_hash(config)
            known = next((one for one in stats.load_all() if one.config == wanted), None)
        # Kernels are launched on the device that is current.
        with self.enough_memory(), torch.cuda.device(self._device):
            return fuse(
                self._model,
                self._placement,
                self._device,
                self._options,
                vram=self._memory[self._device],
                limit=limit,
                counts=None if known is None else known.layers,
                say=self.notes.append,
            )


def fused_device(placement: Placement, model: Any, dtype: str) -> str | None:
    """The device of fused layers; None where no rule fuses any.

    Raises InputError where rules fuse some layers only, or on several devices, or ask for what fused layers
    cannot do, or what only they can; for a model that has no fused steps; and for a type other than bfloat16.
    """
    fused = [one for one in placement.assignments if one.op == "fused"]
    if not fused:
        for one in placement.assignments:
            _check_unfused(one)
        return None
    where = fused[0].rule.where
    layers = list(model.get_decoder().layers)
    names = {id(module): name for name, module in model.named_modules()}
    wanted, given = {names[id(layer)] for layer in layers}, {one.module for one in fused}
    if odd := sorted(given - wanted):
        where.fail(f"op 'fused' replaces decoder layers, and {odd[0]} is none")
    if left := sorted(wanted - given):
        where.fail(f"op 'fused' is for all decoder layers or none, and {left[0]} has another rule")
    if len({one.device for one in fused}) > 1:
        where.fail("op 'fused' keeps all decoder layers on one device")
    try:
        from hetero.decode.families import FAMILIES
    except ModuleNotFoundError as error:
        raise _missing(error) from None
    kind = type(layers[0]).__name__
    if kind not in FAMILIES:
        where.fail(
            f"op 'fused' has no steps for layers of class {kind}; it has for {', '.join(FAMILIES)}; "
            "default-gpu serves any model"
        )
    _check_experts(placement, model)
    if dtype != FUSED_DTYPE:
        raise InputError(f"--dtype {dtype}: op 'fused' computes in {FUSED_DTYPE}; leave the option out")
    return fused[0].device


def _check_unfused(one: Assignment) -> None:
    """Refuse what only fused layers do."""
    if one.op != "moe":
        return
    experts = one.options["experts"]
    asked = {"cache": experts["cache"].of(1 << 40), "share": experts["share"], "defer": experts["defer"]}
    for key, value in asked.items():
        if value:
            one.rule.where.fail(f"experts: '{key}' needs fused decoder layers: a rule with 'op: fused'")


def _check_experts(placement: Placement, model: Any) -> None:
    """Refuse experts that a step cannot hand to the CPU."""
    for name, module in model.named_modules():
        if not is_experts(module):
            continue
        found = placement.by_module[name]
        owner = placement.by_module.get(found.owner or "", found)
        where = owner.rule.where
        if owner.op != "moe":
            where.fail(f"fused layers need 'op: moe' for their blocks, and {name} has none")
        experts = owner.options["experts"]
        if experts["device"] != "cpu":
            where.fail("fused layers keep all experts in main memory; 'cache' says how many a GPU has too")
        if experts["backend"] != "native" or experts["tier"] != "ram":
            where.fail("fused layers need experts of backend 'native', all of them in main memory")


def _missing(error: ModuleNotFoundError) -> InputError:
    return InputError(f"op 'fused' needs the package {error.name}: pip install {error.name}")
