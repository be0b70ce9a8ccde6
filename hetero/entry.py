"""Entry point of the ``hetero`` command: Ctrl-C ends it in silence, also while it still imports itself."""

from __future__ import annotations

import os
import signal
from typing import NoReturn

INTERRUPTED = 130


def _leave(*_: object) -> NoReturn:
    os._exit(INTERRUPTED)  # nothing was begun that had to be ended


def main() -> None:
    """Import the command line and run it."""
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # as of a job in the background
    if not ignored:
        signal.signal(signal.SIGINT, _leave)
    from hetero.cli import main as command

    if not ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    command()


if __name__ == "__main__":
    main()
