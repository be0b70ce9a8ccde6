"""GGUF's block types against ``gguf.quants``, to the bit: as floats, as codes, and packed by experts."""

from __future__ import annotations

import re
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from hetero import _cpu
from hetero.core import ExpertSpec, InputError
from hetero.cpu import CpuExperts, isas, packed_nbytes, set_threads
from hetero.formats import expert_bytes, in_blocks, packed_bytes, parse_format
from hetero.quant import ggml_types as types
from hetero.quant.ggml import ggml_codes, ggml_floats, ggml_format, ggml_type, ggml_types
from hetero.quant.pack import dequantise, pack_codes
from tests.cpu.ggml_blocks import HALVES, Bytes, random_blocks, reference
from tests.cpu.reference import decoded

NAMES = list(ggml_types())
QUANTISED = [name for name in NAMES if ggml_format(name) is not None]


@pytest.fixture
def rng(generator: torch.Generator) -> np.random.Generator:
    return np.random.default_rng(generator.initial_seed())


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and np.array_equal(a.view(np.uint32), b.view(np.uint32))


def test_sizes_are_those_of_the_gguf_package() -> None:
    described = {row[0]: row[1:] for row in _cpu.ggml.types()}
    assert set(described) == set(NAMES)
    for name, (number, values, size, *_) in described.items():
        file_type = gguf.GGMLQuantizationType[name]
        assert (number, (values, size)) == (file_type, gguf.GGML_QUANT_SIZES[file_type])
        assert ggml_type(name).bits_per_weight == 8 * size / values


def test_the_table_of_the_documentation() -> None:
    text = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\w+) \| ([\d.]+) \| ([\w ]+) \| ([\d.]+) \| ([\d.]+) \|$", text, re.M)
    assert {row[0] for row in rows} == set(QUANTISED)
    for name, bits, packed_as, packed, ratio in rows:
        kind, fmt = ggml_type(name), ggml_format(name)
        assert fmt is not None
        assert (float(bits), packed_as, float(packed)) == (
            kind.bits_per_weight,
            str(fmt),
            fmt.bits_per_weight,
        )
        assert ratio == f"{fmt.bits_per_weight / kind.bits_per_weight:.2f}"


def test_every_type_that_the_package_decodes_is_read() -> None:
    decodable = {kind.name for kind in gguf.quants._type_traits}
    assert decodable <= set(NAMES)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_values(name: str, threads: int, rng: np.random.Generator) -> None:
    """Floats and, by way of codes and packing, packed values: all bits, with signs of zeros."""
    set_threads(threads)
    n, k = int(rng.integers(1, 70)), 256 * int(rng.integers(1, 8))
    blocks = random_blocks(name, n, k, rng)
    expected = reference(name, blocks)
    assert same_bits(ggml_floats(name, blocks, n, k).numpy(), expected)
    fmt = ggml_format(name)
    if fmt is not None:
        packed = pack_codes(fmt, *ggml_codes(name, blocks, n, k))
        assert same_bits(dequantise(fmt, packed, n, k).numpy(), expected)


@pytest.mark.parametrize("name", QUANTISED)
def test_extreme_blocks(name: str, rng: np.random.Generator) -> None:
    """All zeros, all ones but the scales, subnormal and the largest scales, of either sign."""
    kind, k = ggml_type(name), 512
    blocks = random_blocks(name, 8, k, rng).reshape(8, -1, kind.bytes)
    blocks[0], blocks[1] = 0, 255 if name != "NVFP4" else 254  # its scale 255 is refused
    # In each type an fp16 that is all of a scale stands at one of these places; codes may be anything.
    for at in (0, 2, 52, 64, 80, 82, 108, 208):
        if at + 1 < kind.bytes and name != "NVFP4":
            blocks[2:6, :, at : at + 2] = np.array([[1, 0], [0xFF, 0x7B], [0xFF, 0x83], [0xFF, 0xFB]])[
                :, None
            ]
    blocks = blocks.reshape(8, -1)
    expected = reference(name, blocks)
    floats = ggml_floats(name, blocks, 8, k).numpy()
    assert np.array_equal(floats, expected, equal_nan=True)
    finite = np.isfinite(expected).all(1)
    for row in range(8):
        if finite[row]:
            packed = pack_codes(ggml_format(name), *ggml_codes(name, blocks[row], 1, k))
            assert same_bits(dequantise(ggml_format(name), packed, 1, k).numpy(), expected[row : row + 1])


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K", "IQ2_XS", "F16"])
def test_kinds_of_memory(name: str, rng: np.random.Generator) -> None:
    """Mapped files are read-only arrays; no copy, no warning. Bytes may begin at any address."""
    n, k = 5, 256
    blocks = random_blocks(name, n, k, rng)
    expected = reference(name, blocks)
    shifted = np.empty(blocks.nbytes + 1, np.uint8)[1:]
    shifted[:] = blocks.reshape(-1)
    frozen = blocks.copy()
    frozen.flags.writeable = False
    for data in (
        shifted,
        frozen,
        blocks.tobytes(),
        memoryview(bytearray(blocks.tobytes())),
        torch.tensor(blocks),
    ):
        assert same_bits(ggml_floats(name, data, n, k).numpy(), expected)


