"""How loading goes wrong in public reports, as a user of the command meets it: output or message.

The parts that do it have tests of their own (``test_loading``, ``test_bad_checkpoints``, ``test_gguf_file``).
Here are whole files and the whole command.
"""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PretrainedConfig
from typer.testing import CliRunner

from hetero import cli
from hetero.model.build import choose_class
from hetero.model.gguf_scan import BLOCK_TYPES
from tests.model.checkpoints import edit_config, edit_tensors, write_config
from tests.model.hf_to_gguf import write as write_gguf
from tests.model.quiet import quiet  # noqa: F401  an automatic fixture
from tests.model.test_bad_input import refused
from tests.model.test_gguf_models import rewrite_without
from tests.model.tiny_moe import tiny_config, tiny_model


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread, and a cache of the test's own."""
    monkeypatch.setenv("HETERO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HETERO_THREADS", "1")


def small(**changes: Any) -> PretrainedConfig:
    """Hidden size = 2 x intermediate: of transposed experts, shapes tell nothing."""
    config = tiny_config("qwen3_moe")
    config.num_hidden_layers, config.moe_intermediate_size = 2, config.hidden_size // 2
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def tokens(model: Path, *more: str, experts: str = "f32") -> tuple[list[int], str]:
    """What a run answers, and what it says beside."""
    asked = ["run", str(model), "--prompt-ids", "5,6,7", "--max-tokens", "6", "--json", "--no-stats"]
    result = CliRunner().invoke(cli.app, [*asked, "--set", f"experts={experts}", *more])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["token_ids"], result.stderr


def reference(model: Any) -> list[int]:
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        for _ in range(6):
            ids = torch.cat((ids, model(input_ids=ids).logits[:, -1:].argmax(-1)), 1)
    return ids[0, 3:].tolist()  # type: ignore[no-any-return]


def test_packed_experts_and_single_ones_are_the_same_model(tmp_path: Path) -> None:
    want = reference(write_config(small(), tmp_path / "single"))
    write_config(small(), tmp_path / "packed", save_original_format=False)
    assert tokens(tmp_path / "single")[0] == tokens(tmp_path / "packed")[0] == want
    spare = "model.layers.0.mlp.experts.gate_up_proj"
    edit_tensors(tmp_path / "single", lambda t: t.update({spare: torch.zeros(2, 2)}))
    assert spare in refused(tmp_path / "single")


def test_either_spelling_of_the_number_of_experts(tmp_path: Path) -> None:
    want = reference(write_config(small(), tmp_path / "m"))
    for before, now in (("num_local_experts", "num_experts"), ("num_experts", "num_local_experts")):
        edit_config(tmp_path / "m", lambda c, now=now, before=before: c.update({now: c.pop(before)}))
        assert tokens(tmp_path / "m")[0] == want
    edit_config(tmp_path / "m", lambda c: c.update(num_local_experts=9))
    assert "mlp.experts" in refused(tmp_path / "m")


def test_heads(tmp_path: Path) -> None:
    tied, untied = (write_config(small(tie_word_embeddings=t), tmp_path / str(t)) for t in (True, False))
    assert tokens(tmp_path / "True")[0] == reference(tied)
    assert tokens(tmp_path / "False")[0] == reference(untied)
    edit_tensors(tmp_path / "False", lambda t: t.pop("lm_head.weight"))
    said = refused(tmp_path / "False")
    assert said.endswith("nothing in the checkpoint fills 1 parameters: lm_head.weight")
    edit_config(tmp_path / "False", lambda c: c.update(tie_word_embeddings=True))
    tokens(tmp_path / "False")


@pytest.fixture(scope="module")
def gguf_model() -> Any:
    config = small(norm_topk_prob=True)
    chosen = choose_class(config)
    return tiny_model(chosen.cls, chosen.config, seed=3)


def test_splits_tell_their_faults_apart(gguf_model: Any, tmp_path: Path) -> None:
    want = reference(gguf_model)
    write_gguf(gguf_model, tmp_path / "m.gguf", "qwen3moe", split=12)
    parts = sorted(tmp_path.glob("m-*.gguf"))
    assert len(parts) > 2
    assert tokens(parts[0])[0] == want
    second = refused(parts[1])
    assert f"part 2 of {len(parts)}" in second
    assert f"give its first part, {parts[0]}" in second
    whole = tmp_path / "whole.gguf"
    whole.write_bytes(b"".join(part.read_bytes() for part in parts))
    assert "concatenated" in refused(whole)
    whole.unlink()
    parts[-1].unlink()
    lost = refused(parts[0])
    assert f"of {len(parts)} parts" in lost
    assert parts[-1].name in lost


def test_truncated_files_give_both_sizes(gguf_model: Any, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(gguf_model, path, "qwen3moe", more=lambda w: w.add_tensor("pad.weight", PAD))
    whole = path.stat().st_size
    for size in (whole - 1, whole - (1 << 20), 200):
        os.truncate(path, size)
        message = refused(path)
        assert message.startswith(f"{path}: ")
        assert "truncated" in message
        assert f"the file has {size}" in message
        assert size == 200 or str(whole) in message


PAD = torch.zeros(1 << 18, 2).numpy()


def test_a_type_that_is_not_known_is_named_with_its_tensor(gguf_model: Any, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(gguf_model, path, "qwen3moe")
    name = b"blk.0.ffn_up_exps.weight"
    raw = bytearray(path.read_bytes())
    at = raw.index(name) + len(name)
    (dimensions,) = struct.unpack_from("<I", raw, at)
    at += 4 + 8 * dimensions
    for kind, shown in ((999, "999 (unknown)"), (36, "type 36")):
        struct.pack_into("<I", raw, at, kind)
        path.write_bytes(raw)
        message = refused(path)
        assert f"tensor {name.decode()}" in message
        assert shown in message
        assert all(known in message for known in BLOCK_TYPES)


def test_what_experts_lack_is_never_zeros(tmp_path: Path) -> None:
    write_config(small(), tmp_path / "m")
    other = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if ".experts." in name]:
            leaf = name.split(".")[-2]
            tensors[name.replace(leaf, other[leaf])] = tensors.pop(name)

    edit_tensors(tmp_path / "m", rename)
    assert "mlp.experts.0.w1.weight" in refused(tmp_path / "m")
    config = tiny_config("deepseek_v3")
    chosen = choose_class(config)
    path, model = tmp_path / "d.gguf", tiny_model(chosen.cls, chosen.config, seed=1)
    rewrite_without(path, "blk.3.exp_probs_b.bias", "deepseek2", model)
    assert "layers.3.mlp.gate.e_score_correction_bias" in refused(path)


def test_packed_experts_of_another_format_or_model_do_not_serve(tmp_path: Path) -> None:
    model, packed = tmp_path / "m", tmp_path / "packed"
    write_config(small(), model)
    made = CliRunner().invoke(cli.app, ["pack", str(model), "-o", str(packed), "--set", "experts=int8"])
    assert made.exit_code == 0, made.output
    want, _ = tokens(model)
    for more in ((), ("--pack-cache", str(packed))):
        got, said = tokens(model, *more)
        assert got == want
        assert "were read from" not in said
    assert "were read from" in tokens(model, "--pack-cache", str(packed), experts="int8")[1]
    edit_tensors(model, lambda t: t.update({"model.norm.weight": t["model.norm.weight"] * 2}))
    said = tokens(model, "--pack-cache", str(packed), experts="int8")[1]
    assert "the checkpoint has changed since (model.safetensors)" in said
