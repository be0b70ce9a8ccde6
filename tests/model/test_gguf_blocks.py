"""Models whose experts come from a GGUF file block by block: packed, or kept in the blocks of the file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from hetero.core import InputError
from hetero.cpu import CpuExperts
from hetero.engine.load import load_model
from hetero.formats import in_blocks
from hetero.model.build import choose_class
from hetero.model.gguf_source import GgufSource
from hetero.ops.experts import CpuExpertsOp
from hetero.quant.ggml import ggml_codes, ggml_format
from tests.cpu.ggml_blocks import HALVES, random_blocks
from tests.model import hf_to_gguf
from tests.model.parity import prompt
from tests.model.quiet import quiet  # noqa: F401  a fixture of every test here
from tests.model.tiny_moe import tiny_config, tiny_model


def small_blocks(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    """Random blocks whose scales make values below one or so, [..., bytes of a row]."""
    n, k = int(np.prod(shape[:-1])), shape[-1]
    blocks = random_blocks(name, n, k, rng).reshape(-1, gguf.GGML_QUANT_SIZES[Kind[name]][1])
    # The exponents of fp16 scales; IQ1_M has theirs in one byte too.
    for at in HALVES.get(name, (54,)):
        blocks[:, at + 1] = (blocks[:, at + 1] & 0x83) | 0x10
    return blocks.reshape(*shape[:-1], -1)


def write(path: Path, up: str, down: str, monkeypatch: pytest.MonkeyPatch, *, fuse: bool = False) -> None:
    config = tiny_config("qwen3_moe")
    for name in ("hidden_size", "intermediate_size", "moe_intermediate_size"):
        setattr(config, name, 256)
    config.norm_topk_prob, config.num_hidden_layers, config.mlp_only_layers = True, 2, []
    chosen = choose_class(config)
    rng = np.random.default_rng()

    def kind_of(name: str, values: Any) -> Kind | None:
        part = re.search(r"ffn_(gate_up|gate|up|down)_exps", name)
        return None if part is None else Kind[down if part[1] == "down" else up]

    def quantize(values: Any, kind: Kind) -> Any:
        return small_blocks(kind.name, values.shape, rng)

    # The package decodes these types and does not make them: what a file holds is random.
    monkeypatch.setattr(gguf.quants, "quantize", quantize)
    hf_to_gguf.write(tiny_model(chosen.cls, chosen.config, 3), path, "qwen3moe", kind_of=kind_of, fuse=fuse)


def load(path: Path, experts: str) -> Any:
    return load_model(path, rules="default-cpu", overrides={"experts": experts}, threads=1).runnable.model


def backends(model: Any) -> list[CpuExperts]:
    return [module.backend for module in model.modules() if isinstance(module, CpuExpertsOp)]


def logits(model: Any) -> torch.Tensor:
    return model(input_ids=prompt(), use_cache=False).logits.detach()


@pytest.mark.parametrize(
    ("up", "down", "fuse"),
    [("IQ2_XXS", "Q2_K", False), ("IQ1_M", "IQ4_XS", False), ("Q4_K", "IQ2_S", True)],
)
def test_experts_stay_in_blocks_where_the_rule_says_so(
    up: str, down: str, fuse: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits as packed ones, in less memory; types that packing does not double are packed."""
    write(tmp_path / "m.gguf", up, down, monkeypatch, fuse=fuse)
    packed, kept = load(tmp_path / "m.gguf", "keep"), load(tmp_path / "m.gguf", "keep blocks")
    assert len(backends(packed)) == len(backends(kept)) == 2
    for one, other in zip(backends(packed), backends(kept), strict=True):
        assert (one.format, one.down_format) == (ggml_format(up), ggml_format(down))
        assert (other.format, other.down_format) == (in_blocks(one.format), in_blocks(one.down_format))
        assert other.nbytes < one.nbytes
    want = logits(packed)
    assert torch.isfinite(want).all()
    assert want.std() > 0.01
    assert torch.equal(logits(kept), want)


def test_experts_from_blocks_are_those_from_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the loader packs from blocks is, byte by byte, what the source's codes are."""
    write(tmp_path / "m.gguf", "Q5_K", "IQ3_S", monkeypatch)
    ours = backends(load(tmp_path / "m.gguf", "keep"))[1]
    again = CpuExperts(ours.spec, ours.format, ours.down_format)
    with GgufSource(tmp_path / "m.gguf") as source:
        for expert in range(ours.spec.num_experts):
            for part in ("gate", "up", "down"):
                piece = source.pieces("model.layers.1.mlp.experts", expert, part)
                assert piece is not None
                again.put_codes(expert, part, *source.codes(piece.name, piece.index))
    for expert in range(ours.spec.num_experts):
        buffers = [memoryview(bytearray(ours.whole_bytes)) for _ in range(2)]
        ours.save(expert, buffers[0])
        again.save(expert, buffers[1])
        assert buffers[0] == buffers[1]


def test_blocks_of_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "m.gguf", "IQ1_S", "Q2_K", monkeypatch)
    with GgufSource(tmp_path / "m.gguf") as source:
        name = "model.layers.0.mlp.experts.down_proj.weight"
        assert source.tensors[name].ggml == "Q2_K"
        blocks = source.blocks(name, 3)
        assert blocks.shape == (256, 84)
        for mine, theirs in zip(ggml_codes("Q2_K", blocks, 256, 256), source.codes(name, 3), strict=True):
            assert mine is not None
            assert theirs is not None
            assert torch.equal(mine, theirs)
        with pytest.raises(InputError, match="has no matrix None"):
            source.blocks(name)
        with pytest.raises(InputError, match="is not in blocks of a GGUF type"):
            source.blocks("model.embed_tokens.weight")
