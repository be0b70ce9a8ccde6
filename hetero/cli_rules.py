"""``hetero rules``: check, explain, list and migrate rule files. Loads torch only where a model is built.

Errors are raised as HeteroError; ``hetero.cli`` tells them.
"""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from hetero.core import InputError
from hetero.registry import load_class, op_names
from hetero.rules import Placement, RuleSet, load_rules, match
from hetero.rules.defaults import default_rules_for, for_dense, shipped
from hetero.rules.devices import parse_devices
from hetero.rules.explain import (
    CACHE,
    DENSE_BYTES,
    IN_RAM,
    Line,
    cache_notes,
    explain,
    group,
    human,
    table_notes,
    totals,
)
from hetero.rules.migrate import migrate
from hetero.rules.mistakes import Mistakes
from hetero.rules.options import schemas_for
from hetero.rules.source import did_you_mean, listed
from hetero.rules.variables import parse_set
from hetero.terminal import Console
from hetero.wholefile import unwritable

if TYPE_CHECKING:
    from hetero.core import ModuleInfo

app = typer.Typer(
    help="Check, explain, list and migrate rule files.", no_args_is_help=True, pretty_exceptions_enable=False
)

SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Override a variable of the file.")
]
DevicesOption = Annotated[
    str | None,
    typer.Option("--devices", metavar="LIST", help="Assume these devices, e.g. cpu,cuda:0; else those here."),
]
RevisionOption = Annotated[
    str | None, typer.Option("--revision", metavar="NAME", help="Of a model of the Hub.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def check(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A rule file, or the name of a shipped one.")],
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A folder, a config.json, synthetic:NAME or OWNER/NAME.")
    ],
    *,
    set_: SetOption = None,
    devices: DevicesOption = None,
    revision: RevisionOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check a rule file against a model; no weight is read."""
    _, placement, modules = _place(file, model, set_, devices, revision)
    replaced = list(placement.replacements())
    for note in placement.notes:
        Console(stderr=True).print(f"note: {note}", soft_wrap=True, markup=False, highlight=False)
    if as_json:
        _print_json(
            {
                "ok": True,
                "file": placement.ruleset.file,
                "modules": len(modules),
                "replaced": len(replaced),
                "notes": list(placement.notes),
            }
        )
    else:
        typer.echo(f"{placement.ruleset.file}: {len(modules)} modules, {len(replaced)} replaced")


@app.command("explain")
def explain_command(
    words: Annotated[
        list[str],
        typer.Argument(metavar="[FILE] MODEL", help="A rule file (default: the model's), and the model."),
    ],
    *,
    set_: SetOption = None,
    devices: DevicesOption = None,
    revision: RevisionOption = None,
    dtype: Annotated[
        str | None, typer.Option(help="Of dense weights, as in 'hetero run': float32, bfloat16 or float16.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Show modules without weights too.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Print module, rule, operator, device and bytes, and the totals of each device."""
    if dtype is not None and dtype not in DENSE_BYTES:
        hint = did_you_mean(dtype, DENSE_BYTES) or f"; it is one of {listed(DENSE_BYTES)}"
        raise InputError(f"--dtype {dtype}: unknown{hint}")
    if len(words) > 2:
        raise InputError(f"hetero rules explain [FILE] MODEL takes one or two words, not {len(words)}")
    file, model = (None, words[0]) if len(words) == 1 else (words[0], words[1])
    model_type, placement, modules = _place(file, model, set_, devices, revision)
    fused = any(one.op == "fused" for one in placement.assignments)
    lines = explain(placement, modules, dtype or ("bfloat16" if fused else "float32"))
    placement = replace(placement, notes=(*placement.notes, *cache_notes(placement), *table_notes(placement)))
    if as_json:
        _print_json(
            {
                "file": placement.ruleset.file,
                "model_type": model_type,
                "variables": dict(placement.ruleset.variables),
                "modules": [line.as_dict() for line in lines],
                "totals": totals(lines),
                "notes": list(placement.notes),
            }
        )
    else:
        _print_table(placement, model_type, lines, every)


@app.command("list")
def list_command(as_json: JsonOption = False) -> None:
    """List the shipped rule files, the model types that each claims and its variables."""
    files = shipped()
    if as_json:
        _print_json([_shipped_dict(one.name, one.path, one.rules) for one in files])
        return
    table = Table(box=None, pad_edge=False)
    for column in ("file", "models", "variables", "description"):
        table.add_column(column, overflow="fold")
    for one in files:
        variables = " ".join(f"{name}={value}" for name, value in one.rules.variables.items())
        table.add_row(one.name, listed(one.rules.models or ("any",)), variables, one.rules.description)
    _console().print(table)


