"""``hetero pack``: packed experts of a model, written to a file ahead of the first run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from hetero import terminal
from hetero.cli_model import check_threads
from hetero.core import InputError


def pack(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A checkpoint folder, a .gguf file or a name of the Hub.")
    ],
    *,
    revision: Annotated[
        str | None, typer.Option(metavar="NAME", help="Branch, tag or commit of a model of the Hub.")
    ] = None,
    output: Annotated[
        str | None,
        typer.Option("-o", "--output", metavar="DIR", help="Write there; default: the cache folder."),
    ] = None,
    rules: Annotated[
        str | None,
        typer.Option("--rules", metavar="FILE", help="Rule file; default: that of the model's family."),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Set a variable of the rule file."),
    ] = None,
    threads: Annotated[int | None, typer.Option(help="Threads; default: the physical cores.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Write anew what is there already.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of the text.")
    ] = False,
) -> None:
    """Pack a model's experts into a file, from which later runs start at the speed of the disk.

    run, chat and serve find the file in the cache folder and in the model's own folder.
    """
    from hetero.config import settings
    from hetero.engine.load import pack_model
    from hetero.hw import memory
    from hetero.model import hf
    from hetero.model.shapes import resolve_model
    from hetero.rules.variables import parse_set

    found = resolve_model(
        model, revision=revision, weights=True, say=terminal.note, bar=terminal.progress_bar
    )
    if found.kind not in ("folder", "gguf"):
        raise InputError(f"{model}: has a configuration but no weights; give the folder of its checkpoint")
    check_threads(threads)
    hf.quiet()
    with terminal.progress_bar(f"packing {found.name}") as progress:
        packed = pack_model(
            found.path,
            Path(output).expanduser() if output is not None else settings().cache / "packed",
            rules=rules,
            overrides=parse_set(set_ or []),
            threads=threads,
            force=force,
            progress=progress,
            tell=lambda text: terminal.note(f"note: {text}"),
        )
    if as_json:
        body = {
            "file": str(packed.path),
            "bytes": packed.nbytes,
            "blocks": packed.blocks,
            "resumed_blocks": packed.resumed,
            "source_bytes": packed.source_bytes,
            "seconds": packed.seconds,
            "reused": packed.reused,
        }
        typer.echo(json.dumps(body))
        return
    if packed.reused:
        typer.echo(f"{packed.path}: there already ({memory.gib(packed.nbytes)})")
    else:
        rate = packed.nbytes / max(packed.seconds, 1e-9) / 1e9
        typer.echo(
            f"{packed.path}: {packed.blocks} blocks, {memory.gib(packed.nbytes)} in {packed.seconds:.1f} s "
            f"({rate:.2f} GB/s)"
        )
