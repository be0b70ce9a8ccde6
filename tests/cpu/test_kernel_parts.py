"""Activations, input quantisation, the weighted sum and the choice of kernels."""

from __future__ import annotations

import math
import platform
import subprocess
import sys

import numpy as np
import pytest
import torch

from hetero import _cpu, cpu, cpu_pool
from hetero._cpu import kernels
from hetero.core import Activation, ActKind
from tests.cpu.kernel_runner import KINDS, TABLES, bits

INF = math.inf
EVERYTHING = dict.fromkeys(kernels.features(), True) | {"amx_denied": False}


def activate(table: str, gate: np.ndarray, up: np.ndarray, act: Activation, *, gated: bool) -> np.ndarray:
    return kernels.activate(
        table,
        gate,
        up,
        KINDS[act.kind],
        gated,
        act.alpha,
        act.gate_max,
        act.up_limit,
        act.act_max,
        act.up_offset,
    )


def exact(g: np.ndarray, kind: ActKind, alpha: float) -> np.ndarray:
    """The activation in float64."""
    g = g.astype(np.float64)
    erfc = np.vectorize(math.erfc, otypes=[np.float64])
    with np.errstate(over="ignore"):
        if kind is ActKind.SILU:
            return g / (1 + np.exp(-np.float64(np.float32(alpha)) * g))
        if kind is ActKind.GELU:
            return 0.5 * g * erfc(-g / math.sqrt(2))
        if kind is ActKind.GELU_TANH:
            return g / (1 + np.exp(-2 * math.sqrt(2 / math.pi) * (g + 0.044715 * g**3)))
    positive = np.maximum(g, 0)
    return {ActKind.RELU: positive, ActKind.RELU2: positive**2, ActKind.IDENTITY: g}[kind]


@pytest.mark.parametrize("kind", list(ActKind))
def test_activation_is_accurate_and_equal_everywhere(kind: ActKind, generator: torch.Generator) -> None:
    spread = torch.randn(3000, generator=generator) * 6
    small = torch.randn(200, generator=generator) * 1e-6
    g = torch.cat([spread, small, torch.linspace(-12, 12, 801), torch.zeros(3)]).numpy()
    for alpha in (1.0, 1.702):
        act = Activation(kind, alpha=alpha)
        ones = np.ones_like(g)
        base = activate("scalar", g, ones, act, gated=True)
        wanted = exact(g, kind, alpha)
        # The exponent t is rounded to float32 before e^t: up to 6e-8 |t| of relative error.
        t = np.abs(g) * alpha if kind is ActKind.SILU else g**2
        tolerance = (1e-6 + 1.5e-7 * t) * np.abs(wanted) + 1e-37
        assert (np.abs(base - wanted) <= tolerance).all()
        for table in TABLES:
            assert np.array_equal(bits(activate(table, g, ones, act, gated=True)), bits(base)), table
            assert np.array_equal(bits(activate(table, ones, g, act, gated=False)), bits(base)), table


@pytest.mark.parametrize("kind", list(ActKind))
def test_activation_of_huge_and_missing_values(kind: ActKind) -> None:
    g = np.array([1e30, -1e30, 100, -100, 3e38, -3e38, np.nan, 1e-40, -1e-40, INF], np.float32)
    ones = np.ones_like(g)
    for table in TABLES:
        h = activate(table, g, ones, Activation(kind), gated=True)
        assert np.isnan(h[6]), table
        assert not np.isnan(np.delete(h, 6)).any(), table
        if kind in {ActKind.SILU, ActKind.GELU, ActKind.GELU_TANH}:
            assert np.array_equal(h[[0, 2, 4, 9]], g[[0, 2, 4, 9]]), table
            assert (np.abs(h[[1, 3, 5]]) < 1e-30).all(), table


def test_limits_offset_and_every_tail(generator: torch.Generator) -> None:
    """The clamped gate of gpt-oss, for 1 to 40 values."""
    act = Activation(alpha=1.702, gate_max=7.0, up_limit=7.0, up_offset=1.0)
    for n in range(1, 41):
        g, u = (torch.randn(n, generator=generator).mul(6).numpy() for _ in range(2))
        wanted = exact(np.minimum(g, 7), ActKind.SILU, 1.702) * (np.clip(u, -7, 7).astype(np.float64) + 1)
        base = activate("scalar", g, u, act, gated=True)
        assert np.allclose(base, wanted, rtol=2e-6, atol=1e-6)
        for table in TABLES:
            assert np.array_equal(bits(activate(table, g, u, act, gated=True)), bits(base)), table
    capped = activate("scalar", np.float32([5, 1]), np.float32([2, 2]), Activation(act_max=2.0), gated=True)
    assert capped[0] == 4
    assert capped[1] < 2


