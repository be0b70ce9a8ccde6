"""The experts of a chunk of a prompt over all tiers: those in GPU memory from their slots, the others divided
between the CPU and PCIe, so that all three work at the same time.

A layer, eagerly: the rows of each expert come to the host; ``tiers.split_chunk`` divides them; the CPU's
tokens go down and its pool starts on a thread; the GPU sorts all pairs by tier and expert and computes its
slots' experts; on a stream of their own, experts cross PCIe in pieces, into one of two staging buffers, while
the GPU computes the piece before; the sums are added in one order, the CPU's last. Where the last layer
streamed, the next one's first pieces cross while its attention runs.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hetero.cpu import CpuExperts
from hetero.ops.gpu import hybrid_kernels, stamps
from hetero.ops.gpu.cache import ExpertCache
from hetero.ops.gpu.launch import ExpertLaunch, Sorted, sorted_places, tiling
from hetero.ops.gpu.pinned import PinnedArena
from hetero.ops.gpu.tiers import CPU_ALONE, Ints, Rates, Split, Strategy, split_chunk
from hetero.trace import EXPERTS, HITS, PLAN, STREAM, WAIT, Counted, clock, recorder

PIECE = 96 << 20
"""Bytes of a staging buffer, about: whole experts, at least one."""

BUFFERS = 2

ROWS = 8192
"""Sorted rows that are computed at a time, at most; also the most tokens of a chunk."""

_FEW = 2048  # tokens that take no time to send down
_KEPT = 512  # records
_TELLING = 16 << 20  # bytes of a piece whose time tells a rate
_MANY = 16  # rows of an expert beyond which the CPU's time is that of arithmetic
_WIDTH = 1024  # numbers of a program
_FASTER, _SLOWER = 0.5, 2.0  # what one layer may change of the rates


@dataclass(frozen=True, slots=True)
class PrefillRecord:
    """How the experts of one layer and chunk were computed: experts by tier, what was expected, what it took.
    ``cpu_s``: of the CPU's pool; ``seconds``: of the host, from the routing to the sum's last launch."""

    layer: int
    tokens: int
    strategy: str
    gpu: int
    pcie: int
    cpu: int
    expected_cpu_s: float
    expected_pcie_s: float
    expected_s: float
    cpu_s: float
    seconds: float


class Layer(Protocol):
    """``hybrid.HybridExperts``, as far as it is used here."""

    layer: int
    experts: CpuExperts
    cache: ExpertCache
    arena: PinnedArena | None
    launch: ExpertLaunch | None


@dataclass(slots=True)
class _Piece:
    """Experts of a staging buffer. ``ready``: the event that they are there; None before they were sent."""

    experts: list[int]
    buffer: int
    ready: Any = None
    is_sent: bool = False


class _Down(NamedTuple):
    """A chunk's tokens on the host, once ``arrived``."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    arrived: Any


class _Batch(NamedTuple):
    """Sorted rows that are computed at once and their tiles, first and last + 1."""

    rows: tuple[int, int]
    tiles: tuple[int, int]


class Chunk:
    """A layer's experts at work on a chunk; ``collect`` waits for the CPU's and returns float32 [T,
    hidden]."""

    def __init__(self, prefiller: Prefiller, layer: Layer, out: Tensor, split: Split, tokens: int) -> None:
        self._prefiller, self._layer, self._out = prefiller, layer, out
        self._split, self._tokens = split, tokens
        self._began, self._since = time.perf_counter(), stamps.here()
        self.job: Future[tuple[Tensor, float]] | None = None

    def collect(self) -> Tensor:
        cpu_s = 0.0
        if self.job is not None:
            result, cpu_s = self.job.result()
            stamps.lap(WAIT)
            self._prefiller.add_host(self._out, result)
        split = self._split
        stamps.chosen(self._since, split.strategy, self._tokens, split.seconds)
        self._prefiller.note(
            PrefillRecord(
                self._layer.layer, self._tokens, split.strategy,
                len(split.gpu), len(split.pcie), len(split.cpu),
                split.work_s, split.pcie_s, split.seconds, cpu_s, time.perf_counter() - self._began,
            )
        )  # fmt: skip
        return self._out


