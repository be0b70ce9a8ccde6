"""Names, groups and sizes of the formats."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hetero.core import InputError
from hetero.formats import (
    Format,
    block_bytes,
    expert_bytes,
    in_order,
    packed_bytes,
    parse_format,
    parse_target,
    valid_formats,
)


@pytest.mark.parametrize("text", [*valid_formats(), *valid_formats(kept_only=True)])
def test_names_read_back(text: str) -> None:
    assert str(parse_format(text)) == text
    assert parse_format(text.replace(" ", "_")) == parse_format(text.replace(" ", "-")) == parse_format(text)


def test_default_group_is_32() -> None:
    assert parse_format("INT4") == Format("int4", 32)
    assert parse_format(" int8 ") == Format("int8", 32)
    assert parse_format("int4a") == Format("int4a", 32)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "int5",
        "int4 g16",
        "int8 g256",
        "f32 g32",
        "mxfp4 g32",
        "nvfp4 g64",
        "fp8 g128",
        "q4_k_m",
        "q4_k g32",
        "bf-16",
        "g32",
    ],
)
def test_others_are_errors_that_list_the_valid(text: str) -> None:
    with pytest.raises(InputError, match=r"valid: f32, bf16, int8 g32, .*int4a g128, fp8, mxfp4, nvfp4"):
        parse_format(text)


def test_columns_by_their_groups() -> None:
    fmt = parse_format("int4 g128 ordered")
    sizes = [expert_bytes(f, 2048, 768, has_gate=True, has_bias=False) for f in (fmt, fmt.packed)]
    assert sizes[0] == sizes[1] + 4 * 2048  # the order of the inputs
    assert (str(fmt), fmt.packed, fmt.kept_only) == ("int4 g128 ordered", parse_format("int4 g128"), True)
    assert parse_format(str(parse_format("int8z g32 ordered"))) == in_order(parse_format("int8z"))
    for text in ("mxfp4 ordered", "q4_k ordered", "int4 g48 ordered", "int4 ordered g32"):
        with pytest.raises(InputError, match="unknown weight format"):
            parse_format(text)


def test_near_miss_is_named() -> None:
    with pytest.raises(InputError, match="did you mean 'int8'"):
        parse_format("int9")


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("f32", 32),
        ("bf16", 16),
        ("int8 g64", 8.25),
        ("int4", 4.5),
        ("int4a", 5),
        ("int4 g128", 4.125),
        ("fp8", 8.015625),
        ("mxfp4", 4.25),
        ("int8a g64", 8.5),
        ("int4z g128", 4.1875),
        ("int8z", 8.75),
        ("iq4_nl", 4.5),
        ("q4_k", 4.625),
        ("q5_k", 5.625),
        ("q2_k", 3.125),
        ("q3_k", 3.5625),
        ("q6_k", 6.5625),
        ("iq3_s", 4.3125),
        ("iq2_s", 3.5625),
        ("iq2_xxs", 3.3125),
    ],
)
def test_bits(text: str, bits: float) -> None:
    fmt = parse_format(text)
    assert fmt.bits_per_weight == bits
    assert packed_bytes(fmt, 2560, 2048) == 2560 * 2048 * bits / 8


def test_no_weights_are_turned_into_what_is_only_kept() -> None:
    assert parse_target("int4") == parse_format("int4")
    for text in valid_formats(kept_only=True):
        with pytest.raises(InputError, match=f"cannot be turned into '{text}'.*valid: f32"):
            parse_target(text)


def test_padding_counts() -> None:
    int4 = parse_format("int4 g128")
    assert block_bytes(int4, 192) == block_bytes(int4, 256) == 16 * 256 // 2 + 2 * 32
    assert packed_bytes(int4, 17, 192) == 2 * block_bytes(int4, 192)
    assert block_bytes(parse_format("nvfp4"), 192) == 16 * 192 // 2 + 16 * 12 + 64  # 4 bytes of its scale
    assert block_bytes(parse_format("fp8"), 200) == 16 * 256 + 64
    assert block_bytes(parse_format("fp8_row"), 4096) == 16 * 4096 + 64  # 16 scales, however long the rows
    assert block_bytes(parse_format("int4"), 32) == 16 * 32 // 2 + 64  # 32 bytes of scales, up to 64


def test_expert_of_the_flagship() -> None:
    bytes_each = expert_bytes(parse_format("int4"), 2560, 640, has_gate=True, has_bias=False)
    assert bytes_each == 3 * 2560 * 640 * 4.5 / 8
    mixed = expert_bytes(
        parse_format("q4_k"), 2560, 512, has_gate=True, has_bias=False, down_format=parse_format("q6_k")
    )
    assert mixed == 2560 * 512 * (2 * 4.625 + 6.5625) / 8
    with_bias = expert_bytes(parse_format("int4"), 2560, 640, has_gate=False, has_bias=True)
    assert with_bias == 2 * 2560 * 640 * 4.5 / 8 + 4 * (2560 + 640)


def test_no_torch_is_imported() -> None:
    code = "import sys, hetero.formats; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
