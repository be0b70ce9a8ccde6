"""How often the next layer's router, given this layer's input, names the experts that the next layer uses.

    python benchmarks/guess.py --model MODEL --text FILE --json results.json

Without --model the shipped test model, without --text the project's own documents. Beside it what else could
be guessed by: the last token's experts, those used most so far. Of caches of several sizes with the disk
tier's own policy: how many misses the guess would have named, and how many reads it would have begun for
nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))


def choices(model: Any, ids: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Of each layer the experts [T, k] that it uses, and those that its router names for the input of the
    layer before (of layer 0: for its own)."""
    from hetero.ops.moe import MoeBlock

    blocks = [one for one in model.modules() if isinstance(one, MoeBlock)]
    inputs: dict[int, torch.Tensor] = {}

    def keep(at: int) -> Any:
        def hook(_: Any, args: tuple[Any, ...]) -> None:
            inputs[at] = args[0].reshape(-1, args[0].shape[-1])

        return hook

    hooks = [block.register_forward_pre_hook(keep(at)) for at, block in enumerate(blocks)]
    model(ids[None])
    for hook in hooks:
        hook.remove()
    used = [block.chosen(inputs[at]) for at, block in enumerate(blocks)]
    return used, [block.chosen(inputs[max(0, at - 1)]) for at, block in enumerate(blocks)]


class Counted:
    """Caches of one size, one a layer."""

    def __init__(self, layers: int, experts: int, slots: int) -> None:
        from hetero.store.policy import SlotCache

        self.slots = slots
        self._caches = [SlotCache(experts, slots) for _ in range(layers)]
        self._uses = self._misses = self._named = self._wasted = 0

    def step(self, layer: int, used: set[int], guessed: set[int]) -> None:
        cache = self._caches[layer]
        here, absent = cache.lookup(sorted(used))
        reads = guessed - set(cache.resident())
        self._uses += len(used)
        self._misses += len(absent)
        self._named += len(set(absent) & reads)
        self._wasted += len(reads - used)
        cache.touch(sorted(used))
        cache.admit(absent, pinned=here)

    def result(self) -> dict[str, float]:
        misses = max(1, self._misses)
        return {
            "slots": self.slots,
            "miss_rate": self._misses / max(1, self._uses),
            "misses_named": self._named / misses,
            "wasted_per_miss": self._wasted / misses,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "hetero" / "data" / "test-model")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--windows", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=400, help="of a window")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    os.environ["HETERO_TUNE"] = "off"
    from hetero.engine.experts import StoreOptions
    from hetero.engine.load import load_model
    from hetero.model import hf

    hf.quiet()
    loaded = load_model(args.model, dtype="float32", store=StoreOptions("off"))
    texts = [args.text] if args.text else [ROOT / "README.md", ROOT / "docs" / "tiers.md", ROOT / "LICENSE"]
    tokenizer = loaded.tokenizer
    assert tokenizer is not None
    ids = torch.tensor(tokenizer.encode("".join(path.read_text() for path in texts)))
    starts = torch.randint(0, max(1, len(ids) - args.tokens), (args.windows,)).tolist()
    config = loaded.runnable.model.config
    experts, layers = config.num_experts, config.num_hidden_layers
    caches = [Counted(layers, experts, experts * part // 6) for part in range(2, 6)]
    hits = dict.fromkeys(("next router", "last token", "used most"), 0)
    uses, counts = 0, torch.zeros(layers, experts)
    for start in starts:
        with torch.inference_mode():
            used, guessed = choices(loaded.runnable.model, ids[start : start + args.tokens])
        for token in range(1, len(used[0])):
            for layer in range(1, layers):
                now, last = (set(used[layer][at].tolist()) for at in (token, token - 1))
                guess = set(guessed[layer][token].tolist())
                most = set(counts[layer].topk(len(now)).indices.tolist())
                for name, named in zip(hits, (guess, last, most), strict=True):
                    hits[name] += len(now & named)
                uses += len(now)
                counts[layer, list(now)] += 1
                for cache in caches:
                    cache.step(layer, now, guess)
    found = {
        "model": args.model.name,
        "uses": uses,
        "named": {name: count / uses for name, count in hits.items()},
        "caches": [cache.result() for cache in caches],
    }
    print(json.dumps(found, indent=1))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
