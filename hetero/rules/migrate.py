"""A KTransformers rule file becomes one of ours, or each line without a counterpart is named.

What is translated: placement (``generate_device``), MoE blocks with their experts, and the order of the
rules, whose meaning is the same (the first match wins). Operators that compute the same function as
transformers' own module (rotary embeddings, norms, attention, MLPs) become ``keep``, with a note. Operators
that change numbers, memory or the order of work (quantised linear layers, another device for prefill, layer
transfer maps) have no counterpart and are lost.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetero.core import MOE_BLOCK
from hetero.rules.devices import normalise
from hetero.rules.source import Value, did_you_mean, parse_scalar, read_yaml

# backend of the CPU experts -> our format
_BACKENDS = {"amxint4": "int4", "amxint8": "int8", "amxbf16": "bf16"}
# Operators whose function is that of the module they replace: substring of the class, lower case.
_SAME_FUNCTION = ("rope", "rotary", "norm", "attention", "attn", "mlp", "model", "deltanet", "embedding")
_GATE = re.compile(r"gate", re.IGNORECASE)
_EXPERTS = re.compile(r"Experts?(V\d+)?$|MLPExpert$")
_BLOCK = re.compile(r"(MoE|Moe|MoEBlock|MoeBlock|MoEBlockInjected|MoeBlockInjected)(V\d+|Injected)*$")
_PLAIN_LINEAR = {"KLinearTorch", "QuantizedLinearTorch", "KLinearCPUInfer"}
_CPU_EXPERTS = {"KExpertsCPU", "MLPCPUExperts"}
_HANDLED = {
    "generate_device",
    "prefill_device",
    "generate_op",
    "prefill_op",
    "generate_mlp_type",
    "prefill_mlp_type",
    "out_device",
    "backend",
}
# Options that ask for nothing where they hold this value.
_NEUTRAL: Mapping[str, Any] = {"per_layer_prefill_intput_threshold": 0, "absorb_for_prefill": False}


@dataclass(slots=True)
class Migration:
    """``text``: our file. ``notes``: what reads differently and means the same. ``lost``: file:line and what
    has no counterpart."""

    text: str = ""
    notes: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Old:
    """One rule of the old file."""

    value: Value
    name: str | None
    cls: str | None
    target: str  # the operator's class, or "default"
    kwargs: dict[str, Value]
    recursive: bool

    @property
    def kind(self) -> str:
        bare = self.target.rpartition(".")[2]
        if self.target == "default":
            return "keep"
        if not self.target.startswith("ktransformers."):
            return "user"
        if "linear" in bare.lower() and ".linear." in self.target:
            return "linear"
        if _EXPERTS.search(bare) and "Block" not in bare:
            return "experts"
        if ".experts." in self.target and _BLOCK.search(bare):
            return "block"
        if ".gate." in self.target or _GATE.search(bare):
            return "gate"
        if any(word in self.target.lower() for word in _SAME_FUNCTION):
            return "same"
        return "unknown"


@dataclass(slots=True)
class _New:
    """One rule of our file, as ordered (key, value) pairs."""

    name: str
    match: dict[str, str]
    replace: dict[str, Any]
    recursive: bool | None = None
    optional: bool = False


def migrate(path: Path) -> Migration:
    """Translate a file. Raises InputError where it is no KTransformers rule file at all."""
    top = read_yaml(path)
    if isinstance(top.data, dict) and "rules" in top.data:
        top.where.fail("this is a rule file of ours already")
    result = Migration()
    old = [_read(value, result) for value in top.sequence("a KTransformers rule file")]
    rules = _Translator(result).translate([one for one in old if one is not None])
    result.text = _write(path, rules, result)
    return result


def _read(value: Value, result: Migration) -> _Old | None:
    body = value.mapping("a rule")
    for key in body:
        if key not in {"match", "replace", "recursive"}:
            hint = did_you_mean(key, ("match", "replace", "recursive"))
            result.lost.append(f"{value.key_at(key)}: key '{key}' means nothing to KTransformers{hint}")
    if "match" not in body or "replace" not in body:
        value.where.fail("a rule of KTransformers has 'match' and 'replace'")
    match = body["match"].mapping("'match'")
    for key in match:
        if key not in {"name", "class"}:
            result.lost.append(f"{body['match'].key_at(key)}: 'match: {key}' means nothing to KTransformers")
    replace = body["replace"].mapping("'replace'")
    kwargs = dict(replace["kwargs"].mapping("'kwargs'")) if "kwargs" in replace else {}
    for key in replace:
        if key == "device" and "generate_device" not in kwargs:
            kwargs["generate_device"] = replace[key]
        elif key not in {"class", "kwargs", "device"}:
            result.lost.append(
                f"{body['replace'].key_at(key)}: 'replace: {key}' means nothing to KTransformers"
            )
    target = replace["class"].string("'replace: class'") if "class" in replace else "default"
    name = match["name"].string("'match: name'") if "name" in match else None
    cls = match["class"].string("'match: class'") if "class" in match else None
    if name is None and cls is None:
        value.where.fail("'match' has neither 'name' nor 'class'")
    recursive = body["recursive"].boolean("'recursive'") if "recursive" in body else True
    return _Old(value, name, cls, target, kwargs, recursive)


class _Translator:
    """Turns old rules into new ones, in order; collects what is lost."""

    def __init__(self, result: Migration) -> None:
        self.result = result

    def translate(self, old: list[_Old]) -> list[_New]:
        experts = {self._block_name(one.name): one for one in old if one.kind == "experts"}
        blocks = {one.name for one in old if one.kind == "block"}
        rules: list[_New] = []
        for one in old:
            if one.kind == "block":
                rules.append(self._moe(one, experts.get(one.name)))
            elif one.kind == "experts":
                if self._block_name(one.name) not in blocks:
                    rules.append(self._moe(one, one))
            else:
                new = self._other(one)
                if new is not None:
                    rules.append(new)
        self._names(rules)
        rules.append(_New("everything else", {"name": ".*"}, {"op": "keep", "device": "${gpu}"}))
        return rules

    def _moe(self, block: _Old, experts: _Old | None) -> _New:
        options: dict[str, str] = {"device": "cpu", "format": "${experts}"}
        device = self._device(block)
        if experts is None:
            self._lose(block.value, "no rule of the file puts this block's experts on the CPU")
        else:
            device = self._experts(experts, options, None if experts is block else device)
        if block is not experts:
            self._leftovers(block)
        name = self._block_name(block.name)
        match = {"class": MOE_BLOCK} if name is None else {"name": name, "class": MOE_BLOCK}
        return _New("experts", match, {"op": "moe", "device": device, "experts": options})

    def _experts(self, one: _Old, options: dict[str, str], block_device: str | None) -> str:
        """Fill in the options; returns the block's device."""
        where = one.value
        kwargs = one.kwargs
        generate = self._word(one, "generate_device") or "cpu"
        if normalise(generate) != "cpu":
            self._lose(kwargs["generate_device"], f"experts on '{generate}': ours run on the CPU")
        for key in ("generate_op", "generate_mlp_type"):
            if key in kwargs and kwargs[key].text not in _CPU_EXPERTS:
                self._lose(kwargs[key], f"{key} '{_shown(kwargs[key])}' has no counterpart; op moe is used")
        prefill = self._word(one, "prefill_device")
        if prefill is not None and normalise(prefill) != "cpu":
            self._lose(
                kwargs["prefill_device"],
                f"prefill of the experts on '{prefill}': ours prefill on the device of decode",
            )
        backend = self._word(one, "backend")
        if backend is None:
            self._note(
                where, "the experts' format came from the GGUF file; here it is the variable 'experts'"
            )
        elif backend.lower() in _BACKENDS:
            options["format"] = _BACKENDS[backend.lower()]
        elif backend.lower() == "llamafile":
            self._note(
                kwargs["backend"], "llamafile reads the GGUF file's format; here it is the variable 'experts'"
            )
        else:
            self._lose(kwargs["backend"], f"backend '{backend}' has no counterpart")
        out = self._word(one, "out_device")
        result = block_device or self._place(one, out or prefill or "cuda")
        if out is not None and block_device is not None and self._place(one, out) != block_device:
            self._lose(kwargs["out_device"], "out_device differs from the block's device, which we use")
        self._leftovers(one)
        return result

    def _other(self, one: _Old) -> _New | None:
        kind = one.kind
        if kind == "user":
            self._lose(
                one.value, f"class {one.target}: our operators follow another protocol (docs/rules.md)"
            )
        elif kind == "gate":
            self._note(one.value, "the router belongs to the block's operator; the rule is left out")
            return None
        elif kind == "same":
            self._note(one.value, f"{one.target}: transformers' own module does the same; kept")
        elif kind == "unknown":
            self._lose(one.value, f"class {one.target} has no counterpart; the module is kept as it is")
        elif kind == "linear":
            self._linear(one)
        device = self._device(one)
        self._leftovers(one)
        if one.name == "^model$":
            # The whole model's own class; everything below it has rules of its own.
            return None
        match: dict[str, str] = {}
        if one.name is not None:
            match["name"] = one.name
        if one.cls is not None:
            match["class"] = one.cls.rpartition(".")[2]
        new = _New("keep", match, {"op": "keep", "device": device}, None if one.recursive else False)
        # Classes carry other names in transformers, and much lies inside blocks that op moe takes whole.
        new.optional = kind != "keep"
        return new

    def _linear(self, one: _Old) -> None:
        for key in ("generate_op", "prefill_op"):
            value = one.kwargs.get(key)
            if value is not None and value.text not in _PLAIN_LINEAR:
                self._lose(
                    value, f"{key} '{_shown(value)}': dense layers are not quantised; the layer is kept"
                )

    def _device(self, one: _Old) -> str:
        generate = self._word(one, "generate_device")
        prefill = self._word(one, "prefill_device")
        if generate and prefill and normalise(generate) != normalise(prefill):
            self._lose(
                one.kwargs["prefill_device"], "prefill on another device than decode; decode's is used"
            )
        return self._place(one, generate or prefill or "cuda")

    def _place(self, one: _Old, word: str) -> str:
        """A device in our words; the first GPU is the variable."""
        device = normalise(word)
        if device is None:
            self._lose(one.value, f"device '{word}' has no counterpart; cpu is used")
            return "cpu"
        return "${gpu}" if device == "cuda:0" else device

    def _leftovers(self, one: _Old) -> None:
        for key, value in one.kwargs.items():
            if key in _HANDLED or (key in _NEUTRAL and value.data == _NEUTRAL[key]):
                continue
            self._lose(value, f"'{key}' has no counterpart")

    def _word(self, one: _Old, key: str) -> str | None:
        value = one.kwargs.get(key)
        return None if value is None else value.string(f"'{key}'")

    def _block_name(self, name: str | None) -> str | None:
        """The pattern of a block: that of its experts without the last part, in transformers' names."""
        if name is None:
            return None
        return re.sub(r"\\?\.experts\$?$", "$", name)

    def _names(self, rules: list[_New]) -> None:
        """Names that tell rules apart: what they place, and a number where that repeats."""
        seen: dict[str, int] = {}
        for rule in rules:
            base = "routed experts" if rule.replace["op"] == "moe" else self._topic(rule.match)
            seen[base] = seen.get(base, 0) + 1
            rule.name = base if seen[base] == 1 else f"{base} {seen[base]}"
            name = rule.match.get("name")
            if name is not None and "block_sparse_moe" in name:
                rule.match["name"] = name.replace("block_sparse_moe", "mlp")

    def _topic(self, match: Mapping[str, str]) -> str:
        if "class" in match:
            return match["class"]
        words = re.findall(r"[A-Za-z_]{3,}", match.get("name", ""))
        return words[-1] if words else "modules"

    def _note(self, value: Value, text: str) -> None:
        self.result.notes.append(f"{value.where}: {_one_line(text)}")

    def _lose(self, value: Value, text: str) -> None:
        self.result.lost.append(f"{value.where}: {_one_line(text)}")


