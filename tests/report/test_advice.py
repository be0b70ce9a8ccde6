"""Advice on made-up measurements: what it says, and what it must not claim."""

from __future__ import annotations

import pytest

from hetero.report.advice import advise, ratio
from hetero.report.schema import Sample
from tests.report.made import EXPERT_BYTES, around, cell, report, sweep

DECODE_S = 10 * EXPERT_BYTES / 95e9  # 95 of 100 GB/s


def test_a_ratio_is_taken_round_by_round() -> None:
    slow_machine = Sample(rounds=[2.0, 20.0, 4.0])
    fast_code = Sample(rounds=[1.0, 10.0, 2.0])
    found = ratio(slow_machine, fast_code)
    assert (found.median, found.low, found.high) == (2.0, 2.0, 2.0)
    assert found.sure


@pytest.mark.parametrize(
    ("longer", "why"),
    [
        ([1.0, 1.3, 0.8], "goes both ways"),
        ([1.01, 1.01, 1.01], "too small"),
        ([1.02, 1.5, 1.04], "less than its own spread"),
        ([1.5, 1.5], "too few rounds"),
    ],
)
def test_no_difference_below_its_spread(longer: list[float], why: str) -> None:
    assert not ratio(Sample(rounds=longer), Sample(rounds=[1.0] * len(longer))).sure, why


def test_samples_of_different_length_are_compared_by_their_intervals() -> None:
    found = ratio(Sample(rounds=[2.0, 2.2, 2.4]), Sample(rounds=[1.0, 1.0, 1.1, 1.1]))
    assert found.low == pytest.approx(2.0 / 1.1)
    assert found.high == pytest.approx(2.4)


def test_decode_at_the_speed_of_memory() -> None:
    told = advise(report([cell("avx2", 1, DECODE_S * 1.3), cell("avx512", 1, DECODE_S)]))
    text = " ".join(told)
    assert "Decode (1 token, int4 g32): avx512 takes 0.291 ms a layer, at most 71.6 tokens/s" in text
    assert "avx2 takes 1.30 x (1.30 to 1.30) as long" in text
    assert "Memory limits decode: 95 GB/s of weights, 95% of plain reads" in text
    assert "cores limit" not in text


def test_decode_limited_by_cores() -> None:
    halves = sweep({1: 8e-3, 2: 4e-3, 4: 2e-3, 8: 1e-3})
    told = advise(report([cell("avx2", 1, 1e-3)], threads=halves))
    text = " ".join(told)
    assert "The cores limit decode: 27.6 GB/s of weights, 28% of plain reads" in text
    assert "decode grew 2.00 x with twice the threads" in text
    assert "Threads: 8 for decode, 8 for prefill (64 tokens), of 8 tried." in text


def test_neither_roof_is_told_as_neither() -> None:
    told = " ".join(advise(report([cell("avx2", 1, 1e-3)], threads=sweep({4: 1.1e-3, 8: 1e-3}))))
    assert "Neither memory nor the products" in told


def test_weights_in_the_cache_say_nothing_about_memory() -> None:
    told = " ".join(advise(report([cell("avx512", 1, DECODE_S)], beyond_l3=False)))
    assert "fit the L3 cache" in told
    assert "Memory limits" not in told


def test_instruction_sets_within_the_spread_are_equal() -> None:
    noisy = Sample(rounds=[DECODE_S * f for f in (0.9, 1.2, 1.0, 0.8, 1.1)])
    told = " ".join(advise(report([cell("avx2", 1, noisy), cell("avx512", 1, around(DECODE_S, rounds=5))])))
    assert "avx2 does not differ by more than the spread" in told or (
        "avx512 does not differ by more than the spread" in told
    )
    assert "as long" not in told


def test_the_same_kernels_are_no_comparison() -> None:
    same = {"int4.avx512_vnni.gemv": 20}
    cells = [cell("avx512", 1, DECODE_S, kernels=same), cell("amx", 1, DECODE_S * 1.001, kernels=same)]
    assert "amx runs the same kernels" in " ".join(advise(report(cells)))


