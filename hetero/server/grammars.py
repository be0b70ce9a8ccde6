"""Grammars for the answers of one model: JSON, tool calls, each after the thinking if there is any.

A forced call is written in the Hermes format, whatever the model's own is (but harmony): its text is JSON,
which a grammar can hold to the schema of the arguments.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hetero.core import InputError
from hetero.engine.grammar import BLANKS, Grammar, GrammarCompiler
from hetero.server.dialects import HARMONY, REASONING_FORMATS, Dialect, Tool, harmony

if TYPE_CHECKING:
    from hetero.engine.answer import Runnable

# The format of forced calls.
FORCED = "hermes"
CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
# Calls of one answer that is held to calls; a model that knows no end would write them forever.
MAX_CALLS = 16


@dataclass(frozen=True, slots=True)
class Calls:
    """What calls an answer may have. ``required``: at least one and nothing else; ``most``: how many."""

    tools: Sequence[Tool]
    required: bool
    most: int = MAX_CALLS


def writes_calls(dialect: Dialect) -> bool:
    """Whether the model itself writes calls as the grammars force them, and so knows when to."""
    return dialect.tool_format in (FORCED, HARMONY)


def forced(dialect: Dialect) -> Dialect:
    """The dialect of answers whose calls a grammar forces."""
    return dialect if writes_calls(dialect) else Dialect(FORCED, dialect.reasoning_format)


class Grammars:
    """For any thread but the engine's: the first grammar reads the whole vocabulary, which takes a second."""

    def __init__(self, runnable: Runnable) -> None:
        self._runnable = runnable
        self._lock = threading.Lock()
        self._compiler: GrammarCompiler | None = None

    def answer(
        self,
        field: str,
        dialect: Dialect,
        prompt: str,
        schema: Mapping[str, Any] | None = None,
        calls: Calls | None = None,
    ) -> Grammar:
        """An answer to ``prompt`` (the text that the template made) which is JSON that ``schema`` accepts, or
        calls, or either.

        Raises InputError naming ``field`` for what is wrong with the schema or cannot be enforced.
        """
        compiler = self._ready(field)
        if schema is not None:
            # A compiler of JSON schemas alone says better what is wrong with one than the whole grammar does.
            document = compiler.json_schema(schema, field)
            if calls is None and dialect.reasoning_format == "none":
                return document
        for tool in () if calls is None else calls.tools:
            compiler.json_schema(tool.parameters, f"tools: parameters of '{tool.name}'")
        rules = (_HarmonyRules if HARMONY in (dialect.tool_format, dialect.reasoning_format) else _Rules)(
            self._tag
        )
        lead = rules.lead(dialect, prompt)
        bodies = [] if schema is None else [rules.document(schema)]
        if calls is not None:
            bodies.append(rules.calls(calls, free=schema is None and not calls.required))
        return compiler.lark(rules.text(f"{lead} ({' | '.join(bodies)})"), field)

    def _tag(self, tag: str) -> str | None:
        """The name in a grammar of a tag that is a special token; None where it is plain text."""
        tokenizer = self._runnable.tokenizer
        ids = () if tokenizer is None else sorted(tokenizer.special([tag]))
        return f"<[{ids[0]}]>" if ids else None

    def _ready(self, field: str) -> GrammarCompiler:
        with self._lock:
            if self._compiler is None:
                self._compiler = self._make(field)
            return self._compiler

    def _make(self, field: str) -> GrammarCompiler:
        run = self._runnable
        ends = set(run.eos)
        if run.tokenizer is not None and run.tokenizer.eos_id is not None:
            ends.add(run.tokenizer.eos_id)
        serialized = None if run.tokenizer is None else run.tokenizer.serialized
        if serialized is None or not ends:
            raise InputError(
                f"{field}: answers of this model cannot be held to a grammar: "
                "that needs a tokenizer.json and an end-of-text token"
            )
        return GrammarCompiler(serialized, run.vocabulary, frozenset(ends))


