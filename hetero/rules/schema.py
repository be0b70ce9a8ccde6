"""The typed model of a rule file, read from positioned YAML.

Here is checked what needs no model: keys, types, regular expressions, layer ranges. Operators, options and
devices are checked when the rules meet a model (``match``).
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from hetero.core import ModuleInfo
from hetero.rules.mistakes import Mistakes
from hetero.rules.source import Value, Where, did_you_mean, listed

FILE_KEYS = ("description", "models", "vars", "extends", "rules")
RULE_KEYS = ("name", "match", "replace", "recursive", "optional")
MATCH_KEYS = ("name", "class", "layers")
REPLACE_KEYS = ("op", "class", "device", "experts", "table", "kwargs")
EXPERT_KEYS = ("format", "isa", "numa", "threads", "backend", "tier", "ram", "cache", "share", "defer")
TABLE_KEYS = ("tier", "ram")
# Words of KTransformers that its users will try first.
_FOREIGN = {
    "generate_device": "write 'device: ...'",
    "prefill_device": "write 'device: ...'; one device serves prefill and decode",
    "out_device": "the block's 'device' receives the experts' output",
    "generate_op": "write 'op: moe' on the block and 'experts: {format: ...}'",
    "prefill_op": "prefill and decode share one operator",
}
_ANY = "any"
_RANGE = re.compile(r"([0-9]{1,6})(?:\s*-\s*([0-9]{1,6}))?", re.ASCII)
_OF_REPLACE = ("op", "device", "experts", "table", "kwargs")
_RULE_LEVEL = "it is a key of the rule, one level up"
_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")


@dataclass(frozen=True, slots=True)
class Layers:
    """A set of layer indices as the file wrote it."""

    text: str
    ranges: tuple[tuple[int, int], ...]  # inclusive ends
    where: Where

    def __contains__(self, layer: object) -> bool:
        return isinstance(layer, int) and any(a <= layer <= b for a, b in self.ranges)

    @property
    def last(self) -> int:
        return max(b for _, b in self.ranges)


@dataclass(frozen=True, slots=True)
class Match:
    """All that is given must hold."""

    where: Where
    name: re.Pattern[str] | None = None  # searched in the dotted name
    cls: str | None = None  # a glob over the class and its bases
    layers: Layers | None = None

    def matches(self, module: ModuleInfo) -> bool:
        if self.layers is not None and module.layer not in self.layers:
            return False
        if self.cls is not None and not any(fnmatch.fnmatchcase(c, self.cls) for c in module.classes):
            return False
        return self.name is None or self.name.search(module.name) is not None


@dataclass(frozen=True, slots=True)
class Replace:
    """What a matched module becomes; ``op`` or ``cls`` is set."""

    where: Where
    op: Value | None
    cls: Value | None
    device: Value | None
    experts: Value | None
    table: Value | None
    kwargs: Value | None


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule, with its number in its own file (from 1)."""

    name: str
    index: int
    where: Where
    match: Match
    replace: Replace
    recursive: bool | None = None  # None: the operator's own default
    optional: bool = False  # may place nothing
    inherited: bool = False  # came through ``extends``

    @property
    def label(self) -> str:
        return f"rule {self.index} '{self.name}'"


@dataclass(frozen=True, slots=True)
class RuleSet:
    """A file with its variables put in and the rules of ``extends`` after its own."""

    file: str
    rules: tuple[Rule, ...]
    models: tuple[str, ...] | None  # model types that the file claims; None: any
    variables: Mapping[str, object] = field(default_factory=dict)
    description: str = ""


def check_keys(
    value: Value, what: str, known: tuple[str, ...], homes: Mapping[str, str] | None = None
) -> None:
    """Refuse keys that ``what`` does not have, all in one RuleError; ``homes`` says where a misplaced one
    belongs."""
    mistakes = Mistakes()
    for key in value.mapping(what):
        if key in known:
            continue
        with mistakes:
            if homes and key in homes:
                value.key_at(key).fail(f"'{key}' does not belong in {what}: {homes[key]}")
            hint = did_you_mean(key, known) or f"; {what} has {listed(known)}"
            value.key_at(key).fail(f"unknown key '{key}' in {what}{hint}")
    mistakes.tell()


