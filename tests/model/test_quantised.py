"""Quantised safetensors checkpoints: values, codes, whole models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hetero.formats import Format, parse_format
from hetero.model.build import assert_only_experts_on_meta, build_meta, is_experts, load_config
from hetero.model.loader import load, plan_load
from hetero.model.pieces import PartSource
from hetero.model.sources import open_source
from hetero.quant.pack import dequantise, pack_codes
from tests.model.checkpoints import Kept, expected_parts
from tests.model.quantised import (
    SCHEMES,
    Written,
    small_config,
    write_gpt_oss,
    write_packed_fp8,
    write_quantised,
)


class Packed(Kept):
    """A sink of one format: what came as codes is what they stand for, packed and decoded again."""

    def __init__(self, experts: nn.Module, fmt: Format) -> None:
        super().__init__(experts)
        self.fmt = fmt
        self.by_codes = 0
        if fmt.ordered:
            self.wanted += [(expert, "order") for expert in range(experts.down_proj.shape[0])]

    def format_of(self, part: str) -> Format:
        return self.fmt

    def put_codes(self, expert: int, part: str, codes: Tensor, scales: Tensor, extra: Tensor | None) -> None:
        n, k = codes.shape
        self.by_codes += 1
        fmt = self.fmt.packed
        self.put(expert, part, dequantise(fmt, pack_codes(fmt, codes, scales, extra), n, k))


def logits(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids).logits


def check_model(written: Written) -> None:
    """All that is quantised, as floats and inside a whole model."""
    with open_source(written.folder) as source:
        assert source.tensors.keys() == written.names
        for name, values in written.values.items():
            read = source.read(name)
            assert read.dtype == torch.float32
            assert torch.equal(read, values.float()), name
            assert source.tensors[name].shape == tuple(values.shape)
            assert torch.equal(source.read_slice(name, 1), values[1:2].float())
        model = build_meta(load_config(written.folder))
        report = load(model, source)
        assert report.nbytes == source.nbytes
    assert_only_experts_on_meta(model, ())
    ids = torch.randint(3, 90, (1, 7))
    torch.testing.assert_close(logits(model, ids), logits(written.model, ids), rtol=0, atol=1e-6)


def check_experts(written: Written, fmt: str | None) -> None:
    """Experts in the format that keeps them arrive by codes, bit for bit; in another one by floats."""
    modules = dict(written.model.named_modules())
    for wanted in (fmt,) if fmt is not None else ("f32", "fp8"):
        with open_source(written.folder) as source:
            model = build_meta(load_config(written.folder))
            names = [name for name, module in model.named_modules() if is_experts(module)]
            chosen = parse_format(str(wanted))
            sinks = {name: Packed(model.get_submodule(name), chosen) for name in names}
            plan = plan_load(model, source)
            for name in names:
                parts = plan.parts[name]
                assert {str(part.format) if part.format else None for part in parts.values()} == {fmt}
            load(model, source, sinks, plan=plan)
            for name, sink in sinks.items():
                assert not sink.missing()
                if chosen.ordered:
                    put_in_order(sink, plan.parts[name]["down"])
        assert names
        for name, sink in sinks.items():
            matrices = sum(not part.endswith("_bias") for _, part in sink.got)
            assert sink.by_codes == (matrices if wanted == fmt else 0)
            for key, values in expected_parts(modules[name]).items():
                assert torch.equal(sink.got[key].float(), values), (name, key)


def put_in_order(sink: Packed, down: PartSource) -> None:
    """Undo the orders of experts: of the columns of gate and up, and of down's, which their rows follow."""
    assert down.columns_of is not None
    for expert in range(len(sink.wanted) // 4):
        inputs, inner = sink.got.pop((expert, "order")).argsort(), down.columns_of(expert).argsort()
        assert not torch.equal(inputs, torch.arange(len(inputs)))
        for part in ("gate", "up"):
            sink.got[expert, part] = sink.got[expert, part][inner][:, inputs]
        sink.got[expert, "down"] = sink.got[expert, "down"][:, inner]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_in_qwen3_moe(scheme: str, tmp_path: Path) -> None:
    written = write_quantised(tmp_path, "qwen3_moe", SCHEMES[scheme])
    assert len(written.values) == 4 + 3 * 4
    check_model(written)
    check_experts(written, SCHEMES[scheme].format)


@pytest.mark.parametrize("scheme", ["fp8", "w4a16-asym", "awq"])
def test_deepseek_v3(scheme: str, tmp_path: Path) -> None:
    written = write_quantised(tmp_path, "deepseek_v3", SCHEMES[scheme])
    check_model(written)
    check_experts(written, SCHEMES[scheme].format)


def test_blocks_of_fp8_that_the_matrices_do_not_fill(tmp_path: Path) -> None:
    config = small_config("qwen3_moe", hidden_size=192, moe_intermediate_size=136)
    written = write_quantised(tmp_path, "qwen3_moe", SCHEMES["fp8"], config)
    check_model(written)
    check_experts(written, "fp8")


def test_gpt_oss_in_mxfp4(tmp_path: Path) -> None:
    written = write_gpt_oss(tmp_path)
    check_model(written)
    check_experts(written, "mxfp4")


@pytest.mark.parametrize("model_type", ["granitemoe", "aria_text"])
def test_packed_experts_in_fp8(model_type: str, tmp_path: Path) -> None:
    """[E, 2 n, k], and transposed, where tiles of 128 x 128 are turned with their codes."""
    config = small_config(model_type, num_experts_per_tok=2, moe_num_experts=4, moe_topk=2)
    written = write_packed_fp8(tmp_path, config)
    assert any(values.ndim == 3 for values in written.values.values())
    check_model(written)
    check_experts(written, "fp8")
