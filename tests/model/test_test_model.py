"""The shipped test model: its card's figure through our kernels, and its router."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from transformers import AutoTokenizer

from hetero import cpu
from hetero.engine.load import load_model
from hetero.model import demo

HELDOUT = Path(__file__).parent.parent / "data" / "heldout.txt"
MAX_BYTES = 16_000_000


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def card() -> str:
    return (demo.TEST_MODEL / "README.md").read_text(encoding="utf-8")


def card_figure() -> float:
    match = re.search(r"^Held-out bits per byte: ([\d.]+)$", card(), re.MULTILINE)
    assert match is not None, "the card does not state the held-out bits per byte"
    return float(match[1])


def windows(ids: list[int], size: int) -> Iterator[torch.Tensor]:
    """The text as the card says it was measured: windows that do not overlap, [1, n] each."""
    for start in range(0, len(ids), size):
        yield torch.tensor([ids[start : start + size]])


@torch.inference_mode()
def bits_per_byte(model: torch.nn.Module) -> tuple[float, list[torch.Tensor]]:
    """(bits per byte of the held-out text, per layer how often each expert was routed to)."""
    text = HELDOUT.read_bytes()
    ids = AutoTokenizer.from_pretrained(demo.TEST_MODEL).backend_tokenizer.encode(text.decode()).ids
    counts: dict[str, torch.Tensor] = {}

    def count(name: str, experts: int) -> object:
        def hook(_module: object, _args: object, output: tuple[torch.Tensor, ...]) -> None:
            used = torch.bincount(output[2].flatten(), minlength=experts)
            counts[name] = counts.get(name, torch.zeros_like(used)) + used

        return hook

    handles = [
        module.register_forward_hook(count(name, module.num_experts))  # type: ignore[arg-type]
        for name, module in model.named_modules()
        if type(module).__name__ == "Qwen3NextTopKRouter"
    ]
    nats = 0.0
    try:
        for target in windows(ids, 512):
            # Token 0 ends a text; it leads every window, so that each token of the text is predicted once.
            given = F.pad(target[:, :-1], (1, 0), value=0)
            logits = model(input_ids=given, use_cache=False).logits
            nats += F.cross_entropy(logits[0].float(), target[0], reduction="sum").item()
    finally:
        for handle in handles:
            handle.remove()
    return nats / math.log(2) / len(text), list(counts.values())


@pytest.mark.parametrize(
    ("experts", "tolerance"), [("f32", 1e-4), ("bf16", 1e-3), ("int8", 3e-3), ("int4", 2e-2)]
)
def test_heldout_figure_of_the_card(experts: str, tolerance: float) -> None:
    loaded = load_model(demo.TEST_MODEL, overrides={"experts": experts})
    cpu.reset_kernel_counts()
    bits, counts = bits_per_byte(loaded.runnable.model)
    assert bits == pytest.approx(card_figure(), rel=tolerance)
    assert {name.split(".")[0] for name in cpu.kernel_counts()} == {experts}
    # Every expert of every layer works, none less than a quarter of its even share.
    assert len(counts) == loaded.runnable.model.config.num_hidden_layers
    for layer in counts:
        assert layer.sum() > 0
        assert layer.min() > layer.sum() / len(layer) / 4


def test_wrong_experts_show_in_the_figure() -> None:
    """The comparison above must be able to fail: with one expert less the text is read worse."""
    loaded = load_model(demo.TEST_MODEL, overrides={"experts": "f32"})

    def skip_one(_module: object, _args: object, output: tuple[torch.Tensor, ...]) -> object:
        return output[0], output[1], output[2].masked_fill(output[2] == 5, -1)

    for name, module in loaded.runnable.model.named_modules():
        if name == "model.layers.1.mlp.gate":
            module.register_forward_hook(skip_one)
    bits, _ = bits_per_byte_of_part(loaded.runnable.model)
    whole = load_model(demo.TEST_MODEL, overrides={"experts": "f32"})
    want, _ = bits_per_byte_of_part(whole.runnable.model)
    assert bits > want * 1.0005


@torch.inference_mode()
def bits_per_byte_of_part(model: torch.nn.Module) -> tuple[float, int]:
    """Bits per byte of the first 2,048 tokens alone, and how many bytes they are."""
    tokenizer = AutoTokenizer.from_pretrained(demo.TEST_MODEL)
    ids = tokenizer.backend_tokenizer.encode(HELDOUT.read_text(encoding="utf-8")).ids[:2048]
    size = len(tokenizer.decode(ids).encode())
    nats = 0.0
    for target in windows(ids, 512):
        logits = model(input_ids=F.pad(target[:, :-1], (1, 0), value=0), use_cache=False).logits
        nats += F.cross_entropy(logits[0].float(), target[0], reduction="sum").item()
    return nats / math.log(2) / size, size


def test_it_fits_the_repository() -> None:
    files = [path for path in demo.TEST_MODEL.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= MAX_BYTES
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= {p.name for p in files}
    config = json.loads((demo.TEST_MODEL / "config.json").read_text())
    assert config["model_type"] == "qwen3_next"
    assert set(config["layer_types"]) == {"linear_attention", "full_attention"}
