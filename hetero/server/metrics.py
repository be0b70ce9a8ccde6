"""Counters of a server in Prometheus' format; the names follow those that dashboards of the field know."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hetero.core import HeteroError
from hetero.engine.request import Piece, Request, Result

if TYPE_CHECKING:
    from hetero.engine.scheduler import EngineStatus
    from hetero.store.rows import RowReads

# Seconds. A token of a large model takes up to a second on a CPU, and a long prompt minutes.
WHOLE = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600)
BETWEEN = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
RATE = (0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)

# A time for every series would double the exposition.
disable_created_metrics()  # type: ignore[no-untyped-call]

Observer = Callable[[Piece | Result | HeteroError], None]


class Metrics:
    """One registry a server, so that two servers in one process do not share counters."""

    def __init__(self) -> None:
        self.registry = own = CollectorRegistry()

        def seconds(name: str, what: str, buckets: tuple[float, ...] = WHOLE) -> Histogram:
            return Histogram(f"hetero:{name}_seconds", what, buckets=buckets, registry=own)

        self._first = seconds("time_to_first_token", "From submission to the first token, queue included.")
        self._between = seconds("inter_token_latency", "Between two tokens of one answer.", BETWEEN)
        self._whole = seconds("e2e_request_latency", "From submission to the end.")
        self._rate = Histogram(
            "hetero:request_decode_tokens_per_second",
            "Tokens after the first, by the time that they took, of each answer.",
            buckets=RATE,
            registry=own,
        )
        self._ends = Counter(
            "hetero:request_success", "Answers by why they ended.", ["finished_reason"], registry=own
        )
        self._failures = Counter("hetero:request_failure", "Answers that ended by an error.", registry=own)
        self._refused = Counter(
            "hetero:request_rejected", "Requests that the queue had no place for.", registry=own
        )
        self._http = Counter(
            "hetero:http_requests", "Answers of the server.", ["method", "route", "status"], registry=own
        )
        self._bytes = Gauge(
            "hetero:weights_bytes", "Packed weights by where they lie.", ["tier"], registry=own
        )

    def watch(self, status: Callable[[], EngineStatus]) -> None:
        """Take the engine's own figures from ``status`` whenever they are asked for."""
        self.registry.register(_EngineFigures(status))

    def read(self, experts: Callable[[], Mapping[str, tuple[int, int]]]) -> None:
        """Take (experts read, their bytes) of each tier from ``experts`` whenever they are asked for."""
        self.registry.register(_ExpertFigures(experts))

    def cached(self, uses: Callable[[], tuple[int, int, float]]) -> None:
        """Take (hits, misses, seconds waited) of the disk tier from ``uses`` whenever they are asked for."""
        self.registry.register(_CacheFigures(uses))

    def gathered(self, reads: Callable[[], RowReads]) -> None:
        """Take what tables on disk have read from ``reads`` whenever it is asked for."""
        self.registry.register(_TableFigures(reads))

    def placed(self, bytes_of: Mapping[str, int]) -> None:
        """Tell the bytes of weights on each tier."""
        for tier, size in bytes_of.items():
            self._bytes.labels(tier).set(size)

    def answered(self, method: str, route: str, status: int) -> None:
        """One answer over HTTP; ``route`` is the pattern, not the path, whose number has no bound."""
        self._http.labels(method, route, str(status)).inc()

    def rejected(self) -> None:
        """One request found the queue full."""
        self._refused.inc()

    def request(self, request: Request) -> Observer:
        """An observer of the events of one request; called where they are made, in order."""
        began = first = last = time.perf_counter()
        tokens = 0

        def see(event: Piece | Result | HeteroError) -> None:
            nonlocal first, last, tokens
            now = time.perf_counter()
            if isinstance(event, Piece):
                if tokens:
                    self._between.observe(now - last)
                else:
                    first = now
                    self._first.observe(now - began)
                tokens, last = tokens + 1, now
            elif isinstance(event, Result):
                self._whole.observe(now - began)
                self._ends.labels(event.finish_reason).inc()
                if tokens > 1 and last > first:
                    self._rate.observe((tokens - 1) / (last - first))
            else:
                self._failures.inc()

        return see

    def text(self) -> bytes:
        """The exposition, for a scraper."""
        return generate_latest(self.registry)


