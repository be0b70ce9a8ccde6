"""What torch's products reach on the CPU, where dense layers are transformers' modules.

One row by a matrix in float32 is a read of the matrix. In 16 bits each product first packs the matrix, or
widens its values, so that a byte costs its read and then its packing: half of the bytes are far from half of
the time.
"""

from __future__ import annotations

from hetero.plan import constants
from hetero.plan.hardware import Hardware
from hetero.plan.kv import LayerState


def row_gb_s(hardware: Hardware, width: int) -> float:
    """GB/s of a matrix, of values of ``width`` bytes, that is multiplied by one row."""
    cpu, read = hardware.cpu, hardware.ram.read_gb_s.value
    share = cpu.dense_share if width == 4 else cpu.dense16_share
    if share is not None:
        return read * share.value
    if width == 4:
        return read * constants.DENSE_SHARE
    return 1.0 / (1.0 / read + 1.0 / (constants.PACKED_GB_S * cpu.cores))


def many_tflops(hardware: Hardware, width: int) -> float:
    """TFLOPS of products of many rows."""
    cpu = hardware.cpu
    if width == 4:
        return cpu.dense_tflops.value
    if cpu.dense16_tflops is not None:
        return cpu.dense16_tflops.value
    factor = constants.MANY_ROWS_TILES_16 if cpu.isa == "amx" else constants.MANY_ROWS_16
    return cpu.dense_tflops.value * factor


def attention_tflops(hardware: Hardware, width: int) -> float:
    """TFLOPS of a prompt's attention."""
    tiles = width == 2 and hardware.cpu.isa == "amx"
    return hardware.cpu.dense_tflops.value * (constants.ATTENTION_TILES_16 if tiles else constants.ATTENTION)


def passes(state: LayerState) -> float:
    """How often a step of transformers' modules passes over what a layer keeps of a sequence, in plain reads
    of it. What recurrent layers keep is small, and stays in the caches."""
    if not state.per_token:
        return 1.0
    return constants.KEPT_COPY + max(1.0, constants.KEPT_READ * state.readers)
