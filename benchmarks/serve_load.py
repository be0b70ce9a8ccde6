"""A crowd of clients on one server: most behave, some cancel, vanish or send nonsense.

    python benchmarks/serve_load.py --minutes 5 --json load.json [MODEL]

Starts ``hetero serve`` on a free port of 127.0.0.1 in format f32, whose answers do not depend on what else is
in the batch. Says at the end, and by its exit code, whether all of this held: no 5xx, memory flat within 3%
after the warm-up, no slot and no page in use, every finished answer equal to its solo run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from served import serving

SUBJECTS = (
    "whale",
    "sea",
    "captain",
    "harpoon",
    "island",
    "storm",
    "crew",
    "sail",
    "oil",
    "night",
    "coast",
    "ship",
)
NONSENSE: tuple[dict[str, Any], ...] = (
    {},
    {"prompt": 5},
    {"prompt": "a", "temperature": "hot"},
    {"prompt": "a", "surprise": 1},
    {"prompt": "a", "max_tokens": -1},
    {"prompt": [10**9]},
    {"prompt": "a", "model": "another"},
)


@dataclass
class Load:
    """What one run sends and sees."""

    url: str
    bodies: list[dict[str, Any]]
    alone: list[str]
    until: float
    deeds: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    async def client(self, number: int) -> None:
        """One client, until the time is over."""
        chance = random.Random(number)
        while time.monotonic() < self.until:
            try:
                async with httpx.AsyncClient(base_url=self.url, timeout=300) as own:
                    for _ in range(chance.randint(1, 8)):
                        await self.deed(own, chance)
            except httpx.TransportError as error:
                self.deeds[f"transport {type(error).__name__}"] += 1

    async def deed(self, own: httpx.AsyncClient, chance: random.Random) -> None:
        """One request, in one of the ways that clients have."""
        index = chance.randrange(len(self.bodies))
        body = self.bodies[index]
        kind = chance.choices(("whole", "stream", "cancel", "vanish", "nonsense"), (30, 30, 15, 15, 10))[0]
        self.deeds[kind] += 1
        if kind == "nonsense":
            answer = await own.post("/v1/completions", json=chance.choice(NONSENSE))
            self.statuses[answer.status_code] += 1
        elif kind == "vanish":
            # The client gives up at any time, also while it waits in the queue.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(own.post("/v1/completions", json=body), chance.uniform(0.01, 3))
        elif kind == "whole":
            answer = await own.post("/v1/completions", json=body)
            self.statuses[answer.status_code] += 1
            if answer.status_code == 200:
                self.compare(index, answer.json()["choices"][0]["text"])
            await asyncio.sleep(0.2 if answer.status_code == 429 else 0)
        else:
            await self.stream(own, index, chance.randint(1, 20) if kind == "cancel" else None)

    async def stream(self, own: httpx.AsyncClient, index: int, lines: int | None) -> None:
        """Read a stream to its end, or leave after ``lines``."""
        text = ""
        async with own.stream(
            "POST", "/v1/completions", json=self.bodies[index] | {"stream": True}
        ) as answer:
            self.statuses[answer.status_code] += 1
            if answer.status_code != 200:
                await asyncio.sleep(0.2)
                return
            seen = 0
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    self.wrong.append(f"a stream ended by {event['error']['message']}")
                    return
                text += event["choices"][0]["text"]
                seen += 1
                if seen == lines:
                    return
        self.compare(index, text)

    def compare(self, index: int, text: str) -> None:
        """An answer with that of the same request when nobody else asked."""
        self.deeds["finished"] += 1
        if text != self.alone[index]:
            self.wrong.append(f"{self.bodies[index]['prompt']!r}: {text!r} instead of {self.alone[index]!r}")


def resident(process: int) -> int:
    """Bytes in memory of a process."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * 4096


def requests() -> list[dict[str, Any]]:
    """Prompts of many lengths, some with a common beginning."""
    chance = random.Random(0)
    made = []
    for number in range(48):
        words = " and the ".join(chance.choice(SUBJECTS) for _ in range(chance.choice((1, 2, 4, 8, 30))))
        prompt = ("It was told of old that " if number % 2 else "") + f"the {words} of {number}"
        made.append({"prompt": prompt, "max_tokens": chance.choice((4, 8, 16, 32, 64)), "temperature": 0})
    return made


async def crowd(load: Load, clients: int, process: int, samples: list[tuple[float, int]]) -> None:
    """All clients at once; memory is looked at meanwhile."""
    began = time.monotonic()

    async def watch() -> None:
        while time.monotonic() < load.until:
            samples.append((time.monotonic() - began, resident(process)))
            await asyncio.sleep(1)

    await asyncio.gather(watch(), *(load.client(number) for number in range(clients)))


def verdict(
    load: Load, samples: list[tuple[float, int]], minutes: float, end: dict[str, Any]
) -> dict[str, Any]:
    """What held and what did not."""
    # The first fifth is warm-up: caches and arenas of the allocator grow to what this load needs.
    after = [size for at, size in samples if at >= minutes * 60 / 5] or [0]
    third = max(len(after) // 3, 1)
    early, late = sum(after[:third]) / third, sum(after[-third:]) / third
    checks = {
        "no 5xx": not any(status >= 500 for status in load.statuses),
        "memory flat within 3%": bool(early) and late <= early * 1.03,
        "all slots free": end["running"] == 0 and end["waiting"] == 0,
        "all pages free": end["kv_tokens_used"] == 0,
        "finished answers equal their solo runs": not load.wrong and load.deeds["finished"] > 0,
    }
    return {
        "minutes": minutes,
        "deeds": dict(load.deeds),
        "statuses": {str(status): count for status, count in sorted(load.statuses.items())},
        "rss_mb": {"early": early / 1e6, "late": late / 1e6, "most": max(after) / 1e6},
        "end": end,
        "checks": checks,
        "wrong": load.wrong[:10],
    }


def figures(url: str) -> dict[str, Any]:
    """What the server holds, once it is idle."""
    for _ in range(200):
        health = httpx.get(f"{url}/health").json()
        if health["running"] + health["waiting"] == 0:
            break
        time.sleep(0.1)
    text = httpx.get(f"{url}/metrics").text
    used = re.search(r"^hetero:kv_cache_tokens_used (\S+)", text, re.M)
    return {**health, "kv_tokens_used": float(used[1]) if used else -1.0}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    minutes = min(args.minutes, 60.0)
    model = [args.model] if args.model else []
    with serving(*model, "--set", "experts=f32", "--slots", "8", "--max-queue", "48") as (server, url):
        bodies = requests()
        with httpx.Client(base_url=url, timeout=300) as one:
            alone = [one.post("/v1/completions", json=b).json()["choices"][0]["text"] for b in bodies]
        load = Load(url, bodies, alone, time.monotonic() + minutes * 60)
        samples: list[tuple[float, int]] = []
        asyncio.run(crowd(load, args.clients, server.pid, samples))
        result = verdict(load, samples, minutes, figures(url))
        server.terminate()
        result["checks"]["exit code 0"] = server.wait(60) == 0
    result["clients"] = args.clients
    for name in ("deeds", "statuses", "rss_mb"):
        print(f"{name:10}", "  ".join(f"{k} {v:.0f}" for k, v in result[name].items()))
    for name, held in result["checks"].items():
        print(f"{'held' if held else 'FAILED':8}{name}")
    for line in result["wrong"]:
        print(f"        {line}")
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=2) + "\n")
    return 0 if all(result["checks"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
