"""The routed experts of one layer over all tiers: GPU memory, the CPU, and host memory read over PCIe."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import triton
from torch import Tensor

from hetero.cpu import CpuExperts
from hetero.ops.gpu import hybrid_kernels, stamps
from hetero.ops.gpu.cache import RESERVE, ExpertCache
from hetero.ops.gpu.deferral import parted
from hetero.ops.gpu.experts import EXACT_ROWS
from hetero.ops.gpu.hybrid_prefill import ROWS, Chunk
from hetero.ops.gpu.hybrid_shared import LONGEST, MOST_STAGED, HybridShared
from hetero.ops.gpu.launch import ExpertLaunch, Later, check_format
from hetero.ops.gpu.pinned import PinnedArena
from hetero.trace import AHEAD, SUBMIT, WAIT

_GROUPS, _WIDTH = 8, 1024  # of a program: groups of 32 activations, results that are added


class Port(Protocol):
    """The CPU's side of a decode step, by MoE layer, from 0: lanes of a hand-off, or ``DirectPort``."""

    def payload(self, layer: int) -> Any:
        """Of the next submit: tensors ``x`` [R, hidden], ``ids`` [R, k], ``weights`` float32 [R, k] and
        ``result`` float32 [R, hidden], which kernels of the device may write and read; ids outside
        [0, experts) are not the CPU's."""

    def record_submit(self, layer: int) -> None:
        """The payload was written; the CPU may begin."""

    def record_collect(self, layer: int) -> object:
        """What follows on the stream finds the result of the oldest submit that was not collected."""


class DirectPayload(NamedTuple):
    x: Tensor
    ids: Tensor
    weights: Tensor
    result: Tensor


class DirectPort:
    """Computes at once and on the spot: for tests, and steps outside a graph. ``rows``: most of a step.
    ``defer``: ids may be put off (``deferral``)."""

    def __init__(
        self,
        experts: Sequence[CpuExperts],
        rows: int,
        device: str | torch.device = "cpu",
        *,
        defer: bool = False,
    ) -> None:
        self._experts = list(experts)
        self._defer = defer
        self._carry: Tensor | None = None  # what was put off at the last layer
        spec = self._experts[0].spec
        shape = rows, spec.top_k
        self._payload = DirectPayload(
            torch.zeros(rows, spec.hidden, dtype=torch.bfloat16, device=device),
            torch.full(shape, -1, dtype=torch.int64, device=device),
            torch.zeros(shape, dtype=torch.float32, device=device),
            torch.zeros(rows, spec.hidden, dtype=torch.float32, device=device),
        )

    def payload(self, layer: int) -> DirectPayload:
        return self._payload

    def record_submit(self, layer: int) -> None:
        experts, result = self._experts[layer], self._payload.result
        x, ids, weights = (one.cpu() for one in self._payload[:3])
        if not self._defer:
            result.copy_(experts.forward(x, ids, weights))
            return
        now, later = parted(ids, experts.spec.num_experts, last=layer + 1 == len(self._experts))
        total = experts.forward(x, now, weights)
        result.copy_(total if layer == 0 or self._carry is None else total + self._carry)
        self._carry = experts.forward(x, later, weights)

    def record_collect(self, layer: int) -> None:
        pass


class _Done(NamedTuple):
    sum: Tensor

    def collect(self) -> Tensor:
        return self.sum


@dataclass(frozen=True, slots=True)
class TierCounts:
    """Experts of decode steps since the start, each once a step: found in GPU memory, read from host memory
    by the GPU, computed by the CPU. Of those read, how many ``stayed`` in GPU memory; and how many were
    ``moved`` there beside the steps."""

    gpu: int
    pcie: int
    cpu: int
    stayed: int
    moved: int

    @property
    def hit_rate(self) -> float | None:
        """Share found in GPU memory; None before the first step."""
        total = self.gpu + self.pcie + self.cpu
        return self.gpu / total if total else None


