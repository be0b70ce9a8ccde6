"""From a loaded tree whose layers a rule asks to fuse to the runner that makes its steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from hetero.config import settings
from hetero.core import HeteroError, InputError
from hetero.cpu import CpuExperts
from hetero.decode.decoder import Decoder
from hetero.decode.experts import DirectExperts
from hetero.decode.inputs import PAGE
from hetero.engine.gpu import share
from hetero.engine.gpu.loading import ROWS, GpuOptions
from hetero.engine.gpu.port import LanePort
from hetero.engine.gpu.room import CacheWish, cache_slots, default_lengths, fill, first_slots
from hetero.engine.gpu.runner import GpuRunner
from hetero.engine.gpu.steps import TRACKS
from hetero.engine.gpu.vram import Vram
from hetero.engine.handoff import Handoff
from hetero.hw.memory import gib
from hetero.ops.experts import CpuExpertsOp
from hetero.ops.gpu.hybrid import DirectPort, HybridExperts, Port
from hetero.ops.gpu.hybrid_shared import HybridShared
from hetero.ops.gpu.launch import check_format
from hetero.ops.gpu.pinned import PinnedArena, pin_all
from hetero.rules import Placement
from hetero.rules.gpu_options import CacheSize
from hetero.stats import Counts

T = TypeVar("T", int, float | None)

_STATES = 4
"""States of sequences a slot, whose memory is taken at the start where there are several slots."""


@dataclass(frozen=True, slots=True)
class Site:
    """The experts of one MoE layer and what their rule says of them."""

    experts: CpuExperts
    layer: int  # of the model
    rule: str
    cache: CacheSize
    share: float | None
    defer: int


class Fusing:
    """One call of ``fuse``."""

    def __init__(
        self,
        model: Any,
        sites: Sequence[Site],
        device: str,
        options: GpuOptions,
        say: Callable[[str], None],
        *,
        lanes: int,
    ) -> None:
        self.model, self.sites, self.options, self.say = model, sites, options, say
        self.lanes = lanes  # by which halves of steps take turns; 0: where that is faster
        self.device = torch.device(device)
        self.experts = [site.experts for site in sites]
        self.text = model.config.get_text_config(decoder=True)
        self.defer = _one_of([site.defer for site in sites], "defer")
        self.wishes: list[CacheWish] = []  # of all layers; none where the GPU reads no experts
        self.port: LanePort | None = None
        self.rows = options.rows or tuple(n for n in ROWS if n < 2 * options.slots)

    def runner(self, vram: Vram | None, limit: int | None, counts: Counts | None) -> GpuRunner:
        options = self.options
        if options.context is not None and limit is not None and options.context > limit:
            raise InputError(f"--ctx {options.context}: the context of this model holds {limit} tokens")
        context, kv_tokens = options.context, options.kv_tokens
        if context is None:
            context, together = default_lengths(self.text, options.slots, limit, vram)
            kv_tokens = kv_tokens or together
        pages = self._pages(context, kv_tokens)
        decoder = Decoder(
            self.model,
            [DirectExperts(one) for one in self.experts],
            slots=options.slots,
            context=context,
            device=self.device,
            pages=pages,
        )
        handoff = self._handoff(decoder.moe_numbers) if vram is not None else None
        if vram is not None:
            torch.cuda.empty_cache()  # what packing and the decoder's making have left
        shared, hybrid = self._hybrid(vram, handoff)
        decoder.experts[:] = hybrid
        if vram is not None:
            vram.hold()
        runner = GpuRunner(
            decoder,
            hybrid,
            handoff=handoff,
            slots=options.slots,
            context=context,
            rows=self.rows,
            eager=options.eager,
            shared=shared,
            wait=options.wait,
            chunk=options.chunk,
            pages=pages,
            numbers=decoder.moe_numbers,
            port=self.port,
            ahead=self.port is not None and settings().ahead,
            halves=self.port is not None and self.lanes != 1,
            closing=[shared.prefiller.close, *(one.arena.close for one in hybrid if one.arena is not None)],
        )
        # At the end of the process at the latest the worker ends, and memory is unpinned while CUDA is there.
        weakref.finalize(runner, _end, handoff, [one.arena for one in hybrid])
        runner.capture()
        if vram is not None and any(first_slots(self.wishes)):
            fill(runner, vram, self.wishes, partial(_resize, hybrid))
        if self.port is not None and self.lanes != 1:
            self._take_turns(runner)
        # Whoever asks for these while a step waits for the host finds their kernels loaded: to load one may
        # take until the device is idle.
        runner.reads()
        runner.uses()
        self._tell_slots(hybrid)
        for one in hybrid:
            one.cache.unlearn()  # what the capture has read
        self._seed(hybrid, counts)
        if vram is not None and options.slots > 1:
            runner.keeping.prepare(_STATES * options.slots)
        told = runner.keeping.told()
        if told is not None and (options.slots > 1 or not runner.keeping.able):
            self.say(told)
        if vram is not None:
            vram.hold()
            self.say(
                f"a sequence holds up to {context} tokens, all together {runner.kv_tokens}; "
                f"{gib(vram.used)} of GPU memory are in use {vram.basis}"
            )
        return runner

    def _take_turns(self, runner: GpuRunner) -> None:
        times = runner.take_turns(True if self.lanes == 2 else None)
        for rows, (plain, turns) in times.items():
            better = "take turns" if turns < plain else "do not"
            self.say(
                f"steps of {rows} rows take {turns * 1e3:.2f} ms if their halves take turns and "
                f"{plain * 1e3:.2f} ms if not: they {better}"
            )

    def _tell_slots(self, hybrid: Sequence[HybridExperts]) -> None:
        if self.wishes:
            held = sum(one.nbytes for one in hybrid)
            count = sum(wish.experts for wish in self.wishes)
            slots = sum(one.slots for one in hybrid)
            self.say(f"{slots} of {count} experts lie in GPU memory too, {gib(held)}")

    def _seed(self, hybrid: Sequence[HybridExperts], counts: Counts | None) -> None:
        """Begin with the experts that earlier runs have used most."""
        if counts is None:
            return
        seeded = 0
        for site, one in zip(self.sites, hybrid, strict=True):
            row = counts.get(site.layer)
            if one.slots and row is not None and len(row) == site.experts.spec.num_experts and any(row):
                one.seed(row)
                seeded += 1
        if seeded:
            self.say(f"those of {seeded} layers were chosen by how earlier runs used them (hetero stats)")

    def _pages(self, context: int, kv_tokens: int | None) -> int | None:
        if kv_tokens is None:
            return None
        return min(self.options.slots * -(-context // PAGE), max(1, -(-kv_tokens // PAGE)))

    def _handoff(self, numbers: Sequence[int]) -> Handoff:
        options = self.options
        top_k = {one.spec.top_k for one in self.experts}
        handoff = Handoff(
            self.experts,
            rows=max(self.rows),
            slots=max(top_k),
            lanes=TRACKS * (1 if self.lanes == 1 else 2),
            device=self.device,
            backend=options.handoff,
            defer=self.defer > 0,
            numbers=numbers,
        )
        self.say(f"hand-off by {handoff.backend.name} ({handoff.backend.why})")
        return handoff

    def _hybrid(self, vram: Vram | None, handoff: Handoff | None) -> tuple[HybridShared, list[HybridExperts]]:
        arenas = self._arenas()
        shared = HybridShared(self.device, defer=self.defer)
        if self.defer:
            self.say(
                f"up to {self.defer} of a token's experts are added one layer later, which changes the output"
            )
        slots = [0] * len(self.experts)
        if arenas:
            self._split(shared, arenas)
            wishes = [
                CacheWish(len(arena.view), arena.view.shape[1], site.cache, site.rule)
                for arena, site in zip(arenas, self.sites, strict=True)
            ]
            # On a device the rest follows once it is known what steps and prompts leave.
            slots = cache_slots(wishes, None, 0) if vram is None else first_slots(wishes)
            self.wishes = wishes
        port: Port
        if handoff is not None:
            port = self.port = LanePort(handoff) if self.lanes == 1 else LanePort(handoff, (0, 1), 2)
        else:
            port = DirectPort(self.experts, max(self.rows), self.device, defer=self.defer > 0)
        hybrid = []
        for layer, one in enumerate(self.experts):
            arena = arenas[layer] if arenas else None
            hybrid.append(HybridExperts(one, layer, port, shared, slots=slots[layer], arena=arena))
        return shared, hybrid

    def _arenas(self) -> list[PinnedArena]:
        """The experts' memory as the device sees it; empty where it cannot read it and no rule asks for more
        than the CPU."""
        try:
            for one in self.experts:
                check_format(one.spec, one.format, self.device, one.down_format)
            return pin_all(self.experts, self.device)
        except InputError as error:
            if any(site.share or site.cache.of(1 << 40) for site in self.sites):
                raise
            self.say(f"the CPU computes all experts: {error}")
            return []

    def _split(self, shared: HybridShared, arenas: Sequence[PinnedArena]) -> None:
        """What the GPU reads in place: as rules say, else as measured."""
        said = _one_of([site.share for site in self.sites], "share")
        if said is not None:
            shared.set_share(said)
        elif self.device.type == "cuda":
            found = share.measure(self.experts, arenas, self.device, max(self.rows))
            shared.balance(found.sides)
            rates = found.rates
            self.say(
                f"the GPU reads about {rates.share:.0%} of the experts that it lacks (measured: "
                f"{rates.bus / 1e9:.0f} GB/s over the bus, {rates.cpu / 1e9:.0f} by the CPU beside it)"
            )


def _one_of(values: Sequence[T], key: str) -> T:
    """What all layers have. Raises InputError where rules say several."""
    if len(set(values)) > 1:
        words = ", ".join(sorted("auto" if one is None else f"{one:g}" for one in set(values)))
        raise InputError(f"experts: '{key}' is one for all layers, and the rules say {words}")
    return values[0]


def fuse(
    model: Any,
    placement: Placement,
    device: str,
    options: GpuOptions,
    *,
    vram: Vram | None = None,
    limit: int | None = None,
    counts: Counts | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> GpuRunner:
    """The runner over a tree whose weights are there. ``device``: of its layers; "cpu": steps without graphs.
    ``vram``: made before the process used the device. ``limit``: tokens that the model itself can attend to.
    ``counts``: of earlier uses of experts, by the index of the layer. ``say``: what was decided, a
    sentence each.

    Raises InputError for a model or rules whose steps cannot be fused, MachineError where memory is lacking.
    """
    if vram is None and torch.device(device).type == "cuda":
        vram = Vram(device, options.vram)
    fused = (one.options.get("lanes", 1) for one in placement.assignments if one.op == "fused")
    sites = find_sites(model, placement)
    return Fusing(model, sites, device, options, say, lanes=next(fused, 1)).runner(vram, limit, counts)


def _resize(hybrid: Sequence[HybridExperts], slots: Sequence[int]) -> None:
    """Caches of so many experts. What was there goes first, so that the new ones find its memory."""
    for one in hybrid:
        one.resize(0)
    torch.cuda.empty_cache()
    for one, count in zip(hybrid, slots, strict=True):
        one.resize(count)


def _end(handoff: Handoff | None, arenas: Sequence[PinnedArena | None]) -> None:
    if handoff is not None:
        handoff.close()  # steps on their way are answered
        with suppress(RuntimeError, HeteroError):
            handoff.backend.synchronize()
    for arena in arenas:
        if arena is not None:
            arena.close()


def find_sites(model: Any, placement: Placement) -> list[Site]:
    """Of each MoE layer in order. Raises InputError for experts that cannot be handed off."""
    sites = []
    for name, module in model.named_modules():
        if not isinstance(module, CpuExpertsOp):
            continue
        found = placement.by_module[name]
        owner = placement.by_module.get(found.owner or "", found)
        if not isinstance(module.backend, CpuExperts):
            owner.rule.where.fail("fused layers need all experts in main memory, by backend 'native'")
        experts = owner.options["experts"]
        if experts["defer"] >= module.spec.top_k:
            owner.rule.where.fail(
                f"experts: defer {experts['defer']}: must be below the {module.spec.top_k} experts of a token"
            )
        said = experts["cache"], experts["share"], experts["defer"]
        sites.append(Site(module.backend, module.layer, owner.rule.label, *said))
    if not sites:
        raise InputError("op 'fused': the model has no experts that an 'op: moe' keeps in main memory")
    return sites
