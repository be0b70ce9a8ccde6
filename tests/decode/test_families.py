"""Steps and prefills of whole tiny models against transformers' own forward of the same weights."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from tests.decode.tiny import DEVICE, decoder_of, error, prefill, reference, step, tiny, tokens_of

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
FAMILIES = {
    "qwen3_moe": {"num_hidden_layers": 2, "mlp_only_layers": [1]},
    "qwen3_next": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    "qwen3_5_moe_text": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
}
LIMIT = 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_and_prefills(family: str, generator: torch.Generator) -> None:
    """A prompt in pieces, then steps beside another sequence that began with steps and an idle row."""
    model = tiny(family, generator, **FAMILIES[family])
    decoder = decoder_of(model)
    first, second = tokens_of(84, generator), tokens_of(5, generator)
    wanted = reference(model, first), reference(model, second)
    for begin, end in ((0, 1), (1, 2), (2, 70), (70, 79)):
        logits = prefill(decoder, first[begin:end], 2, begin)
        assert error(logits, wanted[0][end - 1]) < LIMIT, end
    inputs = decoder.inputs(3)
    for time in range(5):
        rows = [(int(second[time]), 0, time), (0, -1, 0), (int(first[79 + time]), 2, 79 + time)]
        logits = step(decoder, inputs, rows)
        assert error(logits[0], wanted[1][time]) < LIMIT
        assert error(logits[2], wanted[0][79 + time]) < LIMIT

    # The slot is used again, in one piece.
    decoder.clear(2)
    assert error(prefill(decoder, first[:84], 2), wanted[0][83]) < LIMIT
    decoder.clear(0)
    for time in range(2):
        logits = step(decoder, decoder.inputs(1), [(int(second[time]), 0, time)])
        assert error(logits[0], wanted[1][time]) < LIMIT
