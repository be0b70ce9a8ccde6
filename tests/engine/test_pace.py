"""How much of a prompt is read between two tokens, on machines whose costs are made up; and who is next."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.engine.pace import LEAST, Pace
from hetero.engine.queue import FairQueue


def played(
    step: float, fixed: float, each: float, steps: int = 200, most: int = 512
) -> tuple[list[int], float]:
    """Pieces read before each of ``steps`` steps of ``step`` seconds, and the seconds that reading took."""
    pace = Pace(most)
    pieces, spent = [], 0.0
    for _ in range(steps):
        piece = pace.piece()
        pieces.append(piece)
        if piece:
            seconds = fixed + each * piece
            spent += seconds
            pace.read(piece, seconds, beside=True)
        pace.made(step)
    return pieces, spent


@given(
    step=st.floats(0.001, 1),
    fixed=st.floats(0, 3),
    each=st.floats(0.0001, 0.2),
    most=st.sampled_from((7, 512)),
)
def test_reading_takes_no_longer_than_making(step: float, fixed: float, each: float, most: int) -> None:
    pieces, spent = played(step, fixed, each, most=most)
    largest = max(fixed + each * piece for piece in pieces)
    assert spent <= 200 * step + fixed + each * min(LEAST, most) + 1e-6
    assert largest <= max(step, fixed + each * min(LEAST, most)) + 1e-9
    assert sum(pieces) > 0
    assert max(pieces) <= most


def test_pieces_grow_to_what_a_step_is_worth() -> None:
    pieces, _ = played(step=0.1, fixed=0.02, each=0.0005)
    assert pieces[0] == LEAST
    assert max(pieces) == 128  # 0.084 s; 256 would take 0.148 s
    assert pieces.count(128) > 150


def test_what_takes_longer_than_a_step_is_made_up_for() -> None:
    pieces, _ = played(step=0.1, fixed=0.25, each=0.0)
    assert pieces[:7] == [LEAST, 0, 0, LEAST, 0, 0, LEAST]


def test_reading_while_nobody_waits_costs_no_credit() -> None:
    pace = Pace(512)
    pace.read(512, 9.0, beside=False)
    assert pace.piece() == LEAST


def test_the_queue() -> None:
    queue: FairQueue[str] = FairQueue()
    for item in ("a1", "a2", "b1", "a3", "c1"):
        queue.push(item[0], item)
    assert len(queue) == 5
    assert queue.peek() == "a1"
    assert [queue.pop() for _ in range(3)] == ["a1", "b1", "c1"]
    queue.push_front("c", "c1")
    assert queue.peek() == "c1"
    assert queue.remove(lambda item: item == "a2") == ["a2"]
    assert [queue.pop() for _ in range(2)] == ["c1", "a3"]
    assert not queue
    with pytest.raises(IndexError, match="empty"):
        queue.pop()