def with_bad_scale(name: str, blocks: Bytes, bits: int, rng: np.random.Generator) -> Bytes:
    """The same with one scale or minimum of these fp16 bits; types of other scales have one NaN."""
    kind = ggml_type(name)
    one = blocks.copy().reshape(-1, kind.bytes)
    row = int(rng.integers(len(one)))
    if name == "IQ1_M":  # nibbles of four numbers
        for i in range(4):
            one[row, 49 + 2 * i] = (one[row, 49 + 2 * i] & 0x0F) | (bits >> 4 * i & 15) << 4
    elif name in {"MXFP4", "NVFP4"}:
        one[row, 0] = 255
    else:
        at = int(rng.choice(HALVES[name]))
        one[row, at : at + 2] = np.array([bits], "<u2").view(np.uint8)
    return one.reshape(blocks.shape)


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E01])
def test_scales_that_are_no_numbers_are_refused(name: str, bits: int, rng: np.random.Generator) -> None:
    good = random_blocks(name, 20, 256, rng)
    bad = with_bad_scale(name, good, bits, rng)
    ggml_codes(name, good, 20, 256)
    with pytest.raises(InputError, match=f"{name}: a scale is NaN or infinite"):
        ggml_codes(name, bad, 20, 256)
    with np.errstate(invalid="ignore", over="ignore"):
        assert np.array_equal(ggml_floats(name, bad, 20, 256).numpy(), reference(name, bad), equal_nan=True)


@pytest.mark.parametrize("name", ["Q4_K", "Q8_0", "IQ1_M", "F16"])
def test_sizes_that_do_not_match_are_refused(name: str, rng: np.random.Generator) -> None:
    blocks = random_blocks(name, 4, 512, rng)
    row = ggml_type(name).row_bytes(512)
    given = blocks.nbytes
    for n, k, data in (
        (5, 512, blocks),
        (3, 512, blocks),
        (4, 256, blocks),
        (4, 512, blocks.reshape(-1)[:-1]),
        (4, 512, b""),
        (2**62, 512, blocks),
    ):
        size = memoryview(data).nbytes
        expected = n * ggml_type(name).row_bytes(k)
        with pytest.raises(InputError, match=rf"{name} \[{n}, {k}\] takes {expected} bytes .* not {size}"):
            ggml_floats(name, data, n, k)
    assert row * 4 == given
    with pytest.raises(InputError, match=r"takes .* not"):
        ggml_floats(name, blocks, 0, 512)
    if ggml_format(name) is not None:
        with pytest.raises(InputError, match="a row of 257 is impossible"):
            ggml_codes(name, blocks, 4, 257)
    with pytest.raises(InputError, match=f"{name}: data must be contiguous"):
        ggml_floats(name, blocks[:, ::2], 4, 512)
    with pytest.raises(InputError, match=f"{name}: data must be contiguous"):
        ggml_floats(name, torch.zeros(blocks.shape), 4, 512)


def test_the_extension_checks_sizes_itself(rng: np.random.Generator) -> None:
    data = random_blocks("Q8_0", 2, 64, rng).reshape(-1)
    good = {
        "type": 8,
        "data": data,
        "n": 2,
        "k": 64,
        "grid": None,
        "numbers": None,
        "out": np.zeros(128, "f4"),
    }
    _cpu.ggml.floats(**good)
    grid = types.tables(ggml_type("IQ2_S"))["grid"]
    for change in (
        {"type": 9},
        {"type": -1},
        {"n": 3},
        {"n": 0},
        {"k": 65},
        {"k": -64},
        {"n": 2**58 + 2},
        {"data": data[1:]},
        {"out": np.zeros(127, "f4")},
        {"grid": grid},
        {"type": 22, "k": 256, "n": 1, "data": np.zeros(82, np.uint8), "out": np.zeros(256, "f4")},
    ):
        with pytest.raises(ValueError, match=r"size|bytes|blocks|type"):
            _cpu.ggml.floats(**(good | change))


