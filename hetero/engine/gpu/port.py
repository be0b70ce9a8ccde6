"""A lane of the hand-off as the experts see it."""

from __future__ import annotations

from hetero.engine.handoff import Handoff, Payload


class LanePort:
    """The ``Port`` of ``hetero.ops.gpu.hybrid`` over one lane."""

    def __init__(self, handoff: Handoff, lane: int = 0) -> None:
        self._handoff, self._lane = handoff, lane
        self._payloads = [handoff.payload(lane, layer) for layer in range(handoff.layers)]

    def payload(self, layer: int) -> Payload:
        return self._payloads[layer]

    def record_submit(self, layer: int) -> None:
        self._handoff.record_submit(self._lane, layer)

    def record_collect(self, layer: int) -> None:
        self._handoff.record_collect(self._lane, layer)
