"""A hand-off over twins of streams, with inputs that change between replays, and what must come out."""

from __future__ import annotations

from typing import Any

import torch

from hetero.core import ExpertSpec
from hetero.cpu import CpuExperts
from hetero.engine.handoff import Handoff
from hetero.engine.handoff_backends import ThreadBackend
from hetero.formats import parse_format
from tests.cpu.reference import fill, random_weights

SPEC = ExpertSpec(8, 64, 32, 4)
POINTS = {"seen": 0, "work": 1, "computed": 2, "publish": 3, "published": 4}
THROW, STALL, DIE = range(3)
PATIENT_S = 60.0
"""For a watchdog that a test is not about: on a busy machine a thread may get no turn for longer than a
worker is allowed to be silent."""


def make_experts(layers: int, generator: torch.Generator, fmt: str = "int8") -> list[CpuExperts]:
    return [fill(CpuExperts(SPEC, parse_format(fmt)), random_weights(SPEC, generator)) for _ in range(layers)]


class Played:
    """One graph a lane, recorded at once: each layer is submitted and collected in turn, lanes alternating.

    ``streams``: each lane on a stream of its own. ``late``: a layer is collected after the next one's submit.
    """

    def __init__(
        self,
        experts: list[CpuExperts],
        generator: torch.Generator,
        *,
        rows: int = 3,
        lanes: int = 2,
        dtype: torch.dtype = torch.float32,
        ids_dtype: torch.dtype = torch.int64,
        streams: bool = False,
        late: bool = False,
        **options: Any,
    ) -> None:
        self.generator = generator
        self.handoff = Handoff(
            experts,
            rows=rows,
            slots=SPEC.top_k,
            dtype=dtype,
            ids_dtype=ids_dtype,
            lanes=lanes,
            **options,
        )
        backend = self.handoff.backend
        assert isinstance(backend, ThreadBackend)
        self.backend = backend
        self.places = [(lane, layer) for layer in range(len(experts)) for lane in range(lanes)]
        self.x = {place: torch.zeros(rows, SPEC.hidden, dtype=dtype) for place in self.places}
        self.ids = {place: torch.zeros(rows, SPEC.top_k, dtype=ids_dtype) for place in self.places}
        self.weights = {place: torch.zeros(rows, SPEC.top_k) for place in self.places}
        self.out = {place: torch.zeros(rows, SPEC.hidden) for place in self.places}
        for lane, layer in self.places:
            backend.stream(lane if streams else 0)
            place = (lane, layer)
            self.handoff.record_submit(lane, layer, self.x[place], self.ids[place], self.weights[place])
            if not late:
                self.handoff.record_collect(lane, layer, self.out[place])
            elif layer > 0:
                self.handoff.record_collect(lane, layer - 1, self.out[lane, layer - 1])
        if late:
            for lane in range(lanes):
                backend.stream(lane if streams else 0)
                self.handoff.record_collect(lane, len(experts) - 1, self.out[lane, len(experts) - 1])

    def fresh(self) -> None:
        """Random inputs; some ids are the GPU's or out of range."""
        for place in self.places:
            self.x[place].normal_(generator=self.generator)
            self.ids[place].random_(-1, SPEC.num_experts + 1, generator=self.generator)
            self.weights[place].uniform_(generator=self.generator)
            self.out[place].fill_(7.0)

    def replay(self, rows: dict[int, int] | None = None) -> None:
        """One step of every lane, with all rows unless told otherwise. Raises what the hand-off raises."""
        rows = dict.fromkeys(range(self.handoff.lanes), self.handoff.rows) if rows is None else rows
        with self.handoff.step(rows):
            self.backend.launch()
            self.backend.synchronize()

    def check(self, rows: dict[int, int] | None = None, lanes: set[int] | None = None) -> None:
        """The results of the last replay are those of the operator itself, to the bit."""
        for lane, layer in self.places:
            if lanes is not None and lane not in lanes:
                continue
            place = (lane, layer)
            n = self.handoff.rows if rows is None else rows[lane]
            want = self.handoff.experts[layer].forward(
                self.x[place][:n], self.ids[place][:n], self.weights[place][:n]
            )
            assert torch.equal(self.out[place][:n], want), (lane, layer)

    def step(self, rows: dict[int, int] | None = None) -> None:
        self.fresh()
        self.replay(rows)
        self.check(rows)

    def inject(self, point: str, kind: int, *, lane: int = -1, layer: int = -1, seconds: float = 0.0) -> None:
        """One fault of the worker at a point of its way through a layer."""
        self.handoff._channel.inject(POINTS[point], kind, lane, layer, int(seconds * 1e9))

    def jitter(self, seconds: float) -> None:
        """Random delays up to so long at every operation of the streams and every point of the worker."""
        self.handoff._channel.jitter(int(seconds * 1e9))
        for twin in self.backend.twins:
            twin.jitter(int(seconds * 1e9))

    def close(self) -> None:
        self.handoff.close()
