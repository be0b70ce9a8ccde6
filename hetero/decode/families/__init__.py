"""Families of models that have fused steps, by the class of their decoder layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from hetero.core import InputError
from hetero.decode.build import Build
from hetero.decode.families import qwen3, qwen4_exp
from hetero.decode.layer import Layer
from hetero.formats import Format
from hetero.ops.gpu.fused import Rows


class Family(Protocol):
    """What is a family's own: its layers, and the stream that passes through them."""

    @property
    def ple(self) -> int:
        """Width of the n-gram embeddings that steps take; 0: none."""
        ...

    def layer(self, module: nn.Module) -> Layer:
        """Of one decoder layer of the tree, whose weights it takes over. Called for each in order."""
        ...

    def begin(self, x: Tensor) -> Any:
        """The stream of embedded tokens [R, H]."""
        ...

    def rows(self, stream: Any, which: slice) -> Any:
        """After a prefill: the stream of some tokens alone."""
        ...

    def end(self, stream: Any, fmt: Format) -> Rows:
        """What the head reads after the last layer, as rows for ``fmt``, R <= 16."""
        ...

    @property
    def window(self) -> int:
        """Last tokens of a sequence that ``gather`` looks at; 0: there are no n-gram embeddings."""
        ...

    @property
    def gathers_on_host(self) -> bool:
        """Whether ``gather`` waits for nothing that the device does."""
        ...

    def gather(self, tokens: Sequence[Sequence[int]], out: Tensor | None = None) -> Tensor | None:
        """N-gram embeddings [n, ple] on the host for the newest of each row's last tokens, into ``out`` where
        it is given; None: none."""
        ...

    def expect(self, before: Sequence[int], tokens: Sequence[int]) -> None:
        """A prefill of ``tokens`` after ``before`` comes: what it needs from disk may be read."""
        ...


# Class of a decoder layer -> the family.
FAMILIES: dict[str, Callable[[Build], Family]] = {
    "Qwen3MoeDecoderLayer": qwen3.Qwen3Moe,
    "Qwen3NextDecoderLayer": qwen3.Qwen3Next,
    "Qwen3_5MoeDecoderLayer": qwen3.Qwen3Next,
    "Qwen4ExpTextDecoderLayer": qwen4_exp.Qwen4Exp,
}


def family_of(build: Build) -> Family:
    """Raises InputError for a model whose layers have no fused steps."""
    name = type(build.text.layers[0]).__name__
    if name not in FAMILIES:
        raise InputError(f"layers of class {name} have no fused steps; known: {', '.join(FAMILIES)}")
    return FAMILIES[name](build)
