"""Random blocks of ggml's types, and what ``gguf.quants`` makes of them."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np

from hetero.quant.ggml_types import ggml_type

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

# Where fp16 numbers stand in a block; those of IQ1_M are spread over nibbles.
HALVES = {
    **dict.fromkeys(("F16", "Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}


def random_blocks(name: str, n: int, k: int, rng: np.random.Generator) -> Bytes:
    """Any bytes of a matrix [n, k] but scales that are not numbers: uint8 [n, bytes of a row]."""
    kind = ggml_type(name)
    blocks = rng.integers(0, 256, (n * (k // kind.values), kind.bytes), dtype=np.uint8)
    for at in HALVES.get(name, ()):
        # An exponent of ones would be a NaN or an infinity.
        high = blocks[:, at + 1]
        high[(high & 0x7C) == 0x7C] &= 0xBF
    if name == "IQ1_M":
        high = blocks[:, 55]
        high[(high & 0x70) == 0x70] &= 0xBF
    if name == "MXFP4":
        blocks[blocks[:, 0] == 255, 0] = 254
    if name == "NVFP4":
        scales = blocks[:, :4]
        scales[scales == 255] = 254
    if name == "F32":
        blocks[:, 3] &= 0xBF
    if name == "BF16":
        blocks[:, 1] &= 0xBF
    return blocks.reshape(n, -1)


def reference(name: str, blocks: Bytes) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Float32 [n, k] of blocks uint8 [n, bytes of a row]."""
    with np.errstate(over="ignore"):
        return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name])
