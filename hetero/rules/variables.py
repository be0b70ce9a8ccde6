"""Variables of a rule file: ``vars``, ``${name}`` and overrides of the command line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hetero.core import InputError
from hetero.rules.mistakes import Mistakes
from hetero.rules.source import Value, did_you_mean, listed, parse_scalar

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_USE = re.compile(r"\$\{([^}]*)\}?")


def parse_vars(top: Value, bad: set[str], mistakes: Mistakes) -> dict[str, Value]:
    """The ``vars`` of one file; values are scalars, with no variable in them. Names of those that are not are
    added to ``bad``."""
    given = top.mapping("the file").get("vars")
    if given is None or given.data is None:
        return {}
    found: dict[str, Value] = {}
    with mistakes:
        found = given.mapping("'vars'")
    for name, value in found.items():
        with mistakes:
            bad.add(name)
            _check_variable(name, value, given)
            bad.remove(name)
    return dict(found)


def _check_variable(name: str, value: Value, given: Value) -> None:
    if not _NAME.fullmatch(name):
        given.key_at(name).fail(f"'{name}' is no name for a variable: letters, digits and _ only")
    if isinstance(value.data, (list, dict)) or value.data is None:
        value.where.fail(f"variable '{name}' must be a word, a number or true/false, not {value.kind}")
    if "${" in value.text:
        value.where.fail(f"variable '{name}' refers to another one; write its value")


def apply_overrides(
    variables: Mapping[str, Value], overrides: Mapping[str, str], file: str
) -> dict[str, Value]:
    """Put ``--set NAME=VALUE`` over the file's values. Raises InputError for a name that the file lacks."""
    merged = dict(variables)
    for name, text in overrides.items():
        if name not in variables:
            known = f"it has {listed(variables)}" if variables else "it has none"
            hint = did_you_mean(name, variables) or f"; {known}"
            raise InputError(f"--set {name}={text}: {file} has no variable '{name}'{hint}")
        data = parse_scalar(text)
        if data is None:
            raise InputError(f"--set {name}={text}: the value is empty")
        where = replace(variables[name].where, option=f"--set {name}={text}")
        merged[name] = Value(data, where, text)
    return merged


def parse_set(items: list[str]) -> dict[str, str]:
    """``["experts=int8"]`` -> ``{"experts": "int8"}``."""
    result: dict[str, str] = {}
    for item in items:
        name, equals, text = item.partition("=")
        if not equals or not name.strip() or not text.strip():
            raise InputError(f"--set {item}: write NAME=VALUE, e.g. --set experts=int8")
        if name.strip() in result:
            raise InputError(f"--set {name.strip()} is given twice")
        result[name.strip()] = text.strip()
    return result


def substitute(value: Value, variables: Mapping[str, Value], used: set[str], mistakes: Mistakes) -> Value:
    """Put variables into every string below ``value``; adds their names to ``used``. A string for which that
    is not possible stays as it is.

    A string that is one ``${name}`` takes the variable's type; inside a longer string it becomes text.
    """
    if isinstance(value.data, dict):
        for key in value.data:
            if "${" in key:
                with mistakes:
                    value.key_at(key).fail(f"a variable cannot stand in a key ('{key}')")
        data: Any = {k: substitute(v, variables, used, mistakes) for k, v in value.data.items()}
        return Value(data, value.where, "", value.keys)
    if isinstance(value.data, list):
        return Value([substitute(v, variables, used, mistakes) for v in value.data], value.where)
    if isinstance(value.data, str) and "${" in value.data:
        with mistakes:
            return _put_in(value, variables, used)
    return value


def _put_in(value: Value, variables: Mapping[str, Value], used: set[str]) -> Value:
    whole = _USE.fullmatch(value.data)
    if whole and value.data.endswith("}"):
        found = _look_up(whole[1], value, variables, used)
        return Value(found.data, replace(value.where, option=found.where.option), found.text)
    text = _USE.sub(lambda use: _text_of(use, value, variables, used), value.data)
    options = (variables[use[1]].where.option for use in _USE.finditer(value.data))
    return Value(text, replace(value.where, option=next(filter(None, options), None)), text)


def _text_of(use: re.Match[str], value: Value, variables: Mapping[str, Value], used: set[str]) -> str:
    if not use[0].endswith("}"):
        value.where.fail(f"'{use[0]}' has no closing brace")
    return _look_up(use[1], value, variables, used).text


def _look_up(name: str, value: Value, variables: Mapping[str, Value], used: set[str]) -> Value:
    if name not in variables:
        known = f"the file has {listed(variables)}" if variables else "the file has no 'vars'"
        value.where.fail(f"unknown variable '${{{name}}}'{did_you_mean(name, variables) or '; ' + known}")
    used.add(name)
    return variables[name]
