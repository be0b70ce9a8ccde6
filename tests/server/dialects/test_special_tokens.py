"""Tags that are special tokens of a vocabulary, which text leaves out, still reach the parser."""

from __future__ import annotations

import pytest

from hetero.model.tokenizer import Tokenizer
from hetero.server.dialects import Dialect
from tests.model.tiny import tiny_tokenizer
from tests.server.dialects.harness import answer, read, run

ANSWERS = {
    "harmony": (
        Dialect("harmony", "harmony"),
        "<|channel|>analysis<|message|>Hm.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.get_weather "
        '<|constrain|>json<|message|>{"city": "漢"}<|call|>',
    ),
    "deepseek": (
        Dialect("deepseek", "think"),
        "<think>Hm.</think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
        '{"city": "漢"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    ),
    "glm": (
        Dialect("glm", "think"),
        "<think>Hm.</think><tool_call>get_weather<arg_key>city</arg_key><arg_value>漢</arg_value></tool_call>",
    ),
    "mistral": (
        Dialect("mistral", "mistral"),
        '[THINK]Hm.[/THINK][TOOL_CALLS]get_weather[ARGS]{"city": "漢"}',
    ),
    "dsml": (
        Dialect("dsml", "think"),
        '<think>Hm.</think><｜DSML｜function_calls><｜DSML｜invoke name="get_weather">'
        '<｜DSML｜parameter name="city" string="true">漢</｜DSML｜parameter>'
        "</｜DSML｜invoke></｜DSML｜function_calls>",
    ),
}


@pytest.mark.parametrize("family", ANSWERS)
def test_through_the_tokenizer(family: str) -> None:
    dialect, text = ANSWERS[family]
    want = read(dialect, text)
    assert (want.reasoning, want.calls) == ("Hm.", [["get_weather", '{"city": "漢"}']])
    inner = tiny_tokenizer()
    tags = [tag for tag in dialect.tags if tag in text and (tag.startswith("｜") or "DSML" not in tag)]
    inner.add_special_tokens({"additional_special_tokens": tags})
    tokenizer = Tokenizer(inner, "here")
    ids = tokenizer.encode_rendered(text)
    visible = tokenizer.special(dialect.tags)
    assert len(visible) == len(tags)
    shown = tokenizer.detokenizer(visible)
    assert answer(run(dialect, [shown.feed(token) for token in ids])) == want
    hidden = tokenizer.detokenizer()
    assert answer(run(dialect, [hidden.feed(token) for token in ids])).calls == []
