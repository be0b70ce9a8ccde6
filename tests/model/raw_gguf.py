"""GGUF files byte by byte, so that every fault can be written."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

ALIGN = 32
# Numbers of value types in the format.
U32, BOOL, STRING, ARRAY, U64 = 4, 7, 8, 9, 10
_FORMS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    U32: "<I",
    5: "<i",
    6: "<f",
    BOOL: "<B",
    U64: "<Q",
    11: "<q",
    12: "<d",
}


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def scalar(kind: int, value: Any) -> bytes:
    return text(value) if kind == STRING else struct.pack(_FORMS[kind], value)


def pair(key: str, kind: int, value: Any) -> bytes:
    return text(key) + struct.pack("<I", kind) + scalar(kind, value)


def array(key: str, kind: int, values: list[Any], count: int | None = None) -> bytes:
    head = struct.pack("<IIQ", ARRAY, kind, len(values) if count is None else count)
    return text(key) + head + b"".join(scalar(kind, value) for value in values)


@dataclass
class Info:
    """A tensor: dimensions as the file has them, the fastest first."""

    name: str
    dims: tuple[int, ...] = (32,)
    kind: int = 0
    data: bytes = bytes(128)
    offset: int | None = None
    raw_dims: int | None = None


@dataclass
class Raw:
    """What a file says of itself; None counts what is there."""

    pairs: list[bytes] = field(default_factory=lambda: [pair("general.architecture", STRING, "llama")])
    infos: list[Info] = field(default_factory=lambda: [Info("a"), Info("b")])
    magic: bytes = b"GGUF"
    version: bytes = struct.pack("<I", 3)
    tensor_count: int | None = None
    pair_count: int | None = None
    align: int = ALIGN

    def header(self) -> bytes:
        counts = (
            len(self.infos) if self.tensor_count is None else self.tensor_count,
            len(self.pairs) if self.pair_count is None else self.pair_count,
        )
        out = self.magic + self.version + struct.pack("<QQ", *counts) + b"".join(self.pairs)
        offset = 0
        for info in self.infos:
            count = len(info.dims) if info.raw_dims is None else info.raw_dims
            out += (
                text(info.name) + struct.pack("<I", count) + b"".join(struct.pack("<Q", n) for n in info.dims)
            )
            out += struct.pack("<IQ", info.kind, offset if info.offset is None else info.offset)
            offset += self._padded(len(info.data))
        return out

    def bytes(self) -> bytes:
        out = self.header()
        out += bytes(self._padded(len(out)) - len(out))
        for info in self.infos:
            out += info.data + bytes(self._padded(len(info.data)) - len(info.data))
        return out

    def _padded(self, count: int) -> int:
        return -(-count // self.align) * self.align
