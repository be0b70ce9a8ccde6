"""``hetero stats``: which experts of a model are used most, and what a cache of them would be worth."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.table import Table

from hetero import stats
from hetero.core import InputError
from hetero.terminal import Console

# Shares of all experts for which hit rates are told.
SHARES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0)
HOT = 8


def show(
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="A model's name; without one, all are listed.")
    ] = None,
    *,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of the text.")
    ] = False,
    reset: Annotated[bool, typer.Option("--reset", help="Forget the model, or all of them.")] = False,
) -> None:
    """Show which experts real use has chosen, and what a cache of the most used ones would have met."""
    known = stats.load_all()
    if model is not None:
        known = _matching(known, model)
    if reset:
        for one in known:
            stats.reset(one)
        if as_json:
            typer.echo(json.dumps({"forgotten": [one.key for one in known]}))
        else:
            typer.echo(f"forgotten: {', '.join(one.name for one in known) or 'nothing was kept'}")
    elif as_json:
        typer.echo(
            json.dumps({"folder": str(stats.stats_folder()), "models": [as_dict(one) for one in known]})
        )
    elif model is None:
        _list(known)
    else:
        for one in known:
            _print(one)


def as_dict(one: stats.Stats) -> dict[str, Any]:
    """All that is known of a model."""
    return {
        "name": one.name,
        "key": one.key,
        "choices": one.choices,
        "experts": _experts(one),
        "hit_rates": [{"experts": size, "hit_rate": rate} for size, rate in hit_table(one)],
        "layers": [{"layer": layer, "counts": row} for layer, row in one.layers.items()],
    }


def hit_table(one: stats.Stats) -> list[tuple[int, float]]:
    """Numbers of experts in a cache for all layers, and the share of choices that those would be."""
    sizes = sorted({max(1, round(_experts(one) * share)) for share in SHARES})
    return list(zip(sizes, stats.hit_rates(one.array(), sizes), strict=True))


def _experts(one: stats.Stats) -> int:
    return sum(len(row) for row in one.layers.values())


def _matching(known: list[stats.Stats], model: str) -> list[stats.Stats]:
    """By name, by key or by the last part of a path or of a name of the Hub."""
    tail = model.rstrip("/").rpartition("/")[2].partition(":")[0]
    found = [one for one in known if one.key == model or one.name in (model, tail)]
    if not found:
        there = ", ".join(dict.fromkeys(one.name for one in known)) or "none yet"
        raise InputError(f"no statistics of {model!r}; there are: {there}")
    return found


def _list(known: list[stats.Stats]) -> None:
    if not known:
        typer.echo(f"no statistics yet in {stats.stats_folder()}: they come with use (run, chat, serve)")
        return
    table = Table(box=None, pad_edge=False)
    for column in ("model", "layers", "experts", "choices", "hit rate of the hottest 10%"):
        table.add_column(column, overflow="fold")
    for one in known:
        rate = stats.hit_rates(one.array(), [max(1, round(_experts(one) * 0.1))])[0]
        table.add_row(one.name, str(len(one.layers)), str(_experts(one)), str(one.choices), f"{rate:.1%}")
    _console().print(table)


def _print(one: stats.Stats) -> None:
    console = _console()
    console.print(
        f"{one.name}: {one.choices} choices in {len(one.layers)} layers of {_experts(one)} experts in all",
        highlight=False,
    )
    table = Table(box=None, pad_edge=False)
    for column in ("layer", f"the {HOT} most used, with their share of the layer's choices", "together"):
        table.add_column(column, overflow="fold")
    for layer, row in one.layers.items():
        total = sum(row) or 1.0
        hot = sorted(range(len(row)), key=lambda expert: -row[expert])[:HOT]
        shares = "  ".join(f"{expert}:{row[expert] / total:.1%}" for expert in hot if row[expert])
        table.add_row(str(layer), shares, f"{sum(row[expert] for expert in hot) / total:.1%}")
    console.print(table)
    console.print("a cache that had held the most used experts of all layers:", highlight=False)
    rates = Table(box=None, pad_edge=False)
    for column in ("experts", "of all", "hit rate"):
        rates.add_column(column, justify="right")
    for size, rate in hit_table(one):
        rates.add_row(str(size), f"{size / max(1, _experts(one)):.0%}", f"{rate:.1%}")
    console.print(rates)


def _console() -> Console:
    console = Console(markup=False)
    return console if console.is_terminal else Console(width=160, markup=False)
