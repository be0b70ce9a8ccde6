"""What a model consists of: every weight by what it is for, the experts, what a sequence keeps.

Two ways lead here: the configuration alone, for the families of ``hetero.plan.families``, and the module tree
(``from_modules``) for every other type. Counts are of weights; bytes come with a dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from hetero.core import ExpertSpec, ModuleInfo
from hetero.plan.kv import LayerState, states


class Kind(StrEnum):
    """What a weight is for."""

    EMBEDDING = "embedding"  # a token reads one row
    TABLE = "n-gram table"  # a token reads a few rows
    ATTENTION = "attention"
    LINEAR = "linear attention"
    DENSE = "dense mlp"
    SHARED = "shared expert"
    ROUTER = "router"
    EXPERTS = "experts"
    HYPER = "hyper-connections"
    NORM = "norms"
    HEAD = "head"
    OTHER = "other"


TABLES = ("ngram_embedding", "embed_tokens_per_layer")
"""Names of modules that are large tables, which the shipped rules keep in main memory or on disk."""

GATHERED = (Kind.EMBEDDING, Kind.TABLE)
"""Kinds of which a token reads rows, not all."""


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor of the tree, or all that one module holds."""

    name: str  # dotted
    kind: Kind
    params: int
    layer: int | None = None
    shape: tuple[int, ...] = ()  # () where the module is known, but not its tensors
    matrix: bool = False  # a linear layer's, which may be held in 8 bits
    head: bool = False  # an embedding that is the output head as well


@dataclass(frozen=True, slots=True)
class Site:
    """The routed experts of one block."""

    name: str  # of the experts module
    layer: int | None
    spec: ExpertSpec


@dataclass(frozen=True, slots=True)
class Inventory:
    """A model without its weights."""

    model_type: str
    hidden: int
    layers: int
    weights: tuple[Weight, ...]  # experts included
    sites: tuple[Site, ...]
    states: tuple[LayerState, ...]  # what a sequence keeps, one a layer
    context: int | None = None  # most tokens that it attends to
    vocabulary: int = 0
    notes: tuple[str, ...] = ()

    @property
    def params(self) -> int:
        return sum(w.params for w in self.weights)

    def of(self, *kinds: Kind) -> int:
        """Weights of these kinds."""
        return sum(w.params for w in self.weights if w.kind in kinds)

    @property
    def dense_params(self) -> int:
        """All but routed experts and tables that are gathered from main memory or a file."""
        return sum(w.params for w in self.weights if w.kind not in (Kind.EXPERTS, Kind.TABLE))

    @property
    def read_params(self) -> int:
        """Dense weights that every token reads whole."""
        read = sum(
            w.params
            for w in self.weights
            if w.kind is not Kind.EXPERTS and (w.kind not in GATHERED or w.head)
        )
        return read

    @property
    def matrix_params(self) -> int:
        """Dense weights that an 8-bit linear operator could hold."""
        return sum(w.params for w in self.weights if w.matrix and w.kind is not Kind.EXPERTS)

    @property
    def active_params(self) -> int:
        """Weights that take part in one token: dense ones and the chosen experts."""
        return self.read_params + sum(s.spec.params // s.spec.num_experts * s.spec.top_k for s in self.sites)

    def by_kind(self) -> dict[str, int]:
        """Weights of every kind that the model has."""
        return {str(kind): count for kind in Kind if (count := self.of(kind))}


def from_modules(config: Mapping[str, Any], modules: Sequence[ModuleInfo]) -> Inventory:
    """The inventory of a tree as ``hetero.model.build.describe`` tells it."""
    weights: list[Weight] = []
    sites: list[Site] = []
    for module in modules:
        if module.experts is not None:
            sites.append(Site(module.name, module.layer, module.experts))
        inside = any(module.name == s.name or module.name.startswith(f"{s.name}.") for s in sites)
        if not module.own_params:
            continue
        kind = Kind.EXPERTS if inside else _kind(module)
        weights.append(
            Weight(
                module.name,
                kind,
                module.own_params,
                module.layer,
                matrix="Linear" in module.classes and not inside,
            )
        )
    inner = text_config(config)
    if not any(w.kind is Kind.HEAD for w in weights):  # tied: the embedding is the head
        weights = [
            replace(w, head=True) if w.kind is Kind.EMBEDDING and w.layer is None else w for w in weights
        ]
    layers = len({m.layer for m in modules if m.layer is not None})
    kept, notes = states(inner, layers)
    return Inventory(
        model_type=str(config.get("model_type", "")),
        hidden=_int(inner, "hidden_size") or (sites[0].spec.hidden if sites else 0),
        layers=layers,
        weights=tuple(weights),
        sites=tuple(sites),
        states=kept,
        context=_int(inner, "max_position_embeddings"),
        vocabulary=_int(inner, "vocab_size") or 0,
        notes=notes,
    )


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a configuration."""
    for key in ("text_config", "thinker_config", "language_config", "llm_config"):
        inner = config.get(key)
        if isinstance(inner, Mapping):
            return text_config(inner)
    return config


def _int(config: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _kind(module: ModuleInfo) -> Kind:
    name, classes = module.name, " ".join(module.classes)
    leaf = name.rpartition(".")[2]
    if leaf in TABLES:
        return Kind.TABLE
    if "Embedding" in module.classes[0]:
        return Kind.EMBEDDING
    if leaf in ("lm_head", "embed_out", "output_projection"):
        return Kind.HEAD
    if "Norm" in classes:
        return Kind.NORM
    if "hyper" in name:
        return Kind.HYPER
    if "shared" in name:
        return Kind.SHARED
    if leaf in ("gate", "router") or "Router" in classes or ".router." in name:
        return Kind.ROUTER
    if "linear_attn" in name or "mamba" in name or "delta" in name:
        return Kind.LINEAR
    if "attn" in name or "attention" in name:
        return Kind.ATTENTION
    return Kind.DENSE if "mlp" in name or "feed_forward" in name else Kind.OTHER
