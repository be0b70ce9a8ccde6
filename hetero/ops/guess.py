"""Experts on disk that are read a layer early, by the next layer's router and this layer's input."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hetero.ops.moe import MoeBlock

if TYPE_CHECKING:
    from hetero.store.guess import Guesses


def guess_ahead(model: Any) -> Guesses | None:
    """Let each block of a loaded model guess for the next one; None where there are no two that can.

    Both must be blocks on the CPU whose experts are on the disk tier, and routers must need nothing but the
    block's input. Results do not change.
    """
    found = [one for one in model.modules() if isinstance(one, MoeBlock) and one.routes_by_input]
    tiered = [block for block in found if hasattr(_backend(block), "guess_with")]
    if len(tiered) < 2:
        return None
    from hetero.store.guess import Guesses

    guesses = Guesses(max(_backend(block).stride for block in tiered))
    for block in tiered:
        _backend(block).guess_with(guesses)
    for block, following in pairwise(tiered):
        block.following = partial(_expect, following)
    return guesses


def _backend(block: MoeBlock) -> Any:
    experts: Any = block.experts
    return getattr(experts, "backend", None)


def _expect(block: MoeBlock, x: Tensor) -> None:
    backend = _backend(block)
    if x.device.type == "cpu" and backend.misses_much:
        # The first choices of all tokens, then their second ones.
        backend.expect(dict.fromkeys(block.chosen(x).T.flatten().tolist()))
