"""Grammars: random logits, which know nothing of JSON, must give documents that parse and fit."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
import torch

from hetero.core import InputError
from hetero.engine.grammar import Grammar, GrammarCompiler
from hetero.engine.sample import Sampler, SamplingParams
from tests.model.tiny import tiny_tokenizer

END, SIZE = 2, 300
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 3, "maximum": 80},
        "tags": {"type": "array", "items": {"enum": ["x", "yy"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tiny_tokenizer().backend_tokenizer.to_str(), SIZE, frozenset({END}))


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def optional(count: int, name: str = "p") -> dict[str, Any]:
    properties = {f"{name}_{place}": {"type": "string", "maxLength": 1} for place in range(count)}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def write(grammar: Grammar, seed: int, temperature: float = 1.0, width: int = SIZE) -> tuple[list[int], bool]:
    sampler = Sampler(SamplingParams(temperature=temperature, seed=seed), (), grammar)
    random = torch.Generator().manual_seed(seed)
    tokens: list[int] = []
    while not sampler.done and len(tokens) < 3000:
        tokens.append(sampler.pick(torch.randn(width, generator=random)))
    return tokens, sampler.done


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_documents_fit_their_schema(compiler: GrammarCompiler, seed: int, temperature: float) -> None:
    # Wider logits than the tokenizer's vocabulary: the padding must never be drawn.
    tokens, done = write(compiler.json_schema(SCHEMA, "f"), seed, temperature, width=SIZE + 20)
    assert done
    assert max(tokens) < SIZE
    document: dict[str, Any] = json.loads(tiny_tokenizer().decode(tokens, skip_special_tokens=True))
    assert set(document) == {"name", "age", "tags"}
    assert len(document["name"]) <= 8
    assert 3 <= document["age"] <= 80
    assert 1 <= len(document["tags"]) <= 3
    assert set(document["tags"]) <= {"x", "yy"}


def test_the_end_is_allowed_where_the_grammar_is_complete_and_nowhere_else(compiler: GrammarCompiler) -> None:
    matcher = compiler.json_schema({"type": "integer"}, "f").matcher()
    digit = tiny_tokenizer().convert_tokens_to_ids("7")
    scores = torch.zeros(SIZE)
    assert matcher.mask(scores)[END] == -torch.inf
    matcher.accept(digit)
    assert matcher.mask(scores)[END] == 0
    assert not matcher.done
    matcher.accept(END)
    assert matcher.done
    assert torch.equal(scores, torch.zeros(SIZE))


def test_answers_of_one_grammar_have_places_of_their_own(compiler: GrammarCompiler) -> None:
    grammar = compiler.json_schema(SCHEMA, "f")
    alone = {seed: write(grammar, seed) for seed in range(4)}
    got: dict[int, tuple[list[int], bool]] = {}
    threads = [threading.Thread(target=lambda s=seed: got.update({s: write(grammar, s)})) for seed in alone]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == alone


def test_a_grammar_is_compiled_once(compiler: GrammarCompiler) -> None:
    first = compiler.json_schema(SCHEMA, "f")
    assert compiler.json_schema(SCHEMA, "other") is first
    assert compiler.json_schema({"type": "object"}, "f") is not first


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "nosuch"}, "nosuch"),
        ({"properties": {"a": {"not": {"type": "string"}}}}, '"not"'),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"$ref": "#/nope"}, "/nope"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
        ({"items": [{"type": "integer", "multipleOf": 9999991}]}, "multipleOf 9999991"),
        ({"properties": {"a": {"type": "number", "multipleOf": 1234.567}}}, "multipleOf 1234.567"),
        ({"$ref": "#"}, ""),
        ({"properties": {"a": optional(401)}}, "401 optional properties is beyond 400"),
        (nested(400), "recursion"),
        (nested(5000), "recursion"),
    ],
)
def test_what_cannot_be_enforced_is_refused(
    compiler: GrammarCompiler, schema: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InputError, match="response_format: cannot be enforced") as told:
        compiler.json_schema(schema, "response_format")
    assert reason in str(told.value)
    assert "\n" not in str(told.value)


def test_what_becomes_too_complex_ends_the_answer_alone(compiler: GrammarCompiler) -> None:
    parts = [optional(350, f"p{number}") for number in range(2)]
    grammar = compiler.json_schema({"anyOf": parts}, "f")
    with pytest.raises(InputError, match="cannot go on"):
        write(grammar, 0)
    write(compiler.json_schema(SCHEMA, "f"), 0)


def test_as_many_optional_properties_as_are_let_in_can_be_written(compiler: GrammarCompiler) -> None:
    grammar = compiler.json_schema(optional(400), "f")
    tokens, done = write(grammar, 0)
    assert done
    assert isinstance(json.loads(tiny_tokenizer().decode(tokens, skip_special_tokens=True)), dict)
    more = optional(500)
    more["required"] = [f"p_{place}" for place in range(100)]
    compiler.json_schema(more, "f")
