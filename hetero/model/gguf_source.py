"""A GGUF file as a ``Source``: its tensors by the names and in the order that transformers has them.

A parameter is made of the file's tensors by a rule of ``gguf_arch``. Nothing is read before it is asked for,
and of packed experts only the one that is asked for.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gguf.constants import MODEL_TENSOR as T
from gguf.constants import TENSOR_NAMES

from hetero.core import InputError
from hetero.model import gguf_make
from hetero.model.ahead import Files
from hetero.model.gguf_arch import EXPERT_MODULES, Arch, Rule, all_rules, find_arch
from hetero.model.gguf_config import read_config
from hetero.model.gguf_file import GgufFile, opened
from hetero.model.gguf_make import Make
from hetero.model.gguf_scan import GgufTensor
from hetero.model.source import Closing, Piece, StoredRows, TensorInfo
from hetero.quant.ggml import ggml_codes, ggml_floats, ggml_format
from hetero.quant.pack import Codes

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
# What ``read_config`` makes of them, or what the tree computes itself.
_NOT_PARAMETERS = {
    *(TENSOR_NAMES[kind] for kind in (T.ROPE_FREQS, T.ROPE_FACTORS_LONG, T.ROPE_FACTORS_SHORT)),
    TENSOR_NAMES[T.ATTN_ROT_EMBD],
}
_BLOCK_NAME = re.compile(r"blk\.(\d{1,9})\.(.+)")
_DTYPES = ("F32", "F16", "BF16")  # that ``read`` gives as they are
# Ways that leave rows whole, so that codes go along with them.
_ROWS_ALONE = (gguf_make.same, gguf_make.query_rows, gguf_make.key_rows)


@dataclass(frozen=True, slots=True)
class _Recipe:
    """A parameter of the tree, and what makes it."""

    of: tuple[GgufTensor, ...]
    make: Make


def config_of(path: Path) -> dict[str, Any]:
    """The configuration of a file, as a config.json would hold it."""
    found = opened(path)
    with _Files() as files:
        return read_config(found, lambda tensor: files.floats(tensor).float().numpy())


class _Files(Closing):
    """Open files of a model, and the bytes of its tensors."""

    def __init__(self) -> None:
        self._files = Files()

    def floats(self, tensor: GgufTensor, index: int | None = None) -> torch.Tensor:
        """A tensor, or element ``index`` along dimension 0, that dimension kept; float32 where quantised."""
        shape = tensor.shape if index is None else (1, *tensor.shape[1:])
        raw = self.raw(tensor, index)
        if tensor.type_name in _PLAIN:
            value = raw.view(_PLAIN[tensor.type_name])
            return (value.float() if value.dtype == torch.float64 else value).reshape(shape)
        return ggml_floats(tensor.type_name, raw, math.prod(shape[:-1]), shape[-1]).reshape(shape)

    def raw(self, tensor: GgufTensor, index: int | None = None) -> torch.Tensor:
        """Bytes of a tensor, or of an element along dimension 0: uint8 [n]."""
        size, start = tensor.nbytes, tensor.start
        if index is not None:
            size //= tensor.shape[0]
            start += index * size
        return self._files.read(tensor.file, start, size)

    def close(self) -> None:
        self._files.close()


class GgufSource(Closing):
    """The tensors of a GGUF file, by the names of transformers' tree.

    Raises InputError for whatever is wrong with the file, for an architecture that is not supported, and for
    a tensor that the architecture does not have.
    """

    def __init__(self, path: str | Path) -> None:
        self.folder = Path(path)
        self._found = opened(self.folder)
        self._files = _Files()
        # As a config.json would hold it.
        self.config = config_of(self.folder)
        self._arch = find_arch(self._found.metadata, self._found.arch, str(self.folder))
        self._recipes = dict(_recipes(self._found, self._arch, self.config))
        self.tensors = {name: self._info(recipe) for name, recipe in self._recipes.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, as stored."""
        return sum(info.nbytes for info in self.tensors.values())

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor on the CPU; a quantised one as the float32 values that it stands for."""
        recipe = self._recipe(name)
        return self._make(recipe, [self._files.floats(tensor) for tensor in recipe.of])

    def read_slice(self, name: str, index: int) -> torch.Tensor:
        """Element ``index`` along dimension 0, that dimension kept: [1, ...]. Of experts, reads one."""
        recipe, shape = self._recipe(name), self.tensors[name].shape
        if not shape or not 0 <= index < shape[0]:
            raise InputError(f"tensor {name} of shape {list(shape)} has no slice {index}")
        if recipe.make is not gguf_make.same:
            return self.read(name)[index : index + 1]
        return self._files.floats(recipe.of[0], index)

    def codes(self, name: str, index: int | None = None) -> Codes:
        """The quantised values of a matrix [n, k] in the tensor's ``format``, as ``pack_codes`` takes them.

        ``index``: the expert of a tensor [E, n, k]. InputError where the tensor has no format.
        """
        recipe, info = self._recipe(name), self.tensors[name]
        if info.format is None:
            raise InputError(f"{info.file}: tensor {name}: {info.inexact or 'it is not quantised'}")
        tensor, n, k = self._matrix(name, index)
        codes = ggml_codes(tensor.type_name, self._files.raw(tensor, index), n, k)
        if recipe.make is gguf_make.same:
            return codes
        extra = codes.extra
        if extra is not None and extra.numel() > 1:  # else it is of the whole matrix
            extra = self._make(recipe, [extra])
        return Codes(self._make(recipe, [codes.codes]), self._make(recipe, [codes.scales]), extra)

    def blocks(self, name: str, index: int | None = None) -> torch.Tensor:
        """The bytes of the same matrix as they are in the file, uint8 [n, bytes of a row].

        InputError where the tensor has no ``ggml`` type.
        """
        if not self.tensors[name].ggml:
            raise InputError(f"{self.folder}: tensor {name} is not in blocks of a GGUF type, or reordered")
        tensor, n, _ = self._matrix(name, index)
        return self._files.raw(tensor, index).view(n, -1)

    def rows(self, name: str) -> StoredRows | None:
        """Of a matrix that is one tensor of the file as it is; F64 is none that is kept."""
        recipe = self._recipe(name)
        first = recipe.of[0]
        if recipe.make is not gguf_make.same or len(first.shape) != 2 or first.type_name == "F64":
            return None
        count = first.shape[0]
        return StoredRows(first.file, first.start, count, first.nbytes // count, first.type_name)

    def _matrix(self, name: str, index: int | None) -> tuple[GgufTensor, int, int]:
        """The one tensor of the file that a parameter is made of, and the shape of its matrix ``index``."""
        (tensor,) = self._recipe(name).of
        *experts, n, k = tensor.shape
        if bool(experts) != (index is not None) or (index is not None and not 0 <= index < experts[0]):
            raise InputError(f"tensor {name} of shape {list(self.tensors[name].shape)} has no matrix {index}")
        return tensor, n, k

    def pieces(self, experts: str, expert: int, part: str) -> Piece | None:
        """Where ``part`` of an expert stands; None where the file does not have it."""
        leaf = part.removesuffix("_bias")
        suffix = "bias" if leaf != part else "weight"
        name = f"{experts}.{leaf}_proj.{suffix}"
        if name in self.tensors:
            return Piece(name, expert)
        both = f"{experts}.{EXPERT_MODULES[T.FFN_GATE_UP_EXP]}.{suffix}"
        if leaf == "down" or both not in self.tensors:
            return None
        half = self.tensors[both].shape[1] // 2
        return Piece(both, expert, slice(0, half) if leaf == "gate" else slice(half, 2 * half))

    def close(self) -> None:
        """Close the files. A later read opens them again."""
        self._files.close()

    def _recipe(self, name: str) -> _Recipe:
        if name not in self._recipes:
            raise InputError(f"{self.folder} has no tensor {name}")
        return self._recipes[name]

    def _make(self, recipe: _Recipe, tensors: list[torch.Tensor]) -> torch.Tensor:
        if len({tensor.dtype for tensor in tensors}) > 1:
            tensors = [tensor.float() for tensor in tensors]
        return recipe.make(tensors, self.config).contiguous()

    def _info(self, recipe: _Recipe) -> TensorInfo:
        first = recipe.of[0]
        kinds = {tensor.type_name for tensor in recipe.of}
        dtype = kinds.pop() if len(kinds) == 1 and kinds <= set(_DTYPES) else "F32"
        shape = self._shape(recipe)
        quantised = [tensor for tensor in recipe.of if tensor.type_name not in _PLAIN]
        kept = ggml_format(first.type_name) if quantised and recipe.make in _ROWS_ALONE else None
        return TensorInfo(
            shape=shape,
            dtype=dtype,
            file=first.file,
            start=first.start,
            nbytes=sum(tensor.nbytes for tensor in recipe.of),
            format=kept,
            ggml=first.type_name if kept is not None and recipe.make is gguf_make.same else "",
            inexact="it is not stored in the order that the model needs"
            if quantised and kept is None
            else "",
        )

    def _shape(self, recipe: _Recipe) -> tuple[int, ...]:
        sources = [torch.empty(tensor.shape, device="meta") for tensor in recipe.of]
        try:
            return tuple(recipe.make(sources, self.config).shape)
        except (RuntimeError, ValueError, IndexError) as error:
            shapes = ", ".join(f"{tensor.name} {list(tensor.shape)}" for tensor in recipe.of)
            reason = str(error).splitlines()[0]
            raise InputError(
                f"{self.folder}: {shapes}: these shapes do not fit the metadata: {reason}"
            ) from None


def _recipes(found: GgufFile, arch: Arch, config: Mapping[str, Any]) -> Iterator[tuple[str, _Recipe]]:
    """Every parameter that the file's tensors make, by its name."""
    by_base: dict[str, list[Rule]] = defaultdict(list)
    for rule in all_rules(arch):
        for kind in rule.of:
            by_base[TENSOR_NAMES[kind].replace(".{bid}.", ".")].append(rule)
    layers = config.get("num_hidden_layers") or len(config["layers_block_type"])
    made: dict[str, str] = {}
    for name, tensor in found.tensors.items():
        block, base, suffix = _split(name)
        if block is not None and block >= layers:
            # Layers that draft tokens, which the tree has not.
            yield f"model.layers.{block}.{name}", _Recipe((tensor,), gguf_make.same)
            continue
        if base in {other.replace(".{bid}.", ".") for other in _NOT_PARAMETERS}:
            continue
        rule, sources = _choose(found, by_base.get(base, []), block, suffix, name)
        to = rule.to if rule.whole else f"{rule.to}.{suffix}"
        target = to if block is None else f"model.layers.{block}.{to}"
        if target in made:
            if made[target] == sources[0].name:
                continue  # another of the tensors of the same rule
            raise InputError(f"{tensor.file}: tensors {made[target]} and {name} both make {target}")
        made[target] = sources[0].name
        yield target, _Recipe(tuple(sources), _how(rule, arch))


