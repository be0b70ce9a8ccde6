"""What of a GPU's memory is for what: states of sequences, workspace, and experts in what is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hetero.core import MachineError
from hetero.engine.gpu.vram import Vram
from hetero.hw.memory import gib
from hetero.plan.kv import sequence_bytes, states
from hetero.rules.gpu_options import CacheSize

GRAPHS = 256 << 20
"""For captured graphs and what their steps use."""

LONGEST = 32768
"""Tokens of a sequence where nobody says how many; a longer one is the rare case."""

SHORTEST = 2048

STATES = 4
"""Where nobody says how long sequences may be, their states take at most this part of what is left."""

_PAIRS = 8192  # rows of experts that a large step computes at once
_STAGING = 256 << 20  # buffers in which experts cross the bus, and what orders their rows
_WIDTH = 2  # bytes of keys and values


@dataclass(frozen=True, slots=True)
class CacheWish:
    """Of one layer: how many experts of how many bytes it has, and what its rule wants of them in GPU
    memory."""

    experts: int
    expert_bytes: int
    size: CacheSize
    rule: str  # whose blocks share a size in bytes


def default_lengths(text_config: Any, slots: int, limit: int | None, vram: Vram | None) -> tuple[int, int]:
    """Tokens of a sequence, at most, and of all ``slots`` together, where nobody says how many: of one the
    model's own ``limit``, but LONGEST at most, halving until its state takes no more than its part of what is
    left; of all as many as have room in that part."""
    context = min(limit or LONGEST, LONGEST)
    if vram is None:
        return context, slots * context
    layers, _ = states(text_config.to_dict())
    fixed = sequence_bytes(layers, 0, _WIDTH)
    room = vram.left // STATES - slots * fixed

    def growing(tokens: int) -> int:
        return sequence_bytes(layers, tokens, _WIDTH) - fixed

    while context > SHORTEST and growing(context) > room:
        context //= 2
    together = context * room // max(1, growing(context))
    return context, min(slots * context, max(context, together))


def workspace(text_config: Any, chunk: int) -> int:
    """Bytes that reading a prompt ``chunk`` tokens at a time takes at most, by estimate, and graphs."""
    text = text_config.to_dict()
    hidden = int(text.get("hidden_size") or 0) * int(text.get("hc_count") or 1)
    heads = int(text.get("num_attention_heads") or 1)
    head = int(text.get("head_dim") or hidden // heads)
    widest = max(2 * heads * head, 2 * int(text.get("intermediate_size") or 0), 4 * hidden)
    top_k = int(text.get("num_experts_per_tok") or 1)
    inner = int(text.get("moe_intermediate_size") or text.get("intermediate_size") or 0)
    pairs = min(chunk * top_k, _PAIRS) * (2 * inner + int(text.get("hidden_size") or 0))
    return GRAPHS + _STAGING + 4 * (chunk * (6 * hidden + 2 * widest) + pairs)


def cache_slots(wishes: Sequence[CacheWish], left: int | None, reserve: int) -> list[int]:
    """Experts of each layer that GPU memory holds. ``left``: bytes there, None: without end; ``reserve``:
    that something else needs.

    Raises MachineError where sizes that rules name do not fit.
    """
    totals: dict[str, int] = {}
    for wish in wishes:
        totals[wish.rule] = totals.get(wish.rule, 0) + wish.experts * wish.expert_bytes
    slots = [wish.size.slots(wish.experts, totals[wish.rule]) for wish in wishes]
    asked = sum(n * wish.expert_bytes for n, wish in zip(slots, wishes, strict=True) if n is not None)
    if left is not None and asked and asked + reserve > left:
        raise MachineError(
            f"the cache of experts needs {gib(asked)} of GPU memory and a step {gib(reserve)}, {gib(left)} "
            "is left; 'cache: auto' takes what there is"
        )
    free = [wish for n, wish in zip(slots, wishes, strict=True) if n is None]
    each = sum(wish.expert_bytes for wish in free)
    if left is None:
        return [wish.experts if n is None else n for n, wish in zip(slots, wishes, strict=True)]
    room = max(0, left - reserve - asked)
    # One after the other for all layers alike, then one more for the first of them.
    rounds = room // each if each else 0
    rest = room - rounds * each
    found = []
    for asked_slots, wish in zip(slots, wishes, strict=True):
        if asked_slots is not None:
            found.append(asked_slots)
            continue
        more = wish.expert_bytes <= rest and rounds < wish.experts
        rest -= wish.expert_bytes if more else 0
        found.append(min(wish.experts, rounds + more))
    return found
