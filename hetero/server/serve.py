"""The life of a server: listen, load, serve, drain, stop.

The socket is taken before the model is loaded, so that a taken port fails at once, and answers while it
loads: 503 "loading" instead of a connection that hangs for minutes. The main thread loads and waits for
signals; HTTP runs on a second thread and the model on the scheduler's.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from hetero.core import HeteroError, MachineError
from hetero.engine.load import stats_recorder, with_context
from hetero.engine.scheduler import Scheduler
from hetero.ops.embedding import disk_tables, host_tables, table_reads
from hetero.ops.experts import CpuExpertsOp
from hetero.ops.watch import disk_experts, disk_reads
from hetero.server import connection, logs
from hetero.server.app import create_app
from hetero.server.options import Options
from hetero.server.safety import Policy
from hetero.server.state import AppState
from hetero.stats import Recorder

if TYPE_CHECKING:
    from hetero.engine.load import Loaded
    from hetero.store.disk import DiskExperts

# Most time that HTTP takes to send what is made and to close, seconds.
CLOSE_S = 5
# How often the main thread looks around while nothing happens, seconds.
LOOK_S = 2.0
# How often the use of experts is added to the statistics, seconds.
STATS_S = 300.0


class HttpThread:
    """uvicorn on a thread of its own; signals stay with the main thread."""

    def __init__(self, state: AppState, policy: Policy, listener: socket.socket) -> None:
        config = uvicorn.Config(
            create_app(state, policy),
            http=connection.BoundedProtocol,
            ws="none",
            log_config=None,
            access_log=False,
            # A client could else write any address into X-Forwarded-For.
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=CLOSE_S,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [listener]}, name="http", daemon=True
        )
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        """Let the answers under way be sent, at most CLOSE_S, and stop."""
        self._server.should_exit = True
        self._thread.join(2 * CLOSE_S)


def serve(listener: socket.socket, name: str, load: Callable[[], Loaded], options: Options) -> None:
    """Serve the model that ``load`` gives until SIGTERM or SIGINT, then drain. Call it on the main thread.

    Raises what ``load`` raises, and MachineError when HTTP has ended by itself.
    """
    logs.set_up(options.log_file)
    state = AppState(
        name, options.limits, tool_format=options.tool_format, reasoning_format=options.reasoning_format
    )
    http = HttpThread(state, options.policy, listener)
    engine: Scheduler | None = None
    try:
        with _signals() as stop:
            loaded = _loaded(load, stop)
            engine = _start(loaded, options)
            state.metrics.placed(_weights(loaded))
            state.metrics.read(_expert_reads(loaded))
            if tiered := disk_experts(loaded.runnable.model):
                state.metrics.cached(lambda: _uses(tiered))
            if tables := disk_tables(loaded.runnable.model):
                state.metrics.gathered(lambda: table_reads(tables))
            state.attach(engine)
            host, port = listener.getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            logs.say(f"serving {name} on http://{shown}:{port} (Ctrl-C stops)")
            recorder = stats_recorder(loaded, logs.say) if options.stats and not loaded.synthetic else None
            _wait(stop.asked, http, loaded.folder, recorder)
            _drain(state, engine, options.drain_s)
            # Before HTTP, so that clients of what is cut off read why.
            engine.close()
            http.close()
            if recorder is not None:
                recorder.save()
    finally:
        if engine is not None:
            engine.close()
        http.close()
        logs.give_up_stderr()


def _loaded(load: Callable[[], Loaded], stop: _Stop) -> Loaded:
    """What ``load`` gives. Raises StoppedError when a signal ends it."""
    try:
        return load()
    except KeyboardInterrupt:
        raise StoppedError("stopped while the model was being loaded") from None
    finally:
        stop.loading = False


def _start(loaded: Loaded, options: Options) -> Scheduler:
    """A started scheduler. Raises InputError for a context that the model does not have."""
    runnable = with_context(loaded, options.context).runnable
    engine = Scheduler(
        runnable,
        slots=options.slots,
        max_queue=options.max_queue,
        kv_tokens=options.kv_tokens,
        prefix_cache=options.prefix_cache,
    )
    engine.start()
    return engine


def _weights(loaded: Loaded) -> dict[str, int]:
    """Bytes of weights on each tier: experts in their arenas, the rest as torch's parameters."""
    sizes = {"cpu": loaded.expert_bytes, "gpu": 0}
    if tiered := disk_experts(loaded.runnable.model):
        sizes["disk"] = sum(experts.disk_nbytes for experts in tiered)
    if tables := disk_tables(loaded.runnable.model):
        sizes["disk"] = sizes.get("disk", 0) + sum(table.disk_nbytes for table in tables)
    runner = loaded.runnable.runner
    model = loaded.runnable.model
    # Packed linear layers are buffers; in fused layers several share one.
    held = [*model.parameters(), *(() if runner is None else model.buffers())]
    for weight in {weight.data_ptr(): weight for weight in held}.values():
        sizes["cpu" if weight.device.type == "cpu" else "gpu"] += weight.numel() * weight.element_size()
    sizes["cpu"] += sum(table.raw_nbytes for table in host_tables(model))
    if runner is not None:
        sizes["gpu"] += sum(experts.nbytes for experts in runner.experts)
    return sizes


