"""The hook that forces experts upon a step, whose halves may take turns."""

from __future__ import annotations

import torch

from tests.model.routes import Routing


def test_halves_ask_one_after_the_other() -> None:
    each = [
        [(torch.tensor([[10 * layer + one]]), torch.tensor([[0.5 * one]])) for layer in range(2)]
        for one in range(4)
    ]
    routing = Routing("cpu", 2, 1, 4, each)
    routing.step([(one, 0) for one in range(4)])
    ids = torch.tensor([[7], [7], [7], [-1]])
    for parts in ([ids], [ids[:2], ids[2:]], [ids]):
        for layer in range(2):
            got = [routing(layer, part, torch.ones(len(part), 1)) for part in parts]
            wanted = [[10 * layer], [10 * layer + 1], [10 * layer + 2], [-1]]
            assert torch.cat([one for one, _ in got]).tolist() == wanted
            assert torch.cat([weights for _, weights in got]).flatten().tolist() == [0.0, 0.5, 1.0, 1.5]
