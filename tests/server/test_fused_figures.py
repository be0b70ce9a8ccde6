"""What the page and the metrics tell of a model with fused layers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from hetero.engine.answer import Runnable
from hetero.engine.gpu.runner import GpuRunner
from hetero.ops.watch import dense_bytes
from hetero.server.figures import Figures
from hetero.server.serve import _expert_reads, _weights
from tests.engine.paged import VOCAB, Counted, PagedDecoder


class Model(nn.Linear):
    """A tree of one layer."""

    def get_input_embeddings(self) -> nn.Module:
        return self

    def get_output_embeddings(self) -> nn.Module:
        return nn.Identity()  # packed: without a weight


def fused() -> tuple[Runnable, nn.Module]:
    model = Model(4, 3, bias=False)
    model.register_buffer("packed", torch.zeros(5, dtype=torch.uint8))
    runner = GpuRunner(
        PagedDecoder(1, 32), [Counted(), Counted()], handoff=None, slots=1, context=32, numbers=(2, 5)
    )
    return Runnable(model, VOCAB, context=32, runner=runner), model


def test_the_use_of_experts() -> None:
    runnable, _ = fused()
    state: Any = SimpleNamespace(engine=SimpleNamespace(runnable=runnable))
    figures = Figures(state)
    row = {"total": 6, "use": [2000, 0, 1000]}
    assert figures.heat() == {"rows": [{"layer": 2, **row}, {"layer": 5, **row}]}
    assert figures.heat() is None  # nothing has changed
    assert figures._hit_rate() == 0.6
    assert dense_bytes(runnable.model) == {"cpu": 5}


def test_reads_and_weights_by_tier() -> None:
    runnable, model = fused()
    loaded: Any = SimpleNamespace(runnable=runnable, expert_bytes=1000)
    assert _expert_reads(loaded)() == {"gpu": (12, 120), "pcie": (6, 60), "cpu": (2, 20)}
    assert _weights(loaded) == {"cpu": 1000 + 48 + 5, "gpu": 0}
    assert sum(p.numel() for p in model.parameters()) == 12
