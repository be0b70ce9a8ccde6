"""From messages and tools to the text that the model reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hetero.core import InputError
from hetero.model.tokenizer import Tokenizer
from hetero.server.chat_protocol import Message, Tool


def conversation(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Sequence[Tool] = (),
    variables: Mapping[str, Any] | None = None,
) -> str:
    """What the chat template makes of them. Raises InputError as ``Tokenizer.render``."""
    offered = [tool.plain() for tool in tools]
    try:
        return tokenizer.render([message.plain() for message in messages], offered, variables)
    except InputError as error:
        if not any(message.tool_calls for message in messages):
            raise
        # A few templates (DeepSeek's) join the arguments of a call to their text, and fail on an object.
        try:
            as_text = [message.plain(text_arguments=True) for message in messages]
            return tokenizer.render(as_text, offered, variables)
        except InputError:
            raise error from None
