"""Steps of a fused decoder: slots of sequences, and one captured graph for each number of rows.

A step is: fill a pinned buffer, replay the graph of the smallest size that holds the rows, wait for an event,
read the tokens. The graph has the copy of the buffer to the device, the decoder, the choice of the most
likely token and its copy back. On the CPU the same code runs without graphs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hetero.config import settings
from hetero.core import HeteroError, MachineError
from hetero.decode.inputs import PAGE, Mark
from hetero.engine.gpu.graphs import CaptureError, StepGraph, Waiter
from hetero.engine.gpu.loading import ROWS
from hetero.engine.gpu.pages import Pages
from hetero.engine.gpu.parts import Decoder, Each, Experts, Shared
from hetero.engine.gpu.snapshots import Held, Keeping, Kept
from hetero.engine.gpu.staging import Results, Staging
from hetero.engine.gpu.traced import CHUNK, Tracing, stamped
from hetero.engine.handoff import Handoff, Totals
from hetero.ops.gpu.stamps import Tape
from hetero.trace import recorder

log = logging.getLogger("hetero.engine")

LANE = 0
"""Of the hand-off."""

REMEMBERED = 16
"""Tokens of a sequence that are kept for n-grams."""

_WARM_PROMPT = 40
"""Tokens of the prompt that is read before the capture: more than a decode step ever has."""

LEAST_CHUNK = 64
"""Tokens of a prompt at once, below which there is no use in trying fewer."""

_WARM_UPS = 2
"""Steps before the capture: Triton compiles in the first, what the second still makes is made for good."""


class StepOut(NamedTuple):
    """Of each row: the most likely token, its logit, and all logits float32 [n, V] on the device, which hold
    until the next step; None where they were not asked for."""

    ids: list[int]
    best: list[float]
    logits: Tensor | None


class GpuRunner:
    """A fused decoder, its experts, the hand-off and one captured graph for each number of rows.

    ``slots``: sequences at once. ``context``: most tokens of one. ``rows``: sizes of graphs. ``eager``: no
    graphs, which on the CPU is so in any case. ``shared``: what the experts have in common. ``wait``: how the
    host waits, one of ``graphs.WAITS``. ``chunk``: tokens of a prompt that are read at once. ``closing``: is
    called at the end. ``pages``: of keys and values, as the decoder was made with; None: all that slots need.
    ``numbers``: which of the model's layers the MoE layers are.

    One thread at a time. Call ``capture`` before the first step, once weights and options will not change any
    more.
    """

    def __init__(
        self,
        decoder: Decoder,
        experts: Sequence[Experts],
        *,
        handoff: Handoff | None,
        slots: int,
        context: int,
        rows: Sequence[int] = ROWS,
        eager: bool = False,
        shared: Shared | None = None,
        wait: str = "block",
        chunk: int | None = None,
        closing: Sequence[Callable[[], None]] = (),
        pages: int | None = None,
        numbers: Sequence[int] = (),
    ) -> None:
        self.decoder, self.experts, self.handoff = decoder, list(experts), handoff
        self.slots, self.context, self.rows = slots, context, tuple(sorted(rows))
        inputs = {n: decoder.inputs(n) for n in self.rows}
        self.device: torch.device = inputs[self.rows[0]].tokens.device
        on_gpu = self.device.type == "cuda"
        self.eager = eager or not on_gpu
        self.why_eager = "" if not self.eager else "asked for" if on_gpu else "there is no GPU"
        self.pages = Pages(slots, context, self.device, pages)
        self.keeping = Keeping(decoder, self.pages, self.device, settings().snapshots)
        self._staging = {n: Staging(one, n, self.pages.table) for n, one in inputs.items()}
        self._results = {n: Results(n, self.device) for n in self.rows}
        self._graphs: dict[int, StepGraph] = {}
        self._pool: Any = None  # of the graphs' memory
        self._tracing = Tracing(self.device)
        self._stream: Any = torch.cuda.Stream(self.device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._waiter = Waiter(wait) if on_gpu else None
        self._shared = shared
        self._numbers = numbers
        self.chunk = chunk or settings().prefill_chunk
        self._free = list(range(slots - 1, -1, -1))
        self._length = [0] * slots
        self._last: list[list[int]] = [[] for _ in range(slots)]
        self._closing = closing
        self._closed = False

    @property
    def kv_tokens(self) -> int:
        """Tokens of keys and values that all slots together hold."""
        return self.pages.total * PAGE

    # -- sequences

    def claim(self) -> int:
        """An empty slot. Raises HeteroError where all are taken."""
        if not self._free:
            raise HeteroError(f"all {self.slots} slots of the GPU are taken")
        slot = self._free.pop()
        self._empty(slot)
        return slot

    def _empty(self, slot: int) -> None:
        with self._on_stream():
            self.decoder.clear(slot)
        self._length[slot] = 0
        self._last[slot] = []

    def release(self, slot: int) -> None:
        """Give a slot and its pages back."""
        if slot in self._free:
            raise ValueError(f"slot {slot} is free")
        self.pages.release(slot)
        self._free.append(slot)

    def length(self, slot: int) -> int:
        """Tokens that a slot holds."""
        return self._length[slot]

    def recent(self, slot: int) -> list[int]:
        """The last tokens of a slot, as many as are remembered."""
        return list(self._last[slot])

    def keep(self, slot: int) -> Kept | None:
        """What a slot holds, for others to begin from; None where there is no memory for it."""
        with self._on_stream():
            return self.keeping.now(slot, self.recent(slot))

    def resume(self, slot: int, held: Held, used: int) -> None:
        """Let a slot hold the first ``used`` tokens of what another holds or left, in place of its own; all
        of them, unless sequences can be cut. Raises HeteroError where pages are short."""
        with self._on_stream():
            self.keeping.resume(slot, held.pages, used, held.state)
        self._length[slot], self._last[slot] = used, list(held.last)

    def prefill(
        self, slot: int, tokens: Sequence[int], *, marks: Sequence[Mark] = (), each: Each | None = None
    ) -> Tensor:
        """Append tokens; logits float32 [V] on the device after the last. ``marks``, ``each``: as of a
        decoder, with indices of ``tokens``. A chunk that takes more memory than there is halves ``chunk``,
        and an empty slot's prompt begins again, for marks and ``each`` too. Raises MachineError where that
        was not empty, or so few tokens are left that it is no use. After an error the slot's contents are
        worth nothing."""
        if not tokens:
            raise ValueError("no tokens to append")
        is_new = self._length[slot] == 0
        while True:
            try:
                return self._append(slot, tokens, marks, each)
            except torch.OutOfMemoryError:
                tried = min(self.chunk, len(tokens))
                self.chunk = max(LEAST_CHUNK, tried // 2)
                if not is_new or tried <= LEAST_CHUNK:
                    raise MachineError(
                        f"{tried} tokens of a prompt at once take more memory than {self.device} has; from "
                        f"now on they are read {self.chunk} at a time (HETERO_PREFILL_CHUNK)"
                    ) from None
            # Outside the handler, whose error keeps tensors of the failed chunk alive.
            log.warning("prompts are read %d tokens at a time: GPU memory holds no more", self.chunk)
            torch.cuda.empty_cache()
            self._empty(slot)

    def _append(self, slot: int, tokens: Sequence[int], marks: Sequence[Mark], each: Each | None) -> Tensor:
        logits: Tensor | None = None
        with self._on_stream():
            for first in range(0, len(tokens), self.chunk):
                part = list(tokens[first : first + self.chunk])
                self.pages.grow(slot, self._length[slot] + len(part))
                logits = self._read(slot, part, marks, each and partial(_later, each, first))
                self._last[slot] = (self._last[slot] + part)[-REMEMBERED:]
                self._length[slot] += len(part)
            assert logits is not None
            # The caller reads it on a stream of its own.
            self._wait(0)
        return logits

    def read_longest(self) -> None:
        """Read a chunk of random tokens at the end of the longest sequence, which takes the most memory that
        a prompt can. Raises torch.OutOfMemoryError where that is not there."""
        slot = self.claim()
        end = min(self.context, self.kv_tokens)
        count = min(self.chunk, end)
        part: list[int] = torch.randint(self.decoder.vocabulary, (count,)).tolist()
        try:
            with self._on_stream():
                self.pages.grow(slot, end)
                self._length[slot] = end - count
                self._read(slot, part)
                self._wait(0)
        finally:
            self.release(slot)

    def step(self, rows: Sequence[tuple[int, int]], logits: bool = True) -> StepOut:
        """One token for each of (slot, token), all of different slots. Raises HandoffError where the CPU side
        failed: the slots of this step are then worth nothing, and the next step works."""
        count = len(rows)
        if len({slot for slot, _ in rows}) != count or not 1 <= count <= self.rows[-1]:
            raise ValueError(f"{count} rows, must be 1 to {self.rows[-1]} of different slots")
        size = next(n for n in self.rows if n >= count)
        staging, results = self._staging[size], self._results[size]
        with self._on_stream():
            graph, tape = self._means(size)
            with self._tracing.step(tape, count):
                for slot, _ in rows:
                    self.pages.grow(slot, self._length[slot] + 1)
                last = [[*self._last[slot][1 - REMEMBERED :], token] for slot, token in rows]
                if staging.ple is not None:
                    gathered = self.decoder.gather(last)
                    assert gathered is not None
                    staging.ple[:count] = gathered
                staging.fill([(token, slot, self._length[slot]) for slot, token in rows])
                out = self._run(size, count, graph, tape)
                ids, best = results.read(count)
        for (slot, _), tokens in zip(rows, last, strict=True):
            self._length[slot] += 1
            self._last[slot] = tokens
        return StepOut(ids, best, out[:count] if logits else None)

    def _read(
        self, slot: int, part: list[int], marks: Sequence[Mark] = (), each: Each | None = None
    ) -> Tensor:
        """Logits after one chunk of a prompt."""
        start = self._length[slot]
        within = [mark for mark in marks if start < mark.at <= start + len(part)]
        tape = self._tracing.tape(CHUNK)
        with self._tracing.step(tape, len(part)):
            with nullcontext() if tape is None else tape.recording(), stamped(tape):
                ids = torch.tensor(part, dtype=torch.int64).to(self.device)
                logits = self.decoder.prefill(ids, slot, start, self.pages.table, marks=within, each=each)
            if recorder.active:
                self._wait(0)
        return logits

    # -- graphs

    def capture(self, *, prompt: bool = True) -> None:
        """Read a short prompt, unless told not to, and run every size once, so that all kernels are there;
        make the graphs, in place of those that were made before. Where an operator cannot be captured, one
        warning names it and steps run eagerly."""
        if self._stream is None:
            return
        self._tracing.close()
        self._graphs.clear()  # before others are made beside them
        if prompt and self._free:
            slot = self.claim()
            self.prefill(slot, [0] * min(_WARM_PROMPT, self.context))
            self.release(slot)
        with self._on_stream():
            for size in reversed(self.rows):
                self._staging[size].idle()
                for _ in range(_WARM_UPS):
                    self._run(size, size, None, None)
            if self.eager:
                return
            torch.cuda.synchronize(self.device)
            self._pool = torch.cuda.graph_pool_handle()
            # The largest first, so that the others find memory that it has taken.
            for size in reversed(self.rows):
                try:
                    self._graphs[size] = self._captured(size, None)
                except CaptureError as error:
                    self._give_up(error)
                    return
                except MachineError:
                    self._forget()  # whoever makes room may capture again
                    raise

    def _give_up(self, error: CaptureError) -> None:
        self._graphs.clear()
        self.eager, self.why_eager = True, str(error)
        self._forget()
        log.warning("the step cannot be captured as a graph and runs eagerly: %s", error)

    def _forget(self) -> None:
        """What a capture that failed has left half recorded."""
        if self.handoff is not None:
            self.handoff.forget(LANE)
        for one in self.experts:
            one.forget()

    @property
    def launches(self) -> dict[int, int]:
        """Rows -> nodes of the graph that a replay runs; empty without graphs."""
        return {size: graph.launches for size, graph in self._graphs.items()}

    @property
    def nodes(self) -> dict[int, Mapping[str, int]]:
        """Rows -> kinds of nodes."""
        return {size: graph.nodes for size, graph in self._graphs.items()}

    @property
    def totals(self) -> Totals | None:
        """Of the hand-off in the last step."""
        return None if self.handoff is None else self.handoff.totals(LANE)

    def reads(self) -> dict[str, tuple[int, int]]:
        """(experts, bytes of them) of decode steps so far: found in GPU memory ("gpu"), read over the bus by
        the GPU ("pcie"), computed by the CPU ("cpu"). Waits for the device; from any thread."""
        found = dict.fromkeys(("gpu", "pcie", "cpu"), (0, 0))
        for one in self.experts:
            counts = one.counts()
            for tier in found:
                count, nbytes = found[tier]
                more: int = getattr(counts, tier)
                found[tier] = count + more, nbytes + more * one.expert_bytes
        return found

    def uses(self) -> dict[int, list[int]]:
        """How often each expert was chosen so far, by the index of the model's layer. As ``reads``."""
        return {number: one.uses() for number, one in zip(self._numbers, self.experts, strict=False)}

    def close(self) -> None:
        """End the hand-off; the graphs go."""
        if self._closed:
            return
        self._closed = True
        if self._stream is not None:
            torch.cuda.synchronize(self.device)
        self._graphs.clear()
        self._tracing.close()
        if self.handoff is not None:
            self.handoff.close()
        for close in self._closing:
            close()

    # -- one step

    def _means(self, size: int) -> tuple[StepGraph | None, Tape | None]:
        """What runs a step, None being the operators themselves, and the tape that it stamps into."""
        plain, tape = self._graphs.get(size), self._tracing.tape(size)
        if plain is None or tape is None:
            return plain, tape
        graph = self._tracing.graph(size, tape, partial(self._captured, size, tape))
        if graph is None:
            self._forget()
            return plain, None
        return graph, tape

    def _captured(self, size: int, tape: Tape | None) -> StepGraph:
        return StepGraph(partial(self._record, size, tape), self._stream, self._pool)

    def _run(self, size: int, count: int, graph: StepGraph | None, tape: Tape | None) -> Tensor:
        """Logits [size, V] of a step whose first ``count`` rows count, once it is through."""
        with nullcontext() if self.handoff is None else self.handoff.step({LANE: count}):
            if graph is None:
                try:
                    with nullcontext() if tape is None else tape.recording():
                        out = self._record(size, tape)
                except BaseException:
                    self._forget()  # the next step begins anew
                    raise
            else:
                graph.replay()
                out = graph.out
            self._wait(size)
        return out

    def _record(self, size: int, tape: Tape | None) -> Tensor:
        staging = self._staging[size]
        with stamped(tape):
            staging.send()
            out = self.decoder.step(staging.inputs)
            if self._shared is not None:
                self._shared.join()
            self._results[size].take(out)
        return out

    def _wait(self, kind: int) -> None:
        if self._waiter is not None:
            self._waiter.wait(kind)

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        with torch.inference_mode():
            if self._stream is None:
                yield
                return
            # Whoever calls may have changed something, such as the experts that GPU memory holds.
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._stream):
                yield


def _later(each: Each, first: int, index: int, rows: Tensor) -> None:
    each(first + index, rows)
