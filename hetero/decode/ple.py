"""N-gram embeddings: rows of a large table of the host, by hashes of the last tokens, that are added to
residual streams."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor, nn

from hetero.decode.build import Build
from hetero.decode.inputs import Chunk, StepInputs
from hetero.decode.matrix import Part, Projection
from hetero.decode.stream import Sum
from hetero.ops.embedding import HostEmbedding
from hetero.ops.gpu import ple_kernels
from hetero.ops.gpu.fused import Normed, plain_rows
from hetero.ops.gpu.mix import added_parts
from hetero.ops.gpu.overlap import in_turn

# Rows of a prefill at once: some ten float32 tensors as wide as all streams exist at a time.
_ROWS = 512


class NgramTable:
    """Of a ``Qwen4ExpTextNGramEmbedding``, whose table stays where it is: a module's weight, or with op
    ``embedding`` in main memory or on disk."""

    def __init__(self, module: Any) -> None:
        self.size: int = module.ngram_size
        self.eos: int = module.eos_token_id
        buffers = module.layer_multipliers, module.ngram_heads_vocab_sizes, module.ngram_heads_offsets
        self._multipliers, self._sizes, self._offsets = (buffer.cpu().numpy() for buffer in buffers)
        self._heads: int = module.heads_per_ngram
        self._module = module.ngram_embedding

    @property
    def width(self) -> int:
        """Of a token's embedding."""
        return len(self._sizes) * int(self._module.embedding_dim)

    def windows(self, before: Sequence[int], tokens: Sequence[int]) -> NDArray[np.int64]:
        """The last ``size`` tokens up to each of ``tokens``, int64 [n, size], the newest last; ``before``:
        what precedes them in their sequence, of which the last ``size`` - 1 count."""
        past = [self.eos] * (self.size - 1) + list(before)
        joined = np.array([*past[len(past) - self.size + 1 :], *tokens], dtype=np.int64)
        return np.lib.stride_tricks.sliding_window_view(joined, self.size)

    @property
    def on_host(self) -> bool:
        """Whether its rows lie in main memory or on disk."""
        return isinstance(self._module, HostEmbedding) or self._module.weight.device.type == "cpu"

    def gather(self, windows: NDArray[np.int64], out: Tensor | None = None) -> Tensor:
        """Embeddings [n, width] of the newest tokens of windows, on the table's device; into ``out``, of any
        type of floats and device, where it is given. Raises MachineError where the table is on disk and
        cannot be read."""
        ids = torch.from_numpy(self._ids(windows)).flatten()
        if isinstance(self._module, HostEmbedding):
            found = self._module.gather(ids)
        else:
            table: Tensor = self._module.weight.detach()
            found = table.index_select(0, ids.to(table.device))
        found = found.view(len(windows), -1)
        return found if out is None else out.copy_(found)

    def expect(self, before: Sequence[int], tokens: Sequence[int]) -> Future[None] | None:
        """Begin to read from disk, beside everything else, what ``tokens`` after ``before`` will need; the
        future is of the reading, None where there is none to do."""
        if not isinstance(self._module, HostEmbedding):
            return None
        return self._module.expect(lambda: self._ids(self.windows(before, tokens)).ravel())

    def _ids(self, windows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Numbers of the rows [n, heads] of the newest tokens of windows."""
        newest = windows[:, -1]
        mixed = newest * self._multipliers[0]
        ended = np.zeros(len(windows), dtype=bool)
        ids = np.empty((len(windows), len(self._sizes)), dtype=np.int64)
        for back in range(1, self.size):
            # Nothing is seen beyond an end of sequence, which stands for all before it.
            token = windows[:, -1 - back]
            ended |= token == self.eos
            mixed = mixed ^ (np.where(ended, self.eos, token) * self._multipliers[back])
            heads = slice((back - 1) * self._heads, back * self._heads)
            ids[:, heads] = mixed[:, None] % self._sizes[heads] + self._offsets[heads]
        return ids


class Ngrams:
    """Of a ``Qwen4ExpTextPLELayer``: what a layer adds to its streams before anything else.

    ``column``: where its embeddings begin among those of all such layers in ``StepInputs.ple``.
    """

    def __init__(self, module: Any, build: Build, column: int) -> None:
        self.table = NgramTable(module.ple_embedding)
        self._columns = slice(column, column + self.table.width)
        count, hidden = module.hc_count, module.hidden_size
        self._count, self._hidden, self._eps = count, hidden, module.norm_key.eps
        self._in = Projection(Part(module.key_proj, (count * hidden,)), Part(module.value_proj, (hidden,)))
        norms = module.norm_key, module.norm_query, module.norm_conv
        self._norms = [build.tensor(norm.weight) for norm in norms]
        self._conv = build.tensor(module.conv1d.weight[:, 0].T)
        self._taps, self._dilation = len(self._conv), module.conv1d.dilation[0]
        size = (self._taps - 1) * self._dilation + 1
        # Past inputs of the convolution, and past tokens, each at its position modulo the size.
        self.ring = torch.zeros(build.slots, size, count * hidden, dtype=build.dtype, device=build.device)
        self.recent = torch.zeros(
            build.slots, max(self.table.size - 1, 1), dtype=torch.int64, device=build.device
        )
        self._dtype = build.dtype

    @property
    def nbytes(self) -> int:
        return self.ring.nbytes + self.recent.nbytes

    def states(self, slot: int) -> list[Tensor]:
        """As of a mixer."""
        return [self.ring[slot], self.recent[slot]]

    def step(self, streams: Tensor, added: Sum | None, inject: Tensor | None, inputs: StepInputs) -> None:
        """Add the last block's output and then the embeddings to streams [R, count * H] in place."""
        assert inputs.ple is not None
        x = inputs.ple[:, self._columns]
        with in_turn():  # behind the copy that brought x
            rows = Normed(plain_rows(self._in.format, x), x, x)
            if len(self._in.matrices) == 1:
                projected = self._in.whole(rows.rows, self._dtype)
            else:
                projected = torch.cat(self._in.few(rows, self._dtype), 1)
        main, shared, gate = (None, None, None) if added is None else added
        ple_kernels.add_ngrams[(self._count, len(streams))](
            projected, projected.stride(0), streams, *added_parts(main, shared, gate, streams),
            streams if inject is None else inject, *self._norms, self._conv, self.ring, inputs.tokens,
            self.recent, inputs.slots, inputs.positions, self._eps, self._hidden**-0.5,
            COUNT=self._count, HIDDEN=self._hidden, WIDTH=triton.next_power_of_2(self._hidden),
            TAPS=self._taps, DILATION=self._dilation, RECENT=self.recent.shape[1],
            HAS_OUT=added is not None, HAS_SHARED=shared is not None, HAS_GATE=gate is not None,
            NORM_OFFSET=1.0, num_warps=8,
        )  # fmt: skip

    def prefill(self, streams: Tensor, added: Sum | None, inject: Tensor | None, chunk: Chunk) -> None:
        """As ``step``, for consecutive tokens of one sequence."""
        count, back, size = len(streams), self.recent.shape[1], self.ring.shape[1]
        ring, start, end = self.ring[chunk.slot], chunk.start, chunk.start + count
        known = self.recent[chunk.slot].tolist()
        before = [known[at % back] for at in range(max(start - back, 0), start)]
        tokens = chunk.tokens.tolist()
        embedded = self.table.gather(self.table.windows(before, tokens)).to(streams.device, self._dtype)
        past = torch.zeros(size - 1, streams.shape[1], dtype=ring.dtype, device=ring.device)
        held = [at for at in range(start - size + 1, start) if at >= 0]
        if held:
            past[size - 1 - len(held) :] = ring[[at % size for at in held]]
        for first in range(0, count, _ROWS):
            rows = slice(first, first + _ROWS)
            if added is not None and inject is not None:
                block = added.main[rows].float().unsqueeze(1) * inject[rows].unsqueeze(2)
                streams[rows] = (streams[rows].float() + block.flatten(1)).to(streams.dtype)
            past = self._rows(streams[rows], embedded[rows], past)
        newest = range(max(end - size + 1, 0), end)
        ring[[at % size for at in newest]] = past[len(past) - len(newest) :]
        for at in range(max(start, end - back), end):
            known[at % back] = tokens[at - start]
        self.recent[chunk.slot] = torch.tensor(known, device=self.recent.device)

    def _rows(self, streams: Tensor, embedded: Tensor, past: Tensor) -> Tensor:
        """Add embeddings of some rows to streams in place; the convolution's last inputs, for the next."""
        count, hidden = len(streams), self._hidden
        shape = (count, self._count, hidden)
        key, value = self._in.many(embedded)
        key, query = self._normed(key.view(shape), 0), self._normed(streams.view(shape), 1)
        gate = (key * query).sum(2, keepdim=True) * hidden**-0.5
        gate = gate.abs().clamp_min(1e-6).sqrt() * gate.sign()
        gated = torch.sigmoid(gate) * value.float().unsqueeze(1)
        inputs = torch.cat([past, self._normed(gated, 2).flatten(1).to(past.dtype)])
        total = torch.zeros(count, inputs.shape[1], device=inputs.device)
        for tap in range(self._taps):
            first = tap * self._dilation
            total.addcmul_(inputs[first : first + count].float(), self._conv[tap].float())
        streams.copy_(gated.flatten(1).add_(nn.functional.silu(total)).add_(streams.float()))
        return inputs[count:]

    def _normed(self, x: Tensor, which: int) -> Tensor:
        """[n, count, H] float32, each stream by its own root mean square."""
        weight = 1.0 + self._norms[which].float().view(self._count, self._hidden)
        return nn.functional.rms_norm(x.float(), (self._hidden,), eps=self._eps) * weight
