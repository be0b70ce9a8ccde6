"""Lanes of the hand-off as the experts see them."""

from __future__ import annotations

from collections.abc import Sequence

from hetero.engine.handoff import Handoff, Payload


class LanePort:
    """The ``Port`` of ``hetero.ops.gpu.hybrid``. ``lanes``: those of the micro-batches of a step, in order;
    ``apart``: how far the lanes of another step are from them.

    A submit of a layer takes the first lane whose last submit of it was collected; collects come in the order
    of the submits. Raises ValueError for more submits than there are lanes.
    """

    def __init__(self, handoff: Handoff, lanes: Sequence[int] = (0,), apart: int = 1) -> None:
        self._handoff, self._lanes, self._apart = handoff, list(lanes), apart
        self._first = 0
        self._payloads = [
            [handoff.payload(lane, layer) for layer in range(handoff.layers)] for lane in range(handoff.lanes)
        ]
        self._waiting: dict[int, list[int]] = {}  # layer -> lanes that are to be collected

    def use(self, step: int) -> None:
        """Of which step is what is recorded from now on."""
        self._first = step * self._apart

    def payload(self, layer: int) -> Payload:
        """Of the next submit."""
        return self._payloads[self._next(layer)][layer]

    def record_submit(self, layer: int) -> None:
        lane = self._next(layer)
        self._handoff.record_submit(lane, layer)
        self._waiting.setdefault(layer, []).append(lane)

    def record_collect(self, layer: int) -> None:
        waiting = self._waiting.get(layer)
        if not waiting:
            raise ValueError(f"collect of layer {layer}, which was not submitted")
        self._handoff.record_collect(waiting.pop(0), layer)

    def forget(self) -> None:
        """A recording was given up: what was submitted will not be collected."""
        self._waiting.clear()

    def _next(self, layer: int) -> int:
        waiting = self._waiting.get(layer, [])
        for lane in self._lanes:
            if self._first + lane not in waiting:
                return self._first + lane
        raise ValueError(
            f"layer {layer}: {len(waiting)} submits are to be collected, and each needs a lane of its own"
        )
