"""Every kernel of every instruction set: against float64, and to the bit against the portable kernel."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hetero._cpu import kernels
from hetero.formats import Format, padded_k, parse_format
from hetero.quant.iq_tables import TABLES as IQ_TABLES
from hetero.quant.pack import pack_codes, quantise
from tests.cpu.kernel_runner import (
    BULK,
    CLASSES,
    FORMATS,
    GEMM,
    GEMV,
    KEPT,
    MOST_SCALE,
    TABLES,
    Matrix,
    bits,
    random_scales,
    relative,
    valid_codes,
)

# Float32 sums over k in sequence; bulk kernels by bf16 round activations and decoded weights to 8 bits.
EXACT_TOLERANCE, BULK_BF16_TOLERANCE = 3e-6, 6e-3
# What one product may err by: x rounded to 8 bits; the weight truncated to as many and centred, and before
# that rounded where its scale and its zero are added.
WORST_PRODUCT = 2**-8 + 2**-7 - 1 / 384 + 2**-10


# One of each name that only keeps values, and those that stand for kernels of their own in longer checks.
KEPT_NAMES = [fmt for fmt in KEPT if fmt.group <= 32 or str(fmt) == "int4z g128"]
KEPT_FEW = [fmt for fmt in KEPT_NAMES if str(fmt) in {"int4z g128", "q4_k", "q2_k", "q6_k", "iq4_xs"}]


def activations(rows: int, k: int, generator: torch.Generator) -> np.ndarray:
    return torch.randn(rows, k, generator=generator).numpy()


def name_of(table: str, fmt: Format) -> str:
    """The bulk kernel of a table."""
    x, y = np.zeros((1, 1), np.float32), np.zeros((1, 16), np.float32)
    packed = Matrix.gaussian(fmt, 1, 1, torch.Generator()).packed
    return str(kernels.run_kernel(table, BULK, fmt.code, fmt.group, 1, 1, packed, x, y)[0])


def check(
    matrix: Matrix, x: np.ndarray, rows: list[int], tables: list[str] = TABLES, *, alike: bool = False
) -> None:
    """All tables and classes on the first rows of x; in the exact classes no row depends on the others.

    ``alike``: weights err alike, so that only the bound of every single product holds for bf16 tiles.
    """
    wanted, plain = matrix.evaluate(x), x.astype(np.float64) @ matrix.values.T
    sizes = np.abs(matrix.values)
    if matrix.format.name.endswith("z"):  # a code less its zero errs by a part of the scale, even if it is 0
        sizes = np.maximum(sizes, MOST_SCALE)
    worst = WORST_PRODUCT * (np.abs(x) @ sizes.T)
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
                if row_class == BULK and "_bf16" in name_of(table, matrix.format):
                    if alike or matrix.k == 1:
                        assert (np.abs(y[:, : matrix.n] - plain[:count]) <= worst[:count]).all(), where
                    else:
                        assert relative(y[:, : matrix.n], plain[:count]) < BULK_BF16_TOLERANCE, where
                    assert (np.abs(y[:, matrix.n :]) <= 1e-3 * np.abs(plain[:count]).max()).all(), where
                else:
                    assert np.array_equal(bits(y), bits(base[:count])), where


@pytest.mark.parametrize("fmt", FORMATS + KEPT_FEW, ids=str)
def test_rows_1_to_40(fmt: Format, generator: torch.Generator) -> None:
    check(Matrix.gaussian(fmt, 20, 192, generator), activations(40, 192, generator), list(range(1, 41)))


@pytest.mark.parametrize("fmt", FORMATS + KEPT_NAMES, ids=str)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (48, 200), (33, 2048)])
def test_shapes(fmt: Format, n: int, k: int, generator: torch.Generator) -> None:
    check(Matrix.gaussian(fmt, n, k, generator), activations(18, k, generator), [1, 2, 3, 4, 7, 18])


@pytest.mark.parametrize("fmt", FORMATS + KEPT_FEW, ids=str)
def test_more_rows_than_a_chunk(fmt: Format, generator: torch.Generator) -> None:
    check(Matrix.gaussian(fmt, 20, 448, generator), activations(150, 448, generator), [128, 129, 145, 150])


@pytest.mark.parametrize("fmt", ["bf16", "int4", "nvfp4", "q2_k"])
@pytest.mark.parametrize("n", [16, 48])
def test_more_rows_than_two_tiles(fmt: str, n: int, generator: torch.Generator) -> None:
    """3 to 7 tiles of rows, the last one not full; one block, and one beside a pair; k in two parts."""
    matrix = Matrix.gaussian(parse_format(fmt), n, 1312, generator)
    check(matrix, activations(97, 1312, generator), [33, 48, 50, 65, 95, 97])


@pytest.mark.parametrize("fmt", ["bf16", "int8", "int4 g128"])
@pytest.mark.parametrize("k", [2048, 8160, 8224, 16416])
def test_weights_beyond_the_scratch(fmt: str, k: int, generator: torch.Generator) -> None:
    rows = 100 if k == 2048 else 34
    check(Matrix.gaussian(parse_format(fmt), 33, k, generator), activations(rows, k, generator), [rows])


@pytest.mark.parametrize("fmt", [f for f in FORMATS if f.name != "f32"] + KEPT_FEW, ids=str)
@pytest.mark.parametrize("k", [192, 200, 2048])
def test_bulk_errs_no_more_than_the_format(fmt: Format, k: int, generator: torch.Generator) -> None:
    """Against float64 of the decoded weights, beside the torch reference, which quantises activations."""
    n, rows = 48, 49
    matrix = Matrix.gaussian(fmt, n, k, generator)
    x = activations(rows, k, generator)
    x[:, ::7] *= 20  # a few large values, as real activations have
    plain = x.astype(np.float64) @ matrix.values.T
    reference = relative(matrix.evaluate(x), plain) if fmt.rounds_activations else 2e-3
    for table in TABLES:
        for count in (17, 31, 33, 49):
            y = matrix.run(table, BULK, np.ascontiguousarray(x[:count]))[:, :n]
            limit = (reference + 1e-3) * np.linalg.norm(plain) / np.linalg.norm(plain[:count])
            assert relative(y, plain[:count]) < limit * 1.1, f"{table} {count}"


@pytest.mark.parametrize("fmt", [f for f in FORMATS if f.quantised] + KEPT_NAMES, ids=str)
def test_tiles_do_not_shrink_weights(fmt: Format, generator: torch.Generator) -> None:
    """Weights that are truncated lose nothing on average."""
    matrix = Matrix.gaussian(fmt, 64, 2048, generator)
    # Columns of 32 different groups: as many scales as weights, for their rounding to average out.
    x = np.ascontiguousarray(np.eye(2048, dtype=np.float32)[::64])
    for table in TABLES:
        y = matrix.run(table, BULK, x)[:, :64]
        plain = matrix.values[:, ::64].T
        # Truncation that nothing centres loses about 1/384: up to 2^-7, over mantissas from 1 to 2.
        assert abs((y * plain).sum() / (plain * plain).sum() - 1) < 7e-4, table
        assert np.abs(y - plain).max() < 6e-3 * np.abs(plain).max(), table


@pytest.mark.parametrize("fmt", [f for f in FORMATS if f.quantised], ids=str)
def test_extreme_codes(fmt: Format, generator: torch.Generator) -> None:
    """Lowest and highest codes against activations that are all -127 or 127: nothing may saturate."""
    n, k = 48, 256
    low, top = {"int8": (0, 255), "fp8": (0xFE, 0x7E)}.get(fmt.name, (0, 15))
    if fmt.name in {"mxfp4", "nvfp4"}:
        low, top = 15, 7  # -6 and 6
    codes = torch.empty(n, k, dtype=torch.uint8)
    codes[0::3], codes[1::3] = low, top
    codes[2::3] = (torch.randint(0, 2, (n // 3, k), generator=generator) * (top - low) + low).to(torch.uint8)
    scales, extra = random_scales(fmt, n, k, generator)
    matrix = Matrix(fmt, pack_codes(fmt, codes, scales, extra), n, k)
    x = np.ones((6, k), np.float32)
    x[1] = -1
    x[2, ::2], x[3, 1::2] = -1, -1
    x[4:] = torch.randint(0, 2, (2, k), generator=generator).mul(2).sub(1).numpy()
    check(matrix, x, [1, 4, 6], alike=True)


@pytest.mark.parametrize("fmt", KEPT_NAMES, ids=str)
def test_lowest_and_highest_of_what_is_kept(fmt: Format, generator: torch.Generator) -> None:
    """Extreme codes with extreme scales, minima and zeros against activations of -127 and 127, rows mixed: no
    sum of any instruction saturates; and every code in turn."""
    n, k = 48, 520
    known = torch.tensor(valid_codes(fmt), dtype=torch.uint8)
    ends = known
    if fmt.name in IQ_TABLES:
        numbers = torch.tensor(IQ_TABLES[fmt.name])[known.long()]
        ends = known[torch.stack([numbers.argmin(), numbers.argmax()])]
    codes = ends[-torch.randint(0, 2, (n, k), generator=generator)]
    codes[0::4], codes[1::4] = ends[0], ends[-1]
    codes[2::4] = known[torch.arange(n // 4 * k).reshape(n // 4, k) % len(known)]
    scales, extra = random_scales(fmt, n, k, generator)
    if fmt.super_scales:
        top = 127 if fmt.name == "q6_k" else 63
        signed = fmt.name in {"q3_k", "q6_k", "iq4_xs"}
        both = torch.tensor([-128 if signed else 0, top]).to(torch.int8).view(torch.uint8)
        scales = both[torch.randint(0, 2, scales.shape, generator=generator)]
    if extra is not None and fmt.name.endswith("z"):
        extra[0::3], extra[1::3] = 0, int(known[-1])
    x = np.ones((6, k), np.float32)
    x[1] = -1
    x[2, ::2], x[3, 1::2] = -1, -1
    x[4:] = torch.randint(0, 2, (2, k), generator=generator).mul(2).sub(1).numpy()
    check(Matrix(fmt, pack_codes(fmt, codes, scales, extra), n, k), x, [1, 4, 6], alike=True)


@pytest.mark.parametrize("fmt", KEPT_NAMES, ids=str)
def test_scales_of_zero_of_what_is_kept(fmt: Format, generator: torch.Generator) -> None:
    codes = torch.tensor(valid_codes(fmt), dtype=torch.uint8)[-1].expand(32, 256)
    scales, extra = random_scales(fmt, 32, 256, generator)
    x = activations(6, 256, generator)
    none = scales * 0, None if extra is None else extra * 0
    some = scales.clone()
    some[:, 0] = 0
    check(Matrix(fmt, pack_codes(fmt, codes, some, extra), 32, 256), x, [1, 4, 6], alike=True)
    for table in TABLES:
        for row_class in (GEMM, BULK):
            zero = Matrix(fmt, pack_codes(fmt, codes, *none), 32, 256)
            assert (zero.run(table, row_class, x) == 0).all(), table


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
        # mxfp4 saturates at 6 * 2^13 here, as the specification has it
        assert np.allclose(y[:, :8], 6e4 * 256 * factor, rtol=0.19 if fmt.name == "mxfp4" else 4e-3)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("fmt", [f for f in FORMATS if f.group in {0, 32}] + KEPT_FEW, ids=str)
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


@pytest.mark.parametrize("text", ["mxfp4", "nvfp4", "fp8"])
def test_every_code(text: str, generator: torch.Generator) -> None:
    """All 16 codes, or all E4M3 codes that are numbers, subnormal ones too, with signed zeros."""
    fmt = parse_format(text)
    count = 256 if text == "fp8" else 16
    codes = torch.arange(48 * 320).reshape(48, 320) % count
    codes = torch.where((codes & 0x7F) == 0x7F, 1, codes).to(torch.uint8)
    scales, extra = random_scales(fmt, 48, 320, generator)
    matrix = Matrix(fmt, pack_codes(fmt, codes, scales, extra), 48, 320)
    check(matrix, activations(5, 320, generator), [1, 4, 5])


def test_lowest_and_highest_scales_of_mxfp4(generator: torch.Generator) -> None:
    """E8M0 from 0 (2^-127) to 254 (2^127): all exact; the dot's own scale is half of that.

    Tiles take subnormal bf16 for zero, so there the lowest scales lose what is below 2^-126."""
    fmt = parse_format("mxfp4")
    codes = torch.randint(0, 16, (32, 64), generator=generator)
    codes = torch.where(codes % 8 > 2, codes % 8 - 4 & 8, codes).to(torch.uint8)  # up to 1, so that 254 fits
    for e, size in ((0, 1e3), (1, 1e3), (2, 1.0), (253, 1e-3), (254, 1e-3)):
        matrix = Matrix(fmt, pack_codes(fmt, codes, torch.full((32, 2), e, dtype=torch.uint8)), 32, 64)
        assert float(np.abs(matrix.values).max()) == 2.0 ** (e - 127)
        x = activations(5, 64, generator) * np.float32(size)
        y = matrix.run("scalar", GEMM, x)
        assert np.isfinite(y).all()
        wanted = matrix.evaluate(x)
        assert relative(y, wanted) < (1e-4 if e < 2 else EXACT_TOLERANCE)
        for table in TABLES:
            assert np.array_equal(bits(matrix.run(table, GEMM, x)), bits(y)), (table, e)
            bulk = matrix.run(table, BULK, x)
            assert np.isfinite(bulk).all()
            if "bf16" not in name_of(table, fmt):
                assert np.array_equal(bits(bulk), bits(y)), (table, e)
                continue
            lost = 64 * float(np.abs(x).max()) * 2.0**-126 if e < 3 else 0.0
            plain, worst = (f(x).astype(np.float64) @ f(matrix.values).T for f in (np.asarray, np.abs))
            assert (np.abs(bulk - plain) <= lost + WORST_PRODUCT * worst).all(), (table, e)


@pytest.mark.parametrize("text", ["fp8", "nvfp4"])
def test_scales_of_zero_are_zeros(text: str, generator: torch.Generator) -> None:
    fmt = parse_format(text)
    top = 0x7E if text == "fp8" else 7
    codes = torch.full((32, 256), top, dtype=torch.uint8)
    scales, extra = random_scales(fmt, 32, 256, generator)
    scales[:, 0] = 0
    x = activations(6, 256, generator)
    check(Matrix(fmt, pack_codes(fmt, codes, scales, extra), 32, 256), x, [1, 4, 6], alike=True)
    zero = pack_codes(fmt, codes, scales * 0, None if extra is None else extra * 0)
    for table in TABLES:
        for row_class in (GEMM, BULK):
            assert (Matrix(fmt, zero, 32, 256).run(table, row_class, x) == 0).all(), table


def test_halves_of_nvfp4_have_their_own_scales() -> None:
    """One half of a group counts 2^15 times the other."""
    fmt = parse_format("nvfp4")
    codes = torch.full((16, 32), 2, dtype=torch.uint8)
    for half in (0, 1):
        scales = torch.full((16, 2), 0x01, dtype=torch.uint8)  # 2^-9
        scales[:, half] = 0x68  # 2^6
        matrix = Matrix(fmt, pack_codes(fmt, codes, scales, torch.tensor(2.0)), 16, 32)
        x = np.zeros((1, 32), np.float32)
        x[0, 16 * half] = 1
        for table in TABLES:
            assert np.allclose(matrix.run(table, GEMV, x), 2.0 * 2**6, rtol=1e-6), table


@pytest.mark.parametrize("text", ["nvfp4", "q2_k", "q6_k"])
def test_more_halves_than_the_scratch_holds(text: str, generator: torch.Generator) -> None:
    fmt = parse_format(text)
    tables = [t for t in TABLES if t in {"avx2", "avx512"}]
    check(Matrix.gaussian(fmt, 16, 40000, generator), activations(30, 40000, generator), [30], tables)


@pytest.mark.amx
@pytest.mark.skipif("amx" not in TABLES, reason="this CPU or its system offers no AMX tiles; the twin ran")
def test_amx_tiles_really_run(generator: torch.Generator) -> None:
    names = set()
    for fmt in FORMATS + KEPT_NAMES:
        matrix = Matrix.gaussian(fmt, 20, 192, generator)
        x, y = activations(20, 192, generator), np.empty((20, 32), np.float32)
        for row_class in (GEMM, BULK):
            name, _ = kernels.run_kernel("amx", row_class, fmt.code, fmt.group, 20, 192, matrix.packed, x, y)
            names.add(name)
    assert {f"{name}.amx_int8.gemm" for name in ("int8", "int4", "int4a", "mxfp4", "nvfp4")} <= names
    assert {
        f"{name}.amx_bf16.bulk" for name in ("int8", "int4", "int4a", "bf16", "fp8", "mxfp4", "nvfp4")
    } <= names
    assert {f"{fmt.name}.amx_bf16.bulk" for fmt in KEPT_NAMES} <= names
