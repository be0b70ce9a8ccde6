"""Copies of a sequence's cache, whole or of its beginning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from hetero.model.hf import (
    Cache,
    CacheLayerMixin,
    DummyLayer,
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    LinearAttentionCacheLayerMixin,
)

_PARTS = (Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin, DummyLayer)
# Exactly these, in exactly DynamicCache: what derives from them adds state that has no beginning (windows,
# recurrences).
_CUTTABLE = (DynamicLayer, DynamicIndexedLayer, DummyLayer)


def copyable(cache: Any) -> bool:
    """Whether ``copied`` knows this kind of cache."""
    return isinstance(cache, Cache)


def cuttable(cache: Any) -> bool:
    """Whether a shorter beginning can be had from the cache of a longer sequence."""
    return type(cache) is DynamicCache and all(type(layer) in _CUTTABLE for layer in cache.layers)


def copied(cache: Any, cut: int = 0, clone: bool = True) -> Any:
    """A cache that shares no memory with ``cache``, without its last ``cut`` tokens (0 unless cuttable).
    Without ``clone`` it is the same memory, and ``cache`` is not to be used any more."""
    if cut:
        cache = _mapped(cache, lambda tensor: tensor)
        for layer in cache.layers:
            layer.crop(-cut)
    return _mapped(cache, lambda tensor: tensor.clone()) if clone else cache


def host_bytes(cache: Any) -> int:
    """Bytes of a cache's tensors that lie in the machine's memory, not a GPU's."""
    found: list[int] = []

    def count(tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu":
            found.append(tensor.nbytes)
        return tensor

    _mapped(cache, count)
    return sum(found)


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same structure with every tensor changed; what is no part of a cache stays shared."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)(_mapped(part, change) for part in value)
    if isinstance(value, dict):
        return {name: _mapped(part, change) for name, part in value.items()}
    if isinstance(value, _PARTS):
        twin = value.__class__.__new__(value.__class__)
        twin.__dict__.update({name: _mapped(part, change) for name, part in value.__dict__.items()})
        return twin
    return value
