"""Which way a model's sequences are run: by transformers' modules, or by the graphs of fused layers."""

from __future__ import annotations

from hetero.config import settings
from hetero.core import InputError
from hetero.engine.answer import Runnable
from hetero.engine.forward import AnyStepper, Stepper


def stepper_for(runnable: Runnable, rows: bool = False) -> AnyStepper:
    """``rows``: make the model able to step several sequences at once, where its type can."""
    if runnable.runner is not None:
        from hetero.engine.gpu.stepper import SlotStepper  # needs the extension, which others do without

        return SlotStepper(runnable.runner)
    return Stepper(runnable.model, rows)


def chunk_of(runnable: Runnable) -> int:
    """Most prompt tokens of one forward pass."""
    return settings().prefill_chunk if runnable.runner is None else runnable.runner.chunk


def check_slots(runnable: Runnable, slots: int) -> None:
    """Raises InputError for more sequences than the model was loaded for."""
    if runnable.runner is not None and slots > runnable.runner.slots:
        raise InputError(f"slots={slots}: the model was loaded for {runnable.runner.slots} sequences")
