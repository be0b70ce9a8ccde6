"""The wheel carries everything: built, installed in a clean environment, run from another folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command without what this process's environment would lend it; return its standard output."""
    env = {k: v for k, v in os.environ.items() if k not in {"PYTHONPATH", "VIRTUAL_ENV", "HETERO_ISA"}}
    done = subprocess.run(
        [str(c) for c in command], cwd=cwd, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A fresh environment that holds the wheel and what it asks for, nothing of the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run(*pip, "wheel", "-q", "--no-build-isolation", "--no-deps", "-w", folder, ROOT, cwd=folder)
    (wheel,) = folder.glob("hetero-*.whl")
    venv.create(folder / "env")
    # Nearly all of what is installed is never imported here: it need not be compiled.
    install = [*pip, "--python", folder / "env/bin/python", "install", "-q", "--no-compile"]
    run(*install, "-c", ROOT / "constraints.txt", wheel, cwd=folder)
    yield folder
    shutil.rmtree(folder)  # torch among it, while pytest keeps such folders to its end


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_wheel_runs_from_another_folder(clean: Path) -> None:
    hetero = clean / "env/bin/hetero"
    where = run(
        clean / "env/bin/python",
        "-c",
        "import hetero.rules.find as f; print(f.find_rules_dir())",
        cwd=clean,
    ).strip()
    assert where.endswith("hetero/data/rules")
    assert str(ROOT) not in where
    page = run(
        clean / "env/bin/python",
        "-c",
        "from importlib.resources import files\n"
        "print(*sorted(each.name for each in files('hetero.server').joinpath('page').iterdir()))",
        cwd=clean,
    ).split()
    assert page == sorted(each.name for each in (ROOT / "hetero/server/page").iterdir())
    listed = json.loads(run(hetero, "rules", "list", "--json", cwd=clean))
    assert listed
    answer = json.loads(
        run(hetero, "run", "-p", "Call me", "--max-tokens", "8", "--temperature", "0", "--json", cwd=clean)
    )
    assert answer["usage"]["completion_tokens"] == 8
    assert answer["text"].strip()
    assert sum(answer["kernels"].values()) > 0
