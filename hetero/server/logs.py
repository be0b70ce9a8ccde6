"""Where a running server's lines go. A disk that is full must cost lines, never the server."""

from __future__ import annotations

import contextlib
import logging
import os
import sys

from hetero.wholefile import unwritable

log = logging.getLogger("hetero.server")
FORMAT = "%(asctime)s %(levelname)s %(message)s"


def say(text: str) -> None:
    """One line for the person at the terminal and for the log."""
    log.info(text)
    _to_terminal(text)


class LogFile(logging.Handler):
    """Appends lines to a file. What cannot be written is dropped, and said once until it works again.

    Unbuffered by descriptor: Python's files keep what they could not write and fail on it again when closed.
    """

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path
        self._lost = 0
        try:
            self._file = self._open()
        except OSError as error:
            raise unwritable(error, f"--log-file {path}") from None
        self.setFormatter(logging.Formatter(FORMAT))

    def emit(self, record: logging.LogRecord) -> None:
        line = (self.format(record) + "\n").encode("utf-8", "backslashreplace")
        try:
            self._follow()
            while line:
                line = line[os.write(self._file, line) :]
        except OSError as error:
            self._lost += 1
            if self._lost == 1:
                _to_terminal(
                    f"hetero: --log-file {self._path}: {error.strerror}; the server goes on, lines are lost "
                    "until it can be written"
                )
            return
        if self._lost:
            _to_terminal(f"hetero: --log-file {self._path}: written again; {self._lost} lines were lost")
            self._lost = 0

    def close(self) -> None:
        os.close(self._file)
        super().close()

    def _follow(self) -> None:
        """Opens anew when the file was moved away, as log rotation does."""
        try:
            there = os.stat(self._path)
            if os.path.samestat(there, os.fstat(self._file)):
                return
        except FileNotFoundError:
            pass
        fresh = self._open()
        os.close(self._file)
        self._file = fresh

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)


def _to_terminal(text: str) -> None:
    # A stderr that takes nothing is no reason to end.
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)  # noqa: T201


def set_up(path: str | None) -> None:
    """Lines of the server go to ``path``; warnings and worse also to stderr. Raises InputError."""
    # A handler's own failure else prints a traceback of logging.
    logging.raiseExceptions = False
    handlers: list[logging.Handler] = [logging.StreamHandler()]
    handlers[0].setLevel(logging.WARNING)
    handlers[0].setFormatter(logging.Formatter("hetero: %(message)s"))
    if path is not None:
        handlers.append(LogFile(path))
    for name in ("hetero", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers = list(handlers)
        logger.propagate = False
    log.setLevel(logging.INFO)
    # Its warnings are of what strangers send, who could fill a disk with them.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)


def give_up_stderr() -> None:
    """Before the process ends: a stderr that cannot be flushed would change the exit code."""
    try:
        sys.stderr.flush()
    except (OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
