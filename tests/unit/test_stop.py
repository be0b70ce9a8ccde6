"""Stop strings: the same cut for every way of splitting the text."""

from __future__ import annotations

import random

import pytest

from hetero.core import InputError
from hetero.engine.stop import StopMatcher


def run(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    out = "".join(matcher.feed(piece) for piece in pieces)
    return out + matcher.finish(), matcher.matched


def splits(text: str, random_: random.Random) -> list[str]:
    cuts = sorted(random_.sample(range(1, len(text)), k=random_.randint(0, min(6, len(text) - 1))))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize(
    ("stops", "text", "want", "matched"),
    [
        (["END"], "one END two", "one ", "END"),
        (["END"], "one EN", "one EN", None),
        (["\n\n"], "a\nb\n\nc", "a\nb", "\n\n"),
        (["aab"], "aaab", "a", "aab"),
        (["ab", "xabc"], "xabc", "x", "ab"),
        (["b", "ab"], "cab", "c", "ab"),
        (["🙂x"], "a🙂🙂xb", "a🙂", "🙂x"),
        ([], "anything", "anything", None),
        (["whole"], "whole", "", "whole"),
    ],
)
def test_cut_does_not_depend_on_the_split(
    stops: list[str], text: str, want: str, matched: str | None
) -> None:
    random_ = random.Random(7)
    for pieces in [[text], list(text), *(splits(text, random_) for _ in range(50) if len(text) > 1)]:
        assert run(stops, pieces) == (want, matched)


def test_random_texts_agree_with_one_character_at_a_time() -> None:
    random_ = random.Random(11)
    for _ in range(500):
        text = "".join(random_.choice("ab\n") for _ in range(random_.randint(2, 25)))
        stops = ["".join(random_.choice("ab\n") for _ in range(random_.randint(1, 4))) for _ in range(3)]
        ends = [(text.find(s) + len(s), text.find(s)) for s in stops if s in text]
        want = text[: min(ends)[1]] if ends else text
        assert run(stops, list(text))[0] == want
        assert run(stops, splits(text, random_))[0] == want


def test_nothing_of_a_stop_string_is_shown_early() -> None:
    matcher = StopMatcher(["STOP"])
    assert matcher.feed("abcST") == "abc"
    assert matcher.feed("O") == ""
    assert matcher.feed("X") == "STOX"
    assert matcher.feed("STOP and more") == ""
    assert matcher.matched == "STOP"
    assert matcher.feed("later") == ""
    assert matcher.finish() == ""


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(InputError, match="empty"):
        StopMatcher(["a", ""])