class _CacheFigures(Collector):
    """How often an expert was in RAM that also lies on disk."""

    def __init__(self, uses: Callable[[], tuple[int, int, float]]) -> None:
        self._uses = uses

    def collect(self) -> Iterator[Metric]:
        hits, misses, waited = self._uses()
        counters = {
            "expert_cache_hits": ("Experts of the disk tier that a step found in RAM.", hits),
            "expert_cache_misses": ("Experts that it had to read from disk.", misses),
            "expert_disk_wait_seconds": ("Time that steps have waited for these.", waited),
        }
        for name, (what, value) in counters.items():
            yield CounterMetricFamily(f"hetero:{name}", what, value)


class _TableFigures(Collector):
    """How often a row of a table on disk was in RAM."""

    def __init__(self, reads: Callable[[], RowReads]) -> None:
        self._reads = reads

    def collect(self) -> Iterator[Metric]:
        now = self._reads()
        counters = {
            "table_cache_hits": ("Rows of tables on disk that a step found in RAM.", now.cache.hits),
            "table_cache_misses": ("Rows that it had to read from disk.", now.cache.misses),
            "table_read_bytes": ("Bytes of rows that were read from disk.", now.nbytes),
            "table_disk_wait_seconds": ("Time that steps have waited for these.", now.seconds),
        }
        for name, (what, value) in counters.items():
            yield CounterMetricFamily(f"hetero:{name}", what, value)


class _ExpertFigures(Collector):
    """What steps have read of routed experts, by where these lie."""

    def __init__(self, experts: Callable[[], Mapping[str, tuple[int, int]]]) -> None:
        self._experts = experts

    def collect(self) -> Iterator[Metric]:
        what = "Experts that steps have read, each once a step."
        reads = CounterMetricFamily("hetero:expert_reads", what, labels=["tier"])
        size = CounterMetricFamily("hetero:expert_read_bytes", "Bytes of these.", labels=["tier"])
        for tier, (count, nbytes) in self._experts().items():
            reads.add_metric([tier], count)
            size.add_metric([tier], nbytes)
        yield reads
        yield size


class _EngineFigures(Collector):
    """The engine's counters, read when a scraper asks."""

    def __init__(self, status: Callable[[], EngineStatus]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        now = self._status()
        total = now.kv_tokens_total
        prompt = now.prompt_tokens + now.prefix_hit_tokens
        gauges = {
            "num_requests_running": ("Requests that hold a slot.", now.running),
            "num_requests_waiting": ("Requests in the queue.", now.waiting),
            "slots": ("Requests that can run at once.", now.slots),
            "batch_size": ("Sequences in the last step.", now.batch),
            "kv_cache_usage_perc": (
                "Share of the KV tokens in use, 0 to 1.",
                now.kv_tokens_used / total if total else 0.0,
            ),
            "kv_cache_tokens_used": ("KV tokens in use.", now.kv_tokens_used),
            "kv_cache_tokens_total": ("KV tokens that there are.", total or 0),
            "last_step_seconds": ("Time of the last step.", now.last_step_s),
        }
        counters = {
            "prompt_tokens": ("Prompt tokens, cached ones included.", prompt),
            "generation_tokens": ("Tokens made.", now.completion_tokens),
            "prefix_cache_queries": ("Prompt tokens that were looked up among earlier ones.", prompt),
            "prefix_cache_hits": ("Prompt tokens that an earlier request had left.", now.prefix_hit_tokens),
            "num_preemptions": ("Requests sent back to the queue for want of memory.", now.preemptions),
            "engine_steps": ("Steps of the model.", now.steps),
        }
        for name, (what, value) in gauges.items():
            yield GaugeMetricFamily(f"hetero:{name}", what, value)
        for name, (what, value) in counters.items():
            yield CounterMetricFamily(f"hetero:{name}", what, value)
