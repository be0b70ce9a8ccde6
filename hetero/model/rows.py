"""One token of several sequences in one forward pass of transformers' own code, each with its own cache.

Everything that treats tokens apart (projections, norms, experts) runs once for all rows. What looks back runs
row by row on that row's cache, so that it is computed exactly as for a sequence alone, without padding:

- An attention that hands its keys to transformers' attention interface does its own work for all rows; the
  cache gives it the rows' keys as ``_Ragged``, and the function that the interface calls takes them apart.
- Every other module that is given the cache (recurrences, convolutions, attention with an index of its own)
  is called once a row.

One token sees all of its keys, and a sliding window's cache holds no others: the only masks are those that
hide nothing, for modules that cannot do without (``_Mask``).

Whether a model type can be run so is verified for each (``tests/model/test_rows.py``); ``moe_types.APART``
names those that cannot.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hetero.model.hf import (
    ALL_ATTENTION_FUNCTIONS,
    ALL_MASK_ATTENTION_FUNCTIONS,
    Cache,
    GradientCheckpointingLayer,
    PreTrainedModel,
)
from hetero.model.moe_types import APART

# What transformers' modules call the argument for a cache.
CACHE_ARGUMENTS = ("past_key_values", "cache_params")
_PREFIX = "hetero_rows_"


def takes_rows(model: nn.Module) -> bool:
    """Whether ``RowsModel`` is known to work for this type of model."""
    config: Any = model.config
    types = {config.model_type, config.get_text_config(decoder=True).model_type}
    accepted = inspect.signature(model.forward).parameters
    return not types & APART and {"position_ids", "past_key_values"} <= set(accepted)


class RowsModel:
    """Makes a model take rows. It is as before for any other cache. ``release`` gives it back."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._configs = list(
            {id(c): c for c in (_config(m) for m in model.modules()) if c is not None}.values()
        )
        self._apart = [m for m in _mixers(model) if not _by_interface(m)]
        self._own = [m.__dict__.get("forward") for m in self._apart]
        for module in self._apart:
            module.forward = _row_by_row(module)

    def release(self) -> None:
        for module, own in zip(self._apart, self._own, strict=True):
            if own is None:
                del module.forward
            else:
                module.forward = own
        self._apart, self._own = [], []

    def step(
        self, tokens: Sequence[int], lengths: Sequence[int], caches: Sequence[Any], **fixed: Any
    ) -> Tensor:
        """Logits [B, V] after one of ``tokens`` for each row, whose cache holds so many tokens; B >= 2.

        The caches move on by their token. After an exception they are worth nothing. Under inference mode.
        """
        device = self._model.get_input_embeddings().weight.device  # type: ignore[operator]
        ids = torch.tensor(tokens, dtype=torch.long, device=device).unsqueeze(1)
        positions = torch.tensor(lengths, dtype=torch.long, device=device).unsqueeze(1)
        rows = _class_for(caches[0])(caches)
        with self._interface():
            output = self._model(
                input_ids=ids,
                position_ids=positions,
                past_key_values=rows,
                **fixed,
            )
        logits: Tensor = output.logits
        return logits[:, -1]

    @contextmanager
    def _interface(self) -> Iterator[None]:
        before = [config._attn_implementation_internal for config in self._configs]
        try:
            for config, name in zip(self._configs, before, strict=True):
                config._attn_implementation_internal = _registered(name or "eager")
            yield
        finally:
            for config, name in zip(self._configs, before, strict=True):
                config._attn_implementation_internal = name


def _config(module: nn.Module) -> Any:
    config = getattr(module, "config", None)
    return config if hasattr(config, "_attn_implementation_internal") else None


def _mixers(module: nn.Module) -> Iterator[nn.Module]:
    """The modules that get the cache to use it, not to pass it on."""
    for child in module.children():
        accepted = inspect.signature(child.forward).parameters
        passes_on = isinstance(child, PreTrainedModel | GradientCheckpointingLayer)
        if not passes_on and any(name in accepted for name in CACHE_ARGUMENTS):
            yield child
        else:
            yield from _mixers(child)


def _by_interface(module: nn.Module) -> bool:
    """Whether a module does nothing with the cache but update it for the attention interface.

    Not one that keeps its keys compressed (``expand_kv``), nor one with parts that use the cache themselves.
    """
    names = inspect.unwrap(type(module).forward).__code__.co_names
    return "get_interface" in names and "expand_kv" not in names and not any(True for _ in _mixers(module))


class _Rows(Cache):  # type: ignore[misc]
    """The caches of the rows. What a module asks besides is answered by the first row's."""

    def __init__(self, caches: Sequence[Any]) -> None:
        Cache.__init__(self, layers=caches[0].layers)
        self.caches = caches

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[_Ragged, _Ragged]:
        found = [
            cache.update(keys[row : row + 1], values[row : row + 1], layer_idx, *args, **kwargs)
            for row, cache in enumerate(self.caches)
        ]
        return _Ragged([k for k, _ in found]), _Ragged([v for _, v in found])

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise TypeError("this module keeps more than keys and values, and is not run row by row")

    update_conv_state = update_recurrent_state = update_indexer = _refuse
    get_conv_state = get_recurrent_state = crop = reset = reorder_cache = _refuse


