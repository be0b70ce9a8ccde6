"""Ctrl-C while the command is still importing: exit 130, in silence."""

from __future__ import annotations

import subprocess
import sys

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
