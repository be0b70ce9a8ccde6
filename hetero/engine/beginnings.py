"""Where within a prompt the state of a sequence is kept, for models whose states cannot be cut.

Another prompt profits from a state only if it begins with all tokens that the state has seen. So states are
kept where prompts are likely to part: where this one parted from an earlier one (a system prompt that many
share), and shortly before the end of the prompt, since templates change what they put in front of an answer
once it is part of a conversation. What was read and answered as a whole is kept at the end in any case. Where
memory is to spare, some places within a long prompt are kept too, for a second prompt that nobody has seen.
"""

from __future__ import annotations

from hetero.kv.prefix import BLOCK

NEAR = BLOCK
"""Tokens before the end of a prompt."""

LEAST = 4 * BLOCK
"""Tokens that a state must save a reader."""

SPACING, PLACES = 4096, 4
"""Tokens between places within a long prompt, at least, and how many there are, at most."""


def near(size: int, fork: int) -> int:
    """The place shortly before the end of a prompt of ``size`` tokens, which parted from others at ``fork``
    (0: from none); 0: that is as good."""
    place = size - NEAR
    return place if place - fork >= NEAR else 0


def places(size: int, fork: int, known: int) -> dict[int, bool]:
    """Places in a prompt of ``size`` tokens, of which ``known`` were not read anew -> whether they are kept
    only where memory is to spare."""
    every = max(-(-size // (PLACES * SPACING)), 1) * SPACING
    found = dict.fromkeys(range(every, size - every // 2, every), True)
    found |= dict.fromkeys((fork, near(size, fork)), False)
    return {at: spare for at, spare in sorted(found.items()) if known + LEAST <= at < size}
