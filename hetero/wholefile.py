"""Files that are written whole or not at all, and whose fault it is when they cannot be."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

from hetero.core import HeteroError, InputError, MachineError

# What the machine cannot do, whatever the user would have said.
_MACHINES = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO}


def unwritable(error: OSError, what: str, more: str = "") -> HeteroError:
    """The error to raise: the machine's where its disk is the reason, else the user's, who named the file.

    ``what`` cannot be written; ``more`` comes after the reason.
    """
    kind = MachineError if error.errno in _MACHINES else InputError
    return kind(f"{what}: cannot be written: {error.strerror or error}{more}")


def write_whole(path: Path, text: str, what: str) -> None:
    """Put ``text`` into ``path``; what was there before stays until the new text is on the disk.

    Raises InputError, or MachineError where the disk is the reason, with ``what`` in front.
    """
    try:
        if path.exists() and not path.is_file():  # a pipe, or a terminal
            path.write_text(text, encoding="utf-8")
            return
        target = path.resolve()
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=target.parent, prefix=f".{target.name}.", suffix=".part", delete=False
        ) as part:
            try:
                part.write(text)
                part.flush()
                os.fsync(part.fileno())
                os.fchmod(part.fileno(), _mode(target))
                os.replace(part.name, target)
            except BaseException:
                Path(part.name).unlink(missing_ok=True)
                raise
    except OSError as error:
        raise unwritable(error, f"{what} {path}") from None


def _mode(path: Path) -> int:
    """Of the file that is replaced, else what the process gives to new files."""
    if path.exists():
        return path.stat().st_mode & 0o777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
