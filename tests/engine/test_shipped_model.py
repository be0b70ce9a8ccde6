"""The trained model that the project ships, with the CPU experts in format f32: many answers at once."""

from __future__ import annotations

from hetero.engine.load import load_model
from hetero.engine.request import Request
from hetero.engine.scheduler import Scheduler
from hetero.model.demo import TEST_MODEL
from tests.engine.played import Passes, drive, solo, submit
from tests.model.quiet import quiet  # noqa: F401  a fixture of every test here

NAMES = ("Alice", "Holmes", "the White Rabbit", "Watson", "the Queen", "a policeman")


def test_readers_get_their_own_story() -> None:
    run = load_model(TEST_MODEL, overrides={"experts": "f32"}, threads=1).runnable
    assert run.tokenizer is not None
    requests = [
        Request(tuple(run.tokenizer.encode(f"{name} opened the door, and")), max_tokens=24, ignore_eos=True)
        for name in NAMES
    ]
    alone = [solo(run, request) for request in requests]
    assert len(set(alone)) == len(NAMES)
    passes = Passes(run.model)
    engine = Scheduler(run)
    listeners = [submit(engine, request) for request in requests]
    drive(engine)
    assert [listener.result().token_ids for listener in listeners] == alone
    assert max(rows for rows, _ in passes.shapes) == len(NAMES)
    for listener in listeners:
        result = listener.result()
        assert "".join(piece.text for piece in listener.pieces) + result.tail == result.text
