"""Official clients of a server, and models whose answers are written in advance."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anthropic
import openai

from tests.server.serving import END, Served, serving, tokenizer

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
# A model that writes Hermes calls and thinks when it likes to; it sees its tools and what came back.
TEMPLATE = (
    "{# <tool_call> <think> #}{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "<|end|>{% endfor %}<|start|>assistant\n{% if enable_thinking is false %}quick{% endif %}"
)


def call(city: str, days: int = 1) -> str:
    return (
        '<tool_call>\n{"name": "get_weather", "arguments": '
        f'{{"city": "{city}", "days": {days}}}}}\n</tool_call>'
    )


@contextmanager
def model(template: str = TEMPLATE, **engine: Any) -> Iterator[Served]:
    with serving(tokenizer(template), frozenset({END}), **engine) as running:
        yield running


def anthropic_client(served: Served, **more: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(
        **{"base_url": str(served.client.base_url), "api_key": "none", "max_retries": 0} | more
    )


def openai_client(served: Served, **more: Any) -> openai.OpenAI:
    base = f"{served.client.base_url}".rstrip("/") + "/v1"
    return openai.OpenAI(**{"base_url": base, "api_key": "none", "max_retries": 0} | more)
