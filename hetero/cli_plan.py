"""``hetero plan``: what sits where, how fast it can be and why, before anything is downloaded or loaded.

Errors are raised as HeteroError; ``hetero.cli`` tells them. Torch starts only for a model type whose
inventory needs the module tree.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from hetero import jsonfile, stats, terminal
from hetero.core import InputError, MachineError
from hetero.formats import Format, parse_format
from hetero.hw import memory
from hetero.model.numbers import check_numbers
from hetero.model.shapes import ModelRef, resolve_model
from hetero.plan import families
from hetero.plan.as_json import as_dict
from hetero.plan.hardware import Hardware, load_hardware
from hetero.plan.inventory import Inventory, from_modules
from hetero.plan.machine import this_machine
from hetero.plan.planner import Plan, family_format, make_plan
from hetero.plan.quantised import kept_format
from hetero.plan.rulefile import command, rule_file
from hetero.plan.sizes import parse_size
from hetero.plan.tiers import DEFAULT_CONTEXT, Request
from hetero.plan.workspace import DENSE_PACKED
from hetero.report.plan_text import by_cpu_alone, show
from hetero.wholefile import write_whole

_MOST_COUNT = 1e18  # no NaN, no infinity and nothing that a float does not hold


def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A folder, a .gguf file, a config.json, synthetic:NAME or OWNER/NAME."
        ),
    ],
    *,
    revision: Annotated[
        str | None, typer.Option(metavar="NAME", help="Branch, tag or commit of a model of the Hub.")
    ] = None,
    vram: Annotated[
        str | None, typer.Option(metavar="24GiB", help="GPU memory that may be used; 0: none. Default: all.")
    ] = None,
    ram: Annotated[
        str | None,
        typer.Option(metavar="64GiB", help="Main memory that may be used. Default: the machine's."),
    ] = None,
    ctx: Annotated[
        int | None,
        typer.Option(
            help="Tokens of a sequence, prompt and answer. Default: 4096, or all that the model takes."
        ),
    ] = None,
    concurrency: Annotated[int, typer.Option(help="Sequences that run at once.")] = 1,
    hardware: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="A shipped or a written profile. Default: this machine."),
    ] = None,
    format_: Annotated[
        str | None, typer.Option("--format", help="Of experts. Default: that of the model's family.")
    ] = None,
    dense: Annotated[
        str, typer.Option(help="Dense layers: auto, bfloat16, float16, float32, int8, int4 or fp8.")
    ] = "auto",
    draft: Annotated[int, typer.Option(help="Tokens drafted for each step.")] = 0,
    accept: Annotated[float, typer.Option(help="Chance that a drafted token is right.")] = 0.7,
    prompt: Annotated[int, typer.Option(help="Tokens of the prompt for prefill.")] = 8192,
    counts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="JSON [layers][experts]: how often each was chosen. Default: kept statistics.",
        ),
    ] = None,
    write: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the rule file, of a plan that fits.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="With --write: also where a run would not fit.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Tell whether it fits, what sits where and how fast it is, term by term; exit 3 where it does not fit.

    A GGUF file or a quantised checkpoint is planned with the formats that it has (docs/gguf.md).
    """
    machine, available = _hardware(hardware)
    request = Request(
        expert_format=_format(format_),
        vram=None if vram is None else parse_size(vram, "--vram"),
        ram=available if ram is None else parse_size(ram, "--ram"),
        context=DEFAULT_CONTEXT if ctx is None else ctx,
        concurrency=concurrency,
        draft=draft,
        accept=accept,
        prompt=prompt,
        dense=dense,
        counts=() if counts is None else read_counts(counts),
    )
    found = resolve_model(model, revision=revision)
    check_numbers(found.config, str(found.path))
    inventory = take_inventory(found.config)
    if ctx is None and inventory.context is not None:
        request = replace(request, context=min(request.context, inventory.context))
    if counts is None:
        request = replace(request, counts=used_counts(found, inventory))
    if format_ is None:
        kept = own_format(found)
        has_gpu = machine.gpu is not None and request.vram != 0
        fmt = kept or family_format(inventory.model_type, has_gpu)
        request = replace(request, expert_format=fmt, keep=kept is not None)
    try:
        made = make_plan(found.name, inventory, machine, request)
    except MachineError as error:
        alone = _without_gpu(found.name, inventory, machine, request)
        raise MachineError(f"{error}; {alone}" if alone else str(error)) from None
    if write is not None and (made.fits or force):
        write_whole(write, rule_file(made), "--write")
        terminal.note(f"wrote {write}, for {command(made, str(write), model)}")
    if as_json:
        typer.echo(json.dumps(as_dict(made), indent=2))
    else:
        show(made)
        if made.fits:
            own = hardware is None and format_ is None and counts is None and dense == "auto"
            typer.echo(f"next: {next_command(made, model, found.kind, write, own=own)}")
    if not made.fits:
        if write is not None and not force:
            terminal.note(
                f"hetero: --write {write}: nothing was written, since a run with these rules does not fit; "
                "--force writes them all the same"
            )
        raise typer.Exit(MachineError.exit_code)


