"""Many requests on one model: slots that requests join and leave between two tokens.

One thread owns the model. A step of it reads a piece of one prompt and makes one token of every running
answer. Memory for keys and values is given out by need, in blocks: a request starts as soon as its prompt
fits. When a running answer finds no room to grow, the request that was admitted last goes back to the head of
the queue and is read again later, with what it has made so far. The oldest is never sent back, and no request
is accepted that would not fit alone, so every request comes to its end.
"""

from __future__ import annotations

import logging
import threading

import torch
from torch import Tensor

from hetero.core import HeteroError, InputError
from hetero.engine import budget
from hetero.engine.answer import Answer, Runnable, check, clock
from hetero.engine.forward import MOST_ROWS
from hetero.engine.generate import read_chunk
from hetero.engine.job import EngineStatus, Handle, Job, Sink, next_reader
from hetero.engine.pace import Pace
from hetero.engine.queue import FairQueue
from hetero.engine.request import FinishReason, Piece, QueueFull, Request, Result
from hetero.engine.reuse import Reuse
from hetero.engine.sample import Scored
from hetero.engine.stepping import check_slots, chunk_of, stepper_for
from hetero.kv.prefix import BLOCK, Entry, blocks

__all__ = ["EngineStatus", "Handle", "Scheduler"]

log = logging.getLogger("hetero.engine")

# Room for an answer to grow that a request needs to be admitted; without it, one would be let in only to be
# sent back a few steps later.
HEADROOM = 4 * BLOCK


