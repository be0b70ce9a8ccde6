"""The text model of qwen4_exp: hyper-connections, gated delta nets, attention with an indexer, and n-gram
embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hetero.decode.build import Build
from hetero.decode.delta import DeltaMixer
from hetero.decode.hyper import Connection, HyperLayer, HyperStream
from hetero.decode.indexer import IndexedAttentionMixer
from hetero.decode.mixer import Mixer
from hetero.decode.moe import block_of
from hetero.decode.ple import Ngrams
from hetero.formats import Format
from hetero.ops.gpu.fused import Rows


class Qwen4Exp:
    """Layers on several residual streams, which a last mix brings together."""

    def __init__(self, build: Build) -> None:
        self._build = build
        self._count: int = build.config.hc_count
        self._mix = Connection(build.text.hyper_connection_mixer, build)
        self._ngrams: list[Ngrams] = []

    @property
    def ple(self) -> int:
        return sum(ngrams.table.width for ngrams in self._ngrams)

    def layer(self, module: Any) -> HyperLayer:
        mixer: Mixer
        if hasattr(module, "linear_attn"):
            mixer = DeltaMixer(module.linear_attn, self._build)
        else:
            mixer = IndexedAttentionMixer(module.self_attn, self._build)
        ngrams = None
        if module.ple is not None:
            ngrams = Ngrams(module.ple, self._build, self.ple)
            self._ngrams.append(ngrams)
        around_mixer = Connection(module.attn_hyper_connection, self._build)
        around_block = Connection(module.mlp_hyper_connection, self._build)
        return HyperLayer(mixer, block_of(module.mlp, self._build), around_mixer, around_block, ngrams)

    def begin(self, x: Tensor) -> HyperStream:
        return HyperStream(x.repeat(1, self._count))

    def rows(self, stream: HyperStream, which: slice) -> HyperStream:
        return stream.rows(which)

    def end(self, stream: HyperStream, fmt: Format) -> Rows:
        return self._mix.step(fmt, stream)[0].rows

    @property
    def window(self) -> int:
        return max((ngrams.table.size for ngrams in self._ngrams), default=0)

    @property
    def gathers_on_host(self) -> bool:
        return all(ngrams.table.on_host for ngrams in self._ngrams)

    def gather(self, tokens: Sequence[Sequence[int]], out: Tensor | None = None) -> Tensor | None:
        if not self._ngrams:
            return None
        if out is None:
            out = torch.empty(len(tokens), self.ple, dtype=self._build.dtype)
        column = 0
        for ngrams in self._ngrams:
            table = ngrams.table
            start = [table.eos] * table.size
            windows = np.array([[*start, *row][-table.size :] for row in tokens], dtype=np.int64)
            table.gather(windows, out[:, column : column + table.width])
            column += table.width
        return out

    def expect(self, before: Sequence[int], tokens: Sequence[int]) -> None:
        for ngrams in self._ngrams:
            ngrams.table.expect(before, tokens)
