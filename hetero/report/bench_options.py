"""What a benchmark is asked for: the model, where it lies, and options that go together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetero.core import InputError
from hetero.formats import Format
from hetero.rules import load_rules

if TYPE_CHECKING:
    from hetero.model.shapes import ModelRef

GPU = "cuda:0"
DENSE_GPU = ("bfloat16", "int8", "int4", "fp8")
DENSE_CPU = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Options:
    """What is loaded, and where. ``config`` is that of ``model``, cut to ``layers`` where these are given."""

    model: ModelRef
    config: Mapping[str, Any]
    fmt: Format
    dense: str
    gpu: bool
    rules: str  # a path, or the name of a shipped file
    vram: int | None = None
    cache: str = "auto"
    shares: tuple[float | None, ...] = (None,)  # None: as the rules' "auto" decides
    handoff: str = "auto"
    threads: int | None = None
    cpu_gb_s: float | None = None  # fewer threads, until they read no more than this
    isa: str = "auto"
    layers: int | None = None
    serial: bool = False
    wait: str = "nap"
    chunk: int | None = None
    defer: int = 0  # of a token's experts, added one layer later
    turns: bool | None = None  # whether halves of a prompt's chunk take turns; None: as the experts say
    prefill_by: str = "auto"  # of tiers.STRATEGIES
    trace: Path | None = None  # steps and prompts once more, recorded
    overrides: Mapping[str, str] | None = None
    plan: bool = False  # what the plan says of the same run, beside it


def fuses(rules: str) -> bool:
    """Whether a rule file makes steps of fused layers, with variables for what the options say of them."""
    return {"dense", "cache", "share"} <= load_rules(rules).variables.keys()


def check_options(options: Options) -> None:
    """Raises InputError for options that do not go together."""
    given = {
        "--cache": options.cache != "auto",
        "--share": options.shares != (None,),
        "--serial": options.serial,
        "--defer": options.defer > 0,
        "--turns": options.turns is not None,
        "--prefill-by": options.prefill_by != "auto",
    }
    named = [name for name, is_given in given.items() if is_given]
    of_gpu = [
        *named,
        *(["--vram"] if options.vram else []),
        *(["--handoff"] if options.handoff != "auto" else []),
    ]
    if not options.gpu and of_gpu:
        raise InputError(f"{', '.join(of_gpu)}: of a GPU, and there is none")
    variables = load_rules(options.rules).variables
    if named and not fuses(options.rules):
        raise InputError(f"{', '.join(named)}: of fused layers, and {options.rules} says nothing of such")
    if options.defer and "defer" not in variables:
        raise InputError(f"--defer: {options.rules} has no variable for it (experts: {{defer: N}})")
    known = DENSE_CPU if not options.gpu else DENSE_GPU if fuses(options.rules) else DENSE_GPU[:1]
    if options.dense not in known:
        where = "without a GPU" if not options.gpu else f"with {options.rules}"
        raise InputError(f"--dense {options.dense}: must be one of {', '.join(known)} {where}")
