"""Steps of a fused decoder: slots of sequences, and one captured graph for each number of rows.

A step is: fill a pinned buffer, replay the graph of the smallest size that holds the rows, wait for an event,
read the tokens. The graph has the copy of the buffer to the device, the decoder, the choice of the most
likely token and its copy back. On the CPU the same code runs without graphs.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor

from hetero.config import settings
from hetero.core import HeteroError, MachineError
from hetero.decode.inputs import PAGE, Mark
from hetero.engine.gpu.decoding import Decoding, Slots
from hetero.engine.gpu.graphs import CudaMeans, HostMeans, Means
from hetero.engine.gpu.loading import ROWS
from hetero.engine.gpu.pages import Pages
from hetero.engine.gpu.parts import Decoder, Each, Experts, Port, Shared
from hetero.engine.gpu.snapshots import Held, Keeping, Kept
from hetero.engine.gpu.steps import TRACKS, Steps
from hetero.engine.gpu.traced import CHUNK, stamped
from hetero.engine.handoff import Handoff, HandoffError, Totals
from hetero.trace import recorder

log = logging.getLogger("hetero.engine")

_WARM_PROMPT = 40
"""Tokens of the prompt that is read before the capture: more than a decode step ever has."""

LEAST_CHUNK = 64
"""Tokens of a prompt at once, below which there is no use in trying fewer."""


_TIMED = 9
"""Steps by which it is found out whether halves take turns; the first third is not counted."""


class GpuRunner:
    """A fused decoder, its experts, the hand-off and one captured graph for each number of rows.

    ``slots``: sequences at once. ``context``: most tokens of one. ``rows``: sizes of graphs. ``eager``: no
    graphs, which on the CPU is so in any case. ``shared``: what the experts have in common. ``wait``: how the
    host waits, one of ``graphs.WAITS``. ``chunk``: tokens of a prompt that are read at once. ``closing``: is
    called at the end. ``pages``: of keys and values, as the decoder was made with; None: all that slots need.
    ``numbers``: which of the model's layers the MoE layers are. ``port``: what experts are handed over by;
    its hand-off has a lane a track, TRACKS where steps may be launched ``ahead``, and twice as many with
    ``halves``, which lets two halves of a step take turns. ``means``: in a GPU's place, for tests.

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
        port: Port | None = None,
        ahead: bool = False,
        halves: bool = False,
        means: Means | None = None,
    ) -> None:
        self.decoder, self.experts, self.handoff = decoder, list(experts), handoff
        self.slots, self.context, self.rows = slots, context, tuple(sorted(rows))
        self.device: torch.device = decoder.inputs(self.rows[0]).tokens.device
        tracks = TRACKS if ahead else 1
        if means is None:
            on_gpu = self.device.type == "cuda"
            means = CudaMeans(self.device, wait, tracks) if on_gpu else HostMeans()
        self._means = means
        self.pages = Pages(slots, context, self.device, pages)
        self.keeping = Keeping(decoder, self.pages, self.device, settings().snapshots)
        self._steps = Steps(
            decoder,
            self.experts,
            means,
            handoff=handoff,
            rows=self.rows,
            pages=self.pages.table,
            shared=shared,
            port=port,
            eager=means.why_eager or ("asked for" if eager else ""),
            tracks=tracks,
            halves=halves,
        )
        self._numbers = numbers
        self.chunk = chunk or settings().prefill_chunk
        self._free = list(range(slots - 1, -1, -1))
        self._length = [0] * slots
        self._last: list[list[int]] = [[] for _ in range(slots)]
        self.window = max(1, decoder.window)
        held = Slots(self.pages, self.window, self._free, self._length, self._last)
        self._grown = held.grown
        self._decoding = Decoding(held, self._steps, means, decoder, self.rows)
        self.step, self.settle = self._decoding.step, self._decoding.settle
        self._closing = closing
        self._closed = False

    @property
    def eager(self) -> bool:
        return self._steps.eager

    @property
    def why_eager(self) -> str:
        """Why steps run without graphs; "" where they do not."""
        return self._steps.why_eager

    @property
    def kv_tokens(self) -> int:
        """Tokens of keys and values that all slots together hold."""
        return self.pages.total * PAGE

    # -- sequences

    def claim(self) -> int:
        """An empty slot. Raises HeteroError where all are taken."""
        if not self._free:
            raise HeteroError(f"all {self.slots} slots of the GPU are taken")
        self.settle()
        slot = self._free.pop()
        self._empty(slot)
        return slot

    def _empty(self, slot: int) -> None:
        with torch.inference_mode(), self._means.stream():
            self.decoder.clear(slot)
        self._length[slot] = 0
        self._last[slot] = []

    def release(self, slot: int) -> None:
        """Give a slot and its pages back."""
        if slot in self._free:
            raise ValueError(f"slot {slot} is free")
        self._decoding.told.pop(slot, None)
        self.pages.release(slot)
        self._free.append(slot)

    def length(self, slot: int) -> int:
        """Tokens that a slot holds; after ``settle`` the last token that a step has told is among them where
        the next step was launched ahead."""
        return self._length[slot]

    def recent(self, slot: int) -> list[int]:
        """The last tokens of a slot, as many as are remembered."""
        return list(self._last[slot])

    def keep(self, slot: int) -> Kept | None:
        """What a slot holds, for others to begin from; None where there is no memory for it, or where a step
        that was launched ahead has failed."""
        self.settle()
        if isinstance(self._decoding.told.get(slot), HandoffError):
            return None
        with torch.inference_mode(), self._means.stream():
            return self.keeping.now(slot, self.recent(slot))

    def resume(self, slot: int, held: Held, used: int) -> None:
        """Let a slot hold the first ``used`` tokens of what another holds or left, in place of its own; all
        of them, unless sequences can be cut. Raises HeteroError where pages are short."""
        self.settle()
        with torch.inference_mode(), self._means.stream():
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
        self.settle()
        if slot in self._decoding.told:
            raise ValueError(f"slot {slot} has made a step ahead that nobody has asked for")
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
        with torch.inference_mode(), self._means.stream():
            for first in range(0, len(tokens), self.chunk):
                part = list(tokens[first : first + self.chunk])
                self.pages.grow(slot, self._length[slot] + len(part))
                self._expect(slot, tokens, first)
                logits = self._read(slot, part, marks, each and partial(_later, each, first))
                self._grown(slot, *part)
            assert logits is not None
            # The caller reads it on a stream of its own.
            self._wait()
        return logits

    def _expect(self, slot: int, tokens: Sequence[int], first: int) -> None:
        """Let n-gram embeddings that are on disk come while a chunk from ``first`` on is read: those of the
        next one; before the first chunk its own too."""
        if not self.decoder.window:
            return
        begin, end = (first + self.chunk if first else 0), first + 2 * self.chunk
        if coming := tokens[begin:end]:
            self.decoder.expect([*self._last[slot], *tokens[first:begin]], coming)

    def read_longest(self) -> None:
        """Read a chunk of random tokens at the end of the longest sequence, which takes the most memory that
        a prompt can. Raises torch.OutOfMemoryError where that is not there."""
        slot = self.claim()
        end = min(self.context, self.kv_tokens)
        count = min(self.chunk, end)
        part: list[int] = torch.randint(self.decoder.vocabulary, (count,)).tolist()
        try:
            with torch.inference_mode(), self._means.stream():
                self.pages.grow(slot, end)
                self._length[slot] = end - count
                self._read(slot, part)
                self._wait()
        finally:
            self.release(slot)

    def _read(
        self, slot: int, part: list[int], marks: Sequence[Mark] = (), each: Each | None = None
    ) -> Tensor:
        """Logits after one chunk of a prompt."""
        start = self._length[slot]
        within = [mark for mark in marks if start < mark.at <= start + len(part)]
        tape = self._steps.tracing.tape(CHUNK)
        with self._steps.tracing.step(tape, len(part)):
            with nullcontext() if tape is None else tape.recording(), stamped(tape):
                ids = torch.tensor(part, dtype=torch.int64).to(self.device)
                logits = self.decoder.prefill(ids, slot, start, self.pages.table, marks=within, each=each)
            if recorder.active:
                self._wait()
        return logits

    def _wait(self) -> None:
        self._means.mark(0)
        self._means.wait(0, 0)

    # -- graphs

    def capture(self, *, prompt: bool = True) -> None:
        """Read a short prompt, unless told not to, and run every size once, so that all kernels are there;
        make the graphs, in place of those that were made before. Where an operator cannot be captured, one
        warning names it and steps run eagerly."""
        if isinstance(self._means, HostMeans):
            return
        self.settle()
        if prompt and self._free:
            slot = self.claim()
            self.prefill(slot, [0] * min(_WARM_PROMPT, self.context, self.kv_tokens))
            self.release(slot)
        with torch.inference_mode(), self._means.stream():
            self._steps.capture()

    def take_turns(self, turns: bool | None = None) -> dict[int, tuple[float, float]]:
        """Let the halves of steps take turns: of all of several rows, of none, or (None) of those where a few
        steps of random tokens are faster by it. Rows -> seconds without and with, where that was measured.
        Captures anew; between ``capture`` and the first sequence."""
        times: dict[int, tuple[float, float]] = {}
        for size in self.rows:
            if size == 1 or (turns is None and size > self.slots):
                continue
            with torch.inference_mode(), self._means.stream():
                if turns is not None:
                    self._steps.capture_turns(size, turns)
                    continue
            plain = self._seconds(size)
            with torch.inference_mode(), self._means.stream():
                if not self._steps.capture_turns(size, True):
                    continue
            times[size] = plain, self._seconds(size)
            if times[size][1] >= plain:
                with torch.inference_mode(), self._means.stream():
                    self._steps.capture_turns(size, False)
        return times

    def _seconds(self, size: int) -> float:
        """Of a step of so many sequences, the median of a few."""
        slots = [self.claim() for _ in range(size)]
        seconds = []
        for _ in range(_TIMED):
            tokens = torch.randint(self.decoder.vocabulary, (size,)).tolist()
            began = time.perf_counter()
            self.step(list(zip(slots, tokens, strict=True)), logits=False)
            seconds.append(time.perf_counter() - began)
        for slot in slots:
            self.release(slot)
        return statistics.median(seconds[_TIMED // 3 :])

    @property
    def launches(self) -> dict[int, int]:
        """Rows -> nodes of the graph that a replay runs; empty without graphs."""
        return {size: graph.launches for size, graph in self._steps.launches().items()}

    @property
    def nodes(self) -> dict[int, Mapping[str, int]]:
        """Rows -> kinds of nodes."""
        return {size: graph.nodes for size, graph in self._steps.launches().items()}

    @property
    def totals(self) -> Totals | None:
        """Of the hand-off in the last step."""
        return self._steps.totals

    @property
    def host(self) -> Mapping[str, float]:
        """Seconds of the host by what it last did for a step; see ``Steps``."""
        return self._steps.host

    def reads(self) -> dict[str, tuple[int, int]]:
        """(experts, bytes of them) of decode steps so far: found in GPU memory ("gpu"), read over the bus by
        the GPU ("pcie"), computed by the CPU ("cpu"). Waits for the device once; from any thread."""
        tiers = ("gpu", "pcie", "cpu")
        if not self.experts:
            return dict.fromkeys(tiers, (0, 0))
        counts = torch.stack([one.tallies[0][: len(tiers)] for one in self.experts]).cpu()
        sizes = torch.tensor([one.expert_bytes for one in self.experts])
        found = counts.sum(0).tolist(), (sizes @ counts).tolist()
        return dict(zip(tiers, zip(*found, strict=True), strict=True))

    def uses(self) -> dict[int, list[int]]:
        """How often each expert was chosen so far, by the index of the model's layer. As ``reads``."""
        rows = [one.tallies[1] for one in self.experts[: len(self._numbers)]]
        if not rows:
            return {}
        counts = torch.split(torch.cat(rows).cpu(), [len(row) for row in rows])
        return {number: row.tolist() for number, row in zip(self._numbers, counts, strict=True)}

    def close(self) -> None:
        """End the hand-off; the graphs go."""
        if self._closed:
            return
        self._closed = True
        self.settle()
        self._steps.close()
        if self.handoff is not None:
            self.handoff.close()
        for close in self._closing:
            close()


def _later(each: Each, first: int, index: int, rows: Tensor) -> None:
    each(first + index, rows)
