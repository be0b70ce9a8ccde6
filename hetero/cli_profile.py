"""``hetero profile``: instruction sets and formats compared on this machine, for a model's shapes.

Errors are raised as HeteroError; ``hetero.cli`` tells them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetero import terminal
from hetero.cli_model import check_threads
from hetero.core import InputError
from hetero.wholefile import unwritable, write_whole

if TYPE_CHECKING:
    from hetero.report.schema import Report

_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def profile(
    *,
    shapes: Annotated[
        str,
        typer.Option(
            "--shapes", metavar="NAME", help="A known shape, a config.json, a folder, or 2560x640x512x10."
        ),
    ] = "qwen3.8-flash-next-125b",
    isa: Annotated[
        str | None, typer.Option(help="Only these, with commas; default: all here but scalar.")
    ] = None,
    formats: Annotated[
        str | None, typer.Option(help="With commas; default: int4,int8,bf16,fp8,mxfp4,nvfp4.")
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(help="Of a step, with commas; default: 1,2,4,8,16,64,256,1024.")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="Default: the physical cores.")] = None,
    numa: Annotated[str, typer.Option(help="As in a rule: split, replicate, node N or off.")] = "split",
    memory: Annotated[
        str | None,
        typer.Option(metavar="4G", help="Most for weights; default: a quarter of what is free, at most 8G."),
    ] = None,
    budget: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Ends about then; default: 120, quick 20.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="int4 with 1, 4 and 256 tokens, in 20 s.")] = False,
    seed: Annotated[int, typer.Option(help="Of weights, tokens and routing.")] = 0,
    json_to: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the result; - prints it alone.")
    ] = None,
    html_to: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write one page with plots.")
    ] = None,
    compare: Annotated[
        list[Path] | None,
        typer.Option("--compare", metavar="FILE", help="Lay another machine's JSON beside it."),
    ] = None,
    load: Annotated[
        Path | None, typer.Option("--load", metavar="FILE", help="Show this JSON instead of measuring.")
    ] = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of a result.")] = False,
) -> None:
    """Compare instruction sets and formats on this machine, for a model's experts; ends with advice."""
    if schema:
        from hetero.report.schema import Report

        typer.echo(json.dumps(Report.model_json_schema(), indent=1))
        return
    for path in (Path(json_to) if json_to not in (None, "-") else None, html_to):
        _check_writable(path)

    from hetero.report import profile as profiling
    from hetero.report.schema import read_report

    check_threads(threads)
    others = [read_report(path) for path in compare or []]
    if load is not None:
        report = read_report(load)
    else:
        short = quick and tokens is None
        options = profiling.make_options(
            shape=shapes,
            isas=_words(isa),
            formats=_words(formats) or (profiling.FORMATS[:1] if quick else profiling.FORMATS),
            tokens=_numbers(tokens) or (profiling.QUICK_TOKENS if short else profiling.TOKENS),
            threads=threads,
            memory_bytes=_bytes(memory),
            budget_s=budget if budget is not None else (20.0 if quick else 120.0),
            numa=numa,
            seed=seed,
            command=["hetero", *sys.argv[1:]],
        )
        with _progress() as progress:
            report = profiling.profile(options, progress)
    _tell(report, others, json_to, html_to)


def _tell(report: Report, others: list[Report], json_to: str | None, html_to: Path | None) -> None:
    text = report.model_dump_json(indent=1)
    if json_to == "-":
        typer.echo(text)
    else:
        from hetero.report.text import show, show_comparison

        show(report)
        if others:
            show_comparison(report, others)
        sys.stdout.flush()
    if json_to not in (None, "-"):
        write_whole(Path(json_to), text + "\n", "--json")
        terminal.note(f"wrote {json_to}")
    if html_to is not None:
        from hetero.report.page import page

        write_whole(html_to, page([report, *others]), "--html")
        terminal.note(f"wrote {html_to}")


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """A line on stderr that says what is measured; nothing where that is not a terminal."""
    console = terminal.Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status("starting") as status:
        yield status.update


def _check_writable(path: Path | None) -> None:
    """Before minutes of measuring, not after."""
    if path is None:
        return
    try:
        with path.open("a"):
            pass
    except OSError as error:
        raise unwritable(error, str(path)) from None


def _words(text: str | None) -> list[str]:
    return [word.strip() for word in (text or "").split(",") if word.strip()]


def _numbers(text: str | None) -> list[int]:
    try:
        return [int(word) for word in _words(text)]
    except ValueError:
        raise InputError(f"--tokens {text}: must be whole numbers with commas, such as 1,4,256") from None


def _bytes(text: str | None) -> int | None:
    """``4G``, ``512M`` or plain bytes."""
    if text is None:
        return None
    lower = text.strip().lower().removesuffix("ib").removesuffix("b")
    unit = lower[-1:] if lower[-1:] in _UNITS else ""
    try:
        return int(float(lower.removesuffix(unit)) * _UNITS[unit])
    except (ValueError, OverflowError):
        raise InputError(f"--memory {text}: must be a size such as 4G or 512M") from None