class _Step(NamedTuple):
    """What ``collect`` needs of a ``submit``. ``addresses``: of experts in GPU memory and of those that are
    read in place; ``later``: of those that are brought beforehand."""

    rows: int
    result: Tensor
    ids: Tensor
    weights: Tensor
    addresses: Tensor
    sources: Tensor | None
    quantised: tuple[Tensor, Tensor]
    later: Later | None


class HybridExperts:
    """The experts of one MoE layer. ``layer``: its number among MoE layers, by which ``port`` knows it.

    ``slots`` experts have room in GPU memory. ``arena``: the CPU's memory as the GPU sees it; without one the
    CPU computes everything and ``slots`` is 0. What layers have in common stands in ``shared``. Raises
    InputError for experts that the GPU's kernels do not read, where there is an arena.

    A decode step is ``submit``, the GPU's other work, ``collect``, which also starts the moves of the cache
    on the side; all can be captured. A layer may be submitted again before its collect where the port has
    room for it (micro-batches); collects come in the same order.
    """

    def __init__(
        self,
        experts: CpuExperts,
        layer: int,
        port: Port,
        shared: HybridShared,
        *,
        slots: int = 0,
        arena: PinnedArena | None = None,
    ) -> None:
        spec, self.device = experts.spec, shared.device
        self.experts, self.layer, self.port, self.shared, self.arena = experts, layer, port, shared, arena
        self.slots = slots
        # Recorded by ``collect`` where the GPU has nothing left to do but to wait for the CPU.
        self.before_wait: Callable[[], None] | None = None
        self._pending: deque[_Step] = deque()
        self._used: list[Tensor] = []  # ids of steps whose moves wait for those of the last one
        self.launch: ExpertLaunch | None = None
        if arena is not None:
            check_format(spec, experts.format, self.device, experts.down_format)
            self.launch = ExpertLaunch(spec, experts.format, self.device, experts.down_format)
        elif slots:
            raise ValueError("slots without memory that the GPU can read")
        empty = spec.num_experts, 0
        self._host = arena.view if arena is not None else torch.empty(empty, dtype=torch.uint8)
        self.cache = self._cache(slots)
        shared.prefiller.add(self)
        self._place = torch.empty(2 * spec.num_experts, dtype=torch.int64, device=self.device)
        self._coming = torch.zeros(1 + 2 * (RESERVE + MOST_STAGED), dtype=torch.int64, device=self.device)

    def _cache(self, slots: int) -> ExpertCache:
        top_k, shared = self.experts.spec.top_k, self.shared
        return ExpertCache(self._host, slots, self.device, moves=shared.moves, top_k=top_k)

    def resize(self, slots: int) -> None:
        """Another number of slots, which begin with the first experts. Before a capture only: steps that were
        captured read the memory of before."""
        if slots and self.arena is None:
            raise ValueError("slots without memory that the GPU can read")
        self.cache, self.slots = self._cache(slots), slots

    @property
    def nbytes(self) -> int:
        """Bytes of GPU memory of this layer; what layers share counts there."""
        return self.cache.nbytes

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert."""
        return self.experts.whole_bytes

    def submit(self, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        """Starts the CPU's share, and tells who computes what: x bf16 [R, hidden], ids int64 [R, k], weights
        float32 [R, k]; R at most 16. ids outside [0, experts) contribute nothing."""
        to, cache, spec = self.port.payload(self.layer), self.cache, self.experts.spec
        rows, slots = ids.shape
        if x.dtype != to.x.dtype or x.shape != (rows, spec.hidden) or rows > min(EXACT_ROWS, len(to.x)):
            raise ValueError(
                f"a step of {x.dtype} {list(x.shape)} for a payload of {to.x.dtype} {list(to.x.shape)}"
            )
        self.shared.await_moves(self.layer)
        x, ids, weights = x.contiguous(), ids.contiguous(), weights.contiguous()
        launch, shared = self.launch, self.shared
        staged = shared.stages(rows, cache.stride) if launch else 0
        # Of experts in GPU memory and, where some are brought, of these, and of both.
        addresses = torch.empty(3 if staged else 1, rows, slots, dtype=torch.int64, device=self.device)
        sources = torch.empty_like(ids)
        # One step at a time has the free slots. Read by programs that compute with them, biases and the order
        # of inputs lie apart.
        stays = cache.reserve > 0 and cache.moves > 0 and not self._pending
        stays = stays and (staged > 0 or not (spec.has_bias or (launch is not None and launch.order_at)))
        wide = launch.up["K"] if launch else spec.hidden
        coded = launch is not None and launch.takes_codes
        q = torch.empty(rows, wide, dtype=torch.int8 if coded else torch.float32, device=self.device)
        scales = torch.empty(rows, -(-wide // 32), dtype=torch.float32, device=self.device) if coded else q
        chunks = -(-wide // (32 * _GROUPS))
        hybrid_kernels.submit[(1 + rows * chunks,)](
            x, ids, weights, cache.slot_of, shared.split_of(rows) if launch else shared.no_split, cache.free,
            cache.incoming, self._place, addresses, sources, cache.totals, to.x, to.ids, to.weights, q,
            scales, cache.cache_at, cache.host_at, cache.stride, rows * slots, slots, self._coming,
            shared.staging.data_ptr(),
            HIDDEN=spec.hidden, K=wide, QUANTISED=coded, GROUPS=_GROUPS, CHUNKS=chunks,
            PAIRS=triton.next_power_of_2(rows * slots), STAY=stays, LONGEST=LONGEST,
            DEFER=shared.defer, STAGED=staged, **cache.sizes,
        )  # fmt: skip
        self.port.record_submit(self.layer)
        stamps.lap(SUBMIT)
        # Behind the flag, which would else wait for what crosses PCIe.
        learns = shared.at_once and cache.moves > 0 and not self._pending
        most, later = shared.most_of(rows), None
        if staged:
            mark = shared.stage(partial(self._bring, ids if learns else None, most))
            later = Later(addresses[1], addresses[2], partial(shared.staged, mark))
        elif learns:
            shared.fork(self.layer, ids, lambda ids: cache.choose(ids, most, soon=True))
        if learns:
            shared.fork(self.layer, ids, lambda _: self._fetch())
        quantised = (q.view(torch.int32), scales) if coded else (q, q)
        self._pending.append(
            _Step(
                rows, to.result, ids, weights, addresses[0], sources if stays and not staged else None,
                quantised, later,
            )
        )  # fmt: skip

    def collect(self, extra: Tensor | None = None) -> Tensor:
        """float32 [R, hidden]: the GPU's share, then the CPU's, then ``extra`` [R, hidden] added to them."""
        if not self._pending:
            raise RuntimeError(f"collect of layer {self.layer}, which was not submitted")
        step = self._pending.popleft()
        moves, ids = False, step.ids
        most = self.shared.most_of(step.rows)
        if self.cache.moves > 0 and not self.shared.at_once:
            self._used.append(step.ids)
            moves = not self._pending
        if moves:
            ids = ids if len(self._used) == 1 else torch.cat(self._used)
            self._used.clear()
            self.shared.fork(self.layer, ids, lambda ids: self.cache.choose(ids, most))
        try:
            return self._sum(step, extra)
        finally:
            # Not before: the flag and the CPU's sum would wait behind experts on PCIe. But whatever happens:
            # what was chosen counts as there.
            if moves:
                self.shared.fork(self.layer, ids, lambda _: self._fetch())
            if step.later is not None:
                self.shared.unstage()

    def _sum(self, step: _Step, extra: Tensor | None) -> Tensor:
        own = None
        if self.launch is not None:
            own = self.launch.few(
                self.cache.memory, step.quantised, step.addresses, step.weights,
                sources=step.sources, later=step.later,
            )  # fmt: skip
        stamps.lap_experts(self.cache.totals[:3], self.experts.whole_bytes, in_place=step.later is None)
        if self.before_wait is not None:
            self.before_wait()
            stamps.lap(AHEAD)
        self.port.record_collect(self.layer)
        stamps.lap(WAIT)
        out = torch.empty(step.rows, self.experts.spec.hidden, device=self.device)
        count = out.numel()
        hybrid_kernels.add[(-(-count // _WIDTH),)](
            out if own is None else own, step.result, out if extra is None else extra.contiguous(), out,
            count, HAS_OWN=own is not None, HAS_EXTRA=extra is not None, WIDTH=_WIDTH,
        )  # fmt: skip
        return out

    def _bring(self, ids: Tensor | None, most: Tensor) -> None:
        stamps.start()
        self.cache.bring(self._coming, ids, most)
        stamps.lap_reads(self.cache.totals[1:4], self.experts.whole_bytes)

    def _fetch(self) -> None:
        stamps.start()
        self.cache.fetch()
        stamps.lap_moves(self.cache.totals[2:], self.cache.stride)

    def forget(self) -> None:
        """A recording was given up: what was submitted will not be collected."""
        self._pending.clear()
        self._used.clear()
        self.shared.unstage()

    def prefill(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x bf16 [T, hidden], ids int64 [T, k], weights float32 [T, k], any T -> float32 [T, hidden];
        outside graphs, waits for the device."""
        parts = [slice(at, at + ROWS) for at in range(0, len(ids), ROWS)]
        done = [self.prefill_submit(x[part], ids[part], weights[part]).collect() for part in parts]
        return done[0] if len(done) == 1 else torch.cat(done)

    def prefill_submit(self, x: Tensor, ids: Tensor, weights: Tensor) -> Chunk | _Done:
        """Begin ``prefill``; its ``collect()`` gives the sum. Of up to ``hybrid_prefill.ROWS`` tokens the CPU
        works while the caller lets the GPU do other things; more are done at once. Several may be pending."""
        if len(ids) > ROWS:
            return _Done(self.prefill(x, ids, weights))
        self.shared.await_moves(self.layer)
        if self.launch is not None and len(ids) <= EXACT_ROWS:
            return _Done(self._prefill_few(x, ids, weights))
        return self.shared.prefiller.start(self, x, ids, weights)

    def takes_turns(self, rows: int) -> bool:
        """Whether a chunk of so many rows is better computed in two halves that take turns."""
        return self.shared.prefiller.takes_turns(self, rows)

    def _prefill_few(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """As a step computes it, with all that is not in GPU memory on the CPU."""
        launch, cache = self.launch, self.cache
        assert launch is not None
        known = (ids >= 0) & (ids < cache.experts)
        named = torch.where(known, ids, cache.experts).flatten()
        uses = torch.zeros(cache.experts + 1, dtype=torch.int64, device=self.device)
        cache.observe(uses.scatter_add_(0, named, torch.ones_like(named))[:-1], len(ids))
        slot = torch.where(known, cache.slot_of[ids.clamp(0, cache.experts - 1)].long(), -1)
        addresses = torch.where(slot >= 0, cache.cache_at + slot * cache.stride, 0)
        absent = torch.where(slot >= 0, -1, ids)
        x, weights = x.contiguous(), weights.float().contiguous()
        own = launch.few(cache.memory, launch.rows(x), addresses, weights)
        theirs = self.experts.forward(x.cpu(), absent.cpu(), weights.cpu())
        return own + theirs.to(own.device)

    def seed(self, counts: Sequence[float]) -> None:
        """Fill the slots with the experts of the highest ``counts`` [experts]. Between steps only."""
        self.cache.seed(counts)

    @property
    def tallies(self) -> tuple[Tensor, Tensor]:
        """On the device, int64: what ``counts`` tells, [5], and what ``uses`` does, [experts]."""
        return self.cache.totals, self.cache.chosen

    def uses(self) -> list[int]:
        """How often each expert was chosen, by steps and prompts, while GPU memory holds some; waits for the
        device."""
        chosen: list[int] = self.cache.chosen.tolist()
        return chosen

    def counts(self) -> TierCounts:
        """Waits for the device."""
        return TierCounts(*map(int, self.cache.totals.tolist()))