class Prefiller:
    """What the layers of a model share for prompts. ``add`` every layer before the first chunk; memory is
    taken then and counts in ``nbytes``. ``strategy`` may be changed between chunks. Rates
    follow what chunks take. One chunk of one layer at a time starts, several may be unfinished.
    """

    def __init__(self, device: torch.device, *, rates: Rates | None = None, piece: int = PIECE) -> None:
        self.device, self.rates = device, rates or Rates()
        self.strategy: Strategy = "auto"
        self.records: deque[PrefillRecord] = deque(maxlen=_KEPT)
        self._cuda = device.type == "cuda"
        self._piece_bytes = piece
        self._layers: dict[int, Layer] = {}
        self._staging = torch.empty(0, dtype=torch.uint8, device=device)
        self._room: tuple[Tensor, Tensor] | None = None
        self._streams = [torch.cuda.Stream(device) for _ in range(2)] if self._cuda else []  # type: ignore[no-untyped-call]
        self._free: list[Any] = [None] * BUFFERS  # events: a buffer's last experts were computed
        self._next_buffer = 0
        self._lent: deque[tuple[Any, Tensor]] = deque()  # host memory that kernels read until an event
        self._sent: dict[int, list[_Piece]] = {}  # layer -> pieces that cross before its routing is known
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="hetero-prefill")
        self._cpu_takes = False  # part of the last chunk
        self._scale = 1.0  # of the CPU's times, as measured
        self._copied: deque[tuple[int, Any, Any]] = deque()  # bytes of pieces, and events around them
        self._pcie = self.rates.pcie  # as measured beside the CPU's reads

    @property
    def nbytes(self) -> int:
        """Bytes of GPU memory: staging buffers and intermediate rows."""
        return self._staging.numel() + sum(part.nbytes for part in self._room or ())

    @property
    def staging(self) -> Tensor:
        """The buffers, uint8 on the device, which nothing uses while no chunk is under way."""
        return self._staging

    def add(self, layer: Layer) -> None:
        """A layer that will be given chunks."""
        self._layers[layer.layer] = layer
        if layer.launch is None:
            return
        stride = layer.cache.stride
        needed = BUFFERS * max(1, self._piece_bytes // stride) * stride
        if needed > self._staging.numel():
            self._staging = torch.empty(needed, dtype=torch.uint8, device=self.device)
        rooms = self._room
        spec = layer.launch.spec
        if rooms is None or rooms[0].shape[1] < spec.intermediate or rooms[1].shape[1] < spec.hidden:
            self._room = layer.launch.rooms(ROWS)

    def close(self) -> None:
        self._pool.shutdown()

    def note(self, record: PrefillRecord) -> None:
        self.records.append(record)
        if record.cpu_s > 0.0 and record.expected_cpu_s > 0.0:
            ratio = min(max(record.cpu_s / record.expected_cpu_s, _FASTER), _SLOWER)
            self._scale *= ratio**0.25

    def _measured(self) -> Rates:
        """The rates as the last chunks had them."""
        while self._copied and (self._copied[0][2] is None or self._copied[0][2].query()):
            nbytes, began, ended = self._copied.popleft()
            if ended is not None and nbytes >= _TELLING:
                speed = nbytes / max(began.elapsed_time(ended) * 1e-3, 1e-9)
                self._pcie += (speed - self._pcie) / 8
        cpu = tuple((rows, speed / self._scale) for rows, speed in self.rates.cpu)
        return replace(self.rates, cpu=cpu, pcie=self._pcie)

    def takes_turns(self, layer: Layer, rows: int) -> bool:
        """Whether a chunk is better computed in two halves, the CPU's experts of one beside the GPU's other
        layers of the other: where the CPU computes nearly everything, and experts have so many rows that
        reading them twice costs little."""
        spec = layer.experts.spec
        alone = layer.launch is None or self.strategy == "cpu"
        return alone and rows * spec.top_k >= 2 * _MANY * spec.num_experts

    # -- a chunk

    def start(self, layer: Layer, x: Tensor, ids: Tensor, weights: Tensor) -> Chunk:
        """x bf16 [T, hidden], ids int64 [T, k], weights float32 [T, k], T at most ``ROWS``; all but the CPU's
        part is in the current stream when this returns."""
        launch, cache = layer.launch, layer.cache
        tokens, experts = x.shape[0], cache.experts
        x, weights = x.bfloat16().contiguous(), weights.float().contiguous()
        out = torch.empty(tokens, x.shape[1], dtype=torch.float32, device=self.device)
        # The CPU's tokens go down before it is known whether it gets any: it can begin the sooner.
        early = launch is None or self._cpu_takes or tokens <= _FEW
        down = self._send_down(x, ids, weights) if early else None
        if launch is None:
            alone = Chunk(self, layer, out.zero_(), CPU_ALONE, tokens)
            alone.job = self._begin(layer, down or self._send_down(x, ids, weights), None)
            return alone
        flat = ids.flatten()
        flat = torch.where((flat >= 0) & (flat < experts), flat, experts)
        uses = torch.zeros(experts + 1, dtype=torch.int64, device=self.device)
        uses = uses.scatter_add_(0, flat, torch.ones_like(flat))[:experts]
        following = self._layers.get(layer.layer + 1)
        looked = [uses.int(), cache.slot_of, *([following.cache.slot_of] if following else [])]
        rows, slot_of, next_slot_of = _thirds(torch.cat(looked).cpu().numpy().astype(np.int64), experts)
        sent = self._take_sent(layer)
        rates = self._measured()
        split = split_chunk(
            rows,
            slot_of >= 0,
            np.array([e for piece in sent for e in piece.experts], dtype=np.int64),
            tokens=tokens,
            expert_bytes=cache.stride,
            ops=2 * launch.spec.params // experts,
            rates=rates,
            strategy=self.strategy,
        )
        cache.observe(uses, tokens)
        stamps.lap(PLAN)
        chunk = Chunk(self, layer, out, split, tokens)
        self._cpu_takes = len(split.cpu) > 0
        if self._cpu_takes:
            theirs = np.isin(np.arange(experts), split.cpu)
            chunk.job = self._begin(layer, down or self._send_down(x, ids, weights), theirs)
        pieces = [*sent, *self._pieces(layer, split.pcie.tolist(), sent)]
        order, addresses = self._order(layer, split, slot_of, pieces)
        shape = tiling(float(rows[order].mean()) if len(order) else 0.0)
        batches, tiles, of_tile = _batches(order, addresses, rows, shape.rows, self._ends(split, pieces))
        # Where each expert's pairs come: the GPU's in the order in which it takes them, then the others.
        rank = np.full(experts + 1, experts, dtype=np.int64)
        rank[order] = np.arange(len(order))
        told = self._to_device(np.concatenate([rank, of_tile, tiles.ravel()]))
        keys, told = told[: experts + 1][flat], told[experts + 1 :]
        where, edges = told[: len(of_tile)], told[len(of_tile) :]
        pairs = Sorted(*sorted_places(keys), edges.int().view(-1, 2), where)
        first = True
        for piece, of_piece in zip([None, *pieces], batches, strict=True):
            if piece is not None:
                self._bring(layer, piece)
                self._wait(piece.ready)
            for batch in of_piece:
                launch.many(
                    cache.memory, x, weights, pairs, rows=batch.rows, tiles=batch.tiles, out=out,
                    room=self._rooms(), shape=shape, first=first,
                )  # fmt: skip
                first = False
            if piece is not None:
                self._free[piece.buffer] = self._event()
        if first:
            out.zero_()
        stamps.lap(HITS)
        if following is not None and len(split.pcie) > self._per_piece(layer):
            self._send_ahead(following, np.flatnonzero(next_slot_of < 0).tolist())
        return chunk

    def _send_down(self, x: Tensor, ids: Tensor, weights: Tensor) -> _Down:
        with self._stream(1):
            rows, chosen, factors = (self._to_host(part) for part in (x, ids, weights))
            return _Down(rows, chosen, factors, self._event())

    def _begin(
        self, layer: Layer, down: _Down, theirs: npt.NDArray[np.bool_] | None
    ) -> Future[tuple[Tensor, float]]:
        """The CPU's pool on what came down, of ``theirs`` [experts] or all."""
        result = torch.empty(down.x.shape, dtype=torch.float32, pin_memory=self._cuda)
        number = stamps.layer_now(layer.layer)

        def work() -> tuple[Tensor, float]:
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
            if recorder.active:
                read = Counted(_distinct(ids, layer.cache.experts), layer.experts.whole_bytes)
                recorder.add(("cpu", EXPERTS, number, began, ended, len(ids), read))
            return result, (ended - began) / 1e9

        return self._pool.submit(work)

    def add_host(self, out: Tensor, result: Tensor) -> None:
        """Add what lies in pinned host memory, read in place: a copy would wait behind the next layer's
        experts, which are on their way by now."""
        hybrid_kernels.add[(-(-out.numel() // _WIDTH),)](
            out, out, result, out, out, out.numel(),
            HAS_OWN=True, HAS_READ=False, HAS_EXTRA=False, WIDTH=_WIDTH,
        )  # fmt: skip
        if self._cuda:
            # Its memory is given back once the kernel has read it.
            self._lend(result)

    # -- pieces

    def _per_piece(self, layer: Layer) -> int:
        return self._staging.numel() // BUFFERS // layer.cache.stride

    def _pieces(self, layer: Layer, experts: Sequence[int], sent: Sequence[_Piece] = ()) -> list[_Piece]:
        """What of ``experts`` was not sent yet, in staging buffers by turns."""
        on_way = {expert for piece in sent for expert in piece.experts}
        rest, size = [expert for expert in experts if expert not in on_way], self._per_piece(layer)
        made = []
        for at in range(0, len(rest), size):
            made.append(_Piece(rest[at : at + size], self._next_buffer))
            self._next_buffer = (self._next_buffer + 1) % BUFFERS
        return made

    def _order(
        self, layer: Layer, split: Split, slot_of: Ints, pieces: Sequence[_Piece]
    ) -> tuple[Ints, Ints]:
        """The GPU's experts in the order in which it computes them, and where each is by then."""
        cache, half = layer.cache, self._staging.numel() // BUFFERS
        order, addresses = [split.gpu], [cache.cache_at + slot_of[split.gpu] * cache.stride]
        for piece in pieces:
            experts = np.array(piece.experts, dtype=np.int64)
            start = self._staging.data_ptr() + piece.buffer * half
            wanted = np.isin(experts, split.pcie)
            order.append(experts[wanted])
            addresses.append((start + np.arange(len(experts)) * cache.stride)[wanted])
        return np.concatenate(order), np.concatenate(addresses)

    def _ends(self, split: Split, pieces: Sequence[_Piece]) -> list[int]:
        """How many of that order the GPU has seen after its own, and after each piece."""
        ends = [len(split.gpu)]
        for piece in pieces:
            ends.append(ends[-1] + int(np.isin(piece.experts, split.pcie).sum()))
        return ends

    def _bring(self, layer: Layer, piece: _Piece) -> None:
        """Start a piece on its way, unless it is."""
        if piece.is_sent:
            return
        assert layer.arena is not None
        stride, half = layer.cache.stride, self._staging.numel() // BUFFERS
        room = self._staging[piece.buffer * half : (piece.buffer + 1) * half]
        with self._stream(0):
            self._wait(self._free[piece.buffer])
            stamps.start()
            began = self._event(timed=True)
            for at, expert, count in _runs(piece.experts, layer.arena.pieces):
                to = room[at * stride : (at + count) * stride].view(count, stride)
                to.copy_(layer.arena.view[expert : expert + count], non_blocking=True)
            stamps.lap(STREAM, lane="pcie", nbytes=len(piece.experts) * stride)
            piece.ready = self._event(timed=True)
        self._copied.append((len(piece.experts) * stride, began, piece.ready))
        piece.is_sent = True

    def _take_sent(self, layer: Layer) -> list[_Piece]:
        """What was sent ahead for a layer. What a chunk that takes turns with this one has sent for a later
        layer is given up: this one needs the buffers."""
        sent = self._sent.pop(layer.layer, [])
        self._sent.clear()
        return sent

    def _send_ahead(self, layer: Layer, absent: list[int]) -> None:
        """Fill the staging buffers with what the next layer will very likely need."""
        if layer.launch is None or self.strategy == "cpu":
            return
        pieces = self._pieces(layer, absent[: BUFFERS * self._per_piece(layer)])
        for piece in pieces:
            self._bring(layer, piece)
        self._sent[layer.layer] = pieces

    # -- streams, which the CPU does not have

    def _rooms(self) -> tuple[Tensor, Tensor]:
        assert self._room is not None
        return self._room

    @contextmanager
    def _stream(self, index: int) -> Iterator[None]:
        """A side stream, behind what the current one holds."""
        if not self._cuda:
            yield
            return
        stream = self._streams[index]
        if index:  # copies up wait for their buffer alone
            stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            yield

    def _event(self, timed: bool = False) -> Any:
        if not self._cuda:
            return None
        event = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _wait(self, event: Any) -> None:
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def _to_host(self, tensor: Tensor) -> Tensor:
        """A copy that is on its way, in the current stream."""
        if not self._cuda:
            return tensor.clone()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        tensor.record_stream(torch.cuda.current_stream(self.device))
        return host.copy_(tensor, non_blocking=True)

    def _to_device(self, array: Ints) -> Tensor:
        """A few numbers; by a kernel, since a copy would wait behind experts that are on their way."""
        host = torch.from_numpy(array)
        if not self._cuda:
            return host
        host = host.pin_memory()
        out = torch.empty(host.shape, dtype=host.dtype, device=self.device)
        hybrid_kernels.pull[(-(-len(host) // _WIDTH),)](host, out, len(host), WIDTH=_WIDTH)
        self._lend(host)
        return out

    def _lend(self, host: Tensor) -> None:
        """Keep what kernels in the current stream read from here, and let go of what they have read."""
        while self._lent and self._lent[0][0].query():
            self._lent.popleft()
        self._lent.append((self._event(), host))


def _distinct(ids: Tensor, experts: int) -> int:
    """How many experts the ids name; those that are no expert's are left out."""
    real = ids[(ids >= 0) & (ids < experts)]
    return int(torch.bincount(real).count_nonzero())


def _thirds(numbers: Ints, size: int) -> tuple[Ints, Ints, Ints]:
    return numbers[:size], numbers[size : 2 * size], numbers[2 * size :]


def _runs(experts: Sequence[int], border: int) -> Iterator[tuple[int, int, int]]:
    """(place, first expert, number) of neighbours that one copy brings; none crosses a multiple of
    ``border``."""
    begin = 0
    for at in range(1, len(experts) + 1):
        if at == len(experts) or experts[at] != experts[at - 1] + 1 or experts[at] % border == 0:
            yield begin, experts[begin], at - begin
            begin = at


def _batches(
    order: Ints, addresses: Ints, rows: Ints, height: int, ends: Sequence[int]
) -> tuple[list[list[_Batch]], Ints, Ints]:
    """Batches of each group of experts, where group i ends before ``order[ends[i]]``; the edges of all tiles
    [tiles, 2] (first and last + 1 of their sorted rows), and their addresses. A batch has at most ``ROWS``
    rows: as many as an expert may have."""
    mine = rows[order]
    last = np.cumsum(mine)
    count = (mine + height - 1) // height
    tile_last = np.cumsum(count)
    within = np.arange(int(count.sum())) - np.repeat(tile_last - count, count)
    top = np.repeat(last - mine, count) + within * height
    tiles = np.stack([top, np.minimum(top + height, np.repeat(last, count))], 1)
    at_row, at_tile = np.concatenate([[0], last]), np.concatenate([[0], tile_last])
    groups: list[list[_Batch]] = []
    begin = 0
    for end in ends:
        groups.append([])
        while begin < end:
            fits = int(np.searchsorted(at_row, at_row[begin] + ROWS, side="right")) - 1
            until = min(end, fits)
            if at_row[until] > at_row[begin]:
                edges = (at_row[begin], at_row[until]), (at_tile[begin], at_tile[until])
                groups[-1].append(_Batch(*((int(a), int(b)) for a, b in edges)))
            begin = until
    return groups, tiles, np.repeat(addresses, count)
