"""The thread pool: sleeps when idle, carries exceptions, serves two callers, survives fork and exit."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import time

import pytest
import torch

from hetero import _cpu, cpu
from hetero.core import ExpertSpec, InputError
from hetero.cpu import CpuExperts
from hetero.formats import parse_format
from tests.cpu.reference import fill, random_routing, random_weights


def small_experts(generator: torch.Generator) -> tuple[CpuExperts, ExpertSpec]:
    spec = ExpertSpec(8, 128, 64, 4)
    return fill(CpuExperts(spec, parse_format("int8")), random_weights(spec, generator)), spec


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_every_chunk_runs_once(threads: int) -> None:
    cpu.set_threads(threads)
    assert cpu.threads() == threads
    for chunks in (0, 1, 2, 7, 1000):
        assert _cpu.pool_exercise(chunks, 0, -1) == 2 * chunks


def test_many_short_steps() -> None:
    """More threads than cores: late threads must neither lose nor repeat a chunk of a newer step."""
    cpu.set_threads(4)
    for step in range(3000):
        chunks = step % 9
        assert _cpu.pool_exercise(chunks, 0, -1) == 2 * chunks


@pytest.mark.parametrize("threads", [1, 3])
def test_exception_reaches_the_caller_and_the_pool_goes_on(threads: int) -> None:
    cpu.set_threads(threads)
    for _ in range(20):
        with pytest.raises(RuntimeError, match="chunk 5 failed"):
            _cpu.pool_exercise(50, 10, 5)
        assert _cpu.pool_exercise(50, 1, -1) == 100


def test_idle_pool_uses_no_cpu() -> None:
    cpu.set_threads(3)
    _cpu.pool_exercise(30, 100, -1)
    time.sleep(0.05)
    start = time.process_time()
    time.sleep(1.0)
    # One thread that spins would use a second.
    assert time.process_time() - start < 0.1


def test_two_callers_at_once(generator: torch.Generator) -> None:
    experts, spec = small_experts(generator)
    cpu.set_threads(2)
    steps = [random_routing(spec, 1 + i, generator) for i in range(20)]
    want = [experts.forward(*step) for step in steps]
    wrong: list[int] = []

    def caller() -> None:
        for _ in range(10):
            for i, step in enumerate(steps):
                if not torch.equal(experts.forward(*step), want[i]):
                    wrong.append(i)

    callers = [threading.Thread(target=caller) for _ in range(2)]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join()
    assert wrong == []


def test_gil_is_released() -> None:
    """Another Python thread runs while a step of 0.3 s is in flight."""
    cpu.set_threads(1)
    ticks = 0
    step = threading.Thread(target=_cpu.pool_exercise, args=(150, 1000, -1))
    step.start()
    while step.is_alive():
        time.sleep(0.01)
        ticks += 1
    step.join()
    assert ticks >= 3  # a step that kept the lock would let one begin before it at most


def test_child_of_a_fork_computes(generator: torch.Generator) -> None:
    experts, spec = small_experts(generator)
    cpu.set_threads(3)
    step = random_routing(spec, 5, generator)
    want = experts.forward(*step)
    child = os.fork()
    if child == 0:
        ok = False
        try:
            ok = torch.equal(experts.forward(*step), want) and _cpu.pool_exercise(100, 10, -1) == 200
        finally:
            os._exit(0 if ok else 1)
    deadline = time.monotonic() + 30
    while (status := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            os.kill(child, 9)
            os.waitpid(child, 0)
            pytest.fail("the child hangs")
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(status[1]) == 0
    assert torch.equal(experts.forward(*step), want)


def test_fork_during_a_step() -> None:
    """The fork waits for the step, so the child never inherits half of one."""
    cpu.set_threads(2)
    context = multiprocessing.get_context("fork")
    busy = threading.Thread(target=lambda: [_cpu.pool_exercise(40, 500, -1) for _ in range(20)])
    busy.start()
    for _ in range(5):
        child = context.Process(target=_cpu.pool_exercise, args=(20, 10, -1))
        child.start()
        child.join(30)
        assert child.exitcode == 0
    busy.join()


# Python's own handler is put back: a job in the background is started with the signal ignored.
INTERRUPT = "import os, signal as s; s.signal(2, s.default_int_handler); os.kill(os.getpid(), 2)"


@pytest.mark.parametrize("ending", ["", "raise SystemExit(3)", INTERRUPT])
def test_interpreter_ends_cleanly(ending: str) -> None:
    code = f"from hetero import _cpu, cpu\ncpu.set_threads(3)\n_cpu.pool_exercise(99, 10, -1)\n{ending}\n"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == {"": 0, "raise SystemExit(3)": 3}.get(ending, -2)
    assert "terminate" not in done.stderr


def test_steps_at_exit_still_run() -> None:
    code = (
        "import atexit\nfrom hetero import _cpu\n"
        "atexit.register(lambda: print(_cpu.pool_exercise(9, 1, -1)))\n"
        "from hetero import cpu\ncpu.set_threads(2)\n_cpu.pool_exercise(9, 1, -1)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "18")


def test_threads_below_one_are_refused() -> None:
    with pytest.raises(InputError, match="at least 1, not 0"):
        cpu.set_threads(0)