class _Rules:
    """Rules of one grammar, in llguidance's dialect of Lark, as they are needed."""

    def __init__(self, tag: Callable[[str], str | None]) -> None:
        self._tag = tag
        self._rules = ["BLANK: /[ \\t\\r\\n]{1,8}/", "TEXT: /(.|\\n)*/"]

    def text(self, start: str) -> str:
        return "\n".join((f"start: {start}", *self._rules)) + "\n"

    def lead(self, dialect: Dialect, prompt: str) -> str:
        """What may or must stand before the answer proper."""
        thinking = REASONING_FORMATS[dialect.reasoning_format]
        if thinking is None:
            return ""
        self._rules.append(self._until("think", thinking.close))
        if dialect.thinking(prompt):
            return "think BLANK?"
        return f"(BLANK? {self._literal(thinking.open)} think BLANK?)?"

    def document(self, schema: Mapping[str, Any]) -> str:
        self._rules.append(f"document: %json {_with_blanks(schema)}")
        return "document"

    def calls(self, calls: Calls, *, free: bool) -> str:
        """``free``: calls stand anywhere in a text, else they are all there is."""
        names = [f"call_{place}" for place in range(len(calls.tools))]
        for name, tool in zip(names, calls.tools, strict=True):
            head = json.dumps(f'{{"name": {json.dumps(tool.name)}, "arguments": ')
            self._rules.append(f'{name}: {head} %json {_with_blanks(tool.parameters)} "}}"')
        inside = f'"\\n" ({" | ".join(names)}) "\\n" {self._literal(CALL_CLOSE)}'
        if free:
            self._rules.append(self._until("opening", CALL_OPEN))
            return f"(opening {inside}){{0,{calls.most}}} TEXT"
        opening = self._literal(CALL_OPEN)
        more = f'("\\n" {opening} {inside}){{0,{calls.most - 1}}}' if calls.most > 1 else ""
        return f"({opening} {inside} {more})"

    def _literal(self, tag: str) -> str:
        return str(self._tag(tag) or json.dumps(tag))

    def _until(self, name: str, tag: str) -> str:
        """A rule for any text up to and with ``tag``."""
        special = self._tag(tag)
        if special is not None:
            return f"{name}: TEXT {special}"
        escaped = re.escape(tag).replace("/", "\\/")
        return f"{name}[lazy]: /(.|\\n)*{escaped}/"


class _HarmonyRules(_Rules):
    """Answers in channels; a call is a message of its own, and the last of the answer."""

    def lead(self, dialect: Dialect, prompt: str) -> str:
        self._rules.append(self._until("thought", harmony.END))
        self._rules.append(
            f'think: {self._head("analysis")} thought {self._literal(harmony.START)} "assistant"'
        )
        return "think*"

    def document(self, schema: Mapping[str, Any]) -> str:
        return f"({self._head('final')} {super().document(schema)})"

    def calls(self, calls: Calls, *, free: bool) -> str:
        names = [f"call_{place}" for place in range(len(calls.tools))]
        for name, tool in zip(names, calls.tools, strict=True):
            to = json.dumps(f"commentary to=functions.{tool.name} ")
            head = f'{self._literal(harmony.CHANNEL)} {to} {self._literal(harmony.CONSTRAIN)} "json"'
            arguments = f"%json {_with_blanks(tool.parameters)}"
            self._rules.append(f"{name}: {head} {self._literal(harmony.MESSAGE)} {arguments}")
        alternatives = " | ".join(names)
        if not free:
            return f"({alternatives})"
        self._rules.append(f"final: {self._head('final')} TEXT")
        return f"({alternatives} | final)"

    def _head(self, channel: str) -> str:
        return f'{self._literal(harmony.CHANNEL)} "{channel}" {self._literal(harmony.MESSAGE)}'


def _with_blanks(schema: Mapping[str, Any]) -> str:
    return json.dumps({**schema, "x-guidance": {"whitespace_pattern": BLANKS}})
