"""Fuzz one target with atheris: ``python -m tests.fuzz.harness TARGET FOLDER SECONDS`` (``make fuzz``).

FOLDER keeps what was learnt for the next run, and findings as ``crash-*``, ``timeout-*`` and ``oom-*``. The
process may take 2 GB beyond what its imports take.
"""

from __future__ import annotations

import importlib
import resource
import sys
import tempfile
from pathlib import Path
from types import FunctionType

import atheris

from tests.fuzz.targets import TARGETS, run, seeds

ROOM = 2 << 30

# All that targets import, so that nothing is imported under the limit of memory.
MODULES = (
    *("engine.load", "model.config", "model.gguf_config", "model.gguf_file", "model.gguf_source"),
    *("model.gguf_tokenizer", "model.shapes", "model.source", "model.sources", "model.tokenizer", "jsonfile"),
    *("model.gguf_scan", "plan.hardware", "plan.sizes", "stats", "store.manifest"),
)


def instrument() -> None:
    """Let atheris see the branches of our readers. Its hook for imports does not see an editable install."""
    for name in MODULES:
        module = importlib.import_module(f"hetero.{name}")
        for found in list(vars(module).values()):
            for each in (found, *vars(found).values()) if isinstance(found, type) else (found,):
                plain = getattr(each, "fget", each)
                if isinstance(plain, FunctionType) and plain.__module__ == module.__name__:
                    atheris.instrument_func(plain)


def bound_memory() -> None:
    """At most ROOM from here on; beyond it Python raises MemoryError, which is a finding."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


def main(name: str, folder: str, seconds: str) -> None:
    corpus, findings = Path(folder) / name / "corpus", Path(folder) / name
    corpus.mkdir(parents=True, exist_ok=True)
    # In memory, where a file costs microseconds.
    shared = Path("/dev/shm")
    scratch = Path(tempfile.mkdtemp(prefix="hetero-fuzz-", dir=shared if shared.is_dir() else None))
    for number, data in enumerate(seeds(name, scratch)):
        (corpus / f"seed-{number}").write_bytes(data)
    path = scratch / ("model.gguf" if name.startswith("gguf") else f"input-{name}")
    target = TARGETS[name]
    instrument()
    bound_memory()
    options = [
        f"-max_total_time={seconds}",
        "-timeout=10",
        "-rss_limit_mb=0",
        "-max_len=16384",
        "-print_final_stats=1",
    ]
    atheris.Setup(
        [sys.argv[0], *options, f"-artifact_prefix={findings}/", str(corpus)],
        lambda data: run(target, data, path),
    )
    atheris.Fuzz()


if __name__ == "__main__":
    main(*sys.argv[1:])