def _without_gpu(name: str, inventory: Inventory, machine: Hardware, request: Request) -> str | None:
    """What the CPU alone would give where the GPU is too small; None where that does not fit either."""
    if machine.gpu is None or request.vram == 0:
        return None
    alone = replace(request, vram=0, dense="auto" if request.dense in DENSE_PACKED else request.dense)
    try:
        made = make_plan(name, inventory, machine, alone, alternatives=False)
    except MachineError:
        return None
    return by_cpu_alone(made.today.decode.tok_s) if made.fits else None


def next_command(made: Plan, model: str, kind: str, written: Path | None, *, own: bool) -> str:
    """What to type now: the run that the plan is for. ``kind``: as ``resolve_model`` tells it. ``own``: the
    plan is of this machine, with nothing chosen that ``--auto`` would choose otherwise."""
    if kind == "config" and Path(model).exists():
        model = "MODEL_FOLDER"  # a configuration alone has no weights
    # Random weights come without a tokenizer.
    prompt = (
        ""
        if made.request.concurrency > 1
        else f" {'--prompt-ids 1,2,3' if kind == 'synthetic' else '-p TEXT'}"
    )
    if written is None and own and kind != "synthetic":
        return command(made, None, model) + prompt
    file = "rules.yaml" if written is None else str(written)
    before = "the same with --write rules.yaml, then " if written is None else ""
    return before + command(made, file, model) + prompt


def _format(given: str | None) -> Format:
    try:
        return parse_format(given or "int4")
    except InputError as error:
        raise InputError(f"--format {given}: {error}") from None


def _hardware(given: str | None) -> tuple[Hardware, int | None]:
    """The profile, and the memory that is free where it is this machine's."""
    if given is not None:
        return load_hardware(given), None
    return this_machine(), memory.available().bytes


def take_inventory(config: dict[str, Any]) -> Inventory:
    """By arithmetic for the known families, else from the module tree that transformers builds."""
    known = families.inventory(config)
    if known is not None:
        return known
    from hetero.config import wait_passively

    wait_passively()
    import torch

    from hetero.model.build import build_meta, describe
    from hetero.model.config import load_config

    return from_modules(config, describe(build_meta(load_config(config), torch.bfloat16)))


def own_format(model: ModelRef) -> Format | None:
    """The format that a quantised checkpoint's experts keep; None where it is not quantised."""
    if model.kind != "gguf":
        return kept_format(model.config)
    from hetero.auto import gguf_format

    return gguf_format(model.path)


def read_counts(path: Path) -> tuple[tuple[float, ...], ...]:
    """How often experts were chosen, [layers][experts]. Raises InputError for another file."""
    try:
        data = jsonfile.parse(path.read_bytes())
    except OSError as error:
        raise InputError(f"--counts {path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"--counts {path}: not valid JSON: {error}") from None
    rows = data.get("counts") if isinstance(data, dict) else data
    if not isinstance(rows, list) or not rows or not all(_is_row(row) for row in rows):
        raise InputError(f"--counts {path}: must be a list of layers, each a list of finite numbers")
    return tuple(tuple(float(c) for c in row) for row in rows)


def used_counts(model: ModelRef, inventory: Inventory) -> tuple[tuple[float, ...], ...]:
    """How often experts were chosen in earlier runs of this model; () where nothing is kept."""
    kept = stats.load(model.name, stats.config_hash(model.config))
    if kept is None:
        return ()
    rows = [kept.layers.get(site.layer, ()) if site.layer is not None else () for site in inventory.sites]
    if any(len(row) != site.spec.num_experts for row, site in zip(rows, inventory.sites, strict=True)):
        return ()
    return tuple(tuple(float(count) for count in row) for row in rows)


def _is_row(row: object) -> bool:
    return isinstance(row, list) and all(
        isinstance(c, int | float) and not isinstance(c, bool) and -_MOST_COUNT < c < _MOST_COUNT for c in row
    )
