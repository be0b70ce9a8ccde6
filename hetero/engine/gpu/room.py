"""What of a GPU's memory is for what: states of sequences, and experts in all that steps and prompts leave.

What these need is not computed but measured: with a handful of experts in GPU memory, every graph is captured
and the longest chunk of a prompt is read, at the end of the longest sequence. What the driver then has left
goes to the caches of experts, but for a margin, and the same is done once more to see that it holds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hetero.core import MachineError
from hetero.engine.gpu.vram import Vram
from hetero.hw.memory import gib
from hetero.plan.kv import sequence_bytes, states
from hetero.plan.workspace import LATER, LEAST_CHUNK
from hetero.rules.gpu_options import CacheSize

log = logging.getLogger("hetero.engine")

LONGEST = 32768
"""Tokens of a sequence where nobody says how many; a longer one is the rare case."""

SHORTEST = 2048

STATES = 4
"""Where nobody says how long sequences may be, their states take at most this part of what is left."""

FEW = 8
"""Slots of a layer while the rest is measured: as many as kernels need to be those of a large cache."""

_TRIES, _LESS = 4, 32  # times that a cache is made a 32nd smaller where it turns out too large
# Torch takes large tensors from the driver in multiples of this.
_LARGE, _GRAIN = 10 << 20, 2 << 20
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


def cache_slots(wishes: Sequence[CacheWish], left: int | None, reserve: int) -> list[int]:
    """Experts of each layer that GPU memory holds. ``left``: bytes there, None: without end; ``reserve``:
    that something else needs.

    Raises MachineError where sizes that rules name do not fit.
    """
    totals = _totals(wishes)
    slots = [wish.size.slots(wish.experts, totals[wish.rule]) for wish in wishes]
    asked = sum(n * wish.expert_bytes for n, wish in zip(slots, wishes, strict=True) if n is not None)
    if left is not None and asked and asked + reserve > left:
        raise MachineError(
            f"the cache of experts needs {gib(asked)} of GPU memory and a step {gib(reserve)}, {gib(left)} "
            "is left; 'cache: auto' takes what there is"
        )
    if left is None:
        return [wish.experts if n is None else n for n, wish in zip(slots, wishes, strict=True)]
    room = max(0, left - reserve - asked)
    free = [wish for n, wish in zip(slots, wishes, strict=True) if n is None]

    def taken(rounds: int) -> int:
        return sum(_held(min(rounds, wish.experts), wish) for wish in free)

    # One after the other for all layers alike, then one more for the first of them.
    low, high = 0, max((wish.experts for wish in free), default=0)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if taken(middle) <= room else (low, middle - 1)
    rest = room - taken(low)
    found = []
    for asked_slots, wish in zip(slots, wishes, strict=True):
        if asked_slots is not None:
            found.append(asked_slots)
            continue
        count = min(wish.experts, low)
        more = _held(count + 1, wish) - _held(count, wish)
        if count < wish.experts and more <= rest:
            rest -= more
            count += 1
        found.append(count)
    return found


def _held(count: int, wish: CacheWish) -> int:
    """Bytes that so many experts of a layer take from the driver."""
    size = count * wish.expert_bytes
    return size if size < _LARGE else -(-size // _GRAIN) * _GRAIN


class Left(Protocol):
    """``vram.Vram``, as far as it is used here."""

    @property
    def left(self) -> int: ...

    def hold(self) -> None: ...


class Reader(Protocol):
    """``runner.GpuRunner``, as far as it is used here."""

    chunk: int

    def capture(self, *, prompt: bool = True) -> None: ...

    def read_longest(self) -> None:
        """Raises torch.OutOfMemoryError."""


def first_slots(wishes: Sequence[CacheWish]) -> list[int]:
    """Of each layer while the rest is measured: a handful, where its rule does not ask for less."""
    totals = _totals(wishes)
    asked = (wish.size.slots(wish.experts, totals[wish.rule]) for wish in wishes)
    few = (min(FEW, wish.experts) for wish in wishes)
    return [most if n is None else min(most, n) for n, most in zip(asked, few, strict=True)]


def fill(
    runner: Reader, memory: Left, wishes: Sequence[CacheWish], resize: Callable[[Sequence[int]], None]
) -> list[int]:
    """Give the caches of experts what a step and a prompt leave, and capture the steps: the slots of each
    layer. They have ``first_slots`` until then; ``resize`` gives them others, between captures. Where the
    longest chunk of a prompt does not fit even beside these, ``runner.chunk`` is halved.

    Raises MachineError where not even small chunks fit, or sizes that rules name.
    """
    held = first_slots(wishes)
    _measure(runner)
    memory.hold()
    # What torch keeps for itself of that chunk counts as taken, so that this is what is left at the peak.
    left = memory.left + sum(_held(n, wish) for n, wish in zip(held, wishes, strict=True))
    slots = cache_slots(wishes, left, LATER)
    totals = _totals(wishes)
    fixed = [wish.size.slots(wish.experts, totals[wish.rule]) is not None for wish in wishes]
    for attempt in range(_TRIES + 1):
        try:
            resize(slots)
            runner.capture(prompt=False)
            memory.hold()  # anew: graphs are not torch's memory, and what it may have is what they leave
            runner.read_longest()
            return slots
        except (torch.OutOfMemoryError, MachineError) as error:
            if attempt == _TRIES or all(fixed):
                raise _too_little(error, runner.chunk) from None
            log.warning("the cache of experts was too large by a little and is made smaller: %s", error)
            slots = [n if told else n - -(-n // _LESS) for n, told in zip(slots, fixed, strict=True)]
    raise AssertionError("the last attempt returns or raises")


def _measure(runner: Reader) -> None:
    """The longest chunk once, or the longest that fits."""
    while True:
        try:
            runner.read_longest()
            return
        except torch.OutOfMemoryError as error:
            if runner.chunk // 2 < LEAST_CHUNK:
                raise _too_little(error, runner.chunk) from None
            runner.chunk //= 2
            torch.cuda.empty_cache()
            log.warning("prompts are read %d tokens at a time: more do not fit GPU memory", runner.chunk)


def _too_little(error: Exception, chunk: int) -> MachineError:
    if isinstance(error, MachineError):
        return error
    first = (str(error).strip().splitlines() or ["no memory"])[0].partition(". ")[0]
    return MachineError(
        f"GPU memory has no room for a step and {chunk} tokens of a prompt beside the weights ({first}); a "
        "smaller --ctx, HETERO_PREFILL_CHUNK or dense layers in 8 bits (--set dense=int8) need less"
    )


def _totals(wishes: Sequence[CacheWish]) -> dict[str, int]:
    """Bytes of all experts of each rule."""
    totals: dict[str, int] = {}
    for wish in wishes:
        totals[wish.rule] = totals.get(wish.rule, 0) + wish.experts * wish.expert_bytes
    return totals
