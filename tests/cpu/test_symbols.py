"""The check of what the units of each instruction set export and hold, and that it can fail."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from tests.scripts import script as load


@pytest.fixture(scope="module")
def checker() -> Any:
    return load("scripts/check_symbols.py")


def test_units_are_clean(checker: ModuleType) -> None:
    assert checker.check(None) == []


def test_weak_and_foreign_symbols_are_found(checker: ModuleType) -> None:
    good = "0000 T hetero::avx2_table()\n   U memcpy\n0000 t hetero::(anonymous namespace)::f()\n"
    assert checker.check_symbols("isa_avx2", good) == []
    assert checker.check_symbols("isa_avx2", good + "0000 W std::max(int)\n") == [
        "isa_avx2: weak symbol std::max(int)"
    ]
    assert checker.check_symbols("isa_avx2", good + "0000 T helper()\n   U malloc\n") == [
        "isa_avx2: refers to malloc",
        "isa_avx2: exports helper()",
    ]
    assert checker.check_symbols("isa_avx2", "") == ["isa_avx2: does not export hetero::avx2_table()"]


@pytest.mark.parametrize(
    ("unit", "line", "kind"),
    [
        ("isa_scalar", "vaddss %xmm0,%xmm1,%xmm2", "AVX"),
        ("isa_avx2", "vmovdqu64 (%rax),%zmm1", "AVX-512"),
        ("isa_avx2", "vmovaps %ymm16,%ymm0", "AVX-512"),
        ("isa_avx2", "shlx %eax,%ebx,%ecx", "BMI"),
        ("isa_avx512", "vpdpbusd %zmm1,%zmm2,%zmm3", "VNNI"),
        ("isa_avx512_vnni", "vdpbf16ps %zmm1,%zmm2,%zmm3", "BF16"),
        ("isa_avx512_vnni", "tdpbssd %tmm0,%tmm1,%tmm2", "AMX"),
        ("isa_amx_twin", "tilerelease", "AMX"),
    ],
)
def test_foreign_instructions_are_found(checker: ModuleType, unit: str, line: str, kind: str) -> None:
    found = checker.check_instructions(unit, f"  10:\t{line}\n")
    assert f"{unit}: holds {kind}: {line}" in found


def test_missing_instructions_are_found(checker: ModuleType) -> None:
    assert checker.check_instructions("isa_amx", "  10:\tret\n") == ["isa_amx: holds no AMX"]