@app.command("migrate")
def migrate_command(
    source: Annotated[Path, typer.Argument(metavar="IN", help="A KTransformers rule file.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="OUT", help="Write here, not to the terminal.")
    ] = None,
) -> None:
    """Turn a KTransformers rule file into one of ours; exit 2 if a line has no counterpart."""
    result = migrate(source)
    if output is None:
        typer.echo(result.text, nl=False)
    else:
        try:
            output.write_text(result.text, encoding="utf-8")
        except OSError as error:
            raise unwritable(error, str(output)) from None
    for note in result.notes:
        typer.echo(f"note: {note}", err=True)
    for lost in result.lost:
        typer.echo(f"not migrated: {lost}", err=True)
    if result.lost:
        raise typer.Exit(2)


def _place(
    file: str | None, model: str, sets: list[str] | None, devices: str | None, revision: str | None
) -> tuple[str, Placement, list[ModuleInfo]]:
    """Model type, placement and tree of a model under a rule file, or under the model's default one."""
    overrides = parse_set(sets or [])
    assumed = parse_devices(devices) if devices else None
    mistakes = Mistakes()
    ruleset = load_rules(file, overrides, mistakes) if file is not None else None

    # Only here does torch start: a file that cannot be read at all has been told by now.
    import torch

    from hetero.model.build import build_meta, describe
    from hetero.model.config import load_config
    from hetero.model.shapes import resolve_model

    try:
        found = resolve_model(model, revision=revision)
        config_data = found.config
        tree = build_meta(load_config(config_data), torch.float32)
        modules = describe(tree)
    except InputError:
        mistakes.tell()
        raise
    model_type = str(config_data.get("model_type", ""))
    there = assumed or _real_devices()
    if ruleset is None:
        has_gpu = any(device.startswith("cuda") for device in there)
        ruleset = load_rules(default_rules_for(model_type, has_gpu), overrides, mistakes)
        if found.kind == "gguf" and not any(module.experts for module in modules):
            ruleset = for_dense(ruleset)
    ops = schemas_for(op_names())
    placement = match(ruleset, modules, devices=there, ops=ops, model_type=model_type, mistakes=mistakes)
    for path, rule in {a.cls: a.rule for a in placement.replacements() if a.cls is not None}.items():
        with mistakes:
            try:
                load_class(path)
            except InputError as error:
                rule.replace.where.fail(str(error))
    mistakes.tell()
    if find_spec("triton") is not None:  # a machine without a GPU need not have it
        from hetero.engine.gpu.loading import FUSED_DTYPE, fused_device

        fused_device(placement, tree, FUSED_DTYPE)
    if found.kind in ("folder", "gguf"):
        placement = _with_formats(placement, tree, found.path)
    return model_type, placement, modules


def _with_formats(placement: Placement, tree: Any, folder: Path) -> Placement:
    """The placement with what a checkpoint decides: formats, and where tables stand; headers are read."""
    from hetero.model.gguf_file import locate
    from hetero.model.keep import resolve_formats
    from hetero.model.loader import plan_load
    from hetero.model.quantised import is_quantised
    from hetero.model.sources import open_source
    from hetero.model.tables import resolve_tables

    tables = any(one.op == "embedding" for one in placement.assignments)
    weights = folder.is_dir() and any(folder.glob("*.safetensors"))
    if locate(folder) is None and not is_quantised(folder) and not (tables and weights):
        return placement
    with open_source(folder) as source:
        plan = plan_load(tree, source)
        placement, notes = resolve_formats(placement, plan, source)
        placement = resolve_tables(placement, tree, plan, source)
    return replace(placement, notes=(*placement.notes, *notes))


def _real_devices() -> tuple[str, ...]:
    import torch

    return ("cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count())))


def _console() -> Console:
    console = Console()
    # A pipe has no width of its own; folding at 80 columns would break names that a person greps for.
    return console if console.is_terminal else Console(width=160)


def _print_json(data: Any) -> None:
    typer.echo(json.dumps(data, indent=2))


def _shipped_dict(name: str, path: Path, rules: RuleSet) -> dict[str, Any]:
    return {
        "name": name,
        "path": str(path),
        "models": list(rules.models) if rules.models is not None else "any",
        "variables": dict(rules.variables),
        "description": rules.description,
    }


def _print_table(placement: Placement, model_type: str, lines: list[Line], every: bool) -> None:
    console = _console()
    console.print(f"{placement.ruleset.file} on {model_type}", markup=False, highlight=False)
    table = Table(box=None, pad_edge=False)
    for column in ("module", "class", "rule", "op", "device", "format"):
        table.add_column(column, overflow="fold")
    table.add_column("bytes", justify="right", no_wrap=True)
    for one in group(lines):
        line = one.line
        if not (every or one.bytes or (line.owner is None and line.op != "keep")):
            continue
        op = line.op if line.owner is None or line.op in (CACHE, IN_RAM) else f"in {line.op}"
        table.add_row(
            one.pattern or "(root)", line.cls, line.rule, op, line.device, line.format, human(one.bytes)
        )
    console.print(table)
    for device, size in totals(lines).items():
        console.print(f"total {device}: {human(size)} ({size} bytes)", markup=False, highlight=False)
    for note in placement.notes:
        console.print(f"note: {note}", markup=False, highlight=False)
