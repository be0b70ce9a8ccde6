"""N-gram embeddings of fused steps from a table on disk: the same values, and what is expected is read."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from hetero.decode.decoder import Decoder
from hetero.decode.ple import NgramTable
from hetero.model.tables import StoredTable
from hetero.ops.embedding import HostEmbedding
from hetero.store.rows import Run
from tests.decode.tiny import DEVICE, decoder_of, direct_experts, prefill, tiny, tokens_of

SIZES = {"num_hidden_layers": 1, "layer_types": ["linear_attention"], "ple_layer_ids": [1], "hc_count": 2}
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []


def on_disk(model: Any, folder: Path, ram: int) -> Any:
    """A copy of a model whose tables are in files."""
    copied = deepcopy(model)
    for name, module in list(copied.named_modules()):
        if not name.endswith(".ngram_embedding"):
            continue
        weight = module.weight.detach().cpu()
        path = folder / f"{name}.bin"
        path.write_bytes(weight.contiguous().view(torch.uint8).numpy().tobytes())
        run = Run(path, name, 0, len(weight))
        stored = StoredTable((run,), weight.shape[1] * 4, "F32", weight.shape[1])
        owner = copied.get_submodule(name.rpartition(".")[0])
        owner.ngram_embedding = HostEmbedding(module, stored, ram=ram)
    return copied


def test_prompts_and_steps_from_disk(generator: torch.Generator, tmp_path: Path) -> None:
    """Logits of a prompt, and what steps are given, to the bit."""
    model = tiny("qwen4_exp_text", generator, **SIZES)
    ram = decoder_of(model, slots=1, context=64)
    copied = on_disk(model, tmp_path, 1 << 20)
    disk = Decoder(copied, direct_experts(copied), slots=1, context=64, device=DEVICE, kv_dtype=torch.float32)
    tokens = tokens_of(12, generator)
    row = tokens.tolist()
    disk.expect([], row[:7])
    assert torch.equal(prefill(disk, tokens[:7], 0), prefill(ram, tokens[:7], 0))
    disk.expect(row[:7], row[7:])
    assert torch.equal(prefill(disk, tokens[7:], 0, 7), prefill(ram, tokens[7:], 0, 7))
    rows = [row[: at + 1] for at in range(12)]
    want, got = ram.gather(rows), disk.gather(rows)
    assert want is not None
    assert got is not None
    assert torch.equal(got, want)
    out = torch.full((14, want.shape[1]), float("nan"), dtype=want.dtype)
    for decoder in (ram, disk):
        assert decoder.gather(rows, out[1:13]) is not None
        assert torch.equal(out[1:13], want)
        assert bool(out[[0, 13]].isnan().all())
        out.fill_(float("nan"))


def test_what_a_prompt_will_need_is_read_before(generator: torch.Generator, tmp_path: Path) -> None:
    model = tiny("qwen4_exp_text", generator, **SIZES)
    copied = on_disk(model, tmp_path, 1 << 20)
    module = copied.model.layers[0].ple.ple_embedding
    table, rows = NgramTable(module), module.ngram_embedding.rows
    tokens = tokens_of(9, generator).tolist()
    reading = table.expect(tokens[:3], tokens[3:])
    assert reading is not None
    reading.result()
    assert rows.reads.nbytes > 0
    table.gather(table.windows(tokens[:3], tokens[3:]))
    assert rows.reads.cache.hits > 0
    assert rows.reads.cache.misses == 0
    assert NgramTable(model.model.layers[0].ple.ple_embedding).expect([], tokens) is None
