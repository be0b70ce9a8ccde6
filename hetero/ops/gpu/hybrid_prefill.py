"""The experts of a chunk of a prompt over all tiers: those in GPU memory from their slots, the others divided
between the CPU and PCIe, so that all three work at the same time.

A layer, eagerly: the chunk's choices come to the host, which counts the rows of each expert;
``tiers.split_chunk`` divides them; the CPU's pool starts on a thread, on the tokens that came down as well;
the GPU sorts all pairs by tier and expert and computes its slots' experts; on a stream of their own, experts
cross PCIe in pieces (``staged``), into one of two buffers, while the GPU computes the piece before; the sums
are added in one order, the CPU's last. Where the last layer streamed, the next one's first pieces cross while
its attention runs.

Where streams can wait for a word of the host (``lanes.Flags``), whoever launches kernels does not wait for
the CPU's sum: what follows, up to the next layer's router, is launched behind such a wait and runs at once
when the sum is there. What a job raised is raised by the next layer's start; the last layer's is waited for.
"""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hetero.cpu import CpuExperts
from hetero.ops.gpu import stamps
from hetero.ops.gpu.cache import ExpertCache
from hetero.ops.gpu.chunk_tiles import batches
from hetero.ops.gpu.lanes import DOWN, Flags, Lanes
from hetero.ops.gpu.launch import ExpertLaunch, Sorted, sorted_places, tiling
from hetero.ops.gpu.pinned import PinnedArena
from hetero.ops.gpu.staged import PIECE, Piece, Staging
from hetero.ops.gpu.tiers import CPU_ALONE, Ints, PrefillRecord, Rates, Split, Strategy, split_chunk
from hetero.trace import EXPERTS, HITS, PLAN, WAIT, Counted, clock, recorder

ROWS = 8192
"""Sorted rows that are computed at a time, at most; also the most tokens of a chunk."""

_FEW = 2048  # tokens that take no time to send down
_KEPT = 512  # records
_MANY = 16  # rows of an expert beyond which the CPU's time is that of arithmetic
_FASTER, _SLOWER = 0.5, 2.0  # what one layer may change of the rates


class Layer(Protocol):
    """``hybrid.HybridExperts``, as far as it is used here."""

    layer: int
    experts: CpuExperts
    cache: ExpertCache
    arena: PinnedArena | None
    launch: ExpertLaunch | None


class _Down(NamedTuple):
    """A chunk's tokens on the host, once ``arrived``."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    arrived: Any


class Job(NamedTuple):
    """The CPU's part of a chunk: its sum, and seconds that it took, once the future is done and the flag
    ``ticket``, if any, is set."""

    future: Future[float]
    result: Tensor
    ticket: int


class Chunk:
    """A layer's experts at work on a chunk; ``collect`` returns ``out``, float32 [T, hidden], in which what
    is launched afterwards finds the CPU's sum as well."""

    def __init__(self, prefiller: Prefiller, layer: Layer, out: Tensor) -> None:
        self._prefiller, self._layer, self.out = prefiller, layer, out
        self.split, self.tokens = CPU_ALONE, len(out)
        self.times = [time.perf_counter()]  # of the start, then of what ``PrefillRecord`` tells apart
        self._since = stamps.here()
        self.job: Job | None = None
        self._waited = self._ended = 0.0

    def collect(self) -> Tensor:
        job, ahead = self.job, False
        began = time.perf_counter()
        if job is not None:
            ahead = self._prefiller.passes(self._layer, job)
            if not ahead:
                job.future.result()
            self._waited = time.perf_counter() - began
            stamps.lap(WAIT)
            self._prefiller.lanes.add_host(self.out, job.result)
        split = self.split
        stamps.chosen(self._since, split.strategy, self.tokens, split.seconds)
        self._ended = time.perf_counter()
        self._prefiller.unseen.append(self)
        if not ahead:
            self._prefiller.look()
        return self.out

    def record(self) -> PrefillRecord:
        """Once the CPU is through; raises what it raised."""
        cpu_s = 0.0 if self.job is None else self.job.future.result()
        split = self.split
        at = [*self.times, *[self.times[-1]] * (4 - len(self.times))]
        return PrefillRecord(
            self._layer.layer, self.tokens, split.strategy, len(split.gpu), len(split.pcie), len(split.cpu),
            split.work_s, split.pcie_s, split.seconds, cpu_s, self._ended - at[0],
            at[1] - at[0], at[2] - at[1], at[3] - at[2], self._waited,
        )  # fmt: skip


