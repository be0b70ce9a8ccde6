"""What a rule may say beside ``backend: kt_kernel``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.test_rules_file import GOOD, error, place, write


def with_experts(options: str) -> str:
    return GOOD.replace("format: int4", options)


@pytest.mark.parametrize("fmt", ["bf16", "int8", "int4"])
def test_kt_kernel_serves_three_formats(tmp_path: Path, fmt: str) -> None:
    path = write(tmp_path, with_experts(f"backend: kt_kernel, format: {fmt}"))
    options = next(place(path).replacements()).options["experts"]
    assert (options["backend"], options["format"]) == ("kt_kernel", fmt)


def test_kt_kernel_is_int8_by_default(tmp_path: Path) -> None:
    path = write(tmp_path, with_experts("backend: kt_kernel"))
    assert next(place(path).replacements()).options["experts"]["format"] == "int8"


@pytest.mark.parametrize("fmt", ["f32", "int4 g64", "int4a"])
def test_other_formats_are_refused(tmp_path: Path, fmt: str) -> None:
    message = error(write(tmp_path, with_experts(f"backend: kt_kernel, format: {fmt}")))
    assert f"backend 'kt_kernel' has the formats bf16, int8 and int4, not '{fmt}'" in message


@pytest.mark.parametrize(("key", "value"), [("isa", "avx2"), ("numa", "off"), ("numa", "split")])
def test_options_that_it_would_ignore_are_refused(tmp_path: Path, key: str, value: str) -> None:
    message = error(write(tmp_path, with_experts(f"backend: kt_kernel, {key}: {value}")))
    assert f"backend 'kt_kernel' takes no '{key}'" in message
