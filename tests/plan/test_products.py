"""What a plan takes torch's operations on the CPU to cost, in bytes and rates."""

from __future__ import annotations

from typing import Any

import pytest

from hetero.plan import constants
from hetero.plan.hardware import Figure, Hardware
from hetero.plan.planner import make_plan
from hetero.plan.products import attention_tflops, many_tflops, row_gb_s
from hetero.plan.roofline import Term
from tests.plan.example import GIB, asked, machine, small


def with_cpu(hardware: Hardware, **figures: Any) -> Hardware:
    told = {
        name: Figure(measured=value, source="a test") if isinstance(value, float) else value
        for name, value in figures.items()
    }
    return hardware.model_copy(update={"cpu": hardware.cpu.model_copy(update=told)})


def test_a_row_by_a_matrix() -> None:
    """100 GB/s and 8 cores: in 16 bits a byte is read and then packed."""
    here = machine(gpu=False)
    assert row_gb_s(here, 4) == pytest.approx(100 * constants.DENSE_SHARE)
    assert row_gb_s(here, 2) == pytest.approx(1 / (1 / 100 + 1 / (8 * constants.PACKED_GB_S)))
    measured = with_cpu(here, dense_share=0.9, dense16_share=0.4)
    assert (row_gb_s(measured, 4), row_gb_s(measured, 2)) == (pytest.approx(90), pytest.approx(40))


def test_many_rows() -> None:
    """1 TFLOPS in float32: 16 bits are faster by tiles alone, unless they were measured."""
    here = machine(gpu=False)
    assert many_tflops(here, 4) == 1.0
    assert many_tflops(here, 2) == constants.MANY_ROWS_16
    tiles = with_cpu(here, isa="amx")
    assert many_tflops(tiles, 2) == constants.MANY_ROWS_TILES_16
    assert many_tflops(with_cpu(tiles, dense16_tflops=3.0), 2) == 3.0
    assert attention_tflops(tiles, 2) > attention_tflops(tiles, 4) == attention_tflops(here, 2)


@pytest.mark.parametrize(("dtype", "width"), [("float32", 4), ("bfloat16", 2)])
def test_a_step_on_the_cpu(dtype: str, width: int) -> None:
    inventory, here = small(), machine(gpu=False)
    plan = make_plan("m", inventory, here, asked(dense=dtype, context=1000))
    terms: dict[str, Term] = {term.name: term for term in plan.expected[0].terms}
    dense = terms["dense layers, CPU"]
    assert dense.bytes == inventory.read_params * width
    assert dense.ms == pytest.approx(dense.bytes / row_gb_s(here, width) / 1e6)
    # Two layers of keys and values of two heads of 16, which two query heads each read, after a copy.
    passes = constants.KEPT_COPY + max(1.0, 2 * constants.KEPT_READ)
    kept = terms["keys and values of 1000 tokens, copied and read"]
    assert kept.bytes == pytest.approx(2 * 2 * 2 * 16 * 1000 * width * passes)
    assert plan.expected[0].tok_s < plan.decode[0].tok_s


def test_float32_is_not_chosen_where_it_is_slower() -> None:
    slow = with_cpu(machine(gpu=False), dense_share=0.9, dense16_share=0.4, op_us=0.001)
    plan = make_plan("m", small(), slow, asked(context=16))
    assert plan.dense == "float32"
    assert plan.instead is not None
    assert "; in bfloat16 " in plan.instead
    fast = with_cpu(slow, dense16_share=0.8, dense16_tflops=5.0)
    plan = make_plan("m", small(), fast, asked(context=16))
    assert plan.dense == plan.layout.dense == "bfloat16"
    assert plan.instead is not None
    assert "; in float32 " in plan.instead
    exact = make_plan("m", small(), fast, asked(dense="float32", context=16))
    assert exact.today.decode.tok_s < plan.today.decode.tok_s
    assert exact.instead is None


def test_prompts_take_longer_than_the_bound() -> None:
    for hardware, request in (
        (machine(gpu=False), asked()),
        (machine(), asked(vram=24 * GIB)),
        (machine(), asked(vram=24 * GIB, dense="float16")),
    ):
        plan = make_plan("m", small(), hardware, request, alternatives=False)
        assert [p.tokens for p in plan.today.prompts] == [512, 8192]
        least = {p.tokens: p.ms for p in plan.prefill}
        assert all(p.ms > least[p.tokens] for p in plan.today.prompts)
