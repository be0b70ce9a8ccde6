"""What follows the mixer in a layer: a MoE block with its shared expert, or a dense MLP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hetero.core import InputError
from hetero.decode.build import Build
from hetero.decode.inputs import StepInputs
from hetero.decode.matrix import Part, Projection
from hetero.decode.stream import Sum
from hetero.formats import Format
from hetero.ops.gpu.fused import Normed, plain_rows, swiglu_rows
from hetero.ops.gpu.route import route
from hetero.ops.gpu.stamps import lap
from hetero.trace import ROUTER, SHARED


class GatedMlp:
    """``down(silu(gate(x)) * up(x))``: a dense MLP, or a shared expert, whose own gate may come with it."""

    def __init__(self, module: Any, build: Build) -> None:
        if not _is_silu(module.act_fn):
            raise InputError(f"an MLP with the activation {module.act_fn} has no fused step")
        wide = module.gate_proj.out_features
        self._in = Projection(Part(module.gate_proj, (wide,)), Part(module.up_proj, (wide,)))
        self._out = Projection(Part(module.down_proj, (module.down_proj.out_features,)))
        self._dtype = build.dtype

    @property
    def format(self) -> Format:
        return self._in.format

    def few(self, x: Normed) -> Tensor:
        """[R, H] -> [R, H], R <= 16."""
        gate_up = self._in.whole(x.rows, self._dtype)
        return self._out.whole(swiglu_rows(self._out.format, gate_up), self._dtype)

    def begin_step(self, x: Normed, inputs: StepInputs) -> Callable[[], Sum]:
        """With nothing left to do."""
        out = Sum(self.few(x))
        return lambda: out

    def prefill(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, H]."""
        gate, up = self._in.many(x)
        return self._out.many(nn.functional.silu(gate) * up)[0]

    def begin_parts(self, x: Tensor) -> Callable[[], Sum]:
        """With nothing left to do."""
        out = Sum(self.prefill(x))
        return lambda: out

    def begin_prefill(self, x: Tensor) -> Callable[[], Tensor]:
        """With nothing left to do."""
        out = self.prefill(x)
        return lambda: out


class RoutedBlock:
    """A MoE block of ``gate`` (a router with ``weight`` and ``top_k``), experts, and maybe ``shared_expert``
    with ``shared_expert_gate``."""

    def __init__(self, module: Any, build: Build) -> None:
        router = module.gate
        self._top_k, self._norm = router.top_k, bool(getattr(router, "norm_topk_prob", True))
        self._index, self._build = build.next_moe(), build
        parts = [Part(router.weight, (router.weight.shape[0],))]
        shared, gate = (getattr(module, name, None) for name in ("shared_expert", "shared_expert_gate"))
        self._gated = gate is not None
        if gate is not None:  # one output beside hundreds: no launch of its own
            parts.append(Part(gate, (1,)))
        self._router = Projection(*parts)
        self._shared = None if shared is None else GatedMlp(shared, build)

    @property
    def format(self) -> Format:
        return self._router.format if self._shared is None else self._shared.format

    def begin_step(self, x: Normed, inputs: StepInputs) -> Callable[[], Sum]:
        """Up to where the CPU was told, and with the shared expert."""
        fmt = self._router.format
        # Values cost no kernel; where the router is quantised and the shared expert not, one makes its rows.
        mine = x if fmt == self.format else x._replace(rows=plain_rows(fmt, x.x))
        outputs = self._router.few(mine, torch.float32)
        ids, weights = self._routed(outputs[0], inputs.slots)
        experts = self._build.experts[self._index]
        lap(ROUTER)
        experts.submit(x.x, ids, weights)
        shared = None
        if self._shared is not None:
            shared = self._shared.few(x)
            lap(SHARED)
        return lambda: Sum(experts.collect(), shared, outputs[1] if self._gated else None)

    def begin_parts(self, x: Tensor) -> Callable[[], Sum]:
        """Up to where the CPU was told."""
        outputs = self._router.many(x.float())
        ids, weights = self._routed(outputs[0])
        lap(ROUTER)
        pending = self._build.experts[self._index].prefill_submit(x, ids, weights)
        shared = None
        if self._shared is not None:
            shared = self._shared.prefill(x)
            lap(SHARED)
        gate = outputs[1] if self._gated else None
        return lambda: Sum(pending.collect(), shared, gate)

    def begin_prefill(self, x: Tensor) -> Callable[[], Tensor]:
        end = self.begin_parts(x)
        return lambda: end().value().to(x.dtype)

    def _routed(self, logits: Tensor, slots: Tensor | None = None) -> tuple[Tensor, Tensor]:
        # For an idle row no expert is to be read.
        ids, weights = route(logits, self._top_k, norm=self._norm, slots=slots)
        hook = self._build.routing
        return (ids, weights) if hook is None else hook(self._index, ids, weights)


def block_of(module: Any, build: Build) -> RoutedBlock | GatedMlp:
    """Of a layer's ``mlp``, by what it has."""
    return RoutedBlock(module, build) if hasattr(module, "experts") else GatedMlp(module, build)


def _is_silu(act: Any) -> bool:
    x = torch.linspace(-6.0, 6.0, 49)
    return bool(torch.allclose(act(x), nn.functional.silu(x)))
