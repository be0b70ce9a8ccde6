"""Every setting that comes from the environment, in one place. Imports neither torch nor transformers.

``docs/env.md`` lists the same variables; a test holds the two together.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hetero.core import InputError
from hetero.hw.memory import parse_bytes

PCIE = ("early", "late")
ISAS = ("auto", "scalar", "avx2", "avx512", "amx")
# More than any machine has cores; a slip of the keyboard would else start threads until memory is gone.
MAX_THREADS = 4096


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable: its default as a person writes it, and why it exists."""

    name: str
    default: str
    what: str


VARIABLES: tuple[Variable, ...] = (
    Variable("HETERO_ISA", "auto", "instruction set of the CPU experts"),
    Variable("HETERO_THREADS", "physical cores of the affinity mask", "threads of the expert pool"),
    Variable(
        "HETERO_CACHE",
        "$XDG_CACHE_HOME/hetero or ~/.cache/hetero",
        "folder of what is made once",
    ),
    Variable("HETERO_TUNE", "auto", "where the choice of kernels by rows comes from"),
    Variable("HETERO_PREFILL_CHUNK", "512, with fused layers 4096", "prompt tokens of one forward pass"),
    Variable("HETERO_PCIE", "early", "when a step's experts cross PCIe"),
    Variable("HETERO_SNAPSHOTS", "2GiB", "main memory for states of sequences of fused layers"),
    Variable("HETERO_AHEAD", "on", "whether greedy steps of fused layers are launched one ahead"),
    Variable("HETERO_GRAPHS", "on", "whether steps of models without fused layers are captured on a GPU"),
    Variable("HETERO_API_KEY", "none", "key that clients of the server must give"),
    Variable("HETERO_STATS", "on", "whether counts of the experts that are used are kept"),
    Variable("HETERO_DEBUG", "0", "show the traceback of an unexpected error"),
)


@dataclass(frozen=True, slots=True)
class Settings:
    """Values of the variables after checking. ``threads`` None: the operator's own default."""

    isa: str = "auto"
    threads: int | None = None
    cache: Path = Path("~/.cache/hetero")
    tune: str = "auto"  # auto, off, force or a file
    prefill_chunk: int = 512
    pcie: str = "early"
    snapshots: int = 2 << 30
    ahead: bool = True
    graphs: bool = True
    stats: bool = True
    debug: bool = False


def settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Read the environment now (it is cheap, and tests change it). Raises InputError naming the variable."""
    env = os.environ if environ is None else environ
    isa = env.get("HETERO_ISA") or "auto"
    if isa not in ISAS:
        raise InputError(f"HETERO_ISA={isa}: must be one of {', '.join(ISAS)}")
    return Settings(
        isa=isa,
        threads=_positive(env, "HETERO_THREADS", MAX_THREADS),
        cache=_cache(env),
        tune=env.get("HETERO_TUNE") or "auto",
        prefill_chunk=_positive(env, "HETERO_PREFILL_CHUNK") or 512,
        pcie=_one_of(env, "HETERO_PCIE", PCIE),
        snapshots=_size(env, "HETERO_SNAPSHOTS", 2 << 30),
        ahead=_switch(env, "HETERO_AHEAD"),
        graphs=_switch(env, "HETERO_GRAPHS"),
        stats=_switch(env, "HETERO_STATS"),
        debug=debug(env),
    )


def debug(environ: Mapping[str, str] | None = None) -> bool:
    """Whether tracebacks are shown; apart, since it must work while another variable is wrong."""
    env = os.environ if environ is None else environ
    return env.get("HETERO_DEBUG", "0") not in ("", "0")


def wait_passively() -> None:
    """Let torch's threads sleep at once when they have nothing to do; before torch is imported.

    By default they spin for milliseconds after every operation. The expert pool works on the same cores in
    between, and on a machine with other work a step took 10 to 40 times as long.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def _switch(env: Mapping[str, str], name: str) -> bool:
    return _one_of(env, name, ("on", "off")) == "on"


def _one_of(env: Mapping[str, str], name: str, words: tuple[str, str]) -> str:
    """One of two words, the first where nothing is said."""
    text = env.get(name) or words[0]
    if text not in words:
        raise InputError(f"{name}={text}: must be {words[0]} or {words[1]}")
    return text


def _positive(env: Mapping[str, str], name: str, most: int | None = None) -> int | None:
    text = env.get(name)
    if not text:
        return None
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1 or (most is not None and value > most):
        wanted = "of at least 1" if most is None else f"from 1 to {most}"
        raise InputError(f"{name}={text}: must be a whole number {wanted}")
    return value


def _size(env: Mapping[str, str], name: str, default: int) -> int:
    """Bytes; 0 for none."""
    text = env.get(name)
    if not text:
        return default
    if text == "0":
        return 0
    try:
        return parse_bytes(text)
    except InputError as error:
        raise InputError(f"{name}={text}: {error}") from None


def _cache(env: Mapping[str, str]) -> Path:
    if own := env.get("HETERO_CACHE"):
        return Path(own).expanduser()
    if shared := env.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "hetero"
    return Path("~/.cache/hetero").expanduser()
