"""``hetero bench``: how fast a model decodes and reads prompts here, beside what is possible at most.

Errors are raised as HeteroError; ``hetero.cli`` tells them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from hetero import terminal
from hetero.cli_model import check_threads
from hetero.config import wait_passively
from hetero.core import InputError, MachineError
from hetero.formats import Format, parse_target
from hetero.hw import memory
from hetero.plan.sizes import parse_size
from hetero.wholefile import write_whole

_TURNS = {"auto": None, "on": True, "off": False}


def bench(  # noqa: PLR0915 (an option is a statement or two)
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="synthetic:NAME, synthetic:PATH of a config.json, or a folder."),
    ],
    *,
    routing: Annotated[
        str,
        typer.Option(metavar="WORDS", help="router, uniform, local, trace:FILE; several with commas."),
    ] = "router",
    batch: Annotated[
        str, typer.Option(metavar="1,8", help="Sequences of a step; several with commas.")
    ] = "1",
    prefill: Annotated[
        str | None, typer.Option(metavar="512,8192", help="Prompts to time too, in tokens.")
    ] = None,
    context: Annotated[int, typer.Option(help="Tokens of a sequence when a run ends.")] = 1024,
    prompt: Annotated[
        int | None, typer.Option(help="Tokens of the prompt of a decode run; default: what fits the context.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Decoded in a run.")] = 128,
    runs: Annotated[int, typer.Option(help="Timed, after one that is not.")] = 5,
    format_: Annotated[str, typer.Option("--format", help="Of experts.")] = "int4 g32",
    dense: Annotated[
        str | None,
        typer.Option(
            help="Dense layers: int8, int4, fp8 or bfloat16 on a GPU; float32, bfloat16 or float16 else."
        ),
    ] = None,
    vram: Annotated[
        str | None, typer.Option(metavar="24GiB", help="Most GPU memory, everything included.")
    ] = None,
    ram: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Main memory to count on, whatever the machine says.")
    ] = None,
    cache: Annotated[
        str,
        typer.Option(
            metavar="auto|SIZE|PART", help="Experts in GPU memory, as in a rule: auto, 8GiB, 20%, 0."
        ),
    ] = "auto",
    share: Annotated[
        str,
        typer.Option(
            metavar="auto|0..1", help="Of the other experts, that PCIe brings; several with commas."
        ),
    ] = "auto",
    handoff: Annotated[str, typer.Option(help="auto, memop, spin or hostfunc.")] = "auto",
    wait: Annotated[str, typer.Option(help="How the host waits for a step: block, spin or nap.")] = "nap",
    chunk: Annotated[int | None, typer.Option(help="Tokens of a prompt that are read at once.")] = None,
    defer: Annotated[
        int,
        typer.Option(help="Experts of a token that are added one layer later, with what it does to logits."),
    ] = 0,
    turns: Annotated[
        str,
        typer.Option(metavar="auto|on|off", help="Halves of a prompt's chunk take turns on CPU and GPU."),
    ] = "auto",
    prefill_by: Annotated[
        str, typer.Option(metavar="auto|cpu|stream|split", help="Where experts of prompts are computed.")
    ] = "auto",
    trace: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Steps and prompts once more, recorded for Perfetto."),
    ] = None,
    serial: Annotated[
        bool, typer.Option("--serial", help="Once more with CPU, PCIe and GPU one after the other.")
    ] = False,
    threads: Annotated[
        int | None, typer.Option(help="Threads of the experts; default: the physical cores.")
    ] = None,
    cpu_gbps_cap: Annotated[
        float | None,
        typer.Option(metavar="GB/S", help="Fewer threads, until they read no more than this."),
    ] = None,
    isa: Annotated[str, typer.Option(help="Of CPU experts: auto, scalar, avx2, avx512 or amx.")] = "auto",
    layers: Annotated[int | None, typer.Option(help="Only so many layers of a synthetic model.")] = None,
    no_gpu: Annotated[bool, typer.Option("--no-gpu", help="The CPU alone, even beside a GPU.")] = False,
    modules: Annotated[
        bool, typer.Option("--modules", help="transformers' modules on the GPU, no fused layers.")
    ] = False,
    rules: Annotated[
        str | None, typer.Option(metavar="FILE", help="Rule file in place of what the options say.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Set a variable of the rule file.")
    ] = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Beside what is measured, what the plan says of this very run.")
    ] = False,
    predict: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME|FILE", help="Add what the plan predicts for this hardware; repeatable."),
    ] = None,
    save_routing: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the table of the first routing as .npy and end."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of prompts and tables.")] = 7,
    revision: Annotated[
        str | None, typer.Option(metavar="NAME", help="Branch, tag or commit of a model of the Hub.")
    ] = None,
    json_to: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the result; - prints it alone.")
    ] = None,
) -> None:
    """Measure decode and prefill, with the bound from bandwidths of the same run beside them."""
    wait_passively()
    from hetero.cli_plan import take_inventory
    from hetero.model.shapes import resolve_model
    from hetero.plan.hardware import load_hardware
    from hetero.report.bench import Series, check_series
    from hetero.rules.defaults import default_rules_for
    from hetero.rules.gpu_options import parse_cache
    from hetero.rules.variables import parse_set

    series = Series(
        routings=tuple(_words(routing, "--routing")),
        batches=tuple(_counts(batch, "--batch")),
        prefills=tuple(_counts(prefill, "--prefill")) if prefill else (),
        context=context,
        prompt=prompt,
        tokens=tokens,
        runs=runs,
        seed=seed,
    )
    check_series(series)
    memory.state(None if ram is None else parse_size(ram, "--ram"))
    check_threads(threads)
    if cpu_gbps_cap is not None and not 0 < cpu_gbps_cap < 1e6:
        raise InputError(f"--cpu-gbps-cap {cpu_gbps_cap:g}: must be above 0")
    if chunk is not None and chunk < 1:
        raise InputError(f"--chunk {chunk}: must be at least 1")
    if defer < 0:
        raise InputError(f"--defer {defer}: must be 0 or more")
    if turns not in _TURNS:
        raise InputError(f"--turns {turns}: must be one of {', '.join(_TURNS)}")
    if trace is not None:
        from hetero.trace_file import check_writable

        check_writable(Path(trace))
    if layers is not None and layers < 1:
        raise InputError(f"--layers {layers}: must be at least 1")
    try:
        parse_cache(cache)
    except InputError as error:
        raise InputError(f"--cache: {error}") from None
    if json_to not in (None, "-"):
        from hetero.trace_file import check_writable

        check_writable(Path(str(json_to)), "--json")
    others = [load_hardware(name, "--predict") for name in predict or []]
    found = resolve_model(
        model, revision=revision, weights=True, say=terminal.note, bar=terminal.progress_bar
    )

    import torch

    from hetero.engine.gpu.graphs import WAITS
    from hetero.engine.gpu.loading import HANDOFFS
    from hetero.model import hf
    from hetero.ops.gpu.tiers import STRATEGIES
    from hetero.plan.workspace import MOST_CHUNK
    from hetero.report.bench_load import bench as measure
    from hetero.report.bench_options import Options, check_options, fuses
    from hetero.report.bench_plan import predicted

    if handoff not in HANDOFFS:
        raise InputError(f"--handoff {handoff}: must be one of {', '.join(HANDOFFS)}")
    if prefill_by not in STRATEGIES:
        raise InputError(f"--prefill-by {prefill_by}: must be one of {', '.join(STRATEGIES)}")
    if chunk is not None and chunk > MOST_CHUNK:
        raise InputError(f"--chunk {chunk}: must be at most {MOST_CHUNK}")
    if wait not in WAITS:
        raise InputError(f"--wait {wait}: must be one of {', '.join(WAITS)}")
    hf.quiet()
    gpu = torch.cuda.is_available() and not no_gpu
    if modules and (rules is not None or no_gpu):
        raise InputError(f"--modules: contradicts {'--rules' if rules is not None else '--no-gpu'}")
    asked = {"--modules": modules, "--vram": vram is not None, "--handoff": handoff != "auto"}
    if not gpu and not no_gpu and (named := [name for name, is_given in asked.items() if is_given]):
        raise MachineError(f"{', '.join(named)}: of a GPU, and torch sees none here")
    config = found.config
    if layers is not None:
        if found.kind not in ("synthetic", "config"):
            raise InputError(f"--layers {layers}: only a synthetic model can be cut")
        from hetero.model.synthetic import cut_layers

        config = cut_layers(config, layers)
    file = rules or ("default-gpu" if modules and gpu else str(default_rules_for(found.model_type, gpu)))
    if dense is None:
        dense = "float32" if not gpu else "int8" if fuses(file) else "bfloat16"
    options = Options(
        model=found,
        config=config,
        fmt=_format(format_),
        dense=dense,
        gpu=gpu,
        vram=None if vram is None else parse_size(vram, "--vram"),
        cache=cache,
        shares=tuple(_shares(share)),
        handoff=handoff,
        threads=threads,
        cpu_gb_s=cpu_gbps_cap,
        isa=isa,
        layers=layers,
        serial=serial,
        wait=wait,
        chunk=chunk,
        defer=defer,
        turns=_TURNS[turns],
        prefill_by=prefill_by,
        trace=None if trace is None else Path(trace),
        rules=file,
        overrides=parse_set(set_ or []),
        plan=plan,
    )
    check_options(options)
    inventory = take_inventory(dict(config))
    for option, length in (("--context", context), *(("--prefill", one) for one in series.prefills)):
        if inventory.context is not None and length > inventory.context:
            raise InputError(f"{option} {length}: the model attends to at most {inventory.context} tokens")
    if save_routing is not None:
        _save_table(save_routing, series, inventory)
        return
    told = [told for one in others for told in predicted(found.name, one, inventory, options, series)]

    def save(result: dict[str, Any]) -> None:
        if json_to not in (None, "-"):
            text = json.dumps(result | {"predicted": told}, indent=1)
            write_whole(Path(str(json_to)), text + "\n", "--json")

    result = measure(options, series, inventory, terminal.note, save) | {"predicted": told}
    if json_to == "-":
        typer.echo(json.dumps(result, indent=1))
        return
    from hetero.report.bench_text import show

    console = terminal.Console()
    show(result, console if console.is_terminal else terminal.Console(width=200))


def _save_table(path: Path, series: Any, inventory: Any) -> None:
    from hetero.report.routing import DRAWN, make_table, save_table

    kind = series.routings[0]
    if kind not in DRAWN:
        raise InputError(f"--save-routing: of --routing {' or '.join(DRAWN)}, not {kind}")
    specs = {(site.spec.num_experts, site.spec.top_k) for site in inventory.sites}
    if len(specs) != 1:
        raise InputError("--save-routing: the model has no experts, or layers of different numbers of them")
    ((experts, top_k),) = specs
    steps = (series.runs + 1) * series.tokens
    rows = max(series.batches)
    table = make_table(
        kind,
        layers=len(inventory.sites),
        steps=steps,
        rows=rows,
        experts=experts,
        top_k=top_k,
        seed=series.seed,
    )
    try:
        save_table(path, table)
    except OSError as error:
        raise InputError(f"--save-routing {path}: cannot be written: {error.strerror}") from None
    terminal.note(f"wrote {path}: {len(inventory.sites)} layers, {steps} steps, {rows} rows, {top_k} experts")


def _format(text: str) -> Format:
    try:
        return parse_target(text)
    except InputError as error:
        raise InputError(f"--format {text}: {error}") from None


def _words(text: str, option: str) -> list[str]:
    words = [word.strip() for word in text.split(",")]
    if not all(words) or len(set(words)) != len(words):
        raise InputError(f"{option} {text}: must be different words with commas")
    return words


def _counts(text: str, option: str) -> list[int]:
    try:
        counts = [int(word) for word in _words(text, option)]
    except ValueError:
        raise InputError(f"{option} {text}: must be whole numbers with commas, such as 1,8") from None
    return counts


def _shares(text: str) -> list[float | None]:
    found: list[float | None] = []
    for word in _words(text, "--share"):
        try:
            share = None if word == "auto" else float(word)
        except ValueError:
            share = -1.0
        if share is not None and not 0 <= share <= 1:
            raise InputError(f"--share {text}: must be auto or numbers from 0 to 1")
        found.append(share)
    return found
