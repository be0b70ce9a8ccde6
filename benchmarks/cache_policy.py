"""Which experts a GPU cache should hold: hit rates of policies on tables of routing, without any device.

    python benchmarks/cache_policy.py [--slots 130] [--steps 400] [--layers 12] [--json FILE]

Routings of 512 experts, 10 a token: ``local`` (45% of the last token's experts, 35% of those 2 to 8 back, the
rest anywhere), ``uniform``, ``skewed`` (fixed popularity, the r-th expert in proportion to 1 / r), and
``phases`` (skewed, but every 100 steps with another order of popularity), ``change`` (the first half local,
then uniform, which is what counts). Of each policy: hits after the
first quarter of the steps, moves a layer and step, and what stayed since the GPU read it over PCIe anyway,
where slots are kept free for that.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

EXPERTS, TOP = 512, 10
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


def table(kind: str, layers: int, steps: int, seed: int) -> npt.NDArray[np.int64]:
    """Ids [layers, steps, TOP], distinct within a step."""
    r = np.random.default_rng(seed)
    out = np.empty((layers, steps, TOP), np.int64)
    for layer in range(layers):
        history: list[list[int]] = []
        local = kind == "local"
        popularity = r.permutation(1.0 / np.arange(1, EXPERTS + 1))
        for step in range(steps):
            if kind == "change":
                local = step < steps // 2
            if kind == "phases" and step % 100 == 0:
                popularity = r.permutation(popularity)
            if kind in ("skewed", "phases"):
                keys = r.exponential(size=EXPERTS) / popularity
                chosen = np.argpartition(keys, TOP)[:TOP].tolist()
            elif not local or not history:
                chosen = r.choice(EXPERTS, TOP, replace=False).tolist()
            else:
                last = history[-1]
                older = list({e for one in history[-8:-1] for e in one} - set(last))
                got: set[int] = set()
                while len(got) < TOP:
                    u = r.random()
                    source = last if u < 0.45 else older if u < 0.8 and older else range(EXPERTS)
                    got.add(int(source[r.integers(len(source))]))
                chosen = list(got)
            history.append(chosen)
            out[layer, step] = chosen
    return out


class Policy(Protocol):
    """``values`` [layers, experts] after a step: what holding each expert is worth; an expert moves in where
    it is worth ``margin`` times (``gain`` more than) the least worthy one that is held."""

    def values(self, used: Bools) -> Floats: ...
    def goes(self, best: Floats, worst: Floats) -> Bools: ...


class Recency:
    def __init__(self, layers: int) -> None:
        self.last = np.full((layers, EXPERTS), -1.0)
        self.step = 0

    def values(self, used: Bools) -> Floats:
        self.step += 1
        self.last[used] = self.step
        return self.last

    def goes(self, best: Floats, worst: Floats) -> Bools:
        return best > worst


class Decayed:
    def __init__(self, layers: int, half_life: float, margin: float) -> None:
        self.scores = np.zeros((layers, EXPERTS))
        self.decay, self.margin = 2.0 ** (-1.0 / half_life), margin

    def values(self, used: Bools) -> Floats:
        self.scores = self.scores * self.decay + used
        return self.scores

    def goes(self, best: Floats, worst: Floats) -> Bools:
        return (best > worst * self.margin) & (best > 0)


class Learned:
    """The chance that an expert is used in the next step, counted by how long ago and how often it was
    used."""

    AGES, OFTEN = 8, 8

    def __init__(self, layers: int, gain: float, memory: float = 12.0, prior: float = 32.0) -> None:
        self.age = np.full((layers, EXPERTS), 1 << 20)
        self.often = np.zeros((layers, EXPERTS))
        self.decay, self.fade, self.gain, self.prior = (
            2.0 ** (-1.0 / 64.0),
            2.0 ** (-1.0 / memory),
            gain,
            prior,
        )
        cells = self.AGES * self.OFTEN
        rate = 2.0 ** (np.arange(cells) % self.OFTEN - 8)
        self.seen = np.full((layers, cells), 16.0)
        self.used = self.seen * rate
        self.rows = np.arange(layers)[:, None]

    def cells(self) -> npt.NDArray[np.int64]:
        age = np.minimum(np.floor(np.log2(np.maximum(self.age, 1))), self.AGES - 1).astype(np.int64)
        rate = self.often * (1 - self.decay)
        often = np.clip(np.floor(np.log2(np.maximum(rate, 1e-9))) + 8, 0, self.OFTEN - 1).astype(np.int64)
        return age * self.OFTEN + often

    def values(self, used: Bools) -> Floats:
        cell = self.cells()
        self.seen *= self.fade
        self.used *= self.fade
        np.add.at(self.seen, (self.rows, cell), 1.0)
        np.add.at(self.used, (self.rows, cell), used)
        self.age = np.where(used, 1, self.age + 1)
        self.often = self.often * self.decay + used
        usual = self.used.sum(1, keepdims=True) / self.seen.sum(1, keepdims=True) * self.prior
        return np.take_along_axis((self.used + usual) / (self.seen + self.prior), self.cells(), 1)

    def goes(self, best: Floats, worst: Floats) -> Bools:
        return best > worst + self.gain


def split(misses: int, cpu: float = 80.0, pcie: float = 47.0, lead: float = 0.35) -> int:
    """How many of a step's misses the GPU reads, so that the later of both ends soonest. Rates in GB/s;
    ``lead``: experts' worth of the CPU's time that the hand-off takes."""
    return min(range(misses + 1), key=lambda t: max((misses - t + lead) / cpu, t / pcie))


def simulate(
    ids: npt.NDArray[np.int64], slots: int, moves: int, policy: Policy, *, reserve: int, skipped: int
) -> tuple[float, float, float]:
    """Of the steps after the first ``skipped``: (hit rate, moves a layer and step, experts a layer and step
    that stayed since
    the GPU read them over PCIe for the step anyway). ``reserve`` slots are kept free for the latter."""
    layers, steps, _ = ids.shape
    row = np.arange(layers)
    held = np.zeros((layers, EXPERTS), bool)
    held[:, : slots - reserve] = True
    taken_of = np.array([split(m) for m in range(TOP + 1)])
    hits = total = moved = stayed = 0
    for step in range(steps):
        used = np.zeros((layers, EXPERTS), bool)
        used[row[:, None], ids[:, step]] = True
        counts = step >= skipped
        if counts:
            hits += int((used & held).sum())
            total += layers * TOP
        missing = used & ~held
        free = slots - held.sum(1)
        admitted = np.minimum(np.minimum(taken_of[missing.sum(1)], reserve), free)
        held |= missing & (missing.cumsum(1) <= admitted[:, None])
        stayed += int(admitted.sum()) if counts else 0
        values = policy.values(used)
        for _ in range(moves):
            best = np.where(held, -1.0, values).argmax(1)
            worst = np.where(held, values, np.inf).argmin(1)
            goes = policy.goes(values[row, best], values[row, worst])
            held[row[goes], worst[goes]] = False
            held[row[goes], best[goes]] = True
            moved += int(goes.sum()) if counts else 0
            if not goes.any():
                break
        for _ in range(reserve):
            full = held.sum(1) > slots - reserve
            worst = np.where(held, values, np.inf).argmin(1)
            held[row[full], worst[full]] = False
    counted = layers * (steps - skipped)
    return hits / total, moved / counted, stayed / counted


def policies(layers: int) -> dict[str, Callable[[], Policy]]:
    made: dict[str, Callable[[], Policy]] = {"recency (LRU)": lambda: Recency(layers)}
    for half_life in (8, 64, 256):
        made[f"decayed, half-life {half_life}, margin 1.5"] = lambda h=half_life: Decayed(layers, h, 1.5)
    for memory, prior, gain in ((256, 0, 0.03), (12, 0, 0.04), (12, 32, 0.04), (12, 32, 0.1)):
        made[f"learned, {memory} steps, prior {prior}, {gain}"] = lambda m=memory, p=prior, g=gain: Learned(
            layers, g, m, p
        )
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--slots", type=int, default=130)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--json")
    options = parser.parse_args()
    kinds = ("local", "uniform", "skewed", "phases", "change")
    tables = {kind: table(kind, options.layers, options.steps, 1) for kind in kinds}
    results: list[dict[str, Any]] = []
    print(f"{options.slots} of {EXPERTS} slots a layer: hit rate (moves + stayed, a layer and step)")
    print(f"{'policy':36} {'moves':>5} {'free':>4}  " + "  ".join(f"{kind:>17}" for kind in kinds))
    for name, make in policies(options.layers).items():
        for moves, reserve in ((1, 0), (2, 0), (4, 0), (1, 1), (2, 1), (1, 3), (2, 3)):
            cells = []
            for kind, ids in tables.items():
                skipped = options.steps // (2 if kind == "change" else 4)
                rate, moved, stayed = simulate(
                    ids, options.slots, moves, make(), reserve=reserve, skipped=skipped
                )
                cells.append(f"{100 * rate:5.1f} ({moved:.2f}+{stayed:.2f})")
                results.append(
                    {
                        "policy": name, "most_moves": moves, "reserve": reserve, "routing": kind,
                        "hits": rate, "moves": moved, "stayed": stayed,
                    }
                )  # fmt: skip
            print(f"{name:36} {moves:5} {reserve:4}  " + "  ".join(f"{cell:>17}" for cell in cells))
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"slots": options.slots, "results": results}, file, indent=1)


if __name__ == "__main__":
    main()
