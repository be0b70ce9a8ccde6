"""A rule file, its bases and its variables become one RuleSet."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hetero.core import InputError
from hetero.rules.find import shipped_files
from hetero.rules.schema import (
    Rule,
    RuleSet,
    check_file_keys,
    parse_models,
    parse_rule,
    rule_name,
)
from hetero.rules.source import Value, Where, did_you_mean, listed, read_yaml
from hetero.rules.variables import apply_overrides, parse_vars, substitute


def load_rules(path_or_name: str | Path, overrides: Mapping[str, str] | None = None) -> RuleSet:
    """Read a rule file: a path, or the name of a shipped one with or without ``.yaml``.

    ``overrides`` are the command line's ``--set``. Raises InputError naming file, line and rule.
    """
    path = resolve(path_or_name)
    files = _chain(path)
    variables: dict[str, Value] = {}
    for _, top in reversed(files):
        variables |= parse_vars(top)
    variables = apply_overrides(variables, overrides or {}, str(path))

    used: set[str] = set()
    rules: list[Rule] = []
    for depth, (file, top) in enumerate(files):
        rules += _own_rules(file, top, variables, used, inherited=depth > 0)
    for name, value in variables.items():
        if name not in used:
            value.where.fail(f"variable '{name}' is not used by any rule")
    if not rules:
        Where(str(path), 1).fail("the file has no rules")
    top = files[0][1].data
    description = top["description"].string("'description'") if "description" in top else ""
    return RuleSet(
        file=str(path),
        rules=tuple(rules),
        models=parse_models(files[0][1]),
        variables={name: value.data for name, value in variables.items()},
        description=" ".join(description.split()),
    )


def resolve(path_or_name: str | Path, beside: Path | None = None) -> Path:
    """The file that a path or a shipped name means; ``beside`` is the folder of the file that extends it."""
    text = str(path_or_name)
    names = [text] if text.endswith((".yaml", ".yml")) else [text, f"{text}.yaml", f"{text}.yml"]
    for name in names:
        path = (beside / name) if beside else Path(name)
        if "\0" not in name and path.is_file():
            return path
    shipped = {path.name: path for path in shipped_files()}
    for name in names:
        if name in shipped:
            return shipped[name]
    stems = [path.stem for path in shipped.values()]
    raise InputError(
        f"{text}: no such rule file, and none is shipped under that name"
        + (did_you_mean(text, stems) or f"; shipped: {listed(stems)}")
    )


def _chain(path: Path) -> list[tuple[Path, Value]]:
    """The file and those that it extends, itself first."""
    files: list[tuple[Path, Value]] = []
    seen: dict[Path, str] = {}
    while True:
        top = read_yaml(path)
        check_file_keys(top)
        files.append((path, top))
        seen[path.resolve()] = str(path)
        base = top.data.get("extends")
        if base is None:
            return files
        name = base.string("'extends'")
        try:
            path = resolve(name, path.parent)
        except InputError as error:
            base.where.fail(f"extends {error}")
        if path.resolve() in seen:
            base.where.fail(f"extends runs in a circle: {' -> '.join([*seen.values(), str(path)])}")


def _own_rules(
    file: Path, top: Value, variables: Mapping[str, Value], used: set[str], *, inherited: bool
) -> list[Rule]:
    given = top.data.get("rules")
    if given is None:
        if "extends" not in top.data:
            top.where.fail("the file has no 'rules' and extends none")
        return []
    rules: list[Rule] = []
    first: dict[str, int] = {}
    for index, value in enumerate(given.sequence("'rules'"), 1):
        if not isinstance(value.data, dict):
            value.where.fail(f"rule {index} must be a mapping with 'match' and 'replace', not {value.kind}")
        name = rule_name(value, index)
        if name in first:
            Where(str(file), value.where.line, f"rule {index} '{name}'").fail(
                f"rule {first[name]} has the same name"
            )
        first[name] = index
        named = value.named(f"rule {index} '{name}'")
        rules.append(parse_rule(substitute(named, variables, used), index, inherited=inherited))
    return rules