@pytest.mark.parametrize("name", ["Q8_K", "Q8_1", "I32", "q4_k", "Q9_9"])
def test_other_types_are_refused(name: str) -> None:
    with pytest.raises(InputError, match=f"cannot read ggml type '{name}'.*readable: F32, .*Q4_K"):
        ggml_format(name)


def test_plain_types_have_no_codes() -> None:
    assert ggml_format("BF16") is None
    with pytest.raises(InputError, match="F16 is not quantised"):
        ggml_codes("F16", bytes(64), 1, 32)


# hidden and intermediate: not multiples of 16 rows, and of several blocks
SPEC = ExpertSpec(num_experts=2, hidden=256, intermediate=768, top_k=1)


def whole(experts: CpuExperts, expert: int) -> bytes:
    out = bytearray(experts.whole_bytes)
    experts.save(expert, memoryview(out))
    return bytes(out)


@pytest.mark.parametrize("name", QUANTISED)
def test_experts_from_blocks_equal_those_from_codes(name: str, rng: np.random.Generator) -> None:
    experts = CpuExperts(SPEC, ggml_format(name), threads=int(rng.integers(1, 4)))
    for part, (n, k) in {"gate": (768, 256), "up": (768, 256), "down": (256, 768)}.items():
        blocks = random_blocks(name, n, k, rng)
        experts.put_ggml(0, part, name, blocks)
        experts.put_codes(1, part, *ggml_codes(name, blocks, n, k))
    assert whole(experts, 0) == whole(experts, 1)


@pytest.mark.parametrize(("up", "down"), [("Q4_K", "Q6_K"), ("IQ2_XXS", "Q2_K"), ("IQ1_M", "IQ4_NL")])
def test_files_of_mixed_types(up: str, down: str, rng: np.random.Generator) -> None:
    """The types of common files, down in another than gate and up: the values in the arena are the file's."""
    experts = CpuExperts(SPEC, ggml_format(up), down_format=ggml_format(down))
    expected = {}
    for e in range(SPEC.num_experts):
        for part, name, n, k in (("gate", up, 768, 256), ("up", up, 768, 256), ("down", down, 256, 768)):
            blocks = random_blocks(name, n, k, rng)
            experts.put_ggml(e, part, name, blocks)
            expected[e, part] = reference(name, blocks)
    assert experts.missing() == []
    for key, values in decoded(experts).items():
        assert np.array_equal(values.numpy(), expected[key].astype(np.float64)), key


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_plain_matrices_are_packed_as_floats(name: str, rng: np.random.Generator) -> None:
    experts = CpuExperts(SPEC, parse_format("int8"))
    for part, (n, k) in {"gate": (768, 256), "up": (768, 256), "down": (256, 768)}.items():
        dtype = types.PLAIN[name]
        weights = torch.randn(n, k, generator=torch.Generator().manual_seed(int(rng.integers(2**31)))).to(
            dtype
        )
        experts.put_ggml(0, part, name, weights.view(torch.uint8))
        experts.put(1, part, weights)
    assert whole(experts, 0) == whole(experts, 1)


def test_what_experts_refuse(rng: np.random.Generator) -> None:
    experts = CpuExperts(SPEC, parse_format("int8"))
    good = random_blocks("Q8_0", 256, 768, rng)
    with pytest.raises(InputError, match="expert 0 down: Q4_K is kept by q4_k, these weights are int8 g32"):
        experts.put_ggml(0, "down", "Q4_K", good)
    with pytest.raises(
        InputError, match=r"expert 0 down: Q8_0 \[256, 768\] takes 208896 bytes .* not 208895"
    ):
        experts.put_ggml(0, "down", "Q8_0", good.reshape(-1)[1:])
    with pytest.raises(InputError, match="expert 0 down: a scale is NaN or infinite"):
        experts.put_ggml(0, "down", "Q8_0", with_bad_scale("Q8_0", good, 0x7C00, rng))
    with pytest.raises(InputError, match="expert 2 down: there are 2 experts"):
        experts.put_ggml(2, "down", "Q8_0", good)
    with pytest.raises(InputError, match="expert 0 down: cannot read ggml type 'Q8_K'"):
        experts.put_ggml(0, "down", "Q8_K", good)
    assert (0, "down") in experts.missing()
    experts.put_ggml(0, "down", "Q8_0", good)
    with pytest.raises(InputError, match="expert 0 down: given twice"):
        experts.put_ggml(0, "down", "Q8_0", good)


BLOCKS = [name for name in QUANTISED if in_blocks(ggml_format(name)).blocks]


