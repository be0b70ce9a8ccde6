"""How much text one token can stand for, so that a text can be known to be too long without reading it."""

from __future__ import annotations

import json
from typing import Any

# Steps that neither remove text nor make it shorter. NFC can: up to four characters become one.
_KEEP = frozenset({"ByteLevel", "Metaspace", "Digits", "Punctuation", "Split", "UnicodeScripts"})
_COMPOSED = 4


def longest_token(tokenizer: str) -> int | None:
    """Most characters of a text that one token of a tokenizer.json stands for; None: there may be no bound.

    That is so where a step removes text, where unknown characters vanish or become one token together,
    and where a special token takes the space around it.
    """
    data = json.loads(tokenizer)
    model = data["model"]
    normalisers = _steps(data.get("normalizer"), "normalizers")
    splitters = _steps(data.get("pre_tokenizer"), "pretokenizers")
    shrinks = 1
    for step in normalisers:
        if step["type"] == "NFC":
            shrinks *= _COMPOSED
        elif not (step["type"] == "Prepend" or _grows(step)):
            return None
    for step in splitters:
        if step["type"] not in _KEEP or step.get("behavior", "Isolated") == "Removed":
            return None
    if model.get("type") != "BPE" or not _knows_all(model, splitters):
        return None
    added = data.get("added_tokens") or []
    if any(token.get("lstrip") or token.get("rstrip") for token in added):
        return None
    longest = max(map(len, (*model["vocab"], *(token["content"] for token in added))), default=0)
    return longest * shrinks if longest else None


def _steps(step: Any, plural: str) -> list[dict[str, Any]]:
    """One step, or those of a sequence."""
    if step is None:
        return []
    if step["type"] == "Sequence":
        return [each for part in step[plural] for each in _steps(part, plural)]
    return [step]


def _grows(step: dict[str, Any]) -> bool:
    """Whether a replacement is at least as long as what it replaces."""
    wanted = step.get("pattern", {}).get("String")
    return step["type"] == "Replace" and wanted is not None and len(step["content"]) >= len(wanted)


def _knows_all(model: dict[str, Any], splitters: list[dict[str, Any]]) -> bool:
    """Whether every byte has a token, so that nothing is unknown. A token's text then has a character for
    each of its bytes, or a name of six for one: never fewer than the text that it stands for."""
    vocabulary = model["vocab"]
    if any(step["type"] == "ByteLevel" for step in splitters):
        return sum(len(token) == 1 for token in vocabulary) >= 256
    return bool(model.get("byte_fallback")) and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
