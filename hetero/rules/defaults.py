"""Which shipped rule file serves a model that comes without one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from hetero.rules.find import shipped_files
from hetero.rules.load import load_rules
from hetero.rules.schema import RuleSet


@dataclass(frozen=True, slots=True)
class Shipped:
    """A shipped rule file, read."""

    name: str  # without .yaml
    path: Path
    rules: RuleSet


def shipped() -> list[Shipped]:
    """Every shipped rule file, by name."""
    return [Shipped(path.stem, path, load_rules(path)) for path in shipped_files()]


def default_rules_for(model_type: str, has_gpu: bool) -> Path:
    """The file of the model's family, ``NAME-cpu.yaml`` or ``NAME-gpu.yaml``; where no family claims the
    model type, ``default-cpu.yaml`` or ``default-gpu.yaml``."""
    suffix = "-gpu" if has_gpu else "-cpu"
    fallback: Path | None = None
    for one in shipped():
        if not one.name.endswith(suffix):
            continue
        if one.rules.models is None:
            fallback = one.path
        elif model_type in one.rules.models:
            return one.path
    assert fallback is not None, "the wheel carries default-cpu.yaml and default-gpu.yaml"
    return fallback


def fused_rules_for(model_type: str) -> str | None:
    """The name of the file that fuses the layers of a model type on a GPU; None where none does."""
    path = default_rules_for(model_type, True)
    ops = (rule.replace.op for rule in load_rules(path).rules)
    return path.stem if any(op is not None and op.data == "fused" for op in ops) else None


def for_dense(rules: RuleSet) -> RuleSet:
    """Shipped rules for a model that may lack what they are for: most GGUF files are of dense models, whose
    users expect that any runs."""
    return replace(rules, rules=tuple(replace(rule, optional=True) for rule in rules.rules))
