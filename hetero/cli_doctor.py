"""``hetero doctor``: what this machine is, what is wrong with it, and the profile that plans use.

Errors are raised as HeteroError; ``hetero.cli`` tells them.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from hetero import terminal
from hetero.config import wait_passively
from hetero.core import MachineError
from hetero.plan.machine import profile_path
from hetero.wholefile import write_whole

_COLOURS = {"ok": "green", "warning": "yellow", "problem": "red"}


def doctor(
    *,
    quick: Annotated[bool, typer.Option("--quick", help="Look only; measure nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    write_profile: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the measurements as a profile for hetero plan --hardware."),
    ] = None,
) -> None:
    """Examine this machine: what is ok, a warning or a problem, and what to do. A problem exits with 3."""
    wait_passively()
    from hetero.doctor.examine import doctor as examine_all
    from hetero.doctor.examine import make_profile

    findings = []
    with _status(as_json) as tell:
        for finding in examine_all(quick=quick):
            tell(finding.what)
            findings.append(finding)
    if not quick or write_profile is not None:
        profile = make_profile(findings).model_dump_json(indent=2, exclude_none=True) + "\n"
        if write_profile is not None:
            write_whole(write_profile, profile, "--write-profile")
            terminal.note(f"wrote {write_profile}")
        if not quick:
            _keep(profile)
    problems = [f for f in findings if f.status == "problem"]
    if as_json:
        told: dict[str, Any] = {
            "kind": "hetero-doctor",
            "version": 1,
            "ok": not problems,
            "findings": [f.as_dict() for f in findings],
        }
        typer.echo(json.dumps(told, indent=2))
    else:
        _show([(f.status, f.what, f.value, f.advice) for f in findings])
    if problems:
        raise typer.Exit(MachineError.exit_code)


@contextlib.contextmanager
def _status(silent: bool) -> Iterator[Any]:
    """A line on stderr that says what was looked at last."""
    console = terminal.Console(stderr=True)
    if silent or not console.is_terminal:
        yield lambda _: None
        return
    with console.status("looking around") as status:
        yield lambda what: status.update(f"after {what}")


def _show(rows: list[tuple[str, str, str, str]]) -> None:
    console = terminal.Console()
    if not console.is_terminal:
        console = terminal.Console(width=140)
    table = Table(box=None, pad_edge=False, show_header=False)
    for status, what, value, advice in rows:
        text = Text(value)
        if advice:
            text.append(f"\n-> {advice}", style="bold" if status == "problem" else "")
        table.add_row(Text(status, style=_COLOURS[status]), what, text)
    console.print(table)


def _keep(text: str) -> None:
    """For plans of this machine. A cache that cannot be written costs only that."""
    path = profile_path()
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(text, encoding="utf-8")
        part.replace(path)
