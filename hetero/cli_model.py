"""What run, chat and serve share: the options that choose and place a model, and loading by them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from hetero import terminal
from hetero.config import MAX_THREADS, settings
from hetero.core import InputError, MachineError
from hetero.hw import cpu
from hetero.plan.sizes import parse_size

if TYPE_CHECKING:
    from hetero.engine.load import Loaded

ModelArg = Annotated[
    str | None,
    typer.Argument(
        metavar="[MODEL]",
        help="A folder, a .gguf file, OWNER/NAME of the Hub or synthetic:NAME; default: the demo model.",
    ),
]
RevisionOption = Annotated[
    str | None, typer.Option(metavar="NAME", help="Branch, tag or commit of a model of the Hub.")
]
CtxOption = Annotated[
    int | None, typer.Option(help="Most tokens of prompt and answer; default: the model's.")
]
TraceOption = Annotated[
    str | None,
    typer.Option("--trace", metavar="FILE", help="Write when what ran, for chrome://tracing and Perfetto."),
]
StatsOption = Annotated[
    bool, typer.Option("--no-stats", help="Do not add to the statistics of experts (hetero stats).")
]


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Options of every command that loads a model, as the command line gives them."""

    rules: Annotated[
        str | None,
        typer.Option("--rules", metavar="FILE", help="Rule file; default: that of the model's family."),
    ] = None
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Set a variable of the rule file."),
    ] = None
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Of dense layers: float32 (the default), bfloat16 (with fused layers) or float16; "
            "with --auto the plan's."
        ),
    ] = None
    auto: Annotated[
        bool,
        typer.Option("--auto", help="Plan for this machine: formats and places that fit, as a rule file."),
    ] = False
    isa: Annotated[str, typer.Option(help="Of CPU experts: auto, scalar, avx2, avx512 or amx.")] = "auto"
    threads: Annotated[int | None, typer.Option(help="Threads; default: the physical cores.")] = None
    tier: Annotated[
        str | None,
        typer.Option(help="Of experts: ram, or disk (those used most in RAM); default: the rules'."),
    ] = None
    ram: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Memory to count on, e.g. 60GiB, whatever the machine says it has."
        ),
    ] = None
    vram: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Most of a GPU's memory to take, all included, e.g. 24GiB."),
    ] = None
    handoff: Annotated[
        str,
        typer.Option(help="Between a graph and the CPU, with fused layers: auto, memop, spin or hostfunc."),
    ] = "auto"
    pack_cache: Annotated[
        str,
        typer.Option(
            metavar="WORD|DIR",
            help="Files of packed experts: auto uses them, write also makes them, off; or a folder for both.",
        ),
    ] = "auto"

    def claim(self) -> None:
        """Check the sizes; from here on this process counts on the memory that was stated."""
        from hetero.hw import memory

        ram = None if self.ram is None else parse_size(self.ram, "--ram")
        if ram == 0:
            raise InputError(f"--ram {self.ram}: must be above 0")
        memory.state(ram)
        _ = self._vram

    @property
    def _vram(self) -> int | None:
        return None if self.vram is None else parse_size(self.vram, "--vram")

    def load(
        self,
        folder: Path,
        name: str,
        *,
        context: int | None = None,
        concurrency: int = 1,
        kv_tokens: int | None = None,
    ) -> Loaded:
        """Load what ``checkpoint`` gave, with a progress bar and notes on stderr. Raises HeteroError."""
        from hetero.rules.variables import parse_set

        if self.auto and (self.rules is not None or self.set_):
            raise InputError("--auto chooses the rules itself: leave out --rules and --set, or take its file")
        overrides = parse_set(self.set_ or [])
        check_threads(self.threads)
        if context is not None and context < 2:
            raise InputError(f"--ctx {context}: must be at least 2")

        from hetero.engine.experts import StoreOptions
        from hetero.engine.gpu.loading import gpu_options
        from hetero.engine.load import load_model, with_context
        from hetero.model import hf

        rules, dtype, vram = self.rules, self.dtype, self._vram
        gpu = gpu_options(vram, slots=concurrency, context=context, kv_tokens=kv_tokens, handoff=self.handoff)
        _require_gpu({"--vram": vram is not None, "--handoff": self.handoff != "auto"})
        hf.quiet()
        if self.auto:
            from hetero.auto import gpu_now, plan_run

            chosen = plan_run(
                folder, name, context=context, concurrency=concurrency, device=gpu_now(vram), dtype=dtype
            )
            terminal.note(chosen.note)
            rules, dtype = str(chosen.rules), chosen.dtype
        with terminal.progress_bar(f"loading {name}") as progress:
            loaded = load_model(
                folder,
                rules=rules,
                overrides=overrides,
                dtype=dtype,
                isa=self.isa,
                threads=self.threads,
                progress=progress,
                store=StoreOptions(self.pack_cache, self.tier),
                gpu=gpu,
                tell=lambda text: terminal.note(f"note: {text}"),
            )
        for text in loaded.notes:
            terminal.note(f"note: {text}")
        return with_context(dataclasses.replace(loaded, name=name), context)


