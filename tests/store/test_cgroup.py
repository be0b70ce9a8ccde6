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

import pytest
import torch

from tests.store.large import large

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


@pytest.mark.slow
def test_a_model_of_twice_the_memory(tmp_path: Path, generator: torch.Generator) -> None:
    """Under a cgroup where one can be made; else under --ram alone, which counts but does not enforce."""
    folder = tmp_path / "m"
    seed = int(torch.randint(0, 2**31, (), generator=generator))
    assert large(folder, seed, layers=4, experts=38, hidden=1024, intermediate=1024) >= 2 * LIMIT
    (tmp_path / "disk.yaml").write_text(RULES)
    (tmp_path / "ram.yaml").write_text(RULES.replace(", tier: disk, ram: 64MiB", ""))
    env = {**os.environ, "HETERO_CACHE": str(tmp_path / "cache"), "HETERO_TUNE": "off"}
    asked = [sys.executable, "-m", "hetero.cli", "run", str(folder), "--prompt-ids", "1,2,3,4,5"]
    asked += ["--max-tokens", "12", "--ignore-eos", "--json", "--no-stats", "--dtype", "bfloat16", "--rules"]

    def run(rules: str, *more: str, before: str = "") -> tuple[list[int], str]:
        command = ["sh", "-c", f'{before} exec "$@"', "sh", *asked, str(tmp_path / rules), *more]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=250, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)["token_ids"], done.stderr

    with memory_group() as group:
        if isinstance(group, str):
            log.warning("no memory cgroup here (%s): --ram alone", group)
            found, told = run("disk.yaml", "--ram", f"{LIMIT}b")
        else:
            enter = f"echo $$ > {group.folder}/cgroup.procs &&"
            found, told = run("disk.yaml", before=enter)
            assert group.kills() == 0
            peak = group.peak()
            assert peak is None or peak <= LIMIT
            log.info("peak %s of %s bytes", peak, LIMIT)
    assert "disk tier: RAM holds" in told
    want, told = run("ram.yaml")
    assert "packed experts were read from" in told
    assert found == want