def _write(path: Path, rules: list[_New], result: Migration) -> str:
    """Our YAML. Strings are quoted as JSON where a plain or single-quoted one would not do."""
    used = json.dumps([rule.replace for rule in rules])
    values = {"gpu": "cuda:0", "experts": "int4"}
    variables = [f"{name}: {text}" for name, text in values.items() if f"${{{name}}}" in used]
    lines = [f"# Migrated from {path.name}."]
    if result.lost:
        lines.append("# Without a counterpart:")
        lines += [f"#   {_comment(text, path)}" for text in result.lost]
    lines.append(f"vars: {{{', '.join(variables)}}}")
    lines.append("rules:")
    for rule in rules:
        lines.append(f"  - name: {_quote(rule.name)}")
        lines.append(f"    match: {_flow(rule.match)}")
        lines.append(f"    replace: {_flow(rule.replace)}")
        if rule.recursive is not None:
            lines.append(f"    recursive: {str(rule.recursive).lower()}")
        if rule.optional:
            lines.append("    optional: true")
    return "\n".join(lines) + "\n"


def _shown(value: Value) -> str:
    return value.text or value.kind


def _one_line(text: str) -> str:
    """Messages become comments of the file, and words of the old file may hold ends of lines."""
    return " ".join(text.split())


def _comment(text: str, path: Path) -> str:
    return text.replace(f"{path}:", "line ", 1)


def _flow(mapping: Mapping[str, Any]) -> str:
    parts = [f"{k}: {_flow(v) if isinstance(v, dict) else _quote(v)}" for k, v in mapping.items()]
    return "{" + ", ".join(parts) + "}"


def _quote(text: str) -> str:
    if re.fullmatch(r"[A-Za-z_](\w| (?! |$))*(:\d+)?", text) and parse_scalar(text) == text:
        return text
    if text.isprintable():
        return "'" + text.replace("'", "''") + "'"
    return json.dumps(text)
