"""Several sequences in one pass, and copies of their caches, against a sequence alone: every MoE type."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from hetero.engine.forward import Sequence, Stepper
from hetero.model.caches import copied, cuttable
from hetero.model.moe_types import APART
from hetero.model.rows import RowsModel, takes_rows
from tests.model.parity import load_ours, prompt, relative, save_tiny
from tests.model.quiet import quiet  # noqa: F401  a fixture of every test here
from tests.model.test_parity import TOLERANCE, WORKING
from tests.model.tiny import tiny
from tests.model.tiny_moe import SIZES

# Shorter and longer than every window of the tiny models.
PROMPTS = [prompt(1)[0].tolist()[:5], prompt(2)[0].tolist(), prompt(3)[0].tolist() + prompt(4)[0].tolist()]
NEXT = [[5, 6, 7, 8], [9, 10, 11, 12], [33, 34, 35, 36]]


def begun(stepper: Stepper, tokens: list[int]) -> Sequence:
    sequence = stepper.start()
    sequence.advance(tokens)
    return sequence


@pytest.mark.parametrize("model_type", WORKING)
def test_rows_are_sequences_alone(model_type: str, tmp_path: Path) -> None:
    save_tiny(model_type, tmp_path)
    model = load_ours(tmp_path)
    assert takes_rows(model) == (model_type not in APART)
    with torch.inference_mode():
        stepper = Stepper(model)
        alone = [begun(stepper, tokens) for tokens in PROMPTS]
        want = [
            torch.stack([sequence.advance([token]) for token in tokens])
            for sequence, tokens in zip(alone, NEXT, strict=True)
        ]
    if model_type in APART:  # it refuses such rows, or takes their positions for one another's
        with suppress(RuntimeError, ValueError):
            got = stepped(model)
            assert max(relative(got[:, row], want[row]) for row in range(len(PROMPTS))) > TOLERANCE
        return
    got = stepped(model)
    for row in range(len(PROMPTS)):
        assert relative(got[:, row], want[row]) < TOLERANCE, row
    assert relative(got[:, 0], want[1]) > 0.01, "rows so alike prove nothing"


@torch.inference_mode()
def stepped(model: torch.nn.Module) -> torch.Tensor:
    """Logits [steps, rows, V] of all sequences together."""
    stepper = Stepper(model)
    sequences = [begun(stepper, tokens) for tokens in PROMPTS]
    rows = RowsModel(model)
    try:
        return torch.stack(
            [
                rows.step(
                    [tokens[step] for tokens in NEXT],
                    [len(tokens) + step for tokens in PROMPTS],
                    [sequence.cache for sequence in sequences],
                    use_cache=True,
                )
                for step in range(len(NEXT[0]))
            ]
        )
    finally:
        rows.release()


@pytest.mark.parametrize("model_type", WORKING)
@torch.inference_mode()
def test_a_copy_goes_its_own_way(model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Sparse attention would choose among keys that score alike, where rounding decides.
    monkeypatch.setitem(SIZES, "index_topk", 64)
    save_tiny(model_type, tmp_path)
    stepper = Stepper(load_ours(tmp_path))
    first = begun(stepper, PROMPTS[2])
    cuts = [0, 7] if first.cuttable else [0]
    copies = []
    for cut in cuts:
        copies.append(stepper.start())
        copies[-1].begin(first.cache, first.length, first.length - cut)
    first.advance([50])
    first.advance([51])
    for cut, copy in zip(cuts, copies, strict=True):
        fresh = begun(stepper, PROMPTS[2][: len(PROMPTS[2]) - cut])
        assert copy.length == fresh.length
        for token in NEXT[0]:
            assert relative(copy.advance([token])[None], fresh.advance([token])[None]) < TOLERANCE


def test_what_can_be_cut() -> None:
    """Attention over all tokens, and nothing with a window or a recurrence in it."""
    found = {}
    for family in ("qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next", "lfm2_moe"):
        with torch.inference_mode():
            found[family] = begun(Stepper(tiny(family)), PROMPTS[1]).cuttable
    assert found == {
        "qwen3_moe": True,
        "deepseek_v3": True,
        "gpt_oss": False,
        "qwen3_next": False,
        "lfm2_moe": False,
    }


def test_a_cut_copy_holds_no_more_than_it_shows() -> None:
    cache = DynamicCache()
    cache.update(torch.ones(1, 2, 100, 4), torch.ones(1, 2, 100, 4), 0)
    assert cuttable(cache)
    twin = copied(cache, 90)
    assert twin.layers[0].keys.shape[-2] == 10
    assert twin.layers[0].keys.untyped_storage().nbytes() == 10 * 2 * 4 * 4
    assert cache.layers[0].keys.shape[-2] == 100


def test_the_model_is_given_back() -> None:
    model = tiny("qwen3_next")
    forwards = [module.forward for module in model.modules()]
    rows = RowsModel(model)
    assert [module.forward for module in model.modules()] != forwards
    rows.release()
    assert [module.forward for module in model.modules()] == forwards
