"""Keys and values of one sequence in memory that stays where it is, for steps that a graph holds.

The sequence's own cache, which grows by new tensors, is copied into it once; afterwards it sees the same
memory.
"""

from __future__ import annotations

from typing import Any

from hetero.model.hf import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer, StaticLayer

_KINDS = (DynamicLayer, DynamicSlidingWindowLayer)


def unsuited(cache: Any) -> str:
    """Why the cache of a sequence cannot be held so; "": it can."""
    if type(cache) is not DynamicCache:
        return f"its cache is of class {type(cache).__name__}"
    odd = {type(layer).__name__ for layer in cache.layers if type(layer) not in _KINDS}
    return f"its cache has layers of class {', '.join(sorted(odd))}" if odd else ""


class HeldCache:
    """Room for ``length`` tokens, in layers with a sliding window too, where masks hide those before it.
    ``cache``: what a model's forward takes."""

    def __init__(self, like: Any, length: int) -> None:
        """``like``: a sequence's cache that holds tokens."""
        self.length = length
        self.cache: Any = Cache(layers=[StaticLayer(max_cache_len=length) for _ in like.layers])
        for layer, own in zip(self.cache.layers, like.layers, strict=True):
            layer.lazy_initialization(own.keys, own.values)

    def load(self, own: Any, held: int) -> None:
        """Take over the ``held`` tokens of a sequence's cache, which afterwards sees this memory."""
        for layer, theirs in zip(self.cache.layers, own.layers, strict=True):
            here = slice(held - theirs.keys.shape[2], held)
            # What no token of this sequence has written is hidden, but takes part all the same: it may be no
            # number after a step that failed.
            layer.keys.zero_()
            layer.values.zero_()
            layer.keys[:, :, here].copy_(theirs.keys)
            layer.values[:, :, here].copy_(theirs.values)
        self.rewind(held)

    def rewind(self, held: int) -> None:
        """The next token is written behind so many."""
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(held)

    def show(self, own: Any, held: int, *, apart: bool = False) -> None:
        """Let a sequence's cache see ``held`` tokens; ``apart``: in memory of its own."""
        for layer, theirs in zip(self.cache.layers, own.layers, strict=True):
            first = 0
            if type(theirs) is DynamicSlidingWindowLayer:
                first = max(0, held - theirs.sliding_window + 1)
                theirs.cumulative_length = held
            keys, values = layer.keys[:, :, first:held], layer.values[:, :, first:held]
            theirs.keys, theirs.values = (keys.clone(), values.clone()) if apart else (keys, values)
