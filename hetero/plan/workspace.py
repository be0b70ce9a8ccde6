"""What fused layers take of a GPU beside experts, keys and values, and how their prompts are read.

A run measures it (``engine.gpu.room``) and gives experts the rest. Before one there are these figures: dense
weights by what the shipped rules do with each, and allowances that were taken from runs on an H200.
"""

from __future__ import annotations

import re
from functools import lru_cache

from hetero.formats import parse_format
from hetero.plan.inventory import Inventory, Kind, Weight
from hetero.rules.defaults import fused_rules_for
from hetero.rules.load import load_rules

MIB = 2**20

CHUNK, MOST_CHUNK, LEAST_CHUNK = 4096, 8192, 256
"""Tokens of a prompt that fused layers read at once where nobody says how many, the most, and the fewest that
are tried where memory is short."""

LATER = 256 * MIB
"""Bytes that no cache of experts takes: kernels that the driver loads when they are first used, what sampling
takes, the graph of a step that is recorded, and what torch's blocks do not fill."""

CONTEXT = 896 * MIB
"""CUDA's context and the kernels of steps and prompts, as the driver counts them: 897 to 900 MiB."""

GRAPHS = 256 * MIB
STAGING = 288 * MIB  # two buffers of experts that cross the bus, and rooms for rows that are computed at once
SLACK, SLACK_PART = 128 * MIB, 1 / 3
"""What torch takes from the driver and does not fill: so much, and of what a chunk takes that part. With a
125B model 400 to 490 MiB."""

PAIRS = 8192  # rows of experts that a large step computes at once
_FLOAT = 4
DENSE_PACKED = {word: parse_format(word) for word in ("int8", "int4", "fp8")}
"""Formats that fused layers may have linear layers in, besides bfloat16."""


def fuses(inventory: Inventory, dense: str) -> bool:
    """Whether the shipped rules fuse this model's layers on a GPU with dense layers of that kind."""
    return (
        bool(inventory.sites)
        and dense in ("bfloat16", *DENSE_PACKED)
        and fused_rules(inventory.model_type) is not None
    )


@lru_cache(maxsize=64)
def fused_rules(model_type: str) -> str | None:
    """The name of the shipped file that fuses the layers of a model type; None where none does."""
    return fused_rules_for(model_type)


def fused_dense_bytes(inventory: Inventory, dense: str) -> int:
    """Bytes of dense weights in GPU memory, all of which every token reads: those that the rules pack in
    ``dense``, the others in bfloat16. Embeddings stay in main memory."""
    packed = _packed_names(inventory.model_type)
    fmt = DENSE_PACKED.get(dense)
    total = 0.0
    for weight in inventory.weights:
        if weight.kind in (Kind.EXPERTS, Kind.TABLE):
            continue
        if weight.kind is Kind.EMBEDDING and not weight.head:
            continue
        # Hyper-connections are decoded when the layers are fused.
        if fmt is not None and weight.kind is not Kind.HYPER and _is_packed(weight, packed):
            total += weight.params * fmt.bits_per_weight / 8
        else:
            total += 2 * weight.params
    return int(total)


def _is_packed(weight: Weight, names: re.Pattern[str]) -> bool:
    module = weight.name.removesuffix(".weight")
    return weight.matrix and names.search(module) is not None


@lru_cache(maxsize=64)
def _packed_names(model_type: str) -> re.Pattern[str]:
    """The pattern of the rule that packs linear layers."""
    rules = load_rules(fused_rules(model_type) or "qwen-gpu").rules
    for rule in rules:
        if rule.replace.op is not None and rule.replace.op.data == "linear" and rule.match.name is not None:
            return rule.match.name
    return re.compile(r"(?!)")


def host_bytes(inventory: Inventory) -> int:
    """Bytes of the embeddings, which fused layers read from main memory, in bfloat16: of pinned memory, which
    torch takes in powers of two."""
    size = 2 * inventory.of(Kind.EMBEDDING)
    return 1 << (size - 1).bit_length() if size else 0


def workspace_bytes(inventory: Inventory, chunk: int) -> int:
    """Bytes of graphs, staging and what reading ``chunk`` tokens of a prompt at once takes at most."""
    hidden = inventory.hidden
    wide = hidden * streams(inventory)
    widest = max((_outputs(w) for w in inventory.weights if w.layer is not None), default=0)
    widest = max(widest, 4 * hidden)
    pairs = 0
    for site in inventory.sites[:1]:
        each = 2 * site.spec.intermediate + hidden
        pairs = min(chunk * site.spec.top_k, PAIRS) * each
    rows = _FLOAT * (chunk * (4 * wide + 2 * widest) + pairs)
    return GRAPHS + STAGING + SLACK + int((1 + SLACK_PART) * rows)


def streams(inventory: Inventory) -> int:
    """Residual streams: several in a model with hyper-connections."""
    wide = max(
        (w.shape[-1] for w in inventory.weights if w.kind is Kind.HYPER and w.matrix and w.shape), default=0
    )
    return max(1, wide // inventory.hidden) if inventory.hidden else 1


def _outputs(weight: Weight) -> int:
    """Of a projection in a mixer or a dense layer."""
    return weight.shape[0] if weight.matrix and weight.shape and weight.kind is not Kind.HYPER else 0