def _expert_reads(loaded: Loaded) -> Callable[[], dict[str, tuple[int, int]]]:
    """What asks all operators how many experts, and bytes of them, steps have read."""
    if loaded.runnable.runner is not None:
        return loaded.runnable.runner.reads
    operators = [op for op in loaded.runnable.model.modules() if isinstance(op, CpuExpertsOp)]
    tiered = disk_experts(loaded.runnable.model)

    def now() -> dict[str, tuple[int, int]]:
        reads = [op.use.snapshot().reads for op in operators]
        size = sum(n * op.expert_bytes for n, op in zip(reads, operators, strict=True))
        found = {"cpu": (sum(reads), size)}
        if tiered:
            total = disk_reads(tiered)
            found["disk"] = (total.cache.misses, total.nbytes)
        return found

    return now


def _uses(tiered: list[DiskExperts]) -> tuple[int, int, float]:
    """(hits, misses, seconds waited) of the disk tier."""
    total = disk_reads(tiered)
    return total.cache.hits, total.cache.misses, total.seconds


def _wait(asked: threading.Event, http: HttpThread, folder: Path, recorder: Recorder | None) -> None:
    """Until a signal comes."""
    there = True
    saved = time.monotonic()
    while not asked.wait(LOOK_S):
        if recorder is not None and time.monotonic() - saved >= STATS_S:
            recorder.save()
            saved = time.monotonic()
        if not http.alive:
            raise MachineError("the HTTP server has ended by itself; the log says why")
        if there and not folder.exists():
            there = False
            logs.say(
                f"hetero: {folder} is gone; the model stays in memory and is served on; a restart needs it"
            )


def _drain(state: AppState, engine: Scheduler, seconds: float) -> None:
    """Take no more requests; those that were taken may end within ``seconds``."""
    state.draining = True
    engine.stop_accepting()
    status = engine.status()
    if status.running + status.waiting:
        logs.say(
            f"hetero: stopping; {status.running + status.waiting} requests may end within {seconds:g} s "
            "(a second signal stops at once)"
        )
    end = time.monotonic() + seconds
    while status.running + status.waiting and time.monotonic() < end:
        time.sleep(0.05)
        status = engine.status()


@dataclass(slots=True)
class _Stop:
    """``asked`` is set by the first signal; ``loading`` makes it end the load instead."""

    asked: threading.Event = field(default_factory=threading.Event)
    loading: bool = True


@contextmanager
def _signals() -> Iterator[_Stop]:
    """SIGTERM and SIGINT: the first asks for an orderly end, the second ends the process where it is."""
    stop = _Stop()

    def handler(number: int, _: FrameType | None) -> None:
        if stop.asked.is_set():
            logs.say("hetero: stopped at once")
            os._exit(128 + number)
        stop.asked.set()
        if stop.loading:
            # No HeteroError: code that loads may take one for a fault of a file.
            raise KeyboardInterrupt

    before = {number: signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, old in before.items():
            signal.signal(number, old)


class StoppedError(HeteroError):
    """A signal came before there was anything to drain."""

    exit_code = 130
