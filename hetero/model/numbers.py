"""Numbers of a configuration that mean nothing, told by the field's name. Imports no torch, which plans do
without."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hetero.core import InputError

MOST = 1_000_000
"""Of layers, heads and experts."""

POSITIVE = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "moe_intermediate_size")
"""Fields that are never 0."""

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k")
"""Names that types have for the number of experts, and for those that a token takes."""

# Of experts none are a dense model, of what else is absent some types write 0.
_NOT_NEGATIVE = ("intermediate_size", "num_key_value_heads", "head_dim", *EXPERTS, *CHOSEN)
# Of parts that no run has.
_OTHERS = ("vision", "audio", "quantization_config")


def check_numbers(data: Mapping[str, Any], where: str, prefix: str = "") -> None:
    """Raises InputError for counts and sizes of the text part that no model can have. ``where``: the file."""
    for name, value in data.items():
        field = f"{where}: field '{prefix}{name}'"
        if isinstance(value, Mapping):
            if not str(name).startswith(_OTHERS):
                check_numbers(value, where, f"{prefix}{name}.")
            continue
        for one in value if isinstance(value, list) else [value]:
            _check(str(name), one, field)
    experts = next((data[n] for n in EXPERTS if isinstance(data.get(n), int)), None)
    for name in CHOSEN:
        chosen = data.get(name)
        if not experts or not isinstance(chosen, int):
            continue
        if not 1 <= chosen <= experts:
            raise InputError(
                f"{where}: field '{prefix}{name}' is {chosen}: a token takes from 1 to all {experts} experts"
            )


def _check(name: str, value: Any, field: str) -> None:
    if value is None or isinstance(value, Mapping | list):
        return  # a default of the type, or a shape of its own
    known = name in POSITIVE or name in _NOT_NEGATIVE
    if known and (isinstance(value, bool) or not isinstance(value, int)):
        raise InputError(f"{field} is {value!r}: must be a whole number")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    # Counts size lists of transformers' own, which would fill the memory before anything else looks.
    if name.startswith(("num_", "n_")) and not value <= MOST:
        raise InputError(f"{field} is {value}: at most {MOST} are possible")
    if name in POSITIVE and value < 1:
        raise InputError(f"{field} is {value}: must be at least 1")
    if known and value < 0:
        raise InputError(f"{field} is {value}: must not be negative")
