"""Qwen3-MoE, Qwen3-Next and the text model of Qwen3.5-MoE: plain pre-norm layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from hetero.decode.attention import AttentionMixer
from hetero.decode.build import Build
from hetero.decode.delta import DeltaMixer
from hetero.decode.layer import PlainLayer, PlainStream
from hetero.decode.mixer import Mixer
from hetero.decode.moe import block_of
from hetero.decode.norm import Norm
from hetero.formats import Format
from hetero.ops.gpu.fused import Rows


class Qwen3Moe:
    """Attention in every layer."""

    ple = window = 0
    gathers_on_host = True
    _norm_offset: ClassVar[float] = 0.0

    def __init__(self, build: Build) -> None:
        self._build = build
        self._norm = self._normed(build.text.norm)

    def layer(self, module: Any) -> PlainLayer:
        norms = self._normed(module.input_layernorm), self._normed(module.post_attention_layernorm)
        return PlainLayer(self._mixer(module), block_of(module.mlp, self._build), *norms)

    def begin(self, x: Tensor) -> PlainStream:
        return PlainStream(x)

    def rows(self, stream: PlainStream, which: slice) -> PlainStream:
        added = None if stream.added is None else stream.added.rows(which)
        return PlainStream(stream.residual[which], added)

    def end(self, stream: PlainStream, fmt: Format) -> Rows:
        return self._norm.step(fmt, stream.residual, stream.added).rows

    def gather(self, tokens: Sequence[Sequence[int]], out: Tensor | None = None) -> None:
        return None

    def expect(self, before: Sequence[int], tokens: Sequence[int]) -> None:
        return None

    def _normed(self, module: Any) -> Norm:
        return Norm.of(module, self._build, self._norm_offset)

    def _mixer(self, module: Any) -> Mixer:
        window = getattr(module.self_attn, "sliding_window", None) or 0
        return AttentionMixer(module.self_attn, self._build, norm_offset=self._norm_offset, window=window)


class Qwen3Next(Qwen3Moe):
    """Gated delta nets in most layers, gated attention in the others; norms keep their weights around zero.

    Qwen3.5 differs in its delta net's projections, which are not by key heads, and in rotary positions for
    images, which for text are the plain ones.
    """

    _norm_offset = 1.0

    def _mixer(self, module: Any) -> Mixer:
        if hasattr(module, "linear_attn"):
            return DeltaMixer(module.linear_attn, self._build)
        return super()._mixer(module)
