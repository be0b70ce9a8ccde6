"""A tiny model of qwen4_exp with every kind of layer, beyond its indexer's budget, against transformers."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from hetero.decode import hyper, indexer, ple
from hetero.ops.gpu import fused, overlap
from tests.decode.tiny import DEVICE, decoder_of, error, prefill, reference, step, tiny, tokens_of

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
SIZES = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
    "hc_count": 2,
    "indexer_n_heads": 6,
    "indexer_budget": 6,
    "indexer_compress_ratio": 3,
}
EOS, LIMIT = 2, 1e-4
GREEDY = 16 if DEVICE == "cuda" else 4  # the interpreter takes a second for each


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # idle rows hold anything, which may overflow
def test_prefills_and_greedy_steps(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt in pieces, then greedy tokens, half of them beside another sequence; a slot used again."""
    model = tiny("qwen4_exp_text", generator, **SIZES)
    decoder = decoder_of(model, slots=2, context=64)
    none, half = (decoder_of(model, slots=2, context=64, pages=count).state_bytes for count in (0, 4))
    # Keys and values, and those of the indexer, are as many as there are pages.
    assert decoder.state_bytes - half == half - none > 0
    first, second = tokens_of(19, generator), tokens_of(12, generator)
    first[[0, 5, 7, 12]] = EOS  # n-grams end there
    second[2] = EOS
    wanted = reference(model, first), reference(model, second)
    # Within the budget, across its end, and behind it.
    for begin, end in ((0, 1), (1, 4), (4, 13), (13, 19)):
        logits = prefill(decoder, first[begin:end], 1, begin)
        assert error(logits, wanted[0][end - 1]) < LIMIT, end
    made, seen = first.tolist(), [logits]
    inputs = decoder.inputs(2)
    for at in range(GREEDY):
        made.append(int(seen[-1].argmax()))
        other = at - GREEDY // 2
        assert inputs.ple is not None
        decoder.gather([second[: max(other, 0) + 1].tolist(), made], inputs.ple)
        beside = (int(second[other]), 0, other) if other >= 0 else (0, -1, 0)
        rows = step(decoder, inputs, [beside, (made[-1], 1, len(made) - 1)])
        seen.append(rows[1])
        if other >= 0:
            assert error(rows[0], wanted[1][other]) < LIMIT
    whole = reference(model, torch.tensor(made, device=DEVICE))[18:]
    assert error(torch.stack(seen), whole) < LIMIT
    assert [int(row.argmax()) for row in seen] == whole.argmax(1).tolist()
    decoder.clear(1)
    # What is computed a number of rows at a time.
    monkeypatch.setattr(hyper, "_ROWS", 5)
    monkeypatch.setattr(indexer, "_QUERIES", 3)
    monkeypatch.setattr(ple, "_ROWS", 7)
    assert error(prefill(decoder, second, 1), wanted[1][-1]) < LIMIT


def test_what_follows_the_copy_of_embeddings_waits_for_it(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = SIZES | {"num_hidden_layers": 1, "layer_types": ["linear_attention"], "ple_layer_ids": [1]}
    decoder = decoder_of(tiny("qwen4_exp_text", generator, **sizes), slots=1, context=16)
    told: list[bool | None] = []

    def launched(device: Any) -> dict[str, Any]:
        told.append(overlap.enabled())
        return overlap.overlap(device)

    monkeypatch.setattr(fused, "overlap", launched)
    decoder.step(replace(decoder.inputs(1), await_ple=lambda: told.append(None)))
    assert told.count(None) == 1
    after = told.index(None) + 1
    assert told[after] is False
    assert all(told[after + 1 :])
    assert overlap.enabled()


def test_only_the_thread_that_asked_launches_in_turn() -> None:
    others: list[bool] = []
    with overlap.in_turn():
        thread = threading.Thread(target=lambda: others.append(overlap.enabled()))
        thread.start()
        thread.join()
        assert not overlap.enabled()
    assert others == [True]
