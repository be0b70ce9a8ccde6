"""A benchmark's result for a person."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table

from hetero.plan.sizes import gib
from hetero.terminal import Console


def show(result: Mapping[str, Any], console: Console) -> None:
    """What ``hetero bench`` prints last."""

    def say(text: str = "") -> None:
        console.print(text, markup=False, highlight=False)

    say()
    hardware, options = result["hardware"], result["options"]
    gpu = f", {hardware['gpu']}" if "gpu" in hardware else ""
    layers = f", {result['layers']} layers of it" if result["layers"] else ""
    made = ", random weights" if result["synthetic"] else ""
    say(f"{result['model']}{layers}{made}: experts {options['format']}, dense layers {options['dense']}")
    say(f"{hardware['cpu']}, {result['cpu']['threads']} threads{gpu}; {hardware['date']}")
    say(", ".join(_rates(result["rates"])))
    say()
    console.print(_decode(result["decode"], ""))
    if result["serial"]:
        say()
        console.print(_decode(result["serial"], "one after the other"))
        for line in _slower(result["decode"], result["serial"]):
            say(line)
    if result["prefill"]:
        say()
        console.print(_prefill(result["prefill"]))
    for one in result.get("traced", ()):
        is_prompt = one["kind"] == "prefill"
        what = f"{one['tokens']} tokens" if is_prompt else f"{one['routing']}, {one['rows']} rows"
        for line in one["lines"]:
            say(f"recorded {one['kind']}, {what}: {line}")
    if result.get("deferral"):
        say(f"{options['defer']} deferred experts {result['deferral']['line']}")
    for rows, ms in result["dense_ms"].items():
        launches = result.get("dense_launches", {}).get(rows)
        say(f"dense half alone, {rows} rows: {ms:.2f} ms" + (f", {launches} launches" if launches else ""))
    for name, table in result["tables"].items():
        last, window = table["reuse_last"], table["reuse_8"]
        say(f"{name} routing: {last:.0%} of the last token's experts, {window:.0%} of the last 8 tokens'")
    for line in _memory(result.get("gpu_memory")):
        say(line)
    for one in result.get("predicted", ()):
        say(_predicted(one))
    for line in _against_plan(result.get("plan")):
        say(line)
    for note in result["notes"]:
        say(f"note: {note}")


def _rates(rates: Mapping[str, Any]) -> Iterator[str]:
    words = {
        "cpu": "CPU reads {:.0f} GB/s",
        "pcie": "PCIe in place {:.0f}",
        "copy": "copies {:.0f}",
        "cpu_of_both": "both at once {:.0f}",
        "pcie_of_both": "+ {:.0f}",
        "gpu": "GPU memory {:.0f} GB/s",
        "launch_us": "a launch {:.2f} us",
    }
    for name, text in words.items():
        if name in rates:
            yield text.format(rates[name]["median"])


def _decode(series: list[dict[str, Any]], title: str) -> Table:
    table = Table(box=None, pad_edge=False, title=title or None, title_justify="left")
    for name in ("routing", "rows", "tok/s", "quartiles", "ms a step", "of bound", "binds"):
        table.add_column(name, justify="left" if name in ("routing", "binds") else "right")
    for name in ("hits", "GB GPU/PCIe/CPU", "CPU us", "hand-off us", "launches", "prompt s"):
        table.add_column(name, justify="right")
    for one in series:
        rate, bound = one["tok_s"], one.get("bound")
        share = one.get("share")
        table.add_row(
            one["routing"] + (f", share {share:g}" if share is not None else ""),
            str(one["rows"]),
            f"{rate['median']:.1f}",
            f"{rate['q1']:.1f}-{rate['q3']:.1f}",
            f"{one['step_ms']['median']:.2f}",
            "" if bound is None else f"{bound['share']:.0%} of {bound['tok_s']:.1f}",
            "" if bound is None else bound["binds"],
            "" if one["hit_rate"] is None else f"{one['hit_rate']:.0%}",
            "/".join(f"{one['bytes_a_step'][tier] / 1e9:.2f}" for tier in ("gpu", "pcie", "cpu")),
            _median(one, "cpu_work_us_a_layer"),
            _median(one, "handoff_us_a_layer"),
            str(one.get("launches") or ""),
            f"{one['prompt_s']['median']:.2f}",
        )
    return table


def _median(one: Mapping[str, Any], name: str) -> str:
    return f"{one[name]['median']:.1f}" if name in one else ""


def _slower(series: list[dict[str, Any]], serial: list[dict[str, Any]]) -> Iterator[str]:
    before = {(one["routing"], one["rows"]): one["tok_s"]["median"] for one in reversed(series)}
    for one in serial:
        fast, slow = before[one["routing"], one["rows"]], one["tok_s"]["median"]
        gain = f"{fast / slow - 1:.0%}"
        yield f"{one['routing']} routing, {one['rows']} rows: {gain} more tokens when all work at once"


def _prefill(series: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("prompt", "first token s", "tok/s", "of bound", "bound's way"):
        table.add_column(name, justify="left" if "way" in name else "right")
    for one in series:
        bound = one.get("bound")
        table.add_row(
            str(one["tokens"]),
            f"{one['ttft_s']['median']:.3f}",
            f"{one['tok_s']['median']:.0f}",
            "" if bound is None else f"{bound['share']:.0%} of {bound['tok_s']:.0f}",
            "" if bound is None else bound["way"],
        )
    return table


def _predicted(one: Mapping[str, Any]) -> str:
    """Of another machine: what is expected there, and the bound."""
    where = one["hardware"] + (f", {one['layers']} layers" if one["layers"] else "")
    if not one["fits"]:
        return f"predicted, not measured, on {where}: does not fit"
    bounds = {d["routing"]: d["tok_s"] for d in one["decode"]}
    told = ", ".join(
        f"{d['tok_s']:.3g} tok/s {d['routing']} (at most {bounds[d['routing']]:.3g})" for d in one["expected"]
    )
    return f"predicted, not measured, on {where}: {told}"


def _against_plan(plan: Mapping[str, Any] | None) -> Iterator[str]:
    """The plan of this run beside what was measured."""
    if plan is None:
        return
    for one in plan["memory"]:
        yield (
            f"plan: {one['tier']} {gib(one['planned'])}, measured {gib(one['measured'])} "
            f"({_off(one['planned'], one['measured'])})"
        )
    slots = plan["slots"]
    if slots is not None:
        off = _off(slots["planned"], slots["measured"])
        yield f"plan: {slots['planned']} experts in GPU memory, measured {slots['measured']} ({off})"
    for one in plan["decode"]:
        what = f"{one['routing']} routing, {one['rows']} rows"
        off = _off(one["expected_tok_s"], one["measured_tok_s"])
        yield f"plan: {what}: {one['expected_tok_s']:.1f} tok/s, measured {one['measured_tok_s']:.1f} ({off})"


def _off(planned: float, measured: float) -> str:
    return "nothing measured" if not measured else f"{planned / measured - 1:+.1%}"


def _memory(told: Mapping[str, Any] | None) -> Iterator[str]:
    if told is None:
        return
    of = ""
    if told["cap"] is not None:
        of = f" of {gib(told['cap'])}: " + ("within the cap" if told["under_cap"] else "OVER THE CAP")
    others = told["used_by_others_before"]
    beside = "" if others is None else f"; {gib(others)} were in use before"
    yield f"GPU memory at most {gib(told['peak'])}{of}, by the driver{beside}"
