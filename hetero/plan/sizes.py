"""Sizes as people write them, ``24GiB``, and as plans print them."""

from __future__ import annotations

import re

from hetero.core import InputError

_UNITS = {"k": 1, "m": 2, "g": 3, "t": 4}
_SIZE = re.compile(r"\s*([0-9]{1,12}(?:\.[0-9]{1,9})?)\s*(?:([kmgt])(i?b)?|b)\s*", re.ASCII | re.IGNORECASE)
_BARE = re.compile(r"\s*[0-9.]+\s*", re.ASCII)


def parse_size(text: str, option: str) -> int:
    """``24GiB`` and ``24G`` are 24 x 2^30 bytes, ``24GB`` 24 x 10^9, ``0`` is none. Raises InputError naming
    the option."""
    if text.strip() == "0":
        return 0
    found = _SIZE.fullmatch(text)
    if found is None:
        unit = "; a unit is missing" if _BARE.fullmatch(text) else ""
        raise InputError(f"{option} {text}: is no size{unit}; write 24GiB, 24GB or 512MiB")
    number, letter, rest = float(found[1]), found[2], (found[3] or "").lower()
    if letter is None:
        return int(number)
    base = 1000 if rest == "b" else 1024
    return int(number * base ** _UNITS[letter.lower()])


def gib(count: int) -> str:
    """Bytes for people, in GiB from a tenth of one up."""
    if abs(count) >= 2**30 // 10:
        return f"{count / 2**30:.1f} GiB"
    return f"{count / 2**20:.1f} MiB"
