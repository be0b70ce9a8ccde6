"""The interpreter takes what the compiler refuses: every kernel of a step goes through the latter as well."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")


def test_kernels_of_a_step_compile_for_a_gpu() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compiled.py")
    root = script.parents[2]
    environment["PYTHONPATH"] = os.pathsep.join([str(root), str(root / "benchmarks")])
    ran = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    _, count, *names = ran.stdout.split()
    assert int(count) > 100
    sources = (path.read_text() for path in (root / "hetero").rglob("*.py"))
    launched = {name for source in sources for name in re.findall(r"kernels\.(\w+)\[", source)}
    assert len(launched) > 30
    assert launched == set(names)
