"""How many kernels a step is: on a GPU each takes about a microsecond, whatever it does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="triton is not installed")

from tests.decode.tiny import DEVICE, decoder_of, tiny

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="it counts what the interpreter runs")
# Operators of torch that launch nothing: they allocate, or see the same memory otherwise.
FREE = {"empty", "empty_like", "empty_strided", "detach", "alias"}


class Launches(TorchDispatchMode):
    """Names of the kernels that run while it is active: those of torch, and of Triton by ``wrap``."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self._inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not (self._inside or func.is_view or name in FREE):
            self.names.append(f"torch {name}")
        return func(*args, **(kwargs or {}))

    def wrap(self, run: Any) -> Any:
        def counted(executor: Any, *args: Any, **kwargs: Any) -> Any:
            self.names.append(executor.fn.__name__)
            self._inside = True  # the interpreter copies what it is given
            try:
                return run(executor, *args, **kwargs)
            finally:
                self._inside = False

        return counted


class Nobody:
    """Experts that launch nothing."""

    def submit(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
        self.x = x

    def collect(self) -> torch.Tensor:
        return self.x


def test_a_step_is_few_kernels(monkeypatch: pytest.MonkeyPatch, generator: torch.Generator) -> None:
    """Eleven a layer besides its experts, all of them Triton's."""
    from triton.runtime.interpreter import GridExecutor

    kinds = ["linear_attention", "full_attention"]
    model = tiny("qwen3_5_moe_text", generator, num_hidden_layers=2, layer_types=kinds)
    decoder = decoder_of(model)
    decoder.experts[:] = [Nobody(), Nobody()]
    inputs, launches = decoder.inputs(2), Launches()
    inputs.slots.copy_(torch.tensor([0, 1]))
    monkeypatch.setattr(GridExecutor, "__call__", launches.wrap(GridExecutor.__call__))
    with torch.no_grad(), launches:
        decoder.step(inputs)
    assert [name for name in launches.names if name.startswith("torch")] == []
    around = 3  # embedding, last norm, head
    assert len(launches.names) <= around + 11 + 11, launches.names