def _split(name: str) -> tuple[int | None, str, str]:
    """(block, name without block and suffix, suffix) of a tensor's name."""
    found = _BLOCK_NAME.fullmatch(name)
    block, rest = (int(found[1]), f"blk.{found[2]}") if found else (None, name)
    for suffix in ("weight", "bias", "scale"):
        if rest.endswith(f".{suffix}"):
            return block, rest.removesuffix(f".{suffix}"), suffix
    return block, rest, ""


def _choose(
    found: GgufFile, rules: list[Rule], block: int | None, suffix: str, name: str
) -> tuple[Rule, list[GgufTensor]]:
    """The first rule all of whose tensors are there, and they."""
    missing = ""
    for rule in rules:
        if rule.suffix not in ((suffix,) if suffix == "scale" else (None, suffix)):
            continue
        names = [_full_name(kind, block, suffix) for kind in rule.of]
        absent = [other for other in names if other not in found.tensors]
        if not absent:
            return rule, [found.tensors[other] for other in names]
        missing = missing or absent[0]
    if missing:
        raise InputError(f"{found.path}: tensor {name} is there, but not {missing}, which belongs to it")
    raise InputError(f"{found.path}: tensor {name} belongs to no parameter of architecture {found.arch!r}")


def _full_name(kind: Any, block: int | None, suffix: str) -> str:
    base: str = TENSOR_NAMES[kind].format(bid=block)
    return f"{base}.{suffix}" if suffix else base


def _how(rule: Rule, arch: Arch) -> Make:
    """The rule's way, or the one that all tensors of its kind need in this architecture."""
    if rule.make is gguf_make.same:
        (kind, *_) = rule.of
        if arch.permuted and kind == T.ATTN_Q:
            return gguf_make.query_rows
        if arch.permuted and kind == T.ATTN_K:
            return gguf_make.key_rows
        if arch.norms_plus_one and "NORM" in kind.name and kind != T.SSM_NORM:
            return gguf_make.minus_one
    return rule.make
