"""How often each expert of a model was chosen, kept from run to run: what a cache should hold first.

One small file a model in the cache folder (``HETERO_CACHE``), with the model's name, a hash of its
configuration and a number for every expert. No text, no token, no time of use: nothing that tells what was
asked. Imports neither torch nor transformers.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hetero import jsonfile
from hetero.config import settings

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Counts = Mapping[int, Sequence[float]]  # by the index of the layer

# Choices in a layer after which what was counted before weighs half: a million tokens of a top-8 model.
HALF_LIFE = 8_000_000
# Files of models that were not used for longest are dropped beyond this.
MOST_MODELS = 64
# No model has as many layers or experts; a broken file may say so.
MOST_LAYERS, MOST_EXPERTS = 4096, 65536
_MOST_BYTES = 64 << 20
_VERSION = 1
# Fields of a configuration that differ between copies of one model.
_VOLATILE = frozenset(
    {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "auto_map"}
)


class Named(Protocol):
    """A model as ``hetero.model.shapes.ModelRef`` tells of it."""

    @property
    def name(self) -> str: ...
    @property
    def config(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Stats:
    """What is known of one model."""

    name: str
    config: str  # hash of its configuration
    choices: int  # (token, expert) pairs counted in all, those that are half forgotten included
    layers: dict[int, list[float]]  # weight of each expert, by the index of the layer

    @property
    def key(self) -> str:
        return _key(self.name, self.config)

    def array(self) -> npt.NDArray[np.float64]:
        """[layers, experts], rows by the index of the layer; zeros where a layer has no experts."""
        import numpy as np  # only here: a command line that has no use for it starts sooner

        rows = max(self.layers, default=-1) + 1
        width = max((len(row) for row in self.layers.values()), default=0)
        table = np.zeros((rows, width))
        for layer, row in self.layers.items():
            table[layer, : len(row)] = row
        return table


def config_hash(config: Mapping[str, Any]) -> str:
    """Of what shapes the model; copies of one model have the same."""
    kept = {name: value for name, value in config.items() if name not in _VOLATILE}
    text = json.dumps(kept, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def expert_counts(model: Named) -> npt.NDArray[np.float64] | None:
    """How often each expert was chosen, float64 [layers, experts], rows by the index of the layer, recent use
    weighing more; zeros in layers without experts. None when the model was never used here.
    """
    found = load(model.name, config_hash(model.config))
    return None if found is None else found.array()


def hit_rates(counts: npt.NDArray[np.float64], sizes: Sequence[int]) -> list[float]:
    """For each number of experts: the share of choices that the most used ones of all layers make up."""
    import numpy as np

    ordered = np.sort(counts.ravel())[::-1]
    total = float(ordered.sum())
    sums = np.concatenate([[0.0], np.cumsum(ordered)])
    return [float(sums[min(size, len(ordered))]) / total if total else 0.0 for size in sizes]


def stats_folder() -> Path:
    return settings().cache / "stats"


def load(name: str, config: str) -> Stats | None:
    """What is kept of a model; None for nothing, or for a file that is no such file."""
    return _read(stats_folder() / f"{_key(name, config)}.json")


def load_all() -> list[Stats]:
    """Of every model, the most lately used first."""
    files = sorted(stats_folder().glob("*.json"), key=_age, reverse=True)
    return [found for file in files if (found := _read(file)) is not None]


def reset(known: Stats) -> None:
    """Forget a model."""
    with _locked():
        (stats_folder() / f"{known.key}.json").unlink(missing_ok=True)


def add(name: str, config: str, new: Counts) -> None:
    """Add counts to what is kept of a model, together with other processes. Raises OSError."""
    if not any(sum(row) for row in new.values()):
        return
    with _locked():
        path = stats_folder() / f"{_key(name, config)}.json"
        old = _read(path)
        merged = _merge(old.layers if old else {}, new)
        choices = (old.choices if old else 0) + int(sum(sum(row) for row in new.values()))
        body = {
            "version": _VERSION,
            "name": name,
            "config": config,
            "choices": choices,
            # Fine enough that a few choices fade what was there.
            "layers": {str(layer): [round(count, 6) for count in row] for layer, row in merged.items()},
        }
        fresh = path.with_name(f".{path.stem}.{uuid.uuid4().hex[:8]}")
        try:
            fresh.write_text(json.dumps(body, separators=(",", ":")), encoding="utf-8")
            fresh.replace(path)
        finally:
            fresh.unlink(missing_ok=True)
        for stale in sorted(stats_folder().glob("*.json"), key=_age, reverse=True)[MOST_MODELS:]:
            stale.unlink(missing_ok=True)


class Recorder:
    """Adds the use of one loaded model to the statistics; ``uses`` gives the counts since it was loaded.

    A file that cannot be written costs the statistics and nothing else: ``say`` is told once.
    """

    def __init__(
        self, model: Named, uses: Callable[[], Counts], say: Callable[[str], None] = lambda _: None
    ) -> None:
        self._name, self._config = model.name, config_hash(model.config)
        self._uses, self._say = uses, say
        self._saved: Counts = {}

    def save(self) -> None:
        """Add what was counted since the last time."""
        now = self._uses()
        new = {
            layer: [
                count - before
                for count, before in zip(row, self._saved.get(layer) or [0] * len(row), strict=True)
            ]
            for layer, row in now.items()
        }
        try:
            add(self._name, self._config, new)
        except OSError as error:
            self._say(f"note: the statistics of experts cannot be kept in {stats_folder()}: {error.strerror}")
            self._say = lambda _: None
            return
        self._saved = now


def _merge(old: Counts, new: Counts) -> dict[int, list[float]]:
    """Old counts, fading with what is new, and the new ones. Layers of another size are taken anew."""
    fading = 0.5 ** (max((sum(row) for row in new.values()), default=0) / HALF_LIFE)
    merged = {layer: [count * fading for count in row] for layer, row in old.items()}
    for layer, row in new.items():
        before = merged.get(layer, [])
        merged[layer] = (
            [a + b for a, b in zip(before, row, strict=True)] if len(before) == len(row) else list(row)
        )
    return dict(sorted(merged.items()))


def _key(name: str, config: str) -> str:
    """The name of the file: readable, and never a path."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "_", name).lstrip(".")[:80] or "model"
    mark = (
        "" if plain == name else f"-{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()[:8]}"
    )
    return f"{plain}{mark}-{config}"


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _read(path: Path) -> Stats | None:
    try:
        if path.stat().st_size > _MOST_BYTES:
            return None
        body = jsonfile.parse(path.read_bytes())
        if body["version"] != _VERSION or not isinstance(body["layers"], dict):
            return None
        layers = {int(layer): [float(count) for count in row] for layer, row in body["layers"].items()}
        found = Stats(str(body["name"]), str(body["config"]), int(body["choices"]), layers)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None
    sound = all(
        0 <= layer < MOST_LAYERS
        and len(row) <= MOST_EXPERTS
        and all(math.isfinite(count) and count >= 0 for count in row)
        for layer, row in layers.items()
    )
    return found if sound else None


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    """Alone among processes; where the file system has no locks, the last one to write wins."""
    folder = stats_folder()
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
