"""A rule file, its bases and its variables become one RuleSet."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hetero.core import InputError
from hetero.rules.find import shipped_files
from hetero.rules.mistakes import Mistakes
from hetero.rules.schema import (
    Rule,
    RuleSet,
    check_file_keys,
    check_is_rule,
    check_rule_keys,
    parse_models,
    parse_rule,
    rule_name,
)
from hetero.rules.source import Value, Where, did_you_mean, listed, read_yaml
from hetero.rules.variables import apply_overrides, parse_vars, substitute


def load_rules(
    path_or_name: str | Path,
    overrides: Mapping[str, str] | None = None,
    mistakes: Mistakes | None = None,
) -> RuleSet:
    """Read a rule file: a path, or the name of a shipped one with or without ``.yaml``.

    ``overrides`` are the command line's ``--set``. Raises InputError naming file, line and rule of every
    mistake. With ``mistakes``, those of single keys and rules go there instead, and the result is what could
    be read: fit for ``match`` with the same ``mistakes``, which finds more of them, and for nothing else.
    """
    found = Mistakes() if mistakes is None else mistakes
    ruleset = _load(resolve(path_or_name), overrides or {}, found)
    if mistakes is None:
        found.tell()
    return ruleset


def _load(path: Path, overrides: Mapping[str, str], mistakes: Mistakes) -> RuleSet:
    files = _chain(path, mistakes)
    reading = _Reading(mistakes)
    for _, top in reversed(files):
        reading.variables |= parse_vars(top, reading.bad, mistakes)
    reading.variables = apply_overrides(reading.variables, overrides, str(path))
    rules: list[Rule] = []
    for depth, (file, top) in enumerate(files):
        rules += reading.rules_of(file, top, inherited=depth > 0)
    own = files[0][1]
    models: tuple[str, ...] | None = None
    description = ""
    with mistakes:
        models = parse_models(own)
    with mistakes:
        if "description" in own.data:
            description = own.data["description"].string("'description'")
    if not mistakes:  # else both may follow from another mistake
        for name, value in reading.variables.items():
            if name not in reading.used:
                with mistakes:
                    value.where.fail(f"variable '{name}' is not used by any rule")
        if not rules:
            with mistakes:
                Where(str(path), 1).fail("the file has no rules")
    return RuleSet(
        file=str(path),
        rules=tuple(rules),
        models=models,
        variables={name: value.data for name, value in reading.variables.items()},
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
    if Path(text).is_dir():
        raise InputError(f"{text}: is a folder; a rule file ends in .yaml")
    family = [stem for stem in stems if stem in {f"{text}-cpu", f"{text}-gpu"}]
    if family:
        raise InputError(f"{text}: no such rule file; this family has {' and '.join(family)}")
    raise InputError(
        f"{text}: no such rule file, and none is shipped under that name"
        + (did_you_mean(text, stems) or f"; shipped: {listed(stems)}")
    )


def _chain(path: Path, mistakes: Mistakes) -> list[tuple[Path, Value]]:
    """The file and those that it extends, itself first."""
    files: list[tuple[Path, Value]] = []
    seen: dict[Path, str] = {}
    while True:
        top = read_yaml(path)
        with mistakes:
            check_file_keys(top)
        if not isinstance(top.data, dict):
            mistakes.tell()
        files.append((path, top))
        seen[path.resolve()] = str(path)
        base = top.data.get("extends")
        if base is None:
            return files
        found: Path | None = None
        with mistakes:
            found = _base(base, path, seen)
        if found is None:
            return files
        path = found


def _base(value: Value, path: Path, seen: Mapping[Path, str]) -> Path:
    """The file that ``extends`` of ``path`` means."""
    name = value.string("'extends'")
    try:
        base = resolve(name, path.parent)
    except InputError as error:
        value.where.fail(f"extends {error}")
    if base.resolve() in seen:
        value.where.fail(f"extends runs in a circle: {' -> '.join([*seen.values(), str(base)])}")
    return base


class _Reading:
    """The rules of a file and of its bases, under one set of variables."""

    def __init__(self, mistakes: Mistakes) -> None:
        self.mistakes = mistakes
        self.variables: dict[str, Value] = {}
        self.bad: set[str] = set()  # variables whose value is a mistake
        self.used: set[str] = set()

    def rules_of(self, file: Path, top: Value, *, inherited: bool) -> list[Rule]:
        given = top.data.get("rules")
        items: list[Value] = []
        with self.mistakes:
            if given is not None:
                items = given.sequence("'rules'")
            elif "extends" not in top.data:
                top.where.fail("the file has no 'rules' and extends none")
        rules: list[Rule] = []
        first: dict[str, int] = {}
        for index, value in enumerate(items, 1):
            with self.mistakes:
                check_is_rule(value, index)
                name = f"#{index}"
                with self.mistakes:
                    name = rule_name(value, index)
                if first.setdefault(name, index) != index:
                    with self.mistakes:
                        Where(str(file), value.where.line, f"rule {index} '{name}'").fail(
                            f"rule {first[name]} has the same name"
                        )
                named = value.named(f"rule {index} '{name}'")
                rules += self._rule(named, name, index, inherited=inherited)
        return rules

    def _rule(self, value: Value, name: str, index: int, *, inherited: bool) -> list[Rule]:
        """The rule, or none where its variables cannot be put in."""
        check_rule_keys(value, self.mistakes)
        before = len(self.mistakes)
        used: set[str] = set()
        value = substitute(value, self.variables, used, self.mistakes)
        self.used |= used
        if len(self.mistakes) > before or used & self.bad:
            return []
        return [parse_rule(value, name, index, inherited=inherited, mistakes=self.mistakes)]
