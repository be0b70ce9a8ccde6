"""YAML with positions: every value knows its file and line, and nothing is dropped in silence.

Plain scalars follow YAML 1.2's core schema, so ``off`` is a word and ``1:30`` is no number. Duplicate keys,
anchors and several documents are errors.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import yaml

from hetero.core import InputError
from hetero.rules.mistakes import Mistake, RuleError

_MAX_DEPTH = 32
_INT = re.compile(r"[-+]?[0-9]{1,18}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")


@dataclass(frozen=True, slots=True)
class Where:
    """A line of a rule file, and the rule that it belongs to if it belongs to one."""

    file: str
    line: int  # from 1
    rule: str | None = None
    option: str | None = None  # of the command line, where that gives the value and not the file

    def fail(self, message: str) -> NoReturn:
        by = f" (given by {self.option})" if self.option else ""
        raise RuleError([Mistake(self.file, self.line, f"{self}: {message}{by}")])

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" + (f": {self.rule}" if self.rule else "")


@dataclass(frozen=True, slots=True)
class Value:
    """A node of the file. ``data``: a scalar, a list of Value, or a mapping of str to Value."""

    data: Any
    where: Where
    text: str = ""  # a scalar as it is written, quotes removed
    keys: Mapping[str, Where] | None = None  # of a mapping

    def named(self, rule: str) -> Value:
        """The same tree, with the rule's name in every position."""
        where = replace(self.where, rule=rule)
        if isinstance(self.data, dict):
            keys = {k: replace(w, rule=rule) for k, w in (self.keys or {}).items()}
            return Value({k: v.named(rule) for k, v in self.data.items()}, where, "", keys)
        if isinstance(self.data, list):
            return Value([v.named(rule) for v in self.data], where)
        return Value(self.data, where, self.text)

    def mapping(self, what: str) -> dict[str, Value]:
        if not isinstance(self.data, dict):
            self.where.fail(f"{what} must be a mapping of keys to values, not {self.kind}")
        return self.data

    def sequence(self, what: str) -> list[Value]:
        if not isinstance(self.data, list):
            self.where.fail(f"{what} must be a list, not {self.kind}")
        return self.data

    def one_of(self, what: str, key: str, words: Sequence[str]) -> str:
        """One of ``words``, of ``key`` in ``what``."""
        if self.data not in words:
            shown = self.text or self.kind
            hint = did_you_mean(shown, words) or f"; it is one of {listed(words)}"
            self.where.fail(f"{what}: unknown {key} '{shown}'{hint}")
        return str(self.data)

    def string(self, what: str) -> str:
        if not isinstance(self.data, str):
            self.where.fail(f"{what} must be a string, not {self.kind}")
        return self.data

    def boolean(self, what: str) -> bool:
        if not isinstance(self.data, bool):
            self.where.fail(f"{what} must be true or false, not {self.kind}")
        return self.data

    @property
    def kind(self) -> str:
        if self.data is None:
            return "empty"
        if isinstance(self.data, dict):
            return "a mapping"
        if isinstance(self.data, list):
            return "a list"
        return repr(self.data)

    def key_at(self, key: str) -> Where:
        return (self.keys or {}).get(key, self.where)

    def plain(self) -> Any:
        """Without positions."""
        if isinstance(self.data, dict):
            return {k: v.plain() for k, v in self.data.items()}
        if isinstance(self.data, list):
            return [v.plain() for v in self.data]
        return self.data


def read_yaml(path: Path) -> Value:
    """Parse a file. Raises InputError with file and line for everything that is wrong with it."""
    try:
        text = path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise InputError(f"{path}: no such rule file") from None
    except IsADirectoryError:
        raise InputError(f"{path}: a folder, not a rule file") from None
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise InputError(f"{path}:{line}: not UTF-8 text") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    return parse_yaml(text, str(path))


def parse_yaml(text: str, file: str) -> Value:
    """Parse a document; ``file`` stands in the messages."""
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            anchor = getattr(event, "anchor", None)
            if anchor is not None and event.start_mark is not None:
                Where(file, event.start_mark.line + 1).fail(
                    f"anchors and aliases ({anchor!r}) are not part of the grammar: use 'vars' and ${{name}}"
                )
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        Where(file, line).fail(f"not valid YAML: {error.problem or error.context}")
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        Where(file, line).fail(f"not valid YAML: character {error.character!r} is not allowed")
    except RecursionError:
        Where(file, 1).fail(f"nested deeper than {_MAX_DEPTH} levels")
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        # PyYAML lets int() and chr() speak for malformed escapes and directives.
        Where(file, 1).fail(f"not valid YAML: {' '.join(str(error).split())}")
    if node is None:
        raise InputError(f"{file}:1: the file is empty; it needs 'rules'")
    return _convert(node, file, 0)


def _convert(node: yaml.Node, file: str, depth: int) -> Value:
    where = Where(file, node.start_mark.line + 1)
    if depth > _MAX_DEPTH:
        where.fail(f"nested deeper than {_MAX_DEPTH} levels")
    if isinstance(node, yaml.MappingNode):
        return _convert_mapping(node, file, where, depth)
    if isinstance(node, yaml.SequenceNode):
        return Value([_convert(child, file, depth + 1) for child in node.value], where)
    assert isinstance(node, yaml.ScalarNode)  # a composed node is one of three
    text = str(node.value)
    if node.tag.startswith("!") or (node.tag == "tag:yaml.org,2002:binary"):
        where.fail(f"tags ({node.tag}) are not part of the grammar")
    return Value(_scalar(text) if node.style is None else text, where, text)


def _convert_mapping(node: yaml.MappingNode, file: str, where: Where, depth: int) -> Value:
    data: dict[str, Value] = {}
    keys: dict[str, Where] = {}
    for key_node, value_node in node.value:
        at = Where(file, key_node.start_mark.line + 1)
        if not isinstance(key_node, yaml.ScalarNode):
            at.fail("a key must be a word")
        key = str(key_node.value)
        if key in keys:
            at.fail(f"key '{key}' stands twice here; the first is in line {keys[key].line}")
        keys[key] = at
        data[key] = _convert(value_node, file, depth + 1)
    return Value(data, where, "", keys)


def _scalar(text: str) -> Any:
    if text in {"", "~", "null", "Null", "NULL"}:
        return None
    if text in {"true", "True", "TRUE"}:
        return True
    if text in {"false", "False", "FALSE"}:
        return False
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text


def parse_scalar(text: str) -> Any:
    """The value of a word of the command line, by the rules for a plain scalar of a file."""
    return _scalar(text)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` or nothing."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean '{close[0]}'?" if close else ""


def listed(words: Iterable[str]) -> str:
    return ", ".join(words)
