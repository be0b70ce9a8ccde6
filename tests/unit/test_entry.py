"""How the command begins and ends: interrupts while it imports, readers that leave, the version."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version

import pytest

INTERRUPTED_IMPORT = """
import builtins, os, signal, sys
real = builtins.__import__
from hetero import entry
target, sys.argv = sys.argv[1], ["hetero", *sys.argv[2:]]
def importing(name, *rest, **named):
    if name == target:
        os.kill(os.getpid(), signal.SIGINT)
    return real(name, *rest, **named)
builtins.__import__ = importing
entry.main()
"""


@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("hetero.cli", ["--help"]),
        ("typer", ["--help"]),
        ("hetero.rules.defaults", ["plan", "synthetic:qwen3-30b-a3b"]),
        ("torch", ["bench", "synthetic:qwen3-30b-a3b"]),
    ],
)
def test_an_interrupt_while_modules_are_imported(module: str, command: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_IMPORT, module, *command],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr.strip()) == (130, "")


def test_an_ignored_interrupt_stays_ignored() -> None:
    program = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + INTERRUPTED_IMPORT
    done = subprocess.run(
        [sys.executable, "-c", program, "hetero.cli", "--help"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0
    assert "Usage" in done.stdout


@pytest.mark.parametrize(
    "command",
    [
        ["plan", "synthetic:qwen3-30b-a3b", "--hardware", "rtx4090-7950x"],
        ["rules", "list"],
        ["--help"],
        ["plan", "--help"],
    ],
)
def test_a_reader_that_has_left_ends_a_command_quietly(command: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "hetero", *command],
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_the_version() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hetero", "--version"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout == f"hetero {version('hetero')}\n"