def check_file_keys(top: Value) -> None:
    """The keys of a whole file, and that it is no file of another project."""
    if isinstance(top.data, list):
        top.where.fail(
            "the file is a bare list, as KTransformers writes its rules; "
            "'hetero rules migrate' turns it into 'rules: ...'"
        )
    homes = dict.fromkeys(RULE_KEYS, "it is a key of a rule, under 'rules'")
    check_keys(top, "the file", FILE_KEYS, homes)


def parse_models(top: Value) -> tuple[str, ...] | None:
    value = top.mapping("the file").get("models")
    if value is None or value.data == _ANY:
        return None
    if isinstance(value.data, str):
        value.where.fail("'models' must be a list of model types, or 'any'")
    return tuple(v.string("a model type") for v in value.sequence("'models'"))


def check_is_rule(value: Value, index: int) -> None:
    """Refuse an item of 'rules' that is no mapping."""
    if not isinstance(value.data, dict):
        value.where.fail(f"rule {index} must be a mapping with 'match' and 'replace', not {value.kind}")


def rule_name(value: Value, index: int) -> str:
    """The name a rule gives itself, or its number."""
    given = value.mapping(f"rule {index}").get("name")
    if given is None:
        return f"#{index}"
    name = given.string(f"'name' of rule {index}").strip()
    if not name:
        given.where.fail(f"'name' of rule {index} is empty")
    return name


def check_rule_keys(rule: Value, mistakes: Mistakes) -> None:
    """The keys of a rule, its ``match`` and its ``replace``, and that all are there."""
    homes = dict.fromkeys(_OF_REPLACE, "indent it under 'replace'")
    in_rule = homes | dict.fromkeys(EXPERT_KEYS, "indent it under 'replace', in 'experts'")
    in_rule["layers"] = "indent it under 'match'"
    in_rule["class"] = "indent it under 'match' (which modules) or 'replace' (which operator)"
    before = len(mistakes)
    with mistakes:
        check_keys(rule, "a rule", RULE_KEYS, in_rule | _FOREIGN)
    for key in ("match", "replace"):
        # An unknown key is most often the missing one, spelt wrongly.
        if key not in rule.data and len(mistakes) == before:
            with mistakes:
                rule.where.fail(f"the rule has no '{key}'")
    if (match := rule.data.get("match")) is not None:
        with mistakes:
            _check_match_keys(match, homes)
    if (replace := rule.data.get("replace")) is not None:
        with mistakes:
            _check_replace_keys(replace)


def _check_match_keys(value: Value, homes: Mapping[str, str]) -> None:
    for key in value.mapping("'match'"):
        if _RANGE.fullmatch(key):
            value.key_at(key).fail("inside {...} a comma ends a value: quote the ranges, layers: '0-3,8'")
    in_rule = dict.fromkeys(("replace", "recursive", "optional", "match"), _RULE_LEVEL)
    check_keys(value, "'match'", MATCH_KEYS, {**homes, **in_rule})
    if not value.data:
        value.where.fail(f"'match' is empty; give one of {listed(MATCH_KEYS)}")


def _check_replace_keys(value: Value) -> None:
    homes = dict.fromkeys(("match", "recursive", "optional", "replace"), _RULE_LEVEL)
    homes |= dict.fromkeys(("layers", "name"), "it is a key of 'match'")
    homes |= dict.fromkeys(EXPERT_KEYS, "indent it under 'experts'")
    check_keys(value, "'replace'", REPLACE_KEYS, homes | _FOREIGN)
    has = [key for key in ("op", "class") if key in value.data]
    if len(has) != 1:
        value.where.fail(
            f"'replace' needs 'op' or 'class' (a user's operator), and has {'both' if has else 'neither'}"
        )


