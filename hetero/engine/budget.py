"""How many tokens of keys and values there may be, and whether the machine's memory holds them."""

from __future__ import annotations

from hetero.core import InputError, MachineError
from hetero.hw import memory
from hetero.kv.prefix import BLOCK, blocks

# Tokens for each slot when nothing says how much memory there is; a context beyond is the rare case.
TOKENS_PER_SLOT = 32768


def tokens(given: int | None, slots: int, context: int | None) -> int:
    """Of all requests together, in whole blocks: as ``given``, else a whole context a slot within reason.

    Raises InputError for less than a block.
    """
    if given is not None:
        if given < BLOCK:
            raise InputError(f"kv_tokens={given}: must be at least {BLOCK}")
        return given // BLOCK * BLOCK
    each = TOKENS_PER_SLOT if context is None else context
    return blocks(max(each, slots * min(each, TOKENS_PER_SLOT)))


def answer(total: int, size: int, limit: int) -> int:
    """Tokens that may follow a prompt of ``size`` tokens: ``limit``, or what room for ``total`` leaves.

    Raises InputError where the prompt alone does not fit.
    """
    room = total - size
    if room < min(limit, 1):
        raise InputError(
            f"the prompt has {size} tokens and the memory for keys and values holds {total}, "
            "so it can never run: shorten it, or give the engine more (kv_tokens)"
        )
    return min(limit, room)


def shortage(total: int, held: int, held_bytes: int) -> str | None:
    """What to tell a person when memory does not hold ``total`` tokens; None when it does, or nothing tells.

    ``held_bytes``: what the ``held`` tokens of a sequence take in the machine's memory, from which the rest
    is known exactly where attention is over all tokens.
    """
    try:
        have = memory.available()
    except MachineError:
        return None
    each = held_bytes / held
    wanted = int(each * (total - held))
    if wanted <= have.bytes:
        return None
    fits = int(have.bytes / each) // BLOCK * BLOCK
    return (
        f"{total} tokens of keys and values would take {memory.gib(wanted)} more, {memory.gib(have.bytes)} "
        f"is available ({have.limit}): --kv-tokens {fits} fits"
    )
