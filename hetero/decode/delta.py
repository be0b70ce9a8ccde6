"""Gated delta nets with their projections."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hetero.core import InputError
from hetero.decode.build import Build
from hetero.decode.inputs import Chunk, StepInputs
from hetero.decode.matrix import VALUES, Part, Projection
from hetero.decode.mixer import Projected
from hetero.decode.prefill_delta import convolved, delta_rule
from hetero.ops.gpu.delta import DeltaShape, DeltaState, DeltaWeights, delta_core
from hetero.ops.gpu.fused import Normed, gated_norm_rows

# Tokens of a prefill that the recurrence takes at a time: their float32 intermediates are some hundred
# megabytes in large models.
_SEGMENT = 2048


class DeltaMixer(Projected):
    """Of a module with ``in_proj_qkv``, ``_z``, ``_b``, ``_a``, or with ``in_proj_qkvz`` and ``_ba``, whose
    rows are by key heads; ``conv1d``, ``A_log``, ``dt_bias``, ``norm`` and ``out_proj``.

    Raises InputError for activations that the step does not have.
    """

    def __init__(self, module: Any, build: Build) -> None:
        self.shape = DeltaShape(
            module.num_k_heads, module.num_v_heads, module.head_k_dim, module.head_v_dim,
            module.conv_kernel_size,
        )  # fmt: skip
        gate = getattr(module.norm, "activation", "silu")
        if module.activation != "silu" or gate not in {"silu", "sigmoid"}:
            acts = f"{module.activation} and {gate}"
            raise InputError(f"a gated delta net with the activations {acts} has no fused step")
        self._silu = gate == "silu"
        self.weights = DeltaWeights(
            build.tensor(module.conv1d.weight[:, 0], torch.float32),
            build.tensor(module.A_log, torch.float32),
            build.tensor(module.dt_bias, torch.float32),
            build.tensor(module.norm.weight, torch.float32),
            module.norm.variance_epsilon,
        )
        self._dtype = build.dtype
        self._in = Projection(*_inputs(module, self.shape))
        self._out = Projection(Part(module.out_proj, (module.out_proj.out_features,)))
        self.state = DeltaState(self.shape, build.slots, build.device)

    @property
    def nbytes(self) -> int:
        return self.state.nbytes

    def step(self, x: Normed, inputs: StepInputs) -> Tensor:
        qkv, z, b, a = self._in.few(x, self._dtype)
        y = delta_core(self.state, self.weights, (qkv, a, b), inputs.slots, inputs.positions)
        norm = self.weights.norm, self.weights.eps
        rows = gated_norm_rows(self._out.format, y, z, *norm, silu=self._silu)
        return self._out.whole(rows, self._dtype)

    def prefill(self, x: Tensor, chunk: Chunk) -> Tensor:
        projected = self._in.many(x)
        outputs = []
        for first in range(0, x.shape[0], _SEGMENT):
            qkv, z, b, a = (part[first : first + _SEGMENT] for part in projected)
            acted = convolved(self.state, self.weights, qkv, chunk.slot, chunk.start + first)
            y = delta_rule(self.state, self.weights, (acted, a, b), chunk.slot)
            norm = self.weights.norm, self.weights.eps
            outputs.append(gated_norm_rows(VALUES, y, z, *norm, silu=self._silu).q.to(x.dtype))
        return self._out.many(torch.cat(outputs))[0]

    def clear(self, slot: int) -> None:
        self.state.clear(slot)

    def states(self, slot: int) -> list[Tensor]:
        return [self.state.rings[slot], self.state.states[slot]]

    @property
    def paged(self) -> list[Tensor]:
        return []


def _inputs(module: Any, shape: DeltaShape) -> list[Part]:
    """The projections whose outputs are qkv, z, b, a."""
    values, heads = shape.value_heads * shape.value_dim, shape.value_heads
    if hasattr(module, "in_proj_qkv"):
        return [
            Part(module.in_proj_qkv, (shape.channels,)),
            Part(module.in_proj_z, (values,)),
            Part(module.in_proj_b, (heads,)),
            Part(module.in_proj_a, (heads,)),
        ]
    # For every key head: its query, its key, the values of its value heads, their z; their b, their a.
    group, keys = heads // shape.key_heads, shape.key_heads
    sizes = [shape.key_dim, shape.key_dim, group * shape.value_dim, group * shape.value_dim]
    rows = torch.split(torch.arange(shape.channels + values).view(keys, -1), sizes, 1)
    gates = torch.split(torch.arange(2 * heads).view(keys, -1), [group, group], 1)
    qkvz, ba = (torch.cat([part.flatten() for part in parts]) for parts in (rows, gates))
    return [
        Part(module.in_proj_qkvz, (shape.channels, values), qkvz),
        Part(module.in_proj_ba, (heads, heads), ba),
    ]
