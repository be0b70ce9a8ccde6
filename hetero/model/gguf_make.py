"""How parameters of transformers are made of tensors that a GGUF converter has turned into its own order.

Each function takes the tensors of one rule of ``gguf_arch`` and the model's configuration as a dictionary,
and undoes what the converter did. All of them run on ``meta`` too, which is how shapes are known before
anything is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

Make: TypeAlias = Callable[[Sequence[torch.Tensor], Mapping[str, Any]], torch.Tensor]


def same(tensors: Sequence[torch.Tensor], config: Mapping[str, Any]) -> torch.Tensor:
    """The tensor as it is."""
    return tensors[0]


def query_rows(tensors: Sequence[torch.Tensor], config: Mapping[str, Any]) -> torch.Tensor:
    """Rows of a head, [first halves, second halves], from pairs that rotate together, side by side."""
    return _halves(tensors[0], config["num_attention_heads"])


def key_rows(tensors: Sequence[torch.Tensor], config: Mapping[str, Any]) -> torch.Tensor:
    """As ``query_rows``, for keys."""
    return _halves(tensors[0], config["num_key_value_heads"])


def _halves(value: torch.Tensor, heads: int) -> torch.Tensor:
    rows, *rest = value.shape
    return value.reshape(heads, rows // heads // 2, 2, *rest).transpose(1, 2).reshape(rows, *rest)


def minus_one(tensors: Sequence[torch.Tensor], config: Mapping[str, Any]) -> torch.Tensor:
    """The weight of a norm that adds one to it."""
    return tensors[0].float() - 1


def flat(tensors: Sequence[torch.Tensor], config: Mapping[str, Any]) -> torch.Tensor:
    """[n] of any shape with n elements."""
    return tensors[0].reshape(-1)


def row(tensors: Sequence[torch.Tensor], config: Mapping[str, Any]) -> torch.Tensor:
    """[1, n] of any shape with n elements."""
    return tensors[0].reshape(1, -1)


def log_decay(tensors: Sequence[torch.Tensor], config: Mapping[str, Any]) -> torch.Tensor:
    """A_log [n] of A = -exp(A_log)."""
    return torch.log(-tensors[0].float()).reshape(-1)


def log_decay_matrix(tensors: Sequence[torch.Tensor], config: Mapping[str, Any]) -> torch.Tensor:
    """A_log [inner, state] of A = -exp(A_log)."""
    return torch.log(-tensors[0].float())


def log_decay_heads(tensors: Sequence[torch.Tensor], config: Mapping[str, Any]) -> torch.Tensor:
    """A_log [1, 1, heads, 1] of A = -exp(A_log)."""
    return torch.log(-tensors[0].float()).reshape(1, 1, -1, 1)


def convolution(tensors: Sequence[torch.Tensor], config: Mapping[str, Any]) -> torch.Tensor:
    """Depth-wise kernels [channels, 1, width], of one tensor or of those of query, key and value."""
    return torch.cat([t.reshape(-1, 1, t.shape[-1]) for t in tensors])


def concatenated(tensors: Sequence[torch.Tensor], config: Mapping[str, Any]) -> torch.Tensor:
    """One after the other, along rows."""
    return torch.cat(list(tensors))


def latent_key_value(tensors: Sequence[torch.Tensor], config: Mapping[str, Any]) -> torch.Tensor:
    """kv_b [heads (nope + v), rank] of k_b [heads, rank, nope] and v_b [heads, v, rank]."""
    keys, values = tensors
    return torch.cat((keys.transpose(1, 2), values), dim=1).flatten(0, 1)


def grouped_qkvz(tensors: Sequence[torch.Tensor], config: Mapping[str, Any]) -> torch.Tensor:
    """Query, key, value and gate of each key head together; of all queries, keys, values, and all gates."""
    qkv, gates = tensors
    heads, keys = config["linear_num_key_heads"], config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] // heads * config["linear_value_head_dim"]
    parts = (*torch.split(qkv, [heads * keys, heads * keys, heads * values]), gates)
    return torch.cat([part.reshape(heads, -1, part.shape[-1]) for part in parts], dim=1).flatten(0, 1)


def _grouped(value: torch.Tensor, dim: int, size: int, config: Mapping[str, Any]) -> torch.Tensor:
    """Value heads of ``size`` elements along ``dim``, those of a key head together.

    The converter writes the first value head of every key head, then the second of every one, and so on.
    """
    heads = config["linear_num_key_heads"]
    per_head = config["linear_num_value_heads"] // heads
    shape = value.shape
    value = value.reshape(*shape[:dim], per_head, heads, size, *shape[dim + 1 :])
    return value.transpose(dim, dim + 1).reshape(shape)


def grouped_qkv(tensors: Sequence[torch.Tensor], config: Mapping[str, Any]) -> torch.Tensor:
    """Queries and keys as they are, value heads grouped by key head."""
    rows = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    fixed, values = tensors[0][:rows], tensors[0][rows:]
    return torch.cat((fixed, _grouped(values, 0, config["linear_value_head_dim"], config)))


def grouped_convolution(tensors: Sequence[torch.Tensor], config: Mapping[str, Any]) -> torch.Tensor:
    """Kernels of ``grouped_qkv``."""
    return grouped_qkv([convolution(tensors, config)], config)


def grouped_rows(tensors: Sequence[torch.Tensor], config: Mapping[str, Any]) -> torch.Tensor:
    """Rows of value heads, grouped by key head."""
    return _grouped(tensors[0], 0, config["linear_value_head_dim"], config)


def grouped_columns(tensors: Sequence[torch.Tensor], config: Mapping[str, Any]) -> torch.Tensor:
    """Columns of value heads, grouped by key head."""
    return _grouped(tensors[0], 1, config["linear_value_head_dim"], config)


def grouped_heads(tensors: Sequence[torch.Tensor], config: Mapping[str, Any]) -> torch.Tensor:
    """One row or element a value head, grouped by key head."""
    return _grouped(tensors[0], 0, 1, config)


def grouped_log_decay(tensors: Sequence[torch.Tensor], config: Mapping[str, Any]) -> torch.Tensor:
    """``log_decay`` of ``grouped_heads``."""
    return _grouped(log_decay(tensors, config), 0, 1, config)