def check_threads(asked: int | None) -> None:
    """What ``--threads``, else HETERO_THREADS, says: a note where it is more than this process has cores for.
    Raises InputError for a number that is none."""
    if asked is not None and not 1 <= asked <= MAX_THREADS:
        raise InputError(f"--threads {asked}: must be from 1 to {MAX_THREADS}")
    count = settings().threads if asked is None else asked
    cores, quota = cpu.physical_cores(os.sched_getaffinity(0)), cpu.quota()
    if quota is not None:
        cores = max(1, min(cores, int(quota)))
    if count is not None and count > cores:
        name = "HETERO_THREADS=" if asked is None else "--threads "
        have = f"{cores} physical core{'s' if cores > 1 else ''}"
        terminal.note(
            f"note: {name}{count}: this process may use {have}; with more threads than that each step "
            "waits for threads that have no core"
        )


def _require_gpu(asked: Mapping[str, bool]) -> None:
    """Raises MachineError for options of a GPU where there is none."""
    import torch

    named = [name for name, is_given in asked.items() if is_given]
    if named and not torch.cuda.is_available():
        raise MachineError(f"{', '.join(named)}: of a GPU, and torch sees none here")


def takes_model(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the fields of ModelOptions as options in place of its parameter ``options``."""
    hints = get_type_hints(command, include_extras=True)
    of_model = get_type_hints(ModelOptions, include_extras=True)
    fields = dataclasses.fields(ModelOptions)
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        if parameter.name != "options":
            parameters.append(parameter.replace(annotation=hints[parameter.name]))
            continue
        parameters += [
            inspect.Parameter(
                field.name, parameter.kind, default=field.default, annotation=of_model[field.name]
            )
            for field in fields
        ]

    @functools.wraps(command)
    def called(**given: Any) -> None:
        options = ModelOptions(**{field.name: given.pop(field.name) for field in fields})
        command(options=options, **given)

    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return called


@contextlib.contextmanager
def counted(loaded: Loaded, no_stats: bool) -> Iterator[None]:
    """Add the use of experts within it to the statistics."""
    # Random weights choose experts that tell nothing of the model.
    if no_stats or loaded.synthetic or not settings().stats:
        yield
        return
    from hetero.engine.load import stats_recorder

    recorder = stats_recorder(loaded, terminal.note)
    try:
        yield
    finally:
        recorder.save()


def checkpoint(model: str | None, revision: str | None) -> tuple[Path, str]:
    """The checkpoint folder or file, and what to call the model. One of the Hub is fetched."""
    if model is None:
        from hetero.model.demo import default_model

        default = default_model()
        if default.note is not None:
            terminal.note(default.note)
        return default.path, "demo" if default.note is None else default.path.name
    from hetero.model.shapes import resolve_model

    found = resolve_model(
        model, revision=revision, weights=True, say=terminal.note, bar=terminal.progress_bar
    )
    if found.kind not in ("folder", "gguf", "synthetic"):
        raise InputError(
            f"{model}: has a configuration but no weights; to run it, give the folder of its checkpoint "
            "(hetero rules works with a configuration alone)"
        )
    return found.path, found.name
