"""For every dialect and any text: no cut changes the answer, and nothing that the model wrote is lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.core import InputError
from hetero.server.dialects import REASONING_FORMATS, TOOL_FORMATS, Delta, Dialect, ToolStart, choose
from tests.server.dialects.harness import TOOLS, answer, pieces, run

DIALECTS = [
    *(Dialect(tool, "think") for tool in TOOL_FORMATS if tool != "harmony"),
    Dialect("mistral", "mistral"),
    Dialect("harmony", "harmony"),
    Dialect("none", "none"),
]
SNIPPETS = (
    '{"name": "get_weather", "arguments": {"city": "a"}}',
    '{"name": "get_weather", ',
    '"arguments": {',
    '"parameters": "',
    "{",
    "}",
    "[",
    "]",
    '"',
    "\\",
    ",",
    ":",
    ";",
    "\n",
    " ",
    "get_weather",
    "function",
    "```json\n",
    "```",
    "<",
    ">",
    "null",
    "<think>",
    "</think>",
    " to=functions.get_weather",
    "commentary",
    "analysis",
    "<function=get_weather>",
    "<parameter=city>",
    "</parameter>",
    '<invoke name="get_weather">',
    '<parameter name="city">',
    "</invoke>",
    "｜DSML｜",
    "é🙂",
)


def texts(dialect: Dialect) -> st.SearchStrategy[list[str]]:
    tags = st.sampled_from(dialect.tags or ("<",))
    cut_tags = tags.flatmap(lambda tag: st.integers(0, len(tag)).map(lambda size: tag[:size]))
    words = st.integers(0, 99).map(lambda number: f"w{number:02}w")
    return st.lists(tags | tags | cut_tags | st.sampled_from(SNIPPETS) | words, max_size=14)


def without_ids(deltas: list[Delta]) -> list[Delta]:
    return [ToolStart(d.index, str(d.index), d.name) if isinstance(d, ToolStart) else d for d in deltas]


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda d: f"{d.tool_format}-{d.reasoning_format}")
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_no_cut_changes_the_answer(dialect: Dialect, data: st.DataObject) -> None:
    parts = data.draw(texts(dialect))
    text = "".join(parts)
    prompt = data.draw(st.sampled_from(["", "<think>\n", "[THINK]"]))
    tools = data.draw(st.sampled_from([TOOLS, ()]))
    whole = run(dialect, [text], prompt, tools)
    want = answer(without_ids(whole))
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=12))
    for cut in (list(text), pieces(text, cuts)):
        assert answer(without_ids(run(dialect, cut, prompt, tools))) == want
    starts = "".join(delta.id for delta in whole if isinstance(delta, ToolStart))
    said = want.content + want.reasoning + starts + "".join(name + args for name, args in want.calls)
    for word in {part for part in parts if part.startswith("w") and len(part) == 4}:
        # In some formats there is text which only describes a call: a header, a type before the name,
        # attributes of a tag.
        assert word in said or dialect.tool_format in ("harmony", "deepseek", "minimax", "dsml")


TEMPLATES = {
    "<tool_call></tool_call> <think>": ("hermes", "think"),
    "<tool_call> <function=x> <parameter=": ("qwen-xml", "none"),
    "<tool_call> <arg_key> </think>": ("glm", "think"),
    "<minimax:tool_call> <invoke> <think>": ("minimax", "think"),
    "<｜tool▁calls▁begin｜>": ("deepseek", "none"),
    "<｜DSML｜function_calls>": ("dsml", "none"),
    "<|tool_calls_section_begin|>": ("kimi", "none"),
    "[TOOL_CALLS] [THINK]": ("mistral", "mistral"),
    "<|start_header_id|> tools <|python_tag|>": ("llama", "none"),
    '<|header_start|> tools "parameters"': ("llama", "none"),
    "<|start|>assistant<|channel|>final<|message|>": ("harmony", "harmony"),
    "{{ messages }}": ("none", "none"),
    "": ("none", "none"),
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_chosen_by_the_template(template: str) -> None:
    dialect = choose(template)
    assert (dialect.tool_format, dialect.reasoning_format) == TEMPLATES[template]
    assert dialect.tools == (dialect.tool_format != "none")


def test_chosen_by_name() -> None:
    assert choose("<tool_call>", "none", "think") == Dialect("none", "think")
    for tool in TOOL_FORMATS:
        assert choose("", tool).tool_format == tool
    with pytest.raises(InputError, match="--tool-format xml: must be one of auto, none, hermes"):
        choose("", "xml")
    with pytest.raises(InputError, match="--reasoning-format r1"):
        choose("", "auto", "r1")
    with pytest.raises(InputError, match="harmony"):
        choose("", "harmony", "think")
    assert set(REASONING_FORMATS) == {"none", "think", "mistral", "harmony"}