def parse_rule(value: Value, name: str, index: int, *, inherited: bool, mistakes: Mistakes) -> Rule:
    """Read a rule whose keys are checked and whose variables are put in.

    A part that is wrong counts as one that says nothing, so that no other mistake follows from it.
    """
    get = value.data.get
    if (given := get("name")) is not None and isinstance(given.data, str):
        name = given.data.strip() or name  # it may hold variables
        value = value.named(f"rule {index} '{name}'")
    recursive: bool | None = None
    optional = False
    with mistakes:
        recursive = None if (given := get("recursive")) is None else given.boolean("'recursive'")
    with mistakes:
        optional = False if (given := get("optional")) is None else given.boolean("'optional'")
    return Rule(
        name=name,
        index=index,
        where=value.where,
        match=_parse_match(get("match"), value.where, mistakes),
        replace=_parse_replace(get("replace"), value.where, mistakes),
        recursive=recursive,
        optional=optional,
        inherited=inherited,
    )


def _parse_match(value: Value | None, rule: Where, mistakes: Mistakes) -> Match:
    if value is None or not isinstance(value.data, dict):
        return Match(rule)
    name: re.Pattern[str] | None = None
    cls: str | None = None
    layers: Layers | None = None
    with mistakes:
        if (given := value.data.get("name")) is not None:
            name = _parse_pattern(given)
    with mistakes:
        if (given := value.data.get("class")) is not None:
            cls = _parse_class(given)
    with mistakes:
        if (given := value.data.get("layers")) is not None:
            layers = parse_layers(given)
    return Match(value.where, name, cls, layers)


def _parse_pattern(given: Value) -> re.Pattern[str]:
    text = given.string("'match: name'")
    try:
        return re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        given.where.fail(f"'{text}' is not a regular expression: {error}")


def _parse_class(given: Value) -> str:
    cls = given.string("'match: class'")
    if not cls.strip():
        given.where.fail("'match: class' is empty")
    if "." in cls:
        bare = cls.rpartition(".")[2]
        given.where.fail(f"'class' is compared with bare class names: write '{bare}', not '{cls}'")
    return cls


def parse_layers(value: Value) -> Layers:
    """``0-47``, ``0-3,8``, ``5`` or a list of those."""
    parts = value.data if isinstance(value.data, list) else [value]
    words = [(w.strip(), part.where) for part in parts for w in part.text.split(",")]
    ranges = []
    for word, where in words:
        found = _RANGE.fullmatch(word)
        if found is None:
            where.fail(f"'{word}' is no layer range; write 5, 0-47 or 0-3,8")
        assert found is not None  # fail() does not return
        first = int(found[1])
        last = int(found[2] or first)
        if last < first:
            where.fail(f"layer range {word} runs backwards")
        ranges.append((first, last))
    if not ranges:
        value.where.fail("'layers' is empty; write 5, 0-47 or 0-3,8")
    return Layers(",".join(word for word, _ in words), tuple(ranges), value.where)


def _parse_replace(value: Value | None, rule: Where, mistakes: Mistakes) -> Replace:
    nothing = Replace(rule, Value("keep", rule), None, None, None, None, None)
    if value is None or not isinstance(value.data, dict):
        return nothing
    get = value.data.get
    op, cls = get("op"), get("class")
    experts, table, kwargs = get("experts"), get("table"), get("kwargs")
    before = len(mistakes)
    with mistakes:
        if op is not None:
            op.string("'replace: op'")
    with mistakes:
        if cls is not None and not _DOTTED.fullmatch(cls.string("'replace: class'")):
            cls.where.fail(f"'class: {cls.data}' is no dotted path of a class, such as package.module.Class")
    with mistakes:
        if kwargs is not None:
            kwargs.mapping("'kwargs'")
    with mistakes:
        if experts is not None:
            experts.mapping("'experts'")
    with mistakes:
        if table is not None:
            table.mapping("'table'")
    if len(mistakes) > before or (op is None) == (cls is None):
        return nothing
    return Replace(value.where, op, cls, get("device"), experts, table, kwargs)
