"""A ``hetero serve`` of the benchmarks' own, on a free port of 127.0.0.1."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

READY = re.compile(rb"serving \S+ on (http://\S+) ")


@contextmanager
def serving(*words: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """The process and its URL, once it serves. Ends this program with what it said when it ends before."""
    with tempfile.TemporaryFile() as heard:
        command = [sys.executable, "-m", "hetero.cli", "serve", *words, "--port", "0"]
        server = subprocess.Popen(command, stderr=heard)
        try:
            found = None
            while found is None:
                ended = server.poll() is not None
                heard.seek(0)
                said = heard.read()
                if ended:
                    print(said.decode())
                    sys.exit(1)
                found = READY.search(said)
                time.sleep(0.1)
            yield server, found[1].decode()
        finally:
            if server.poll() is None:
                server.terminate()
                try:
                    server.wait(60)
                except subprocess.TimeoutExpired:
                    server.kill()
