"""Every kernel of every instruction set: against float64, and to the bit against the portable kernel."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hetero._cpu import kernels
from hetero.formats import Format, padded_k
from hetero.quant.pack import pack_codes, quantise
from tests.cpu.kernel_runner import BULK, CLASSES, FORMATS, GEMM, GEMV, TABLES, Matrix, bits, relative

# Float32 sums over k in sequence; bulk bf16 rounds the activations to 8 bits.
EXACT_TOLERANCE, BULK_BF16_TOLERANCE = 3e-6, 6e-3


def activations(rows: int, k: int, generator: torch.Generator) -> np.ndarray:
    return torch.randn(rows, k, generator=generator).numpy()


def check(matrix: Matrix, x: np.ndarray, rows: list[int], tables: list[str] = TABLES) -> None:
    """All tables and classes on the first rows of x; in the exact classes no row depends on the others."""
    wanted = matrix.evaluate(x)
    base = matrix.run("scalar", GEMM, x)
    assert relative(base[:, : matrix.n], wanted) < EXACT_TOLERANCE
    assert (base[:, matrix.n :] == 0).all()
    for table in tables:
        for row_class in CLASSES:
            for count in rows:
                if row_class == GEMV and count > 4:
                    continue
                y = matrix.run(table, row_class, np.ascontiguousarray(x[:count]))
                where = f"{table} {matrix.format} class {row_class} rows {count}"
                if row_class == BULK and matrix.format.name == "bf16":
                    assert relative(y[:, : matrix.n], wanted[:count]) < BULK_BF16_TOLERANCE, where
                    assert (y[:, matrix.n :] == 0).all(), where
                else:
                    assert np.array_equal(bits(y), bits(base[:count])), where


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_rows_1_to_40(fmt: Format, generator: torch.Generator) -> None:
    check(Matrix.gaussian(fmt, 20, 192, generator), activations(40, 192, generator), list(range(1, 41)))


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (48, 200), (33, 2048)])
def test_shapes(fmt: Format, n: int, k: int, generator: torch.Generator) -> None:
    check(Matrix.gaussian(fmt, n, k, generator), activations(18, k, generator), [1, 2, 3, 4, 7, 18])


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_more_rows_than_a_chunk(fmt: Format, generator: torch.Generator) -> None:
    check(Matrix.gaussian(fmt, 20, 448, generator), activations(150, 448, generator), [128, 129, 145, 150])


@pytest.mark.parametrize("k", [2048, 8224, 16416])
def test_bf16_activations_beyond_the_scratch(k: int, generator: torch.Generator) -> None:
    rows = 100 if k == 2048 else 9
    check(Matrix.gaussian(Format("bf16"), 16, k, generator), activations(rows, k, generator), [rows])


@pytest.mark.parametrize("fmt", [f for f in FORMATS if f.quantised], ids=str)
def test_extreme_codes(fmt: Format, generator: torch.Generator) -> None:
    """Lowest and highest codes against activations that are all -127 or 127: nothing may saturate."""
    n, k = 48, 256
    top = 255 if fmt.name == "int8" else 15
    codes = torch.empty(n, k, dtype=torch.uint8)
    codes[0::3], codes[1::3] = 0, top
    codes[2::3] = (torch.randint(0, 2, (n // 3, k), generator=generator) * top).to(torch.uint8)
    scales = torch.rand(n, k // fmt.group, generator=generator).add(0.5).half()
    minima = torch.randn(n, k // fmt.group, generator=generator).half() if fmt.name == "int4a" else None
    matrix = Matrix(fmt, pack_codes(fmt, codes, scales, minima), n, k)
    x = np.ones((6, k), np.float32)
    x[1] = -1
    x[2, ::2], x[3, 1::2] = -1, -1
    x[4:] = torch.randint(0, 2, (2, k), generator=generator).mul(2).sub(1).numpy()
    check(matrix, x, [1, 4, 6])


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_groups_of_zeros_are_zeros(fmt: Format, generator: torch.Generator) -> None:
    w = torch.randn(32, 256, generator=generator)
    w[:, 128:] = 0
    w[5] = 0
    x = activations(6, 256, generator)
    x[3] = 0
    matrix = Matrix(fmt, quantise(fmt, w), 32, 256)
    assert (matrix.values[:, 128:] == 0).all()
    check(matrix, x, [4, 6])
    y = matrix.run("scalar", GEMM, x)
    assert (y[:, 5] == 0).all()
    assert (y[3] == 0).all()


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_large_weights_stay_finite(fmt: Format, generator: torch.Generator) -> None:
    """Weights of 6e4 at activations of one sum to 1.5e7, far beyond fp16, and scaled down stay right."""
    w = torch.full((16, 256), 6e4)
    w[8:] *= torch.rand(8, 256, generator=generator)
    matrix = Matrix(fmt, quantise(fmt, w), 16, 256)
    for factor in (1.0, 0.01, 100.0):
        x = np.full((5, 256), factor, np.float32)
        check(matrix, x, [4, 5])
        y = matrix.run("scalar", GEMM, x)
        assert np.isfinite(y).all()
        assert np.allclose(y[:, :8], 6e4 * 256 * factor, rtol=4e-3)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("fmt", [f for f in FORMATS if f.group in {0, 32}], ids=str)
def test_non_finite_activations_reach_their_row_only(
    fmt: Format, bad: float, generator: torch.Generator
) -> None:
    matrix = Matrix.gaussian(fmt, 20, 192, generator)
    x = activations(20, 192, generator)
    clean = {table: [matrix.run(table, c, x) for c in (GEMM, BULK)] for table in TABLES}
    x[1, 70] = x[17, 0] = bad
    for table in TABLES:
        for row_class in CLASSES:
            count = 4 if row_class == GEMV else 20
            y = matrix.run(table, row_class, np.ascontiguousarray(x[:count]))
            broken = [row for row in (1, 17) if row < count]
            whole = [row for row in range(count) if row not in broken]
            assert not np.isfinite(y[broken][:, :20]).any(), table
            before = clean[table][1 if row_class == BULK else 0]
            assert np.array_equal(bits(y[whole]), bits(before[whole])), table


def test_padding_of_the_input_is_not_read(generator: torch.Generator) -> None:
    """k of 200 is padded to 224 or 256: the result equals that of a matrix with explicit zeros."""
    for fmt in FORMATS:
        w = torch.randn(16, 200, generator=generator)
        k_pad = padded_k(fmt, 200)
        wide = torch.cat([w, torch.zeros(16, k_pad - 200)], 1)
        x = activations(3, 200, generator)
        x_wide = np.concatenate([x, np.zeros((3, k_pad - 200), np.float32)], 1)
        y = Matrix(fmt, quantise(fmt, w), 16, 200).run(TABLES[-2], GEMM, x)
        if fmt.name != "int4a":  # its range of codes would take in the zeros
            y_wide = Matrix(fmt, quantise(fmt, wide), 16, k_pad).run(TABLES[-2], GEMM, x_wide)
            assert np.array_equal(bits(y), bits(y_wide)), fmt


@pytest.mark.amx
@pytest.mark.skipif("amx" not in TABLES, reason="this CPU or its system offers no AMX tiles; the twin ran")
def test_amx_tiles_really_run(generator: torch.Generator) -> None:
    names = set()
    for fmt in FORMATS:
        matrix = Matrix.gaussian(fmt, 20, 192, generator)
        x, y = activations(20, 192, generator), np.empty((20, 32), np.float32)
        for row_class in (GEMM, BULK):
            name, _ = kernels.run_kernel("amx", row_class, fmt.code, fmt.group, 20, 192, matrix.packed, x, y)
            names.add(name)
    assert {"int8.amx_int8.gemm", "int4.amx_int8.gemm", "int4a.amx_int8.gemm", "bf16.amx_bf16.bulk"} <= names
