"""Counters of a server in Prometheus' format; the names follow those that dashboards of the field know."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from hetero.core import HeteroError
from hetero.engine.request import Piece, Request, Result

if TYPE_CHECKING:
    from hetero.engine.scheduler import EngineStatus

# Seconds. A token on a large model takes up to a second on a CPU; a long prompt takes minutes.
FIRST = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600)
BETWEEN = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)


class Metrics:
    """One registry a server, so that two servers in one process do not share counters."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._status: Callable[[], EngineStatus] | None = None
        self._first = Histogram(
            "hetero:time_to_first_token_seconds",
            "From submission to the first token.",
            buckets=FIRST,
            registry=self.registry,
        )
        self._between = Histogram(
            "hetero:inter_token_latency_seconds",
            "Between two tokens of one answer.",
            buckets=BETWEEN,
            registry=self.registry,
        )
        self._whole = Histogram(
            "hetero:e2e_request_latency_seconds",
            "From submission to the end.",
            buckets=FIRST,
            registry=self.registry,
        )
        self._ends = Counter(
            "hetero:request_success",
            "Answers by the reason of their end.",
            ["finished_reason"],
            registry=self.registry,
        )
        self._failures = Counter(
            "hetero:request_failure", "Answers that ended by an error.", registry=self.registry
        )

    def watch(self, status: Callable[[], EngineStatus]) -> None:
        """Take the engine's own figures from ``status`` whenever they are asked for."""
        self._status = status

    def request(self, request: Request) -> Callable[[Piece | Result | HeteroError], None]:
        """An observer of one request's events; called where they are made, in order."""
        began = last = time.perf_counter()
        tokens = 0

        def see(event: Piece | Result | HeteroError) -> None:
            nonlocal last, tokens
            now = time.perf_counter()
            if isinstance(event, Piece):
                (self._between if tokens else self._first).observe(now - last)
                tokens, last = tokens + 1, now
            elif isinstance(event, Result):
                self._whole.observe(now - began)
                self._ends.labels(event.finish_reason).inc()
            else:
                self._failures.inc()

        return see

    def text(self) -> bytes:
        """The exposition, for a scraper."""
        return generate_latest(self.registry)
