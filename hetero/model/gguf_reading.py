"""Questions to a GGUF file whose configuration is being put together."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from gguf.constants import TENSOR_NAMES

from hetero.core import InputError
from hetero.model.gguf_arch import Arch
from hetero.model.gguf_file import GgufFile
from hetero.model.gguf_scan import GgufTensor

# Reads a tensor of the file as floats.
ReadFloats = Callable[[GgufTensor], np.ndarray[Any, Any]]


class Reading:
    """One file's configuration while it is put together: ``values``, and what the file says.

    Methods raise InputError for metadata and tensors that no configuration can be made of.
    """

    def __init__(self, found: GgufFile, arch: Arch, read_floats: ReadFloats) -> None:
        self.found = found
        self.arch = arch
        self.read_floats = read_floats
        self.values: dict[str, Any] = {"model_type": arch.model_type, **arch.implied}

    def get(self, key: str) -> Any:
        """A value of the metadata, ``key`` being one of ``gguf.Keys``; None where it is absent."""
        return self.found.metadata.get(key.format(arch=self.found.arch))

    def one(self, key: str) -> Any:
        """A number or flag; of one for each block, the one that is not zero. None where it is absent."""
        value = self.get(key)
        if isinstance(value, np.ndarray):
            different = {item for item in value.tolist() if item}
            if len(different) != 1:
                self.wrong(
                    key, f"differs by block ({sorted(different)}), which {self.arch.model_type} cannot"
                )
            value = different.pop()
        if value is None or isinstance(value, bool):
            return value
        if not isinstance(value, (int, float)):
            self.wrong(key, f"is {value!r}, must be a number")
        return shortest(value) if isinstance(value, float) else value

    def by_layer(self, key: str) -> list[int]:
        """Whole numbers that must be there: one for each layer, or one of all."""
        value = self.get(key)
        if not isinstance(value, np.ndarray):
            return [self.number(key)] * self.layers
        numbers: list[int] = value.tolist()[: self.layers]
        if len(numbers) < self.layers or any(type(one) is not int or one < 1 for one in numbers):
            self.wrong(key, f"must be {self.layers} numbers above 0, one a block")
        return numbers

    def number(self, key: str) -> int:
        """A whole number that must be there."""
        value = self.one(key)
        if value is None:
            raise InputError(f"{self.found.path}: metadata {key.format(arch=self.found.arch)} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self.wrong(key, f"is {value!r}, must be a number above 0")
        return int(value)

    def wrong(self, key: str, what: str) -> Any:
        raise InputError(f"{self.found.path}: metadata {key.format(arch=self.found.arch)} {what}")

    def tensor(self, kind: Any, block: int | None = None, suffix: str = "weight") -> GgufTensor | None:
        base = TENSOR_NAMES[kind].format(bid=block)
        return self.found.tensors.get(f"{base}.{suffix}", self.found.tensors.get(base))

    def has(self, kind: Any, block: int | None = None) -> bool:
        return self.tensor(kind, block) is not None

    def any(self, *kinds: Any, suffix: str) -> bool:
        """Whether any block has such a tensor."""
        return any(
            f"{TENSOR_NAMES[kind].format(bid=n)}.{suffix}" in self.found.tensors
            for kind in kinds
            for n in range(self.layers)
        )

    @property
    def layers(self) -> int:
        return int(self.values["num_hidden_layers"])

    def choose(self, kinds: dict[Any, str]) -> list[str]:
        """For each layer, the name of the first kind of tensor that it has."""
        out = []
        for n in range(self.layers):
            name = next((name for kind, name in kinds.items() if self.has(kind, n)), None)
            if name is None:
                wanted = ", ".join(TENSOR_NAMES[kind].format(bid=n) for kind in kinds)
                raise InputError(f"{self.found.path}: block {n} has none of the tensors {wanted}")
            out.append(name)
        return out

    def head_dim(self) -> int:
        """Columns of a head, as far as ``values`` hold them or what they follow from."""
        head = self.values.get("head_dim")
        if head is None:
            head = self.values["hidden_size"] // self.values["num_attention_heads"]
        return int(head) or 1


def shortest(value: float) -> float:
    """The number that was meant: files keep float32, and 1e-5 would come back as 9.99999974e-06."""
    return float(str(np.float32(value))) if math.isfinite(value) else value
