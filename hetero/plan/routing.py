"""Which experts a step needs, and which of them are in a cache of a given size.

``uniform`` draws experts at random. ``local`` follows the published reuse of real text: of a token's experts
45% are those of the token before, 35% of the seven before that, 20% of any. ``counts`` are measured: how
often each expert of each layer was chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LAST, RECENT, WINDOW = 0.45, 0.35, 8
"""Shares of experts that come from the last token and from the 2nd to the ``WINDOW``-th before."""


@dataclass(frozen=True, slots=True)
class Routing:
    """Where the chosen experts come from."""

    name: str  # local, uniform or counts
    counts: tuple[tuple[float, ...], ...] = ()  # [layers][experts]

    def hit_rate(self, share: float, experts: int, top_k: int, streams: int = 1) -> float:
        """Share of a token's experts that a cache with ``share`` of all experts holds, 0 to 1."""
        share = min(1.0, max(0.0, share))
        if self.counts:
            return _top_share(self.counts, share)
        if self.name == "uniform":
            return share
        # Each stream needs its own recent experts; what is left of the cache holds some of the others.
        slots = share * experts / streams
        last = min(1.0, slots / top_k)
        older = top_k * (WINDOW - 1) * (1 - LAST - RECENT)  # that a window adds to those of its last token
        recent = min(1.0, max(0.0, slots - top_k) / older)
        rate = LAST * last + RECENT * recent + (1 - LAST - RECENT) * share
        return max(rate, share)

    def shared(self, position: int) -> float:
        """Share of the experts of a window's token ``position`` (from 0) that its earlier tokens chose."""
        if self.name != "local" or position == 0:
            return 0.0
        return LAST + RECENT * min(position - 1, WINDOW - 1) / (WINDOW - 1)


def distinct(experts: float, drawn: float, times: int) -> float:
    """Different experts among ``times`` independent draws of ``drawn`` different ones out of ``experts``."""
    if experts <= 0:
        return 0.0
    return experts * (1.0 - (1.0 - min(1.0, drawn / experts)) ** times)


def misses(
    routing: Routing, share: float, experts: int, top_k: int, *, rows: int = 1, streams: int = 1
) -> float:
    """Different experts of a layer that a step needs and the cache lacks. ``rows``: tokens of each stream."""
    outside = experts * (1.0 - min(1.0, share))
    if outside <= 0:
        return 0.0
    rate = routing.hit_rate(share, experts, top_k, streams)
    if routing.name == "local":
        one = sum(top_k * (1.0 - max(rate, routing.shared(i))) for i in range(rows))
    else:
        one = distinct(outside, top_k * (1.0 - rate), rows)
    return distinct(outside, min(one, outside), streams)


def touched(routing: Routing, experts: int, top_k: int, *, rows: int = 1, streams: int = 1) -> float:
    """Different experts of a layer that a step needs at all."""
    return misses(routing, 0.0, experts, top_k, rows=rows, streams=streams)


def _top_share(counts: Sequence[Sequence[float]], share: float) -> float:
    """Share of all choices that fell on the most chosen ``share`` of all experts."""
    ranked = sorted((c for layer in counts for c in layer), reverse=True)
    total = sum(ranked)
    if total <= 0:
        return share
    slots = share * len(ranked)
    whole = int(slots)
    part = ranked[whole] * (slots - whole) if whole < len(ranked) else 0.0
    return min(1.0, (sum(ranked[:whole]) + part) / total)
