"""One line for every series of some results of ``hetero bench``: python scripts/bench_table.py FILE..."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def lines(path: Path) -> Iterator[str]:
    """Of one file; nothing for a file of another kind."""
    try:
        found: Any = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        yield f"{path.name}: {error}"
        return
    if not isinstance(found, dict) or found.get("kind") != "hetero-bench":
        return
    rates = {name: round(sample["median"], 1) for name, sample in found["rates"].items()}
    memory = found.get("gpu_memory")
    peak = ""
    if memory:
        peak = f"; GPU peak {memory['peak'] / 2**30:.2f} GiB, under the cap: {memory['under_cap']}"
    whole = "" if found["complete"] else ", NOT COMPLETE"
    yield f"{path.name}: {found['model']}, {found['engine']}, loaded in {found['load_s']:.0f} s{whole}{peak}"
    yield f"  GB/s, a launch in us: {rates}"
    for title, series in (("", found["decode"]), ("serial ", found["serial"])):
        for one in series:
            rate, bound = one["tok_s"], one.get("bound")
            share = f", {bound['share']:.0%} of {bound['tok_s']:.0f} ({bound['binds']})" if bound else ""
            hits = "" if one["hit_rate"] is None else f", hits {one['hit_rate']:.1%}"
            parts = [
                f"{name.partition('_us_')[0]} {one[name]['median']:.1f} us"
                for name in ("cpu_work_us_a_layer", "handoff_us_a_layer")
                if name in one
            ]
            asked = "" if one.get("share") is None else f" share {one['share']:g}"
            yield (
                f"  {title}{one['routing']}{asked} x{one['rows']}: {rate['median']:.1f} tok/s "
                f"[{rate['q1']:.1f}, {rate['q3']:.1f}]{share}{hits}; {', '.join(parts)}; "
                f"{one.get('launches')} launches"
            )
    for one in found["prefill"]:
        bound = one.get("bound")
        share = f", {bound['share']:.0%} of {bound['tok_s']:.0f} ({bound['way']})" if bound else ""
        rate = one["tok_s"]["median"]
        yield f"  prefill {one['tokens']}: {one['ttft_s']['median']:.3f} s, {rate:.0f} tok/s{share}"
    for rows, ms in found["dense_ms"].items():
        launches = found.get("dense_launches", {}).get(rows)
        yield f"  dense half, {rows} rows: {ms:.2f} ms, {launches} launches"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        for line in lines(Path(name)):
            print(line)
