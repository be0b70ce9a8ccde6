"""What the runner needs of a decoder and of experts, so that it depends on neither."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from hetero.decode.inputs import Mark

Each = Callable[[int, Tensor], None]
"""Is given the logits of a prompt's tokens, rows [n, V] at a time from the token of an index on."""


class Experts(Protocol):
    """Routed experts of one layer, as far as the runner is concerned; ``hybrid.HybridExperts``."""

    @property
    def nbytes(self) -> int:
        """Bytes of GPU memory that they hold."""

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert."""

    @property
    def tallies(self) -> tuple[Tensor, Tensor]:
        """On the device, int64: experts of decode steps so far, each once a step, that were found in GPU
        memory, read over the bus by the GPU, and computed by the CPU, [3 or more]; and how often each expert
        was chosen, by steps and prompts, [experts]."""

    def forget(self) -> None:
        """A recording was given up: what was submitted will not be collected."""


class Shared(Protocol):
    """What the experts of all layers have in common; ``hybrid_shared.HybridShared``."""

    turns: bool
    """Whether what is recorded from now on is halves of a step that take turns."""

    def join(self) -> None:
        """The current stream waits for the moves of this step."""


class Port(Protocol):
    """What the experts are handed over by; ``port.LanePort``."""

    def use(self, lane: int) -> None:
        """Of the steps that are recorded from now on."""

    def forget(self) -> None:
        """A recording was given up."""


class Decoder(Protocol):
    """One step of a model as kernels that a graph can hold; ``hetero.decode.Decoder``."""

    @property
    def vocabulary(self) -> int: ...

    @property
    def state_bytes(self) -> int:
        """Of keys, values and recurrent states."""

    def inputs(self, rows: int) -> Any:
        """A ``StepInputs`` of fresh static tensors."""

    def step(self, inputs: Any, *, lanes: int = 1) -> Tensor:
        """Logits float32 [R, V]; with 2 ``lanes`` two halves of the rows take turns."""

    @property
    def paged(self) -> Sequence[Tensor]:
        """What lies in pages, each [pages, ...]."""

    @property
    def grain(self) -> int:
        """Tokens at whose multiples nothing more will be written in pages for those before."""

    def states(self, slot: int) -> Sequence[Tensor]:
        """Views of what a slot holds outside of pages."""

    def prefill(
        self,
        tokens: Tensor,
        slot: int,
        start: int,
        pages: Tensor,
        *,
        marks: Sequence[Mark] = (),
        each: Each | None = None,
    ) -> Tensor:
        """Logits float32 [V] after ``tokens`` int64 [T], which follow ``start`` tokens of the slot; ``marks``
        and ``each``: where states are told, and what takes the logits of all tokens."""

    def clear(self, slot: int) -> None:
        """Forget what a slot holds."""

    @property
    def window(self) -> int:
        """Last tokens of a sequence that ``gather`` looks at; 0: there are no n-gram embeddings."""

    @property
    def gathers_on_host(self) -> bool:
        """Whether ``gather`` waits for nothing that the device does."""

    def expect(self, before: Sequence[int], tokens: Sequence[int]) -> None:
        """``tokens`` after ``before`` are about to be read by ``prefill``. Returns at once."""

    def gather(self, tokens: Sequence[Sequence[int]], out: Tensor) -> Tensor | None:
        """Into ``out`` [n, D] on the host: n-gram embeddings for the newest of each row's last tokens."""
