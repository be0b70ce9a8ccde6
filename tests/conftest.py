"""Settings of every test. Inputs are fresh in every run, but where CI is set: a gate must judge the same code
alike each time."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.interpreter import quicken

if TYPE_CHECKING:
    import torch

# Times differ from machine to machine and from run to run; tests that want them ask for them.
os.environ.setdefault("HETERO_TUNE", "off")
# Tests are no use that anybody wants counted.
os.environ.setdefault("HETERO_STATS", "off")

# A shell ignores Ctrl-C for what it runs in the background, and so would every program that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

HAS_GPU = bool(list(Path("/dev").glob("nvidia[0-9]*")))
# Without a GPU Triton's kernels are interpreted. Triton reads this when it is imported, which transformers
# does for some models: so before any test.
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"

GPU_LIMIT_S = 150.0
"""After so long a test on a machine with a GPU hangs: nothing ends a call that waits for a stream, so all
threads tell where they are, and the process ends."""

# Explaining a failure traces every line of a test. On Python 3.11 a traced test once went on for ever, in a
# process whose threads send each other exceptions, as the bound on a chat template's time does.
with contextlib.suppress(ImportError):  # machines that run the kernels' tests alone do not have it
    from hypothesis import Phase, settings

    untraced = [phase for phase in Phase if phase is not Phase.explain]
    settings.register_profile("untraced", phases=untraced, derandomize="CI" in os.environ)
    settings.load_profile("untraced")


_stderr = -1


def pytest_configure() -> None:
    global _stderr  # noqa: PLW0603  what is captured is lost where a process ends
    _stderr = os.dup(2)


def pytest_collection_finish() -> None:
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is not None and not HAS_GPU:
        quicken(interpreter)


@pytest.fixture(autouse=HAS_GPU)
def _no_hang() -> Iterator[None]:
    faulthandler.dump_traceback_later(GPU_LIMIT_S, exit=True, file=_stderr)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def generator(request: pytest.FixtureRequest) -> torch.Generator:
    """Of random inputs; the seed stands in a failure's captured output."""
    import torch

    name = request.node.nodeid
    seed = (zlib.crc32(name.encode()) if "CI" in os.environ else torch.seed()) % 2**31
    print(f"seed {seed} of {name}")  # noqa: T201
    return torch.Generator().manual_seed(seed)
