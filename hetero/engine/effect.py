"""What an option that changes a model's output does to its logits, with the same tokens forced on both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from hetero.engine.gpu.runner import GpuRunner


@dataclass(frozen=True, slots=True)
class Effect:
    """Of logits over some tokens. ``relative``: norm of the difference by the norm of the first, both without
    each row's mean, which no probability depends on. ``kl``: of the second's distribution from the first's,
    in nats a token, its mean and its largest; ``same_top``: the share of tokens whose likeliest successor is
    the same."""

    tokens: int
    relative: float
    kl: float
    kl_most: float
    same_top: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def line(self) -> str:
        """For a person."""
        return (
            f"over {self.tokens} tokens: logits differ by {self.relative:.2e} (relative norm), KL "
            f"{self.kl:.2e} nats a token (at most {self.kl_most:.2e}), the likeliest token is the same for "
            f"{self.same_top:.1%}"
        )


def effect(plain: Tensor, changed: Tensor) -> Effect:
    """Of two logits [T, V], in float64. Raises ValueError for shapes that differ or hold nothing."""
    if plain.shape != changed.shape or plain.dim() != 2 or not plain.numel():
        raise ValueError(f"logits {list(plain.shape)} and {list(changed.shape)}")
    a, b = plain.double(), changed.double().to(plain.device)
    difference = (a - a.mean(dim=1, keepdim=True)) - (b - b.mean(dim=1, keepdim=True))
    norm = (a - a.mean(dim=1, keepdim=True)).norm()
    log_a, log_b = a.log_softmax(dim=1), b.log_softmax(dim=1)
    kl = (log_a.exp() * (log_a - log_b)).sum(dim=1).clamp(min=0.0)
    return Effect(
        tokens=len(a),
        relative=float(difference.norm() / norm) if norm else 0.0,
        kl=float(kl.mean()),
        kl_most=float(kl.max()),
        same_top=float((a.argmax(dim=1) == b.argmax(dim=1)).double().mean()),
    )


def forced(runner: GpuRunner, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
    """Logits float32 [T, V] on the CPU after each of ``tokens``, each read by a decode step of one row behind
    ``prompt``."""
    slot = runner.claim()
    try:
        runner.prefill(slot, prompt)
        rows = []
        for token in tokens:
            logits = runner.step([(slot, token)]).logits
            assert logits is not None
            rows.append(logits[0].to("cpu", torch.float32, copy=True))
        return torch.stack(rows)
    finally:
        runner.release(slot)


def deferral_effect(
    runner: GpuRunner,
    set_defer: Callable[[int], None],
    count: int,
    *,
    prompt: Sequence[int],
    tokens: Sequence[int],
) -> Effect:
    """What ``count`` deferred experts do against none. ``set_defer``: of what the runner's experts share;
    graphs are captured anew for either, and left as for ``count``."""
    logits = []
    for value in (0, count):
        set_defer(value)
        runner.capture()
        logits.append(forced(runner, prompt, tokens))
    return effect(*logits)
