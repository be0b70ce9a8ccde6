"""Text from tokens, one token at a time, that never shows half a character."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
# A character has at most four bytes, so four tokens at the end may still become one.
_UNDECIDED = 4


class Detokenizer(Protocol):
    """Turns the tokens of one answer into text; the pieces joined are the text of the answer."""

    def feed(self, token: int) -> str:
        """Text that this token makes certain; empty while a character is incomplete."""

    def finish(self) -> str:
        """Text still held at the end. An incomplete character is dropped."""


def unicode_bytes() -> dict[str, int]:
    """Character -> byte of byte-level vocabularies: printable Latin-1 is itself, the rest from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return table


class ByteDetokenizer:
    """For byte-level vocabularies: each token is a string of bytes, decoded as they come."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        return self._decoder.decode(self._bytes(token))

    def finish(self) -> str:
        return ""


class TextDetokenizer:
    """For every other vocabulary: decodes a short window again with each token and shows what has grown.

    ``decode`` takes token ids to text and may render an incomplete character as U+FFFD.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], genuine: Sequence[int] = ()) -> None:
        """``genuine``: the tokens of a U+FFFD that a model means, which is not dropped at the end."""
        self._decode = decode
        self._genuine = list(genuine)
        # Tokens whose text has been shown stay in the window while they may change how the next begins (a
        # leading space); after them come those that are not shown yet.
        self._shown: list[int] = []
        self._waiting: list[int] = []

    def feed(self, token: int) -> str:
        self._waiting.append(token)
        text = self._grown(self._waiting)
        if text and not text.endswith(REPLACEMENT):
            return self._show(len(self._waiting), text)
        if len(self._waiting) > 2 * _UNDECIDED:
            # Not one character any more but bytes that will never be one: let go of all that are decided.
            count = len(self._waiting) - _UNDECIDED
            return self._show(count, self._grown(self._waiting[:count]))
        return ""

    def finish(self) -> str:
        text = self._grown(self._waiting)
        size = len(self._genuine)
        if not (size and self._waiting[-size:] == self._genuine):
            text = text.rstrip(REPLACEMENT)
        self._waiting = []
        return text

    def _grown(self, tokens: list[int]) -> str:
        before = self._decode(self._shown) if self._shown else ""
        return self._decode([*self._shown, *tokens])[len(before) :]

    def _show(self, count: int, text: str) -> str:
        self._shown, self._waiting = self._waiting[:count], self._waiting[count:]
        return text


class VisibleDetokenizer:
    """Shows some special tokens as their literal text; all others go through a detokenizer of their own run.

    A special token is never inside a character, so what was incomplete before it is dropped.
    """

    def __init__(self, make: Callable[[], Detokenizer], shown: Mapping[int, str]) -> None:
        """``shown``: text of each token that ``make``'s detokenizers would leave out."""
        self._make = make
        self._shown = shown
        self._inner = make()

    def feed(self, token: int) -> str:
        text = self._shown.get(token)
        if text is None:
            return self._inner.feed(token)
        before, self._inner = self._inner.finish(), self._make()
        return before + text

    def finish(self) -> str:
        return self._inner.finish()