def test_prefill_names_its_roof() -> None:
    memory_bound = [cell("amx", 1, DECODE_S), cell("amx", 1024, 20e-3, peak=20.0)]
    told = " ".join(advise(report(memory_bound)))
    assert "At 1024 tokens the roof is memory: 14.2 ms against 5.03 ms for its products" in told
    assert "reaches 71% of that roof" in told
    compute_bound = [cell("amx", 1, DECODE_S), cell("amx", 1024, 150e-3, peak=1.0)]
    told = " ".join(advise(report(compute_bound)))
    assert "the roof is the peak of tdpbusd tmm: 101 ms against 14.2 ms for reading its weights" in told
    assert "The kernels, not the hardware" not in told
    slow = [cell("amx", 1, DECODE_S), cell("amx", 1024, 900e-3, peak=1.0)]
    assert "The kernels, not the hardware" in " ".join(advise(report(slow)))


def test_the_crossover_is_the_first_sure_gain() -> None:
    times = {1: (1e-3, 1e-3), 4: (4e-3, 4.02e-3), 16: (16e-3, 10e-3), 64: (64e-3, 20e-3)}
    cells = [
        cell(isa, tokens, t[i]) for tokens, t in times.items() for i, isa in enumerate(("avx512", "amx"))
    ]
    told = " ".join(advise(report(cells)))
    assert "amx is faster than avx512 from 16 tokens a step on (1.60 x" in told
    equal = [cell(isa, n, n * 1e-3) for n in (1, 64) for isa in ("avx512", "amx")]
    assert "amx is not faster than avx512 by more than the spread" in " ".join(advise(report(equal)))


def test_a_small_batch_is_told_with_what_it_reads() -> None:
    cells = [cell("avx512", 1, 1e-3), cell("avx512", 4, 3.9e-3)]
    told = " ".join(advise(report(cells)))
    assert "4 tokens at once take 3.90 x (3.90 to 3.90) the time of one and read 3.88 x the experts" in told


def test_fewer_threads_are_advised_only_when_more_gain_nothing() -> None:
    flat = sweep({1: 4e-3, 2: 2e-3, 4: 1e-3, 8: 0.99e-3})
    told = " ".join(advise(report([cell("amx", 1, DECODE_S)], threads=flat)))
    assert "Threads: 4 for decode, 4 for prefill (64 tokens): more, up to 8, gain nothing" in told
    assert "Set `threads: 4`" in told
    noisy = sweep({1: 4e-3, 2: 2e-3, 4: 1e-3, 8: 0.99e-3}, noise=0.4)
    told = " ".join(advise(report([cell("amx", 1, DECODE_S)], threads=noisy)))
    assert "Set `threads" not in told
    assert "a spread of 40% hides smaller gains" in told


def test_formats_are_ranked_by_their_rates() -> None:
    cells = [cell("avx512", 1, 2e-3, fmt="int8 g32"), cell("avx512", 1, 1e-3)]
    told = " ".join(advise(report(cells)))
    assert "By format, 1 token a step: int4 g32 20.8 tokens/s, int8 g32 10.4 tokens/s." in told


def test_a_slower_clock_is_told_when_it_is_sure() -> None:
    cells = [cell("amx", 1, DECODE_S)]
    assert "Wide vectors do not slow the clock" in " ".join(advise(report(cells)))
    told = " ".join(advise(report(cells, amx_ghz=2.4)))
    assert "Wide vectors slow the clock: 3.00 GHz idle, after tdpbusd tmm 2.40 GHz" in told


def test_a_busy_machine_and_too_few_rounds_come_first() -> None:
    wild = Sample(rounds=[1e-3, 2e-3, 0.5e-3])
    assert "The machine was busy" in advise(report([cell("amx", 1, wild)]))[0]
    crowded = advise(report([cell("amx", 1, 1e-3)], cpu_share=0.55))
    assert crowded[0].startswith("The 8 threads got 55% of their cores")
    assert "fewer than three rounds" in advise(report([cell("amx", 1, Sample(rounds=[1e-3, 1e-3]))]))[0]
