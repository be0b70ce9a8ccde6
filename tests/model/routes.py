"""Which experts tokens go to: as one model chose them, forced upon another.

Where two experts are nearly as likely, rounding decides, and a token that went elsewhere is another token.
With its experts given, every row of logits can be compared, and not most of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hetero.ops.recipes import RECIPES

Chosen = list[tuple[Tensor, Tensor]]
"""Of each MoE layer: ids int64 and weights float32 [T, k] of a sequence's tokens."""


@contextmanager
def chosen_by(model: Any) -> Iterator[Chosen]:
    """Of transformers' own model: what its routers say in the last forward within the context."""
    found: Chosen = []
    hooks = []

    def watch(router: Any, place: int) -> Any:
        def told(module: Any, args: Any, output: Any) -> None:
            _, weights, ids = output[:3]
            found[place] = ids.long().cpu().flatten(0, -2), weights.float().cpu().flatten(0, -2)

        return router.register_forward_hook(told)

    for module in model.modules():
        recipe = RECIPES.get(type(module).__name__)
        if recipe is not None:
            found.append((torch.empty(0), torch.empty(0)))
            hooks.append(watch(getattr(module, recipe.router), len(found) - 1))
    assert hooks, "no MoE blocks"
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def forced(model: Any, chosen: Chosen) -> Iterator[None]:
    """transformers' own model computes by these experts and weights within the context."""
    hooks = []

    def force(router: Any, ids: Tensor, weights: Tensor) -> Any:
        def told(module: Any, args: Any, output: Any) -> tuple[Any, ...]:
            first, theirs, named = output[:3]
            return (first, weights.reshape(theirs.shape).to(theirs), ids.reshape(named.shape).to(named))

        return router.register_forward_hook(told)

    for module in model.modules():
        recipe = RECIPES.get(type(module).__name__)
        if recipe is not None:
            hooks.append(force(getattr(module, recipe.router), *chosen[len(hooks)]))
    assert len(hooks) == len(chosen)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class Routing:
    """A hook for ``Decoder.routing``: without ``chosen`` it keeps what routers say, else it says that,
    which is of several sequences. Steps of up to ``rows`` rows can be captured: what they read and write is
    always in the same place. Of several layers; the halves of a step that take turns ask one after the other.
    """

    def __init__(
        self, device: torch.device | str, layers: int, k: int, rows: int = 1, chosen: Sequence[Chosen] = ()
    ) -> None:
        self._chosen = list(chosen)
        self._ids = torch.zeros(layers, rows, k, dtype=torch.int64, device=device)
        self._weights = torch.zeros(layers, rows, k, device=device)
        self._piece: tuple[int, slice] | None = None  # of a prompt
        self._last = -1, 0  # the layer that has asked last, and rows of it so far
        self._parts: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(layers)]

    def prompt(self, sequence: int, start: int, end: int) -> None:
        """What follows is a piece of a prompt."""
        self._piece = sequence, slice(start, end)

    def step(self, rows: Sequence[tuple[int, int]] = ()) -> None:
        """What follows are steps; of the next one the rows are (sequence, position)."""
        self._piece = None
        for row, (sequence, position) in enumerate(rows if self._chosen else ()):
            for layer, (ids, weights) in enumerate(self._chosen[sequence]):
                self._ids[layer, row].copy_(ids[position])
                self._weights[layer, row].copy_(weights[position])

    def stepped(self) -> None:
        """A step of one row is through."""
        for layer, parts in enumerate(self._parts):
            parts.append((self._ids[layer, :1].cpu(), self._weights[layer, :1].cpu()))

    def kept(self) -> Chosen:
        """Of one sequence, since the beginning or the last call."""
        kept = [
            (torch.cat([ids for ids, _ in parts]), torch.cat([weights for _, weights in parts]))
            for parts in self._parts
        ]
        self._parts = [[] for _ in kept]
        return kept

    def __call__(self, layer: int, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        if self._piece is None:
            before = self._last[1] if self._last[0] == layer and len(self._parts) > 1 else 0
            rows = slice(before, before + len(ids))
            self._last = layer, rows.stop
            if self._chosen:
                # Rows that are idle stay so.
                live = ids[:, :1] >= 0
                return torch.where(live, self._ids[layer, rows], -1), self._weights[layer, rows]
            self._ids[layer, rows].copy_(ids)
            self._weights[layer, rows].copy_(weights)
            return ids, weights
        self._last = -1, 0
        if not self._chosen:
            self._parts[layer].append((ids.cpu(), weights.cpu()))
            return ids, weights
        sequence, piece = self._piece
        kept, their = self._chosen[sequence][layer]
        return kept[piece].to(ids.device), their[piece].to(ids.device, weights.dtype)
