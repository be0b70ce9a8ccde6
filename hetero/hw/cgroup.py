"""Where the limits of this process's cgroup stand, in the v1 and v2 hierarchies."""

from __future__ import annotations

from pathlib import Path


def own_path(root: Path, controller: str) -> str:
    """Path of this process in the v2 hierarchy (controller "") or in a v1 controller's; "/" if unknown."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return "/"
    for line in lines:
        parts = line.split(":", 2)
        if len(parts) == 3 and controller in parts[1].split(","):
            return parts[2]
    return "/"


def levels(base: Path, root: Path, controller: str) -> list[Path]:
    """Folders from the process's own cgroup up to the mount ``base``, innermost first.

    In a container the path may name the host's hierarchy, which is not visible there: what does not exist is
    left out.
    """
    parts = [p for p in own_path(root, controller).split("/") if p and p != ".."]
    return [p for i in range(len(parts), -1, -1) if (p := base.joinpath(*parts[:i])).is_dir()]
