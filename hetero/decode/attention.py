"""Grouped-query attention over paged keys and values, with its projections."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hetero.decode.build import Build
from hetero.decode.inputs import PAGE, Chunk, StepInputs
from hetero.decode.matrix import VALUES, Part, Projection
from hetero.decode.mixer import Projected
from hetero.decode.prefill_attention import attend, rotated
from hetero.ops.gpu.attention import AttentionShape, AttentionWeights, PagedKeys, attention_rows
from hetero.ops.gpu.fused import Normed, sigmoid_gated_rows


class AttentionMixer(Projected):
    """Of a module with ``q_proj``, ``k_proj``, ``v_proj``, ``o_proj`` and, maybe, ``q_norm`` and ``k_norm``.

    ``norm_offset``: is added to these norms' weights. A query projection twice as wide as the heads gives
    [query, gate] for each of them.
    """

    def __init__(self, module: Any, build: Build, *, norm_offset: float = 0.0, window: int = 0) -> None:
        config, dim = build.config, module.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        frequencies, rope_scale = build.rotary()
        normed = getattr(module, "q_norm", None) is not None
        width = module.q_proj.out_features
        self.shape = AttentionShape(
            heads, kv_heads, dim, 2 * len(frequencies),
            scale=module.scaling, window=window, gated=width == 2 * heads * dim,
            norm_offset=norm_offset if normed else None,
        )  # fmt: skip
        sinks = getattr(module, "sinks", None)
        eps = getattr(module.q_norm, "variance_epsilon", None) if normed else 0.0
        self.weights = AttentionWeights(
            frequencies,
            rope_scale,
            build.tensor(module.q_norm.weight) if normed else None,
            build.tensor(module.k_norm.weight) if normed else None,
            module.q_norm.eps if eps is None else eps,
            None if sinks is None else build.tensor(sinks),
        )
        self._dtype = build.dtype
        self._in = Projection(*self._inputs(module))
        self._out = Projection(Part(module.o_proj, (module.o_proj.out_features,)))
        self.cache = PagedKeys(self.shape, build.pages, PAGE, build.kv_dtype, str(build.device))

    def _inputs(self, module: Any) -> list[Part]:
        """The projections whose outputs are queries, keys, values."""
        layers = [getattr(module, name) for name in ("q_proj", "k_proj", "v_proj")]
        return [Part(layer, (layer.out_features,)) for layer in layers]

    @property
    def nbytes(self) -> int:
        return self.cache.nbytes

    def step(self, x: Normed, inputs: StepInputs) -> Tensor:
        q, k, v = self._in.few(x, self._dtype)
        where = inputs.pages, inputs.slots, inputs.positions
        rows = attention_rows(self._out.format, self.shape, self.weights, self.cache, (q, k, v), where)
        return self._out.whole(rows, self._dtype)

    def prefill(self, x: Tensor, chunk: Chunk) -> Tensor:
        shape, count = self.shape, x.shape[0]
        q, k, v = (part.reshape(count, -1, shape.dim) for part in self._in.many(x))
        gate: Tensor | None = None
        if shape.gated:
            q, gate = q.view(count, shape.q_heads, 2 * shape.dim).chunk(2, 2)
        dtype = self.cache.keys.dtype
        q = rotated(shape, self.weights, q, self.weights.q_norm, chunk.start, dtype=dtype)
        k = rotated(shape, self.weights, k, self.weights.k_norm, chunk.start, dtype=dtype)
        y = attend(shape, self.weights, self.cache, (q, k, v), chunk)
        y = y.reshape(count, -1) if gate is None else sigmoid_gated_rows(VALUES, y.contiguous(), gate).q
        return self._out.many(y.to(x.dtype))[0]

    def clear(self, slot: int) -> None:
        """Nothing: positions say what of the pages counts."""

    def states(self, slot: int) -> list[Tensor]:
        return []

    @property
    def paged(self) -> list[Tensor]:
        return [self.cache.keys, self.cache.values]
