"""The scan of GGUF files: what it reads, and a message of its own for each fault."""

from __future__ import annotations

import contextlib
import os
import random
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from hetero.core import InputError
from hetero.model.gguf_file import find_gguf, scan
from hetero.model.gguf_scan import SUPPORTED_TYPES
from tests.model.raw_gguf import ARRAY, BOOL, STRING, U32, U64, Info, Raw, array, pair, text

ARCH = pair("general.architecture", STRING, "llama")


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def fails(path: Path, *parts: str) -> str:
    with pytest.raises(InputError) as caught:
        scan(path)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message
    return message


def test_what_gguf_py_writes_is_read(tmp_path: Path) -> None:
    rng = np.random.default_rng()
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen3moe")
    writer.add_block_count(3)
    writer.add_string("s", "naïve 漢字")
    writer.add_float32("f", 1e-5)
    writer.add_bool("yes", True)
    writer.add_array("words", ["a", "", "ü"])
    writer.add_array("numbers", [3, -4, 5])
    writer.add_array("flags", [True, False])
    plain = rng.standard_normal((5, 7), dtype=np.float32)
    experts = gguf.quants.quantize(
        rng.standard_normal((2, 3, 64), dtype=np.float32), gguf.GGMLQuantizationType.Q8_0
    )
    writer.add_tensor("plain", plain)
    writer.add_tensor("experts", experts, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = scan(tmp_path / "m.gguf")
    assert found.arch == "qwen3moe"
    assert found.metadata["qwen3moe.block_count"] == 3
    assert found.metadata["s"] == "naïve 漢字"
    assert np.float32(found.metadata["f"]) == np.float32(1e-5)
    assert found.metadata["yes"] is True
    assert found.metadata["words"] == ["a", "", "ü"]
    assert found.metadata["numbers"].tolist() == [3, -4, 5]
    assert found.metadata["flags"].tolist() == [True, False]
    info = found.tensors["experts"]
    assert (info.type_name, info.shape, info.nbytes) == ("Q8_0", (2, 3, 64), experts.nbytes)
    raw = (tmp_path / "m.gguf").read_bytes()
    for name, want in (("plain", plain), ("experts", experts)):
        info = found.tensors[name]
        assert raw[info.start : info.start + info.nbytes] == want.tobytes()


def test_version_2_and_another_alignment(tmp_path: Path) -> None:
    raw = Raw(version=struct.pack("<I", 2), align=256)
    raw.pairs.append(pair("general.alignment", U32, 256))
    found = scan(write(tmp_path / "m.gguf", raw.bytes()))
    assert [t.start % 256 for t in found.tensors.values()] == [0, 0]


def test_a_header_longer_than_a_window(tmp_path: Path) -> None:
    words = [os.urandom(20).hex() * random.randint(1, 3) for _ in range(40_000)]
    raw = Raw(pairs=[ARCH, array("words", STRING, words), array("ids", U32, list(range(300_000)))])
    found = scan(write(tmp_path / "m.gguf", raw.bytes()))
    assert found.metadata["words"] == words
    assert found.metadata["ids"].sum() == sum(range(300_000))
    assert len(found.tensors) == 2


MANY = 2**62
FAULTS: dict[str, tuple[Raw | bytes, tuple[str, ...]]] = {
    "empty": (b"", ("not a GGUF file", "expected b'GGUF'")),
    "magic": (Raw(magic=b"GGUX"), ("not a GGUF file", "GGUX")),
    "old format": (Raw(magic=b"tjgg"), ("from before GGUF",)),
    "version 1": (Raw(version=struct.pack("<I", 1)), ("version 1", "2 and 3 are read")),
    "version 4": (Raw(version=struct.pack("<I", 4)), ("version 4", "2 and 3 are read")),
    "big-endian": (Raw(version=struct.pack(">I", 3)), ("big-endian",)),
    "tensor count": (Raw(tensor_count=MANY), (f"{MANY} tensors", "the file has")),
    "pair count": (Raw(pair_count=MANY), (f"{MANY} metadata entries", "the file has")),
    "array count": (Raw(pairs=[ARCH, array("x", U64, [1], MANY)]), (f"x has {MANY} elements",)),
    "strings count": (Raw(pairs=[ARCH, array("x", STRING, ["a"], MANY)]), (f"x has {MANY} elements",)),
    "string length": (
        Raw(pairs=[ARCH, text("x") + struct.pack("<IQ", STRING, MANY)]),
        ("truncated", "but the file has"),
    ),
    "key length": (Raw(pairs=[struct.pack("<Q", MANY)]), ("a metadata key of",)),
    "key's UTF-8": (Raw(pairs=[text(b"\xff") + struct.pack("<IB", BOOL, 1)]), ("key is not valid UTF-8",)),
    "value's UTF-8": (Raw(pairs=[pair("x", STRING, b"\xff")]), ("metadata x is not valid UTF-8",)),
    "value type": (Raw(pairs=[text("x") + struct.pack("<IB", 13, 1)]), ("x has the unknown type 13",)),
    "nested": (Raw(pairs=[text("x") + struct.pack("<IIQ", ARRAY, ARRAY, 1)]), ("array of arrays",)),
    "twice the key": (Raw(pairs=[ARCH, ARCH]), ("general.architecture is there twice",)),
    "twice the tensor": (Raw(infos=[Info("a"), Info("a")]), ("tensor a is there twice",)),
    "type 999": (
        Raw(infos=[Info("a"), Info("late", kind=999)]),
        ("tensor late", "999 (unknown)", *SUPPORTED_TYPES),
    ),
    "type 4": (Raw(infos=[Info("late", kind=4)]), ("tensor late", "type 4 (Q4_2)", "Q4_K")),
    "type 26": (Raw(infos=[Info("late", kind=26)]), ("tensor late", "type 26 (I32)", "Q4_K")),
    "no dimension": (Raw(infos=[Info("a", ())]), ("tensor a has 0 dimensions",)),
    "many dimensions": (Raw(infos=[Info("a", raw_dims=2**31)]), (f"tensor a has {2**31} dimensions",)),
    "zero dimension": (Raw(infos=[Info("a", (4, 0))]), ("tensor a", "no elements")),
    "huge dimensions": (Raw(infos=[Info("a", (MANY, MANY, MANY, MANY))]), ("truncated", "the file has")),
    "block size": (Raw(infos=[Info("a", (48,), kind=8)]), ("tensor a of type Q8_0", "48", "32")),
    "offset beyond": (Raw(infos=[Info("a", offset=1 << 40)]), ("truncated", str((1 << 40) + 128 + 128))),
    "offset unaligned": (Raw(infos=[Info("a", offset=8)]), ("tensor a starts at 8", "32")),
    "overlap": (Raw(infos=[Info("a"), Info("b", offset=96)]), ("tensors a and b overlap",)),
    "alignment 0": (Raw(pairs=[pair("general.alignment", U32, 0)]), ("alignment is 0", "power of two")),
    "alignment text": (Raw(pairs=[pair("general.alignment", STRING, "8")]), ("alignment is '8'",)),
    "split count": (Raw(pairs=[pair("split.count", STRING, "2")]), ("split.count is '2'",)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults(fault: str, tmp_path: Path) -> None:
    raw, parts = FAULTS[fault]
    path = write(tmp_path / "m.gguf", raw if isinstance(raw, bytes) else raw.bytes())
    tracemalloc.start()
    fails(path, str(path), *parts)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20, "memory for what the file only claims to hold"


def test_truncation(tmp_path: Path) -> None:
    """By a byte, by a MiB, and at every byte of the header."""
    whole = Raw(infos=[Info("a", (1 << 19,), data=bytes(1 << 21)), Info("b")])
    content = whole.bytes()
    for cut in (1, 1 << 20):
        path = write(tmp_path / "m.gguf", content[:-cut])
        fails(path, "truncated", str(len(content)), str(len(content) - cut))
    for size in range(len(whole.header())):
        fails(write(tmp_path / "m.gguf", content[:size]), str(tmp_path / "m.gguf"))


def test_random_damage_is_a_message(tmp_path: Path) -> None:
    content = Raw(pairs=[ARCH, array("w", STRING, ["ab", "c"]), pair("n", U64, 7)]).bytes()
    head = len(content) - 256
    for _ in range(400):
        damaged = bytearray(content)
        for _ in range(random.randint(1, 4)):
            damaged[random.randrange(head)] = random.choice((0, 1, 127, 128, 255, random.randrange(256)))
        path = write(tmp_path / "m.gguf", bytes(damaged))
        with contextlib.suppress(InputError):
            scan(path)


def test_what_is_no_file(tmp_path: Path) -> None:
    fails(tmp_path / "none.gguf", "no such file")
    fails(tmp_path, "not a file")
    os.mkfifo(tmp_path / "pipe.gguf")
    fails(tmp_path / "pipe.gguf", "not a file")


def split(folder: Path, stem: str = "m", **changes: Any) -> list[Path]:
    """Three parts of one tensor each; ``changes``: of split.* of the second part."""
    files = []
    for number in range(3):
        said = {"no": number, "count": 3, "tensors.count": 3} | (changes if number == 1 else {})
        pairs = [pair(f"split.{key}", U32, value) for key, value in said.items()]
        raw = Raw(pairs=[ARCH, *pairs] if number == 0 else pairs, infos=[Info(f"t{number}")])
        files.append(write(folder / f"{stem}-{number + 1:05d}-of-00003.gguf", raw.bytes()))
    return files


def test_a_split_file(tmp_path: Path) -> None:
    files = split(tmp_path)
    found = scan(files[0])
    assert found.files == tuple(files)
    assert [(t.name, t.file) for t in found.tensors.values()] == [(f"t{n}", f) for n, f in enumerate(files)]
    assert find_gguf(tmp_path) == files[0]


def test_faults_of_splits_differ(tmp_path: Path) -> None:
    files = split(tmp_path)
    messages = [fails(files[1], "part 2 of 3", "give its first part", files[0].name)]
    whole = b"".join(file.read_bytes() for file in files)
    messages.append(fails(write(tmp_path / "whole.gguf", whole), "concatenated", "begins at byte"))
    renamed = write(tmp_path / "first.gguf", files[0].read_bytes())
    messages.append(fails(renamed, "name does not end in -00001-of-00003.gguf"))
    files[2].unlink()
    messages.append(fails(files[0], "of 3 parts", "part 3", files[2].name))
    assert len({message.replace(str(tmp_path), "") for message in messages}) == 4


def test_parts_that_do_not_belong_together(tmp_path: Path) -> None:
    files = split(tmp_path, no=2)
    fails(files[0], files[1].name, "part 3 of 3", "part 2 of 3")
    files = split(tmp_path)
    write(
        files[1],
        Raw(pairs=[pair("split.no", U32, 1), pair("split.count", U32, 3)], infos=[Info("t0")]).bytes(),
    )
    fails(files[0], "tensor t0 is in two parts")
    write(files[1], Raw(pairs=[pair("split.no", U32, 1), pair("split.count", U32, 3)], infos=[]).bytes())
    fails(files[0], "3 tensors", "they hold 2")


def test_a_folder_of_files(tmp_path: Path) -> None:
    assert find_gguf(tmp_path) is None
    files = split(tmp_path)
    files[0].unlink()
    assert find_gguf(tmp_path) == files[1]  # whose scan says what is missing
    write(tmp_path / "a.gguf", Raw().bytes())
    assert find_gguf(tmp_path) == tmp_path / "a.gguf"
    write(tmp_path / "b.gguf", Raw().bytes())
    with pytest.raises(InputError, match="2 GGUF models"):
        find_gguf(tmp_path)
