"""What many conversations begin with: the same instructions and tools, before anybody has said anything."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from hetero.core import InputError
from hetero.model.tokenizer import Tokenizer
from hetero.server.chat_protocol import Message, Tool
from hetero.server.prompts import conversation

REMEMBERED = 16
_INSTRUCTIONS = ("system", "developer")
_ANY = Message(role="user", content="x")


class Openings:
    """Prompts of conversations that begin as others do and go on otherwise; the last few are remembered,
    since long instructions take the template and the tokenizer a while. From any thread."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, tuple[int, ...]] = OrderedDict()
        self._lock = threading.Lock()

    def of(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        variables: Mapping[str, Any],
    ) -> tuple[int, ...]:
        """Tokens of such a prompt; empty where there are neither instructions nor tools, or the template
        cannot do without what follows them."""
        leading = list(takewhile(lambda message: message.role in _INSTRUCTIONS, messages))
        if not leading and not tools:
            return ()
        key = repr((leading, list(tools), sorted(variables.items(), key=lambda item: item[0])))
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
                return self._known[key]
        try:
            text = conversation(tokenizer, [*leading, _ANY], tools, variables)
            tokens = tuple(tokenizer.encode_rendered(text))
        except InputError:
            tokens = ()
        with self._lock:
            self._known[key] = tokens
            while len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        return tokens
