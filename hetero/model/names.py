"""Which tensors of a checkpoint make which parameters of a tree.

Names go through transformers' own conversion mapping, so that every layout that ``from_pretrained`` reads is
read here: renamed and re-prefixed tensors, one tensor per expert, packed experts, fused projections.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from hetero.core import InputError
from hetero.model import hf
from hetero.model.build import TOWER

_COMPUTED = r"rotary_emb\.inv_freq|(?:^|\.)position_ids$"


@dataclass(slots=True)
class Target:
    """One conversion: tensors of the checkpoint in, one or more parameters of the tree out."""

    names: tuple[str, ...]  # parameters or buffers, the first one names the conversion
    # Source pattern of the converter -> names of checkpoint tensors, in natural order. Without a converter
    # there is one source, which is the parameter itself.
    sources: dict[str, list[str]]
    converter: Any = None

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def tensors(self) -> list[str]:
        return [name for names in self.sources.values() for name in names]


@dataclass(slots=True)
class NameMap:
    """How a checkpoint's tensors map to a tree."""

    targets: list[Target] = field(default_factory=list)
    # Tower or reason -> number of tensors that the model has no place for, by its own design.
    skipped: Counter[str] = field(default_factory=Counter)
    unconsumed: list[str] = field(default_factory=list)


def map_names(model: Any, tensors: Iterable[str]) -> NameMap:
    """Map the names of a checkpoint to the parameters and persistent buffers of ``model``.

    Raises InputError when two tensors claim the same parameter.
    """
    expected = model.state_dict(keep_vars=True)
    transforms = hf.get_model_conversion_mapping(model)
    renamings = [entry for entry in transforms if isinstance(entry, hf.WeightRenaming)]
    converters = [entry for entry in transforms if isinstance(entry, hf.WeightConverter)] + _others(model)
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    ignored = _ignored(model)
    result = NameMap()
    by_name: dict[str, Target] = {}
    for full_name in sorted(tensors, key=hf.dot_natural_key):
        name = _strip(full_name, getattr(model, "checkpoint_prefix", ""))
        if name is None:
            result.skipped[full_name.split(".")[0]] += 1
            continue
        base = model.base_model_prefix
        renamed, pattern = hf.rename_source_key(name, renamings, converters, base, expected)
        if renamed not in expected and name in expected:
            # It needs no renaming; a renaming for an older layout has matched by accident.
            renamed, pattern = hf.rename_source_key(name, [], [], base, expected)
        if renamed not in expected:
            label = _why_skipped(renamed, model, ignored) or _why_skipped(name, model, ignored)
            if label is None:
                result.unconsumed.append(full_name)
            else:
                result.skipped[label] += 1
        elif pattern is None:
            if renamed in by_name:
                first = by_name[renamed].tensors[0]
                raise InputError(f"tensors {first} and {full_name} both claim the parameter {renamed}")
            by_name[renamed] = Target((renamed,), {full_name: [full_name]})
        else:
            converter = by_pattern[pattern]
            if renamed not in by_name:
                by_name[renamed] = Target(_all_names(renamed, converter), defaultdict(list), converter)
            elif by_name[renamed].converter is not converter:
                first = by_name[renamed].tensors[0]
                raise InputError(f"tensors {first} and {full_name} both claim the parameter {renamed}")
            by_name[renamed].sources[pattern].append(full_name)
    result.targets = list(by_name.values())
    return result


def _others(model: Any) -> list[Any]:
    """Conversions that transformers lacks: where a tool gave each expert matrices of its own."""
    if model.config.get_text_config().model_type != "llama4_text":
        return []
    experts = "feed_forward.experts"
    stacked, turned = hf.MergeModulelist(dim=0), hf.Transpose(1, 2)
    return [
        hf.WeightConverter(
            [f"{experts}.*.gate_proj.weight", f"{experts}.*.up_proj.weight"],
            f"{experts}.gate_up_proj",
            [stacked, hf.Concatenate(dim=1), turned],
        ),
        hf.WeightConverter(f"{experts}.*.down_proj.weight", f"{experts}.down_proj", [stacked, turned]),
    ]


def _strip(name: str, prefix: str) -> str | None:
    """The name below ``prefix``, or None for a tensor of another part of the model."""
    if not prefix or name.startswith(prefix):
        return name.removeprefix(prefix)
    return None


def _all_names(renamed: str, converter: Any) -> tuple[str, ...]:
    """Full names of all the parameters that a converter makes, given the one of its first target."""
    first = converter.target_patterns[0]
    return tuple(renamed.replace(first, other, 1) for other in converter.target_patterns)


def _ignored(model: Any) -> re.Pattern[str]:
    """What the model class lets a checkpoint hold beyond the model."""
    patterns = [_COMPUTED, *sorted(model._keys_to_ignore_on_load_unexpected or ())]
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns))


def _why_skipped(name: str, model: Any, ignored: re.Pattern[str]) -> str | None:
    """Why a tensor may be left out: its tower's name, or that the class ignores it. None if it may not."""
    for tower in getattr(model, "dropped_towers", ()):
        if name.startswith(f"{tower}."):
            return str(tower).rpartition(".")[2]
    config = model.config.get_text_config()
    for part in name.split("."):
        if part.isdigit():
            # Draft layers follow the model's own ones in the same list.
            if getattr(config, "num_nextn_predict_layers", None) and int(part) >= config.num_hidden_layers:
                return "mtp"
            break
        if TOWER.search(part):
            return part
    if ignored.search(name) is None:
        return None
    return "what the model class ignores"