_CLASSES: dict[type, type[_Rows]] = {}


def _class_for(cache: Any) -> type[_Rows]:
    """``_Rows`` that derives from the class of the rows' caches, which some models insist on."""
    kind = type(cache)
    if kind not in _CLASSES:
        _CLASSES[kind] = type(f"_RowsOf{kind.__name__}", (_Rows, kind), {})
    return _CLASSES[kind]


class _Ragged:
    """Keys or values [1, heads, length, dim] of each row. Good for nothing but the attention interface."""

    def __init__(self, rows: list[Tensor]) -> None:
        self.rows = rows


class _Split:
    """Outputs of a module run row by row that differ in more than the row, for the next such module."""

    def __init__(self, rows: tuple[Any, ...]) -> None:
        self.rows = rows


class _Mask:
    """Stands for each row's mask that hides nothing of its keys."""

    def __init__(self, additive: bool, dtype: torch.dtype, device: torch.device) -> None:
        self._additive, self._dtype, self._device = additive, dtype, device

    def of(self, cache: Any, layer: int) -> Tensor:
        """[1, 1, 1, keys]: zeros to add, or True where a key is seen."""
        shape = (1, 1, 1, cache.get_mask_sizes(1, layer)[0])
        if self._additive:
            return torch.zeros(shape, dtype=self._dtype, device=self._device)
        return torch.ones(shape, dtype=torch.bool, device=self._device)


def _registered(implementation: str) -> str:
    """Name of the attention and mask functions that take rows apart for ``implementation``."""
    name = f"{_PREFIX}{implementation}"
    if name not in ALL_ATTENTION_FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS.register(name, _attention_of(implementation))
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, _mask_of(implementation))
    return name


def _attention_of(implementation: str) -> Callable[..., Any]:
    def attend(
        module: nn.Module, query: Tensor, key: _Ragged, value: _Ragged, attention_mask: Any, **kwargs: Any
    ) -> Any:
        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        function = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager)
        outputs = [
            function(module, query[row : row + 1], k, v, None, **_row(kwargs, row, len(query)))[0]
            for row, (k, v) in enumerate(zip(key.rows, value.rows, strict=True))
        ]
        return torch.cat(outputs), None

    return attend


def _mask_of(implementation: str) -> Callable[..., Any]:
    def mask(*_: Any, allow_is_causal_skip: bool = True, **kwargs: Any) -> _Mask | None:
        additive = implementation != "sdpa"
        if allow_is_causal_skip and not additive:
            return None
        return _Mask(additive, kwargs.get("dtype", torch.float32), kwargs.get("device", torch.device("cpu")))

    return mask


def _row_by_row(module: nn.Module) -> Callable[..., Any]:
    """The module's forward, called once for each row where it is given rows."""
    forward, config, layer = module.forward, _config(module), getattr(module, "layer_idx", 0)

    def call(*args: Any, **kwargs: Any) -> Any:
        rows = next((x for x in (*kwargs.values(), *args) if isinstance(x, _Rows)), None)
        if rows is None:
            return forward(*args, **kwargs)
        size = len(rows.caches)

        def one(row: int) -> Any:
            own = rows.caches[row]
            return forward(*_row(args, row, size, own, layer), **_row(kwargs, row, size, own, layer))

        with _plain(config):
            outputs = [one(row) for row in range(size)]
        if not isinstance(outputs[0], tuple):
            return _joined(tuple(outputs))
        return tuple(_joined(parts) for parts in zip(*outputs, strict=True))

    return call


@contextmanager
def _plain(config: Any) -> Iterator[None]:
    """What runs within attends as a sequence alone does."""
    if config is None:
        yield
        return
    name = config._attn_implementation_internal
    config._attn_implementation_internal = name.removeprefix(_PREFIX)
    try:
        yield
    finally:
        config._attn_implementation_internal = name


def _joined(parts: tuple[Any, ...]) -> Any:
    """Outputs of the rows as one."""
    if not isinstance(parts[0], Tensor):
        return parts[0]
    alike = all(part.shape[1:] == parts[0].shape[1:] for part in parts)
    return torch.cat(parts) if alike else _Split(parts)


def _row(value: Any, row: int, size: int, cache: Any = None, layer: int = 0) -> Any:
    """The part of an argument that belongs to one row of ``size``, whose cache is ``cache``."""
    if isinstance(value, _Rows):
        return cache
    if isinstance(value, _Split):
        return value.rows[row]
    if isinstance(value, _Mask):
        return value.of(cache, layer)
    if isinstance(value, Tensor):
        rows = value.ndim > 1 and value.shape[0] == size and not isinstance(value, nn.Parameter)
        return value[row : row + 1] if rows else value
    if isinstance(value, tuple | list):
        return type(value)(_row(part, row, size, cache, layer) for part in value)
    if isinstance(value, dict):
        return {name: _row(part, row, size, cache, layer) for name, part in value.items()}
    return value
