"""A model twice as large as the memory that the process may have runs from disk, and lives."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest
import torch

from tests.store.large import large, large_table

LIMIT = 448 << 20

log = logging.getLogger(__name__)
RULES = """
rules:
  - name: experts
    match: {class: MoeBlock}
    replace: {op: moe, experts: {format: bf16, tier: disk, ram: 64MiB}}
  - name: the rest
    match: {name: '.*'}
    replace: {op: keep}
"""


class Group:
    """A memory cgroup of version 1 or 2 with LIMIT."""

    def __init__(self, folder: Path, limit: str, peak: str, events: str) -> None:
        self.folder, self._peak, self._events = folder, peak, events
        (folder / limit).write_text(str(LIMIT))

    def peak(self) -> int | None:
        path = self.folder / self._peak
        return int(path.read_text()) if path.exists() else None

    def kills(self) -> int:
        lines = (self.folder / self._events).read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.split()[0] == "oom_kill")


@contextlib.contextmanager
def memory_group() -> Iterator[Group | str]:
    """A cgroup, or why there is none here."""
    name = f"hetero-test-{os.getpid()}"
    kinds = (
        ("memory", "memory.limit_in_bytes", "memory.max_usage_in_bytes", "memory.oom_control"),
        ("", "memory.max", "memory.peak", "memory.events"),
    )
    reasons = []
    for controller, *files in kinds:
        folder = Path("/sys/fs/cgroup", controller, name)
        try:
            folder.mkdir()
        except OSError as error:
            reasons.append(f"{folder}: {error.strerror}")
            continue
        try:
            group = Group(folder, *files)
        except OSError as error:
            folder.rmdir()
            reasons.append(f"{folder}: {error.strerror}")
            continue
        try:
            yield group
        finally:
            folder.rmdir()
        return
    yield "; ".join(reasons)


class Run(Protocol):
    def __call__(self, *more: str, before: str = "") -> tuple[list[int], str]:
        """The tokens, and what was told; ``before``: shell commands."""


def runner(tmp_path: Path, folder: Path, *asked: str) -> Run:
    """``hetero run`` of a folder in a process of its own."""
    env = {**os.environ, "HETERO_CACHE": str(tmp_path / "cache"), "HETERO_TUNE": "off"}
    words = [sys.executable, "-m", "hetero.cli", "run", str(folder), *asked, "--max-tokens", "12"]
    words += ["--ignore-eos", "--json", "--no-stats", "--dtype", "bfloat16"]

    def run(*more: str, before: str = "") -> tuple[list[int], str]:
        command = ["sh", "-c", f'{before} exec "$@"', "sh", *words, *more]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=250, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)["token_ids"], done.stderr

    return run


def under_limit(run: Run, *more: str) -> tuple[list[int], str]:
    """Under a cgroup where one can be made; else under --ram alone, which counts but does not enforce."""
    with memory_group() as group:
        if isinstance(group, str):
            log.warning("no memory cgroup here (%s): --ram alone", group)
            return run(*more, "--ram", f"{LIMIT}b")
        found = run(*more, before=f"echo $$ > {group.folder}/cgroup.procs &&")
        assert group.kills() == 0
        peak = group.peak()
        assert peak is None or peak <= LIMIT
        log.info("peak %s of %s bytes", peak, LIMIT)
        return found


@pytest.mark.slow
def test_a_model_of_twice_the_memory(tmp_path: Path, generator: torch.Generator) -> None:
    folder = tmp_path / "m"
    seed = int(torch.randint(0, 2**31, (), generator=generator))
    assert large(folder, seed, layers=4, experts=38, hidden=1024, intermediate=1024) >= 2 * LIMIT
    (tmp_path / "disk.yaml").write_text(RULES)
    (tmp_path / "ram.yaml").write_text(RULES.replace(", tier: disk, ram: 64MiB", ""))
    run = runner(tmp_path, folder, "--prompt-ids", "1,2,3,4,5")
    limited = ["--rules", str(tmp_path / "disk.yaml")]
    found, told = under_limit(run, *limited)
    assert "disk tier: RAM holds" in told
    want, told = run("--rules", str(tmp_path / "ram.yaml"))
    assert "packed experts were read from" in told
    assert found == want


@pytest.mark.slow
def test_a_table_larger_than_the_memory(tmp_path: Path, generator: torch.Generator) -> None:
    """The shipped rules leave it on disk by themselves."""
    folder = tmp_path / "m"
    seed = int(torch.randint(0, 2**31, (), generator=generator))
    assert large_table(folder, seed, base=1_100_000) > 1.1 * LIMIT
    prompt = torch.randint(3, 90, (110,), generator=generator).tolist()
    run = runner(tmp_path, folder, "--prompt-ids", ",".join(map(str, prompt)))
    found, told = under_limit(run)
    assert "stay on disk" in told
    want, told = run("--set", "table=ram")
    assert "stay on disk" not in told
    assert found == want