def fill(experts: CpuExperts, expert: int, up: str, down: str, rng: np.random.Generator) -> dict[str, Bytes]:
    """Random blocks of one expert, in gate and up those of ``up``; returns them by part."""
    given = {}
    for part, name, n, k in (("gate", up, 768, 256), ("up", up, 768, 256), ("down", down, 256, 768)):
        given[part] = random_blocks(name, n, k, rng)
        experts.put_ggml(expert, part, name, given[part])
    return given


def test_types_that_can_stay_in_blocks() -> None:
    """Those whose packing takes twice the memory or nearly, but the TQ types, which few files have."""
    assert set(BLOCKS) == {"Q2_K", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ1_S", "IQ1_M"}
    for name in BLOCKS:
        fmt = in_blocks(ggml_format(name))
        assert fmt.bits_per_weight == ggml_type(name).bits_per_weight
        assert parse_format(str(fmt)) == fmt == in_blocks(fmt)
        assert fmt.packed == ggml_format(name)
        n, k = 40, 768
        assert packed_bytes(fmt, n, k) == 3 * -(-16 * ggml_type(name).row_bytes(k) // 64) * 64
    with pytest.raises(InputError, match="unknown weight format 'q4_k blocks'"):
        parse_format("q4_k blocks")


@pytest.mark.parametrize("isa", isas(include_twin=True))
@pytest.mark.parametrize("name", BLOCKS)
def test_experts_in_blocks_compute_what_packed_ones_do(
    name: str, isa: str, rng: np.random.Generator, generator: torch.Generator
) -> None:
    """Every bit of a step, of few and of many tokens, with gate and up, down, or all of it in blocks."""
    other = "Q6_K"
    fmt, blocks, plain = ggml_format(name), in_blocks(ggml_format(name)), ggml_format(other)
    for up, down in ((blocks, blocks), (blocks, plain), (plain, blocks)):
        experts = CpuExperts(SPEC, up, down_format=down, isa=isa, threads=2)
        packed = CpuExperts(SPEC, up.packed, down_format=down.packed, isa=isa)
        names = [name if one.packed == fmt else other for one in (up, down)]
        for e in range(SPEC.num_experts):
            for part, given in fill(experts, e, *names, rng).items():
                packed.put_ggml(e, part, names[part == "down"], given)
        assert experts.nbytes == packed_nbytes(SPEC, up, down) < packed.nbytes
        for tokens in (1, 3, 40):
            # Scales are any fp16, so that weights are up to 2^28.
            x = torch.randn(tokens, 256, generator=generator) * 1e-6
            ids = torch.randint(0, 2, (tokens, 1), generator=generator)
            weights = torch.rand(tokens, 1, generator=generator)
            out, expected = (one.forward(x, ids, weights) for one in (experts, packed))
            assert torch.isfinite(out).all()
            assert torch.equal(out.view(torch.int32), expected.view(torch.int32))


def test_experts_in_blocks_are_saved_and_restored(rng: np.random.Generator) -> None:
    fmt = in_blocks(ggml_format("IQ1_S"))
    experts = CpuExperts(SPEC, fmt)
    fill(experts, 0, "IQ1_S", "IQ1_S", rng)
    experts.restore(1, memoryview(bytearray(whole(experts, 0))))
    assert whole(experts, 1) == whole(experts, 0)
    assert experts.whole_bytes == expert_bytes(fmt, 256, 768, has_gate=True, has_bias=False)


def test_what_experts_in_blocks_refuse(rng: np.random.Generator) -> None:
    fmt = ggml_format("IQ2_S")
    experts = CpuExperts(SPEC, in_blocks(fmt))
    good = random_blocks("IQ2_S", 256, 768, rng)
    alone = "experts that stay in the blocks of their file take these alone"
    with pytest.raises(InputError, match=f"expert 0 down in iq2_s blocks: {alone}"):
        experts.put(0, "down", torch.zeros(256, 768))
    with pytest.raises(InputError, match=f"expert 0 down: {alone}"):
        experts.put_codes(0, "down", *ggml_codes("IQ2_S", good, 256, 768))
    with pytest.raises(InputError, match=f"expert 0 down: {alone}"):
        experts.put_ggml(0, "down", "F16", bytes(256 * 768 * 2))
    with pytest.raises(InputError, match="expert 0 down: IQ2_XS is kept by iq2_xs, these weights are iq2_s"):
        experts.put_ggml(0, "down", "IQ2_XS", good)
    with pytest.raises(InputError, match="expert 0 down: a scale is NaN or infinite"):
        experts.put_ggml(0, "down", "IQ2_S", with_bad_scale("IQ2_S", good, 0xFC00, rng))
    with pytest.raises(InputError, match="rows are no whole blocks"):
        CpuExperts(ExpertSpec(2, 256, 64, 1), in_blocks(fmt))
    assert len(experts.missing()) == 6