@pytest.mark.parametrize("table", TABLES)
def test_quantisation_of_inputs(table: str, generator: torch.Generator) -> None:
    x = torch.randn(8, 200, generator=generator).numpy()
    x[1, :32] = 0
    x[2, 40], x[2, 100], x[2, 199] = np.nan, np.inf, -np.inf
    x[3, :32] = 1e-38
    x[4, 5] = 3e38
    x[5, 32:64] *= 1e-25
    x[6, :32] = np.arange(-16, 16)
    q, scale, total = kernels.quantize_rows(table, x, 256)
    full = np.zeros((8, 256), np.float32)
    full[:, :200] = x
    groups = full.reshape(8, 8, 32)
    for m in range(8):
        for g in range(8):
            values, codes = groups[m, g], q.reshape(8, 8, 32)[m, g]
            amax = np.abs(values).max()
            if not np.isfinite(values).all():
                assert np.isnan(scale[m, g])
                assert not codes.any()
                assert total[m, g] == 0
                continue
            if amax < 2.0**-100:
                assert scale[m, g] == 0
                assert not codes.any()
            else:
                assert scale[m, g] == amax / np.float32(127)
                assert np.array_equal(codes, np.rint(values * (np.float32(127) / amax)))
            assert total[m, g] == codes.astype(np.int64).sum()


@pytest.mark.parametrize("table", TABLES)
def test_weighted_sum(table: str, generator: torch.Generator) -> None:
    for n in (1, 7, 16, 45):
        y, out = (torch.randn(n, generator=generator).numpy() for _ in range(2))
        w = np.float32(0.3)
        wanted = (np.float64(w) * y.astype(np.float64) + out.astype(np.float64)).astype(np.float32)
        kernels.axpy(table, float(w), y, out)
        assert np.array_equal(out, wanted)


def test_choice_by_features() -> None:
    def chosen(**changes: bool) -> dict[str, object]:
        return kernels.select(EVERYTHING | changes)

    assert chosen()["best"] == "amx"
    assert chosen()["missing"] == {"scalar": "", "avx2": "", "avx512": "", "amx": ""}
    denied = chosen(amx_denied=True)
    assert denied["best"] == "avx512"
    assert "permission" in denied["missing"]["amx"]
    assert chosen(amx_int8=False)["missing"]["amx"] == "amx_int8"
    assert chosen(avx512=False)["best"] == "avx2"
    nothing = kernels.select({})
    assert nothing["best"] == "scalar"
    assert nothing["missing"]["avx2"] == "avx2 with fma and f16c"
    assert list(nothing["kernels"]) == ["scalar"]
    with pytest.raises(ValueError, match="no such feature: sse9"):
        kernels.select({"sse9": True})


def test_names_say_what_runs() -> None:
    names = kernels.select(EVERYTHING)["kernels"]
    assert names["amx"]["int4.gemv"] == "int4.avx512_vnni.gemv"
    assert names["amx"]["int4.gemm"] == "int4.amx_int8.gemm"
    assert names["amx"]["f32.bulk"] == "f32.avx512.gemm"
    assert names["avx512"]["bf16.bulk"] == "bf16.avx512_bf16.bulk"
    assert names["avx2"]["int8.gemv"] == "int8.avx2.gemv"
    plain = kernels.select(EVERYTHING | {"avx512_vnni": False, "avx512_bf16": False})
    assert plain["best"] == "avx512"
    assert plain["kernels"]["avx512"]["int4.gemv"] == "int4.avx512.gemv"
    assert plain["kernels"]["avx512"]["bf16.bulk"] == "bf16.avx512.gemm"


def test_detection_agrees_with_the_tables() -> None:
    found = kernels.features()
    assert set(found) == set(EVERYTHING)
    supported = kernels.select(found)["kernels"]
    assert [t for t in TABLES if t in {"scalar", "avx2", "avx512", "amx"}] == list(supported)
    with pytest.raises(ValueError, match="no such kernel table"):
        kernels.activate("mmx", np.ones(1, np.float32), np.ones(1, np.float32), 0, True, 1, INF, INF, INF, 0)


def test_refused_tiles_mean_avx512_and_one_log_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What follows when arch_prctl fails with EPERM: the features say so, and the choice falls to AVX-512."""
    denied = EVERYTHING | {"amx_denied": True}
    best = kernels.select(denied)["best"]
    assert best == "avx512"
    monkeypatch.setattr(_cpu.kernels, "features", lambda: denied)
    monkeypatch.setattr(_cpu, "best_isa", lambda: best)
    monkeypatch.delenv("HETERO_ISA", raising=False)
    cpu_pool._tell_refused_tiles.cache_clear()
    with caplog.at_level("WARNING", "hetero.cpu"):
        assert [cpu.pick_isa() for _ in range(3)] == ["avx512"] * 3
    cpu_pool._tell_refused_tiles.cache_clear()
    assert [record.message for record in caplog.records] == [
        "the operating system refuses this process AMX tiles (arch_prctl); avx512 is used"
    ]


REFUSE = """
import ctypes, platform, struct, sys
# A seccomp filter: arch_prctl (158) fails with EPERM, every other call is allowed.
code = [(0x20, 0, 0, 0), (0x15, 0, 1, 158), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
header = struct.pack("HxxxxxxQ", len(code), ctypes.addressof(program))
libc = ctypes.CDLL(None, use_errno=True)
if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, ctypes.c_char_p(header), 0, 0):
    sys.exit(77)
from hetero._cpu import kernels
found = kernels.features()
assert found["amx_denied"] == found["amx_tile"], found
assert "amx" not in kernels.table_names()
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="arch_prctl is a call of x86-64")
def test_refusal_by_the_system_is_seen() -> None:
    done = subprocess.run([sys.executable, "-c", REFUSE], capture_output=True, text=True, check=False)
    if done.returncode == 77:
        pytest.skip("this system allows no seccomp filter")
    assert done.returncode == 0, done.stderr