class Scheduler:
    """Continuous batching over slots; owns one thread; nothing else touches the model.

    ``slots``: requests that run at once. ``max_queue``: requests that may wait besides. ``prefill_chunk``:
    most prompt tokens of one forward pass. ``kv_tokens``: tokens of keys and values that all requests
    together may hold; an answer that alone would need more ends there, as at the end of the context.
    ``prefix_cache``: keep them after a request for one that begins alike.
    """

    def __init__(
        self,
        runnable: Runnable,
        *,
        slots: int = 8,
        max_queue: int = 64,
        prefill_chunk: int | None = None,
        kv_tokens: int | None = None,
        prefix_cache: bool = True,
    ) -> None:
        for name, value, least in (("slots", slots, 1), ("max_queue", max_queue, 0)):
            if value < least:
                raise InputError(f"{name}={value}: must be at least {least}")
        self.runnable = runnable
        check_slots(runnable, slots)
        self._stepper = stepper_for(runnable, rows=True)
        self._chunk = prefill_chunk or chunk_of(runnable)
        self._slots, self._max_queue = slots, max_queue
        self._kv_total = budget.tokens(kv_tokens, slots, runnable.context)
        if runnable.runner is not None:
            self._kv_total = min(self._kv_total, runnable.runner.kv_tokens)
        self._pace = Pace(self._chunk)
        self._weighed = False
        self._wake = threading.Condition()
        self._reuse = Reuse(
            self._stepper,
            slots,
            self._kv_total,
            on=prefix_cache and not runnable.whole_prompt,
            lock=self._wake,
            room=lambda: self._kv_total - self._needed(),
        )
        # What follows is changed under the condition's lock.
        self._queue: FairQueue[Job] = FairQueue()
        self._running: list[Job] = []  # in the order of their admission
        self._accepting, self._closing = True, False
        self._hits = self._prompt_tokens = self._made = self._steps = self._batch = self._preemptions = 0
        self._step_s = 0.0
        self._service_s = 1.0  # of a request in a slot, a moving mean
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End every request, as cancelled, and the thread."""
        with self._wake:
            self._accepting, self._closing = False, True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()
        else:
            self._cancel_all()
        self._reuse.close()
        self._stepper.close()

    def stop_accepting(self) -> None:
        """Refuse new requests; those that were accepted go on."""
        with self._wake:
            self._accepting = False

    @property
    def most(self) -> int:
        """Requests that it holds at once, in slots and in the queue."""
        return self._slots + self._max_queue

    @property
    def states(self) -> bool:
        """Whether a request's ``alike`` is of use: states are kept where prompts part."""
        return self._reuse.states

    def check(self, request: Request) -> int:
        """Tokens that this request may make at most. Raises InputError when it cannot run at all."""
        return budget.answer(self._kv_total, len(request.prompt), check(self.runnable, request))

    def submit(self, request: Request, sink: Sink) -> Handle:
        """Queue a request, from any thread.

        ``sink`` is called by the engine's thread and must not block; its last call is a Result or a
        HeteroError. Raises InputError for a request that can never run, QueueFull when too many wait,
        HeteroError after ``stop_accepting``.
        """
        limit = self.check(request)
        handle = Handle(self._notify)
        job = Job(request, Answer(self.runnable, request, limit), sink, handle)
        with self._wake:
            if not self._accepting:
                raise HeteroError("the engine accepts no more requests")
            waiting = sum(not job.handle.cancelled for job in self._queue)
            free = self._slots - len(self._running)
            if waiting >= self._max_queue + free:
                wait = min(max(self._service_s * (waiting + 1) / self._slots, 1.0), 60.0)
                raise QueueFull(f"{waiting} requests are waiting, as many as may", wait)
            self._queue.push(request.client, job)
            self._wake.notify()
        return handle

    def status(self) -> EngineStatus:
        """From any thread."""
        with self._wake:
            return EngineStatus(
                slots=self._slots,
                running=len(self._running),
                waiting=sum(not job.handle.cancelled for job in self._queue),
                kv_tokens_used=self._stepper.needs((job.sequence, blocks(job.read)) for job in self._running),
                kv_tokens_cached=self._reuse.store.tokens,
                kv_tokens_total=self._kv_total,
                prefix_hit_tokens=self._hits,
                prompt_tokens=self._prompt_tokens,
                completion_tokens=self._made,
                steps=self._steps,
                last_step_s=self._step_s,
                batch=self._batch,
                preemptions=self._preemptions,
            )

    def _notify(self) -> None:
        with self._wake:
            self._wake.notify()

    def _needed(self) -> int:
        """Tokens in whole blocks that running requests must have to go on; those that share count once."""
        return self._stepper.needs((job.sequence, job.needs) for job in self._running)

    # From here on: the engine's thread alone.

    def _loop(self) -> None:
        while True:
            with self._wake:
                while not (self._closing or self._queue or self._running):
                    self._wake.wait()
                if self._closing:
                    break
            try:
                self.step()
            except Exception:
                # A defect of the scheduler itself must not end the thread that all later requests need.
                log.exception("a step failed")
                for job in list(self._running):
                    self._end(job, HeteroError("internal error"))
        self._cancel_all()

    def step(self) -> None:
        """One step; the engine's thread calls it for as long as there is work. Tests call it by hand."""
        self._reap()
        self._make_room()
        self._admit()
        began = clock()
        writers = [job for job in self._running if not job.reading]
        reader = next_reader(self._running, self._steps)
        if reader is not None:
            self._read(reader, beside=bool(writers))
        if writers:
            middle = clock()
            self._advance(writers, alone=reader is None)
            self._pace.made(clock() - middle)
        with self._wake:
            self._steps += 1
            self._batch = len(writers)
            self._step_s = clock() - began

    def _reap(self) -> None:
        """End what is cancelled or out of time, waiting or running."""
        with self._wake:
            gone = self._queue.remove(lambda job: job.overdue() is not None)
        for job in gone + [job for job in self._running if job.overdue() is not None]:
            self._finish(job, job.overdue())

    def _make_room(self) -> None:
        """Send requests back to the queue, the last admitted first, until the others can go on."""
        with self._wake:
            self._reuse.store.shrink(self._kv_total - self._needed())
            while self._needed() > self._kv_total:
                job = self._running.pop()
                job.drop()
                job.begun = False
                self._queue.push_front(job.request.client, job)
                self._preemptions += 1

    def _admit(self) -> None:
        """Give free slots to waiting requests, as far as there is memory."""
        store = self._reuse.store
        while (admitted := self._next_admitted()) is not None:
            job, found, room = admitted
            if not self._stepper.shares:
                if store.tokens <= room:
                    continue
                with self._wake:
                    found = self._reuse.found(job, self._running)
                    store.shrink(room, spare=found[0] if found else None)
                if store.tokens <= room:
                    continue
                # No room for both: what is kept becomes the sequence.
            if found is not None:
                try:
                    self._start_from(job, *found)
                except Exception as error:
                    self._fail(job, error)
            with self._wake:
                store.shrink(self._kv_total - self._needed())

    def _next_admitted(self) -> tuple[Job, tuple[Entry, int] | None, int] | None:
        """The next request, now running; where memory is shared, what it may begin from; and the tokens that
        may be kept beside it. None: it must wait."""
        with self._wake:
            job = self._queue.peek() if len(self._running) < self._slots else None
            if job is None:
                return None
            found = self._reuse.found(job, self._running) if self._stepper.shares else None
            wanted = job.needs - (self._stepper.shared(found[0].cache, found[1]) if found else 0)
            room = self._kv_total - self._needed() - wanted - (HEADROOM if self._running else 0)
            if room < 0:
                return None
            self._queue.pop()
            self._running.append(job)
            job.sequence = self._stepper.start()
            job.began = clock()
            return job, found, room

    def _start_from(self, job: Job, entry: Entry, used: int) -> None:
        """Not under the lock: a copy of a long cache takes a while, and the server waits for the lock."""
        assert job.sequence is not None
        job.sequence.begin(entry.cache, len(entry.tokens), used)
        if not job.answer.tokens:
            with self._wake:
                self._hits += used - job.answer.cached
            job.answer.cached = used

    def _begin(self, job: Job) -> None:
        """Begin with what is known of the prompt, of kept sequences and of running ones."""
        job.begun = True
        if not job.answer.tokens:
            job.answer.begin()
        if not self._reuse.serves(job):
            return
        with self._wake:
            found = self._reuse.found(job, self._running)
        if found is not None and found[1] > job.read:
            self._start_from(job, *found)
        self._reuse.note(job)

    def _read(self, job: Job, beside: bool) -> None:
        """Read the next piece of a prompt (and of what its answer had when it was sent back)."""
        piece = self._pace.piece() if beside else self._chunk
        if self.runnable.whole_prompt:
            piece = job.known
        if not piece:
            return
        assert job.sequence is not None
        began = clock()
        try:
            if not job.begun:
                self._begin(job)
            start = job.read
            end = self._reuse.mark(job, start, min(start + piece, job.known))
            logits = read_chunk(job.sequence, job.answer, start, job.tokens(start, end))
        except Exception as error:
            self._fail(job, error)
            return
        self._pace.read(end - start, clock() - began, beside)
        with self._wake:
            self._prompt_tokens += end - start
        self._reuse.keep_marked(job, end)
        if end == job.known:
            if not self._weighed and job.sequence.cuttable:
                self._weighed = True
                if short := budget.shortage(self._kv_total, job.sequence.length, job.sequence.host_bytes):
                    log.warning(short)
            job.answer.read()
            self._take(job, logits)

    def _advance(self, jobs: list[Job], alone: bool) -> None:
        """One token of each, in as few passes as can be. ``alone``: nobody reads a prompt meanwhile."""
        rows = MOST_ROWS if self._stepper.together else 1
        alone = alone and len(jobs) <= rows
        for start in range(0, len(jobs), rows):
            batch = jobs[start : start + rows]
            sequences = [job.sequence for job in batch if job.sequence is not None]
            tokens = [job.answer.tokens[-1] for job in batch]
            foreseen = alone and all(job.answer.foreseen for job in batch)
            try:
                with torch.inference_mode():
                    logits = self._stepper.advance(sequences, tokens, foreseen)
            except Exception as error:
                for job in batch:
                    self._fail(job, error)
                continue
            for job, row in zip(batch, logits, strict=True):
                self._take(job, row)

    def _take(self, job: Job, logits: Tensor | Scored) -> None:
        """Draw a token, unless the answer has come to its end without one."""
        try:
            if job.answer.reason is None:
                piece = job.answer.take(logits)
                with self._wake:
                    self._made += 1
                self._send(job, piece)
            if job.answer.reason is not None:
                if job.sequence is not None:
                    self._reuse.keep(job, job.sequence.given)
                self._service_s += 0.2 * (clock() - job.began - self._service_s)
                self._end(job, job.answer.result())
        except Exception as error:
            self._fail(job, error)

    def _fail(self, job: Job, error: Exception) -> None:
        if isinstance(error, HeteroError):
            self._end(job, error)
            return
        # What it says of our files goes to the log alone.
        log.error("a request failed", exc_info=error)
        self._end(job, HeteroError("internal error"))

    def _finish(self, job: Job, reason: FinishReason | None) -> None:
        """End it before its end, with what it has made."""
        job.answer.reason = reason
        try:
            if job.sequence is not None and not self._closing:
                self._reuse.keep(job, job.sequence.given)  # whoever stops an answer often asks on
            result = job.answer.result()
        except Exception as error:
            self._fail(job, error)
        else:
            self._end(job, result)

    def _end(self, job: Job, event: Result | HeteroError) -> None:
        """Free all that a request holds, then tell: who has read the last event finds its place free."""
        job.drop()
        with self._wake:
            if job in self._running:
                self._running.remove(job)
        self._send(job, event)

    def _send(self, job: Job, event: Piece | Result | HeteroError) -> None:
        try:
            job.sink(event)
        except Exception:
            log.exception("a sink failed; its request is cancelled")
            job.handle.cancelled = True

    def _cancel_all(self) -> None:
        with self._wake:
            jobs = self._running + self._queue.remove(lambda job: True)
        for job in jobs:
            self._finish(job, "cancelled")
