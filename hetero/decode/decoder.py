"""A whole model as fused steps over the weights of its tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import lcm
from typing import Any

import torch
from torch import Tensor, nn

from hetero.decode.build import Build, Routing
from hetero.decode.embedding import Embedding
from hetero.decode.experts import LayerExperts
from hetero.decode.families import family_of
from hetero.decode.inputs import PAGE, Chunk, Mark, StepInputs
from hetero.decode.layer import Layer
from hetero.decode.matrix import Part, Projection
from hetero.decode.turns import halves, joined, parted, prefill, step
from hetero.ops.gpu.ahead import fetch_ahead

_SCORED = 16  # rows of logits at once: as many as a step's kernels take


class Decoder:
    """Steps and prefills of a loaded tree whose family is known (``families``).

    ``model``: a causal language model of transformers, its dense weights on ``device`` (the embedding may be
    in memory of the host), in the format that they have. The decoder takes them over: afterwards the tree may
    not be able to run by itself. ``experts``: of each MoE layer, in order. ``slots``: sequences at once;
    ``context``: tokens of one, at most; ``pages``: of PAGE tokens each, for all of them together (None: as
    many as they may ever need).

    Attributes: ``moe_numbers``: which of the layers the MoE layers are; ``turns``: whether two halves of a
    chunk of a prompt take turns (``turns``); None: where the experts say so.

    Raises InputError for a model without fused steps.
    """

    def __init__(
        self,
        model: Any,
        experts: Sequence[LayerExperts],
        *,
        slots: int,
        context: int,
        device: str | torch.device = "cuda:0",
        kv_dtype: torch.dtype = torch.bfloat16,
        pages: int | None = None,
    ) -> None:
        text = model.get_decoder()
        most = slots * -(-context // PAGE)
        self._build = build = Build(
            text,
            list(experts),
            slots,
            context,
            torch.device(device),
            kv_dtype,
            most if pages is None else pages,
        )
        self._embedding = Embedding(text.embed_tokens.weight, build.device)
        text.embed_tokens.weight.data = self._embedding.table  # not twice in memory
        self._dtype = build.dtype
        self._family = family_of(build)
        self._layers: list[Layer] = []
        self.moe_numbers: list[int] = []
        for number, module in enumerate(text.layers):
            before = build.moe_layers
            self._layers.append(self._family.layer(module))
            self.moe_numbers += [number] * (build.moe_layers - before)
        if build.moe_layers != len(experts):
            raise ValueError(f"{len(experts)} experts for {build.moe_layers} MoE layers")
        self.vocabulary: int = model.lm_head.out_features
        self._head = Projection(Part(_head(model.lm_head, build.device), (self.vocabulary,)))
        self.turns: bool | None = None

    @property
    def layers(self) -> int:
        return len(self._layers)

    @property
    def state_bytes(self) -> int:
        """Bytes of keys, values and recurrent states of all slots."""
        return sum(layer.nbytes for layer in self._layers)

    @property
    def experts(self) -> list[LayerExperts]:
        """Of each MoE layer; others may take their places before a capture."""
        return self._build.experts

    @property
    def routing(self) -> Routing | None:
        """What may change the choice of experts, in steps and in prefills (T tells how many rows). In a step
        it has to be capturable."""
        return self._build.routing

    @routing.setter
    def routing(self, hook: Routing | None) -> None:
        self._build.routing = hook

    def inputs(self, rows: int) -> StepInputs:
        """Fresh static tensors, every row idle; each slot's pages in order, as far as there are so many."""
        build = self._build
        numbers = torch.zeros(3, rows, dtype=torch.int64, device=build.device)
        pages = torch.arange(build.slots * build.most_pages, dtype=torch.int32, device=build.device)
        pages.clamp_(max=max(build.pages - 1, 0))
        ple = torch.zeros(rows, self._family.ple, dtype=self._dtype, device=build.device)
        tokens, slots, positions = numbers
        slots.fill_(-1)
        table = pages.view(build.slots, build.most_pages)
        return StepInputs(tokens, slots, positions, table, ple if self._family.ple else None)

    def step(self, inputs: StepInputs, *, lanes: int = 1) -> Tensor:
        """Logits float32 [R, V] of one token of every row; garbage in idle rows. Capturable. ``lanes``: 2:
        two halves of the rows take turns (``turns``), whose experts are a micro-batch each."""
        self._look_ahead()
        parts = [inputs] if lanes == 1 else halves(inputs)
        streams = [self._family.begin(self._embedding(part.tokens)) for part in parts]
        return self._logits(joined(step(self._layers, streams, parts)))

    def _look_ahead(self) -> None:
        """While a step waits for a layer's experts, the next layer's first weights come nearer."""
        for experts, number in zip(self.experts, self.moe_numbers, strict=True):
            if hasattr(experts, "before_wait"):
                following = self._layers[number + 1 : number + 2]
                weights = following[0].first_weights if following else []
                experts.before_wait = partial(fetch_ahead, weights)

    def prefill(
        self,
        tokens: Tensor,
        slot: int,
        start: int,
        pages: Tensor,
        *,
        marks: Sequence[Mark] = (),
        each: Callable[[int, Tensor], None] | None = None,
    ) -> Tensor:
        """Logits float32 [V] after ``tokens`` int64 [T] on the device, which follow ``start`` tokens of the
        slot; ``pages`` as in ``StepInputs``. Eager, of any length. ``marks``: where layers tell their states,
        in order. ``each``: is given the logits of all tokens, a few rows [n, V] at a time from the token of
        an index on, which it must not keep."""
        whole = Chunk(tokens, slot, start, pages, tuple(marks))
        chunks = parted(whole) if self._take_turns(len(tokens)) else [whole]
        streams = [self._family.begin(self._embedding(chunk.tokens)) for chunk in chunks]
        ends = prefill(self._layers, streams, chunks)
        if each is None:
            return self._logits(self._family.rows(ends[-1], slice(-1, None)))[0]
        logits: Tensor | None = None
        for chunk, stream in zip(chunks, ends, strict=True):
            for row in range(0, len(chunk.tokens), _SCORED):
                logits = self._logits(self._family.rows(stream, slice(row, row + _SCORED)))
                each(chunk.start - start + row, logits)
        assert logits is not None
        return logits[-1]

    def _take_turns(self, rows: int) -> bool:
        if self.turns is not None:
            return self.turns
        experts = self._build.experts
        return bool(experts) and experts[0].takes_turns(rows)

    def clear(self, slot: int) -> None:
        """Begin a new sequence in a slot."""
        for layer in self._layers:
            layer.clear(slot)

    def states(self, slot: int) -> list[Tensor]:
        """Views of all that a slot holds outside of pages."""
        return [state for layer in self._layers for state in layer.states(slot)]

    @property
    def paged(self) -> list[Tensor]:
        """What lies in pages, each [pages, ...]."""
        return [part for layer in self._layers for part in layer.paged]

    @property
    def grain(self) -> int:
        """Tokens at whose multiples nothing more will be written for those before."""
        return lcm(*(layer.grain for layer in self._layers))

    @property
    def window(self) -> int:
        """Last tokens of a sequence that ``gather`` looks at; 0 for a family without n-gram embeddings."""
        return self._family.window

    @property
    def gathers_on_host(self) -> bool:
        """Whether ``gather`` waits for nothing that the device does."""
        return self._family.gathers_on_host

    def gather(self, tokens: Sequence[Sequence[int]], out: Tensor | None = None) -> Tensor | None:
        """N-gram embeddings [n, ple_embed_dim] on the host for the newest of each row's last tokens, into
        ``out`` of this shape where it is given; None for a family without. Raises MachineError where they lie
        on disk and cannot be read."""
        return self._family.gather(tokens, out)

    def expect(self, before: Sequence[int], tokens: Sequence[int]) -> None:
        """``tokens`` after ``before``, the last ones of their sequence, are about to be read by ``prefill``:
        n-gram embeddings that lie on disk are fetched while other things run. Returns at once."""
        self._family.expect(before, tokens)

    def _logits(self, stream: Any) -> Tensor:
        rows = self._family.end(stream, self._head.format)
        return self._head.whole(rows, torch.float32)


def _head(module: nn.Module, device: torch.device) -> nn.Module | Tensor:
    """The head, or where it shares an embedding's weight in the host's memory, a copy of that."""
    weight = getattr(module, "weight", None)
    away = isinstance(weight, Tensor) and weight.device.type != device.type
    return weight.to(device) if away else module  # type: ignore[union-attr]