class Prefiller:
    """What the layers of a model share for prompts. ``add`` every layer before the first chunk; memory is
    taken then and counts in ``nbytes``. ``strategy`` may be changed between chunks, ``ahead`` too: whether
    streams wait for the CPU where they can. One chunk of one layer at a time starts, several may be
    unfinished."""

    def __init__(
        self, device: torch.device, *, rates: Rates | None = None, piece: int = PIECE, ahead: bool = True
    ) -> None:
        self.device, self.rates, self.ahead = device, rates or Rates(), ahead
        self.strategy: Strategy = "auto"
        self.records: deque[PrefillRecord] = deque(maxlen=_KEPT)
        self.lanes, self.flags = Lanes(device), Flags(device)
        self.staged = Staging(self.lanes, piece, self.rates.pcie)
        self.unseen: deque[Chunk] = deque()  # that were collected, and their jobs not looked at
        self._layers: dict[int, Layer] = {}
        self._rooms: tuple[Tensor, Tensor] | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="hetero-prefill")
        self._cpu_takes = False  # part of the last chunk
        self._scale = 1.0  # of the CPU's times, as measured

    @property
    def nbytes(self) -> int:
        """Bytes of GPU memory: staging buffers and intermediate rows."""
        return self.staging.numel() + sum(part.nbytes for part in self._rooms or ())

    @property
    def staging(self) -> Tensor:
        """The buffers, uint8 on the device, which nothing uses while no chunk is under way."""
        return self.staged.memory

    def add(self, layer: Layer) -> None:
        """A layer that will be given chunks."""
        self._layers[layer.layer] = layer
        if layer.launch is None:
            return
        self.staged.hold(layer.cache.stride)
        rooms = self._rooms
        spec = layer.launch.spec
        if rooms is None or rooms[0].shape[1] < spec.intermediate or rooms[1].shape[1] < spec.hidden:
            self._rooms = layer.launch.rooms(ROWS)

    def close(self) -> None:
        self._pool.shutdown()

    def room(self) -> tuple[Tensor, Tensor]:
        """Of kernels, for rows between projections."""
        assert self._rooms is not None
        return self._rooms

    def takes_turns(self, layer: Layer, rows: int) -> bool:
        """Whether a chunk is better computed in two halves, the CPU's experts of one beside the GPU's other
        layers of the other: where the CPU computes nearly everything, and experts have so many rows that
        reading them twice costs little."""
        spec = layer.experts.spec
        alone = layer.launch is None or self.strategy == "cpu"
        return alone and rows * spec.top_k >= 2 * _MANY * spec.num_experts

    # -- the CPU's part

    def passes(self, layer: Layer, job: Job) -> bool:
        """Have the current stream wait for a job in the host's place, if that can be; then whoever starts the
        next layer, which waits for the device, looks at it (``look``)."""
        if not job.ticket or self._layers.get(layer.layer + 1) is None:
            return False
        self.flags.wait(job.ticket)
        return True

    def look(self) -> None:
        """At jobs that the device has waited for: records, and rates that follow them. Raises what one
        raised."""
        while self.unseen:
            record = self.unseen.popleft().record()
            self.records.append(record)
            if record.cpu_s > 0.0 and record.expected_cpu_s > 0.0:
                ratio = min(max(record.cpu_s / record.expected_cpu_s, _FASTER), _SLOWER)
                self._scale *= ratio**0.25

    def _begin(self, layer: Layer, down: _Down, theirs: npt.NDArray[np.bool_] | None) -> Job:
        """The CPU's pool on what came down, of ``theirs`` [experts] or all."""
        result = torch.empty(down.x.shape, dtype=torch.float32, pin_memory=self.lanes.cuda)
        number = stamps.layer_now(layer.layer)
        # Layers that the host does not wait for otherwise would be launched without an end.
        ahead = self.ahead and self.flags.able and layer.launch is not None
        ticket = self.flags.take() if ahead else 0

        def work() -> float:
            try:
                if down.arrived is not None:
                    down.arrived.synchronize()
                ids = down.ids
                if theirs is not None:
                    given = ids.numpy()
                    known = (given >= 0) & (given < len(theirs))
                    meant = known & theirs[np.where(known, given, 0)]
                    ids = torch.from_numpy(np.where(meant, given, -1))
                began = clock()
                layer.experts.forward(down.x, ids, down.weights, result)
                ended = clock()
            finally:
                if ticket:  # whatever happened: the device may wait already
                    self.flags.set(ticket)
            if recorder.active:
                read = Counted(_distinct(ids, layer.cache.experts), layer.experts.whole_bytes)
                recorder.add(("cpu", EXPERTS, number, began, ended, len(ids), read))
            return (ended - began) / 1e9

        return Job(self._pool.submit(work), result, ticket)

    # -- a chunk

    def start(self, layer: Layer, x: Tensor, ids: Tensor, weights: Tensor) -> Chunk:
        """x bf16 [T, hidden], ids int64 [T, k], weights float32 [T, k], T at most ``ROWS``; all but the CPU's
        part is in the current stream when this returns. Raises what the CPU's part of an earlier layer
        raised."""
        lanes, launch, cache = self.lanes, layer.launch, layer.cache
        if layer.layer - 1 not in self._layers:
            self._forget()
        x, weights = x.bfloat16().contiguous(), weights.float().contiguous()
        out = torch.empty(x.shape[0], x.shape[1], dtype=torch.float32, device=self.device)
        if launch is None:
            alone = Chunk(self, layer, out.zero_())
            alone.job = self._begin(layer, self._send_down(x, ids, weights), None)
            return alone
        chunk = Chunk(self, layer, out)
        # Copies into the buffers begin behind it: a step that was launched before may use them.
        behind = lanes.event()
        following = self._layers.get(layer.layer + 1)
        with lanes.stream(DOWN):
            known = [lanes.to_host(ids), lanes.to_host(cache.slot_of)]
            known += [lanes.to_host(following.cache.slot_of)] if following else []
            routed = lanes.event()
        # The CPU's tokens go down before it is known whether it gets any: it can begin the sooner.
        early = self._cpu_takes or len(x) <= _FEW
        down = self._send_down(x, known[0], weights) if early else None
        if routed is not None:
            routed.synchronize()
        self.look()
        chunk.times.append(time.perf_counter())
        named = known[0].flatten().numpy()
        named = named[(named >= 0) & (named < cache.experts)]
        rows = np.bincount(named, minlength=cache.experts)
        slot_of = known[1].numpy().astype(np.int64)
        sent = self.staged.take_sent(layer.layer)
        chunk.split = split = split_chunk(
            rows,
            slot_of >= 0,
            np.array([e for piece in sent for e in piece.experts], dtype=np.int64),
            tokens=len(x),
            expert_bytes=cache.stride,
            ops=2 * launch.spec.params // cache.experts,
            rates=self._measured(),
            strategy=self.strategy,
        )
        self._cpu_takes = len(split.cpu) > 0
        if self._cpu_takes:
            theirs = np.zeros(cache.experts, dtype=bool)
            theirs[split.cpu] = True
            chunk.job = self._begin(layer, down or self._send_down(x, known[0], weights), theirs)
        stamps.lap(PLAN)
        chunk.times.append(time.perf_counter())
        pieces = [*sent, *self.staged.pieces(cache.stride, split.pcie.tolist(), sent)]
        self._compute(layer, chunk, (x, ids, weights), (rows, slot_of, pieces), behind)
        if following is not None and len(split.pcie) > self.staged.per_piece(cache.stride):
            self._send_ahead(following, known[2].numpy(), behind)
        chunk.times.append(time.perf_counter())
        return chunk

    def _compute(
        self,
        layer: Layer,
        chunk: Chunk,
        given: tuple[Tensor, Tensor, Tensor],
        known: tuple[Ints, Ints, list[Piece]],
        behind: Any,
    ) -> None:
        """The GPU's experts, those that cross included. ``given``: x, ids, weights; ``known``: rows and slot
        of each expert, and what crosses."""
        (x, ids, weights), (rows, slot_of, pieces) = given, known
        split, out = chunk.split, chunk.out
        launch, cache, arena = layer.launch, layer.cache, layer.arena
        assert launch is not None
        assert arena is not None
        experts = cache.experts
        order, addresses, ends = self._order(cache, split, slot_of, pieces)
        shape = tiling(float(rows[order].mean()) if len(order) else 0.0)
        groups, tiles, of_tile = batches(order, addresses, rows, shape.rows, ends, most=ROWS)
        # Where each expert's pairs come: the GPU's in the order in which it takes them, then the others.
        rank = np.full(experts + 1, experts, dtype=np.int64)
        rank[order] = np.arange(len(order))
        told = self.lanes.to_device(np.concatenate([rank, rows, of_tile, tiles.ravel()]))
        ranks, told = told[: experts + 1], told[experts + 1 :]
        uses, where, edges = (
            told[:experts],
            told[experts : experts + len(of_tile)],
            told[experts + len(of_tile) :],
        )
        cache.observe(uses, len(x))
        flat = ids.flatten()
        keys = ranks[torch.where((flat >= 0) & (flat < experts), flat, experts)]
        pairs = Sorted(*sorted_places(keys), edges.int().view(-1, 2), where)
        first = True
        for piece, group in zip([None, *pieces], groups, strict=True):
            if piece is not None:
                self.staged.bring(arena, piece, behind)
                self.lanes.wait(piece.ready)
            for batch in group:
                launch.many(
                    cache.memory, x, weights, pairs, rows=batch.rows, tiles=batch.tiles, out=out,
                    room=self.room(), shape=shape, first=first,
                )  # fmt: skip
                first = False
            if piece is not None:
                self.staged.computed(piece)
        if first:
            out.zero_()
        stamps.lap(HITS)

    def _order(
        self, cache: ExpertCache, split: Split, slot_of: Ints, pieces: list[Piece]
    ) -> tuple[Ints, Ints, list[int]]:
        """The GPU's experts in the order in which it computes them, where each is by then, and how many it
        has seen after its own and after each piece."""
        crossing = np.zeros(cache.experts, dtype=bool)
        crossing[split.pcie] = True
        order, addresses = [split.gpu], [cache.cache_at + slot_of[split.gpu] * cache.stride]
        for piece in pieces:
            experts = np.array(piece.experts, dtype=np.int64)
            wanted = crossing[experts]
            order.append(experts[wanted])
            addresses.append((self.staged.start(piece) + np.arange(len(experts)) * cache.stride)[wanted])
        ends = np.cumsum([len(part) for part in order]).tolist()
        return np.concatenate(order), np.concatenate(addresses), ends

    def _measured(self) -> Rates:
        """The rates as the last chunks had them."""
        cpu = tuple((rows, speed / self._scale) for rows, speed in self.rates.cpu)
        return replace(self.rates, cpu=cpu, pcie=self.staged.pcie)

    def _forget(self) -> None:
        """A prompt begins: what an earlier one has left that was given up is of no interest."""
        while self.unseen:
            job = self.unseen.popleft().job
            if job is not None:
                job.future.exception()

    def _send_down(self, x: Tensor, ids: Tensor, weights: Tensor) -> _Down:
        """``ids`` may have gone down already."""
        with self.lanes.stream(DOWN):
            chosen = ids if ids.device.type == "cpu" and self.lanes.cuda else self.lanes.to_host(ids)
            return _Down(self.lanes.to_host(x), chosen, self.lanes.to_host(weights), self.lanes.event())

    def _send_ahead(self, layer: Layer, slot_of: npt.NDArray[np.int32], behind: Any) -> None:
        """What the next layer will very likely need."""
        if layer.launch is None or layer.arena is None or self.strategy == "cpu":
            return
        self.staged.send_ahead(layer.layer, layer.arena, np.flatnonzero(slot_of < 0).tolist(), behind)


def _distinct(ids: Tensor, experts: int) -> int:
    """How many experts the ids name; those that are no expert's are left out."""
    real = ids[(ids >= 0) & (ids < experts)]
    return int(torch.bincount(real).count_nonzero())
