"""Running transformers' weight conversions, whole or for one expert at a time.

Nearly every conversion that ends in packed experts ([E, N, K]) treats experts apart: it stacks one tensor per
expert and then works on the other dimensions. Such a conversion is run with a single expert, on [1, N, K], so
that no more than one expert is in memory beside the packed weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch

from hetero.model import hf
from hetero.model.names import Target

Reader = Callable[[str], torch.Tensor]

EXPERT_PARAMETERS = (
    "gate_up_proj",
    "up_proj",
    "down_proj",
    "gate_up_proj_bias",
    "up_proj_bias",
    "down_proj_bias",
)

_WITHIN_EXPERT = (hf.Concatenate, hf.Interleave, hf.Transpose, hf.Chunk)


def per_expert_sources(target: Target) -> bool:
    """Whether the checkpoint has one tensor per expert for this target."""
    return target.converter is not None and isinstance(target.converter.operations[0], hf.MergeModulelist)


def is_expertwise(target: Target) -> bool:
    """Whether the conversion of packed experts can be run for one expert at a time."""
    if target.converter is None:
        return True
    operations = list(target.converter.operations)
    if per_expert_sources(target):
        if operations.pop(0).dim != 0:
            return False
    elif any(len(names) != 1 for names in target.sources.values()):
        return False
    return len(target.names) == 1 and all(
        isinstance(operation, _WITHIN_EXPERT) and min(_dimensions(operation)) >= 1 for operation in operations
    )


def _dimensions(operation: Any) -> tuple[int, ...]:
    if isinstance(operation, hf.Transpose):
        return operation.dim0, operation.dim1
    return (operation.dim,)


class _OneExpert:
    """Stands for the model where a conversion asks it for a parameter's shape: the shape of one expert."""

    def __init__(self, shape: torch.Size) -> None:
        self.parameter = torch.empty((1, *shape[1:]), device="meta")

    def get_parameter(self, name: str) -> torch.Tensor:
        return self.parameter


def convert_expert(
    target: Target, expert: int, shape: torch.Size, config: hf.Config, *, read: Reader, read_slice: Reader
) -> torch.Tensor:
    """The parameter's values of one expert: [N, K], or [N] for a bias.

    ``shape`` is that of the parameter, all experts. ``read`` reads a tensor of this expert, ``read_slice``
    its slice [1, ...] of a packed tensor.
    """
    if target.converter is None:
        return read_slice(target.tensors[0])[0]
    values: dict[str, Any] = {}
    for pattern, names in target.sources.items():
        values[pattern] = [read(names[expert]) if per_expert_sources(target) else read_slice(names[0])]
    for operation in target.converter.operations:
        values = operation.convert(
            values,
            source_patterns=target.converter.source_patterns,
            target_patterns=target.converter.target_patterns,
            full_layer_name=target.name,
            model=_OneExpert(shape),
            config=config,
            missing_keys=None,
        )
    (value,) = values.values()
    tensor: torch.Tensor = value[0] if isinstance(value, list) else value
    return tensor[0]


def convert(
    target: Target, model: Any, read: Reader, shape_of: Callable[[str], tuple[int, ...]]
) -> dict[str, torch.Tensor]:
    """The whole parameters that a target makes, by name. ``shape_of`` gives the shape of a tensor to read."""
    if target.converter is None:
        return {target.name: read(target.tensors[0])}
    if only_concatenates(target):
        return {target.name: _concatenate(target, read, shape_of)}
    converter = deepcopy(target.converter)
    for pattern, names in target.sources.items():
        for name in names:
            converter.add_tensor(target.name, name, pattern, _deferred(read, name))
    made = converter.convert(target.name, model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def _deferred(read: Reader, name: str) -> Callable[[], torch.Tensor]:
    return lambda: read(name)


def only_concatenates(target: Target) -> bool:
    """Whether a conversion puts tensors one after the other and does nothing else."""
    operations = target.converter.operations
    return len(operations) == 1 and isinstance(operations[0], hf.Concatenate) and len(target.tensors) > 1


def _concatenate(target: Target, read: Reader, shape_of: Callable[[str], tuple[int, ...]]) -> torch.Tensor:
    """Concatenate straight into the result: an embedding of 100 GB in 512 parts must not exist twice."""
    dim = target.converter.operations[0].dim
    names = [name for pattern in target.converter.source_patterns for name in target.sources.get(pattern, ())]
    total = sum(shape_of(name)[dim] for name in names)
    first = read(names[0])
    out = first.new_empty((*first.shape[:dim], total, *first.shape[dim + 1 :]))
    start = 0
    for name in names:
        part = first if name is names[0] else read(name)
        out.narrow(dim, start, part.shape[dim]).copy_(part)
        start += part.shape[dim]
    return out


@dataclass(frozen=True, slots=True)
class Layout:
    """How an experts module of transformers lays its parameters out."""

    has_gate: bool
    is_transposed: bool  # [E, K, N] instead of [E, N, K]
    is_concatenated: bool  # gate rows before up rows; else alternating

    @classmethod
    def of(cls, experts: Any) -> Layout:
        return cls(bool(experts.has_gate), bool(experts.is_transposed), bool(experts.is_concatenated))

    def parts(self, parameter: str, value: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Split one expert's parameter into what a sink takes: (part, [N, K]) or (bias part, [N])."""
        suffix = "_bias" if parameter.endswith("_bias") else ""
        if self.is_transposed and not suffix:
            value = value.T
        match parameter.removesuffix("_bias"):
            case "gate_up_proj" if self.is_concatenated:
                gate, up = value.chunk(2, dim=0)
                yield f"gate{suffix}", gate
                yield f"up{suffix}", up
            case "gate_up_proj":
                yield f"gate{suffix}", value[0::2]
                yield f"up{suffix}", value[1::2]
            case "up_proj":
                yield f"up{suffix}", value
            case "down_proj":
                yield f"down{suffix}", value

    def join(self, parameter: str, part: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """The inverse of ``parts``: one expert's parameter from what ``part`` gives for their names."""
        suffix = "_bias" if parameter.endswith("_bias") else ""
        match parameter.removesuffix("_bias"):
            case "gate_up_proj" if self.is_concatenated:
                value = torch.cat([part(f"gate{suffix}"), part(f"up{suffix}")])
            case "gate_up_proj":
                value = torch.stack([part(f"gate{suffix}"), part(f"up{suffix}")], 1).flatten(0, 1)
            case name:
                value = part(f"{name.removesuffix('_proj')}{suffix}")
        return value.T if self.is_transposed and not suffix else value
