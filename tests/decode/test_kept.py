"""Sequences of whole tiny models that begin from what others have left, against sequences alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from hetero.decode import turns
from hetero.engine.gpu.pages import settled
from hetero.engine.gpu.runner import GpuRunner
from hetero.engine.gpu.stepper import SlotSequence, SlotStepper
from tests.decode.tiny import DEVICE, decoder_of, error, reference, tiny, tokens_of

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_hidden_layers": 1, "mlp_only_layers": []},
    "qwen3_next": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    "qwen4_exp_text": {
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "indexed_attention"],
        "ple_layer_ids": [1],
        "hc_count": 2,
        "indexer_n_heads": 6,
        "indexer_budget": 6,
        "indexer_compress_ratio": 3,
    },
}
LIMIT = 1e-4
# Within a page, and within a block of the indexer's, whose first token is the last of the page before.
AT = 17


def read(sequence: SlotSequence, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        got: Any = sequence.advance(tokens)
        return got.logits.clone() if hasattr(got, "logits") else got.clone()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # idle rows hold anything, which may overflow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_beginning_of_another(
    family: str, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sequences go on from a place within a third one's prompt, which goes on by itself meanwhile; and
    one from where that has come to. All pages that nobody has written hold what is no number. Halves of
    prompts take turns; the place is in the second."""
    monkeypatch.setattr(turns, "ALIGNED", 8)
    model = tiny(family, generator, **FAMILIES[family])
    decoder = decoder_of(model, slots=4, context=64)
    decoder.turns = True
    for part in decoder.paged:
        part.fill_(float("nan"))
    runner = GpuRunner(decoder, [], handoff=None, slots=4, context=64, rows=(1,), chunk=64)
    stepper = SlotStepper(runner)
    first, second, third = (tokens_of(count, generator).tolist() for count in (22, 6, 5))
    one = stepper.start()
    if not one.cuttable:
        one.mark(AT)
    whole = read(one, first)
    ((at, kept),) = one.marked() or [(AT, one.kept())]
    assert at == AT
    # Its state goes on, and the page that is shared is written behind what is kept.
    stepped = read(one, [5])
    later = one.kept()
    assert later is not None
    other, again = stepper.start(), stepper.start()
    other.begin(kept, len(first), AT)
    assert other.length == AT
    got = read(other, second)
    again.begin(kept, len(first), AT)
    mine = read(again, third)
    assert runner.pages.in_slots == 2 + 2 * (2 - settled(AT, decoder.grain))
    kept.close()
    one.close()
    last = stepper.start()
    last.begin(later, 23, 23)
    more = read(last, [7, 8])
    sequences = [
        (first, whole),
        ([*first, 5], stepped),
        ([*first[:AT], *second], got),
        ([*first[:AT], *third], mine),
        ([*first, 5, 7, 8], more),
    ]
    for tokens, logits in sequences:
        want = reference(model, torch.tensor(tokens, device=DEVICE))[-1]
        assert error(logits, want) < LIMIT
        assert int(logits.argmax()) == int(want.argmax())
    later.close()
    for sequence in (other, again, last):
        sequence.close()
    assert runner.pages.free == runner.pages.total


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen4_exp_text"])
def test_logits_of_all_tokens(family: str, generator: torch.Generator) -> None:
    """In two pieces, the second of which begins from a page that is not full; more than a step's rows."""
    model = tiny(family, generator, **FAMILIES[family])
    runner = GpuRunner(
        decoder_of(model, slots=1, context=64), [], handoff=None, slots=1, context=64, rows=(1,), chunk=18
    )
    tokens = tokens_of(25, generator)
    rows: list[torch.Tensor] = []

    def take(index: int, logits: torch.Tensor) -> None:
        assert index == sum(len(part) for part in rows)
        rows.append(logits.clone())

    with torch.inference_mode():
        last = SlotStepper(runner).start().advance_each(tokens.tolist(), take)
    got = torch.cat(rows)
    assert error(got, reference(model, tokens)) < LIMIT
    assert torch.equal(last, got[-1])
