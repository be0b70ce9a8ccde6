"""Steps and prefills of whole tiny models against transformers' own forward of the same weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from hetero.core import InputError
from hetero.formats import Format
from hetero.quant.pack import dequantise, quantise
from tests.decode.tiny import (
    DEVICE,
    decoder_of,
    error,
    packed_copy,
    prefill,
    reference,
    step,
    tiny,
    tokens_of,
)

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
MIXED = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_hidden_layers": 2, "mlp_only_layers": [1]},
    "qwen3_next": MIXED,
    "qwen3_5_moe_text": MIXED,
}
LIMIT = 1e-4
FP8 = Format("fp8", 128)


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_and_prefills(family: str, generator: torch.Generator) -> None:
    """A prompt in pieces, then greedy steps beside another sequence, which began with steps, and an idle
    row; then the slots once more."""
    model = tiny(family, generator, **FAMILIES[family])
    decoder = decoder_of(model)
    prompt, other = tokens_of(21, generator), tokens_of(3, generator)
    wanted = reference(model, prompt)
    for begin, end in ((0, 1), (1, 18), (18, 21)):
        logits = prefill(decoder, prompt[begin:end], 2, begin)
        assert error(logits, wanted[end - 1]) < LIMIT, end
    got, tokens, inputs = [[], []], prompt, decoder.inputs(3)  # type: ignore[var-annotated]
    for time, token in enumerate(other.tolist()):
        tokens = torch.cat([tokens, logits.argmax()[None]])
        rows = [(token, 0, time), (0, -1, 0), (int(tokens[-1]), 2, len(tokens) - 1)]
        out = step(decoder, inputs, rows)
        logits = out[2]
        got[0].append(out[0])
        got[1].append(out[2])
    for sequence, ours in ((other, got[0]), (tokens, got[1])):
        assert error(torch.stack(ours), reference(model, sequence)[-3:]) < LIMIT

    decoder.clear(2)
    assert error(prefill(decoder, prompt, 2), wanted[-1]) < LIMIT
    decoder.clear(0)
    logits = step(decoder, decoder.inputs(1), [(int(prompt[0]), 0, 0)])
    assert error(logits[0], wanted[0]) < LIMIT


def test_sixteen_greedy_tokens(generator: torch.Generator) -> None:
    model = tiny("qwen3_moe", generator, num_hidden_layers=1, mlp_only_layers=[])
    decoder = decoder_of(model)
    prompt = tokens_of(5, generator)
    tokens, inputs = [int(prefill(decoder, prompt, 1).argmax())], decoder.inputs(1)
    while len(tokens) < 17:
        tokens.append(int(step(decoder, inputs, [(tokens[-1], 1, len(tokens) + 4)]).argmax()))
    whole = torch.cat([prompt, torch.tensor(tokens[:-1], device=DEVICE)])
    assert tokens == reference(model, whole)[4:].argmax(1).tolist()


@pytest.mark.parametrize(("fmt", "least", "most"), [("int8", 1e-4, 0.08), ("fp8", 0.0, 0.02)])
def test_packed_layers(fmt: str, least: float, most: float, generator: torch.Generator) -> None:
    """Linear layers in 8 bits, among them some whose rows are by key heads, are those of 32 bits but for
    rounding: of fp8, which already is what weights are in, by prompts alone. Everybody goes to the same
    experts, whose choice would magnify it."""
    model = tiny("qwen3_next", generator, **MIXED)
    for module in model.modules():
        if fmt == "fp8" and type(module) is torch.nn.Linear:
            weight = module.weight.data.cpu()
            module.weight.data.copy_(dequantise(FP8, quantise(FP8, weight), *weight.shape))
    plain, packed = decoder_of(model), decoder_of(packed_copy(model, fmt))
    tokens = tokens_of(6, generator)
    for decoder in (plain, packed):
        decoder.routing = lambda layer, ids, weights: (
            ids * 0 + torch.arange(3, device=DEVICE),
            weights * 0 + 0.3,
        )
    pairs = [(prefill(packed, tokens[:5], 1), prefill(plain, tokens[:5], 1))]
    rows = [(int(tokens[5]), 1, 5), (int(tokens[0]), 0, 0)]
    pairs += zip(step(packed, packed.inputs(2), rows), step(plain, plain.inputs(2), rows), strict=True)
    for got, wanted in pairs:
        assert least <= error(got, wanted) < most


def test_choices_from_outside(generator: torch.Generator) -> None:
    """``routing`` is asked in every MoE layer, by its index among them, and what it says counts."""
    model = tiny("qwen3_moe", generator, num_hidden_layers=3, mlp_only_layers=[0])
    decoder = decoder_of(model)
    prompt, seen = tokens_of(3, generator), []

    def nobody(layer: int, ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append((layer, tuple(ids.shape)))
        return torch.full_like(ids, -1), weights

    decoder.routing = nobody
    alone = prefill(decoder, prompt, 0)
    stepped = step(decoder, decoder.inputs(1), [(int(prompt[0]), 1, 0)])
    assert seen == [(0, (3, 3)), (1, (3, 3)), (0, (1, 3)), (1, (1, 3))]
    for layer in model.model.layers[1:]:
        layer.mlp.experts.down_proj.data.zero_()
    wanted = reference(model, prompt)
    assert error(alone, wanted[-1]) < LIMIT
    assert error(stepped[0], wanted[0]) < LIMIT


def test_what_a_decoder_says_of_itself(generator: torch.Generator) -> None:
    model = tiny("qwen3_next", generator, **MIXED)
    decoder = decoder_of(model, slots=2, context=33)
    assert (decoder.layers, decoder.vocabulary, len(decoder.experts)) == (2, 40, 1)
    keys = 2 * 2 * 3 * 16 * 2 * 16 * 4  # keys and values, slots, pages, tokens, heads, dim, float32
    delta = 2 * 4 * (128 * 4 + 4 * 16 * 16)  # slots, float32, channels and taps, heads, dims
    assert decoder.state_bytes == keys + delta
    assert decoder.window == 0
    assert decoder.inputs(4).pages.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert decoder.inputs(4).ple is None


def test_refuses_what_it_does_not_know(generator: torch.Generator) -> None:
    with pytest.raises(InputError, match="layers of class MixtralDecoderLayer have no fused steps"):
        decoder_of(tiny("mixtral", generator, num_hidden_layers=1))
    model = tiny("qwen3_moe", generator, num_hidden_layers=1, mlp_only_layers=[])
    model.model.rotary_emb.rope_type = "dynamic"
    with pytest.raises(InputError, match="type 'dynamic' change with the length of a sequence"):
        decoder_of(model)
