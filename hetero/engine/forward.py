"""One step of a model: token ids in, logits of the last position out, the cache carried along.

The cache is whatever the model's own forward makes: pages of keys and values, sliding windows, recurrent and
convolution states. The engine passes it on and never looks inside.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn


class Stepper:
    """Runs one sequence through a causal language model of transformers' interface."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        accepted = inspect.signature(model.forward).parameters
        # A few recurrent families name their cache differently.
        self._cache_name = "cache_params" if "cache_params" in accepted else "past_key_values"
        self._fixed: dict[str, Any] = {"use_cache": True, "return_dict": True}
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        if "output_router_logits" in accepted:
            self._fixed["output_router_logits"] = False
        # Ids go to where the embedding is, which need not be where the first parameter is.
        embedding = model.get_input_embeddings()  # type: ignore[operator]
        self._device = embedding.weight.device

    def start(self) -> Sequence:
        """A new, empty sequence."""
        return Sequence(self._model, self._fixed, self._last_only, self._cache_name, self._device)


class Sequence:
    """State of one sequence; dropping it frees its cache."""

    def __init__(
        self,
        model: nn.Module,
        fixed: dict[str, Any],
        last_only: dict[str, Any],
        name: str,
        device: torch.device,
    ) -> None:
        self._model, self._fixed, self._last_only = model, fixed, last_only
        self._name, self._device = name, device
        self._cache: Any = None

    def advance(self, tokens: list[int]) -> Tensor:
        """Logits [V] after appending ``tokens`` [n >= 1]. Under inference mode."""
        return self._forward(tokens, self._last_only)[-1]

    def advance_all(self, tokens: list[int]) -> Tensor:
        """Logits [n, V] at each of the appended ``tokens``. Under inference mode."""
        return self._forward(tokens, {})

    def _forward(self, tokens: list[int], keep: dict[str, Any]) -> Tensor:
        ids = torch.tensor([tokens], dtype=torch.long, device=self._device)
        output = self._model(input_ids=ids, **{self._name: self._cache}, **self._fixed, **keep)
        self._cache = output[self._name]
        logits: Tensor = output.logits
        return logits[0]
