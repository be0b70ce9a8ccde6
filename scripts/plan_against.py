"""A table of plans beside what runs measured, of results of ``hetero bench --plan``: plan_against.py FILE...

The plan's memory is asked to be within 3%, its decode within 15%; ``*`` marks what is not. Of steps on a GPU
the parts come too, by which the constants of the estimate (hetero/plan/constants.py) are found again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MEMORY, DECODE = 0.03, 0.15


def rows(path: Path) -> Iterator[str]:
    """Of one result."""
    try:
        found: Any = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        yield f"| {path.name} | cannot be read: {error} | | | |"
        return
    plan = found.get("plan")
    if plan is None:
        yield f"| {path.name} | no plan in it (--plan), or not complete | | | |"
        return
    name = found["model"] + (f", {found['layers']} layers" if found["layers"] else "")
    for one in plan["memory"]:
        yield row(name, f"{one['tier']}, GiB", one["planned"] / 2**30, one["measured"] / 2**30, MEMORY)
    if plan["slots"] is not None:
        yield row(name, "experts in GPU memory", plan["slots"]["planned"], plan["slots"]["measured"], MEMORY)
    for one in plan["decode"]:
        what = f"decode, {one['routing']} routing, {one['rows']} rows, tok/s"
        yield row(name, what, one["expected_tok_s"], one["measured_tok_s"], DECODE)
    for one, series in zip(plan["decode"], found["decode"], strict=True):
        yield from parts(name, one, series, plan["moe_layers"], found["dense_ms"])


def parts(
    name: str, one: dict[str, Any], series: dict[str, Any], layers: int, dense: dict[str, float]
) -> Iterator[str]:
    """Milliseconds of a step: the dense half, and the layers with their experts."""
    if "cpu_waits_us_a_layer" not in series:
        return
    terms = {term["name"]: term["ms"] for term in one["terms"]}
    planned_dense = sum(
        ms for term, ms in terms.items() if term.startswith(("dense", "keys")) or "kernels" in term
    )
    what = f"{one['routing']} routing, {one['rows']} rows, ms"
    if str(one["rows"]) in dense:
        yield row(name, f"dense half, {what}", planned_dense, dense[str(one["rows"])], DECODE)
    us = sum(series[f"{part}_us_a_layer"]["median"] for part in ("cpu_work", "cpu_waits", "handoff"))
    yield row(
        name, f"in the layers, {what}", 1e3 * one["rows"] / one["expected_tok_s"], layers * us / 1e3, DECODE
    )


def row(name: str, what: str, planned: float, measured: float, within: float) -> str:
    off = planned / measured - 1 if measured else 0.0
    mark = "" if measured and abs(off) <= within else " *"
    return f"| {name} | {what} | {planned:.4g} | {measured:.4g} | {off:+.1%}{mark} |"


def main() -> None:
    print("| model | figure | planned | measured | off |\n| --- | --- | --- | --- | --- |")
    for name in sys.argv[1:]:
        for line in rows(Path(name)):
            print(line)


if __name__ == "__main__":
    main()
