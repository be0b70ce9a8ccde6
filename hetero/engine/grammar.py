"""What an answer must look like: a grammar that forbids every token which would leave it.

Compiled by llguidance, which refuses what it cannot enforce. A grammar knows the tokens that end an answer,
and allows them only where it is complete.
"""

from __future__ import annotations

import json
import math
import threading
from collections import OrderedDict
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from torch import Tensor

from hetero.core import InputError

# Between two parts of a document: what people and models write, too little for a model that loops on blanks.
BLANKS = r"[ \t]{1,2}|\n[ \t]{0,40}"
# A divisor becomes an automaton of as many states, and its compiler is given no other limit.
_MAX_DIVISOR = 10_000
# Optional properties of one object, each of which may come next: the parser holds about 500 side by side.
_MAX_OPTIONAL = 400
# Of compiled grammars; a client that sends one schema with every request finds it here.
_KEPT = 64


class Matcher:
    """Where one answer stands in its grammar. For one thread."""

    def __init__(self, inner: LLMatcher, size: int) -> None:
        """``size``: tokens that the grammar knows; the logits may be wider, and those are forbidden."""
        self._inner = inner
        self._bits = np.zeros((size + 31) // 32, dtype=np.uint32)
        self._size = size

    def mask(self, scores: Tensor) -> Tensor:
        """Scores [V] with those of forbidden tokens at minus infinity; the argument stays as it is.

        Raises InputError when the grammar has become too complex to go on.
        """
        self._inner.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        self._check()
        allowed = np.unpackbits(self._bits.view(np.uint8), bitorder="little")[: self._size].astype(bool)
        masked = torch.full_like(scores, -torch.inf)
        size = min(self._size, scores.numel())
        known = torch.from_numpy(allowed)[:size]
        masked[:size] = torch.where(known, scores[:size], masked[:size])
        return masked

    def accept(self, token: int) -> None:
        """Move on by a token that ``mask`` allowed."""
        self._inner.consume_token(token)
        self._check()

    @property
    def done(self) -> bool:
        """Nothing but the end may follow."""
        return bool(self._inner.is_stopped())

    def _check(self) -> None:
        if self._inner.is_error():
            raise InputError(f"the answer's grammar cannot go on: {_one_line(self._inner.get_error())}")


class Grammar:
    """A compiled grammar; any number of answers may use it, each through its own matcher."""

    def __init__(self, inner: LLMatcher, size: int) -> None:
        self._inner, self._size = inner, size

    def matcher(self) -> Matcher:
        """At the start of an answer."""
        return Matcher(self._inner.deep_copy(), self._size)


class GrammarCompiler:
    """Grammars over one tokenizer. For any thread; compiling may take a second, so not for the engine's."""

    def __init__(self, serialized: str, vocabulary: int, eos: frozenset[int]) -> None:
        """``serialized``: the text of a tokenizer.json. ``eos``: at least one token that ends an answer."""
        self._tokenizer = LLTokenizer(serialized, n_vocab=vocabulary, eos_token=sorted(eos))
        self._size = vocabulary
        self._lock = threading.Lock()
        self._known: OrderedDict[str, Grammar] = OrderedDict()

    def json_schema(self, schema: Mapping[str, Any], field: str) -> Grammar:
        """JSON that ``schema`` accepts.

        Raises InputError naming ``field`` for a schema that is wrong or beyond what can be enforced.
        """
        try:
            _check_sizes(schema)
            source = LLMatcher.grammar_from_json_schema(json.dumps(schema), {"whitespace_pattern": BLANKS})
        except (ValueError, RecursionError) as error:
            raise InputError(f"{field}: cannot be enforced: {_one_line(str(error))}") from None
        return self._compile(source, field)

    def lark(self, text: str, field: str) -> Grammar:
        """A grammar in llguidance's dialect of Lark. Raises InputError as ``json_schema``."""
        return self._compile(LLMatcher.grammar_from_lark(text), field)

    def _compile(self, source: str, field: str) -> Grammar:
        with self._lock:
            known = self._known.get(source)
            if known is not None:
                self._known.move_to_end(source)
                return known
        limits = LLParserLimits(verbose_errors=False, max_lexer_states=50_000)
        inner = LLMatcher(self._tokenizer, source, log_level=0, limits=limits)
        if not inner.is_error():
            # Some of what is too complex shows only at the first token: here, and not in the engine.
            inner.compute_bitmask()
        if inner.is_error():
            raise InputError(f"{field}: cannot be enforced: {_one_line(inner.get_error())}")
        grammar = Grammar(inner, self._size)
        with self._lock:
            self._known[source] = grammar
            while len(self._known) > _KEPT:
                self._known.popitem(last=False)
        return grammar


def _check_sizes(schema: Any) -> None:
    """Raises ValueError for a multipleOf that would take minutes to compile, and for an object that would
    compile but end its answers."""
    for value in schema.values() if isinstance(schema, Mapping) else schema:
        if isinstance(value, Mapping | list | tuple):
            _check_sizes(value)
    if not isinstance(schema, Mapping):
        return
    properties, required = schema.get("properties"), schema.get("required")
    if isinstance(properties, Mapping):
        needed = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
        optional = len(properties.keys() - needed)
        if optional > _MAX_OPTIONAL:
            raise ValueError(f"an object of {optional} optional properties is beyond {_MAX_OPTIONAL}")
    divisor = schema.get("multipleOf")
    if isinstance(divisor, int | float) and math.isfinite(divisor):
        numerator, _ = Fraction(repr(divisor)).as_integer_ratio()
        if numerator > _MAX_DIVISOR:
            raise ValueError(f"multipleOf {divisor} is beyond {_MAX_DIVISOR}")


def _one_line(error: str) -> str:
    return " ".join(error.split())
