"""Sizes of the processor's caches, from sysfs."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


def l3_bytes(root: Path = Path("/"), cpus: Iterable[int] | None = None) -> int | None:
    """Bytes of all level 3 caches beside the CPUs of this process; None where the system tells none.

    A virtual machine reports the whole cache of its host, of which it may own a share.
    """
    found: dict[str, int] = {}
    for cpu in os.sched_getaffinity(0) if cpus is None else cpus:
        for index in sorted((root / f"sys/devices/system/cpu/cpu{cpu}/cache").glob("index*")):
            try:
                level = (index / "level").read_text().strip()
                size = (index / "size").read_text().strip()
                shared = (index / "shared_cpu_list").read_text().strip()
            except OSError:
                continue
            if level == "3" and size[:-1].isdigit() and size[-1] in _UNITS:
                found[shared] = int(size[:-1]) * _UNITS[size[-1]]
    return sum(found.values()) or None
