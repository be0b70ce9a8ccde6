"""The two ways in which a benchmark runs a model: fused steps of a runner, or transformers' modules."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from hetero.config import settings
from hetero.core import ExpertSpec, InputError
from hetero.cpu import CpuExperts
from hetero.engine.forward import MOST_ROWS, Stepper
from hetero.ops.experts import CpuExpertsOp
from hetero.ops.moe import MoeBlock
from hetero.report.forced import ForcedRouting

if TYPE_CHECKING:
    from hetero.engine.gpu.runner import GpuRunner


_REPLAYS = 20


@dataclass(frozen=True, slots=True)
class Counts:
    """Experts of decode steps since the start, each once a step, by where they were read."""

    gpu: int = 0
    pcie: int = 0
    cpu: int = 0
    moved: int = 0

    def since(self, before: Counts) -> Counts:
        return Counts(*(now - then for now, then in zip(astuple(self), astuple(before), strict=True)))

    def plus(self, other: Counts) -> Counts:
        return Counts(*(one + more for one, more in zip(astuple(self), astuple(other), strict=True)))

    @property
    def hit_rate(self) -> float | None:
        total = self.gpu + self.pcie + self.cpu
        return self.gpu / total if total else None


class Run(Protocol):
    """What the benchmark drives. A sequence is whatever ``prefill`` returns first."""

    engine: str
    most_rows: int
    expert_bytes: float  # of one expert, the mean of all layers

    @property
    def specs(self) -> Sequence[ExpertSpec]:
        """Of each MoE layer."""

    def rows_of(self, batch: int) -> int:
        """Rows of the step that ``batch`` sequences make, idle ones included."""

    def prefill(self, prompt: Sequence[int]) -> tuple[Any, int]:
        """A new sequence that holds a prompt, and its most likely next token."""

    def step(self, sequences: Sequence[Any], tokens: Sequence[int]) -> Sequence[int]:
        """One token for each; the most likely next ones."""

    def end(self, sequence: Any) -> None:
        """It is not needed any more."""

    def force(self, routing: ForcedRouting | None) -> None:
        """Take experts by a table from the next step on; None: by the router."""

    def counts(self) -> Counts:
        """Waits for the device."""

    def sample(self) -> None:
        """Between steps: note what the last one tells of itself."""

    def samples(self) -> dict[str, list[float]]:
        """What was noted since the last call, by name."""


class ModulesRun:
    """Steps of transformers' modules, with the operators that rules have put into their tree."""

    engine = "modules"

    def __init__(self, model: Any) -> None:
        self._stepper = Stepper(model, rows=True)
        self.most_rows = MOST_ROWS if self._stepper.together else 1
        self._blocks = [module for module in model.modules() if isinstance(module, MoeBlock)]
        self._ops = [one for one in model.modules() if hasattr(one, "use") and hasattr(one, "spec")]
        self.specs = [op.spec for op in self._ops]
        total = sum(op.backend.nbytes for op in self._ops)
        self.expert_bytes = total / max(1, sum(spec.num_experts for spec in self.specs))
        self._chunk = settings().prefill_chunk
        self._table: ForcedRouting | None = None

    def rows_of(self, batch: int) -> int:
        return batch

    def prefill(self, prompt: Sequence[int]) -> tuple[Any, int]:
        sequence = self._stepper.start()
        with torch.inference_mode():
            for first in range(0, len(prompt), self._chunk):
                logits = sequence.advance(list(prompt[first : first + self._chunk]))
            return sequence, int(logits.argmax())

    def step(self, sequences: Sequence[Any], tokens: Sequence[int]) -> Sequence[int]:
        with torch.inference_mode(), _decoding(self._table, len(tokens)):
            found: list[int] = self._stepper.advance(sequences, tokens).argmax(-1).tolist()
        return found

    def end(self, sequence: Any) -> None:
        pass

    def force(self, routing: ForcedRouting | None) -> None:
        if routing is not None and len(self._blocks) != len(self._ops):
            raise InputError(
                "--routing: this model's blocks keep their own code, in which a table cannot replace the "
                "router; use --routing router"
            )
        self._table = routing
        for layer, block in enumerate(self._blocks):
            block.routing = None if routing is None else _hook(routing, layer)

    def counts(self) -> Counts:
        on_cpu = on_gpu = 0
        for op in self._ops:
            reads = op.use.snapshot().reads
            if isinstance(op, CpuExpertsOp):
                on_cpu += reads
            else:
                on_gpu += reads
        return Counts(gpu=on_gpu, cpu=on_cpu)

    def sample(self) -> None:
        pass

    def samples(self) -> dict[str, list[float]]:
        return {}


def _hook(routing: ForcedRouting, layer: int) -> Any:
    def replace(ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return routing(layer, ids, weights)

    return replace


class SerialPort:
    """A port at which the stream waits for the CPU's sum as soon as it is asked for."""

    def __init__(self, port: Any) -> None:
        self._port = port

    def payload(self, layer: int) -> Any:
        return self._port.payload(layer)

    def record_submit(self, layer: int) -> None:
        self._port.record_submit(layer)
        self._port.record_collect(layer)

    def record_collect(self, layer: int) -> None:
        pass


class NoExperts:
    """Experts that cost nothing, for the time of everything else."""

    def __init__(self, rows: int, hidden: int, device: torch.device) -> None:
        self._sum = torch.zeros(rows, hidden, device=device)

    def submit(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
        pass

    def collect(self, extra: torch.Tensor | None = None) -> torch.Tensor:
        return self._sum if extra is None else extra.float()


class FusedRun:
    """Steps of a runner, each one captured graph on a GPU."""

    engine = "fused"

    def __init__(self, runner: GpuRunner) -> None:
        self.runner = runner
        self.most_rows = runner.rows[-1]
        hybrid: Sequence[Any] = runner.experts
        self._hybrid = hybrid
        experts: Sequence[CpuExperts] = [one.experts for one in hybrid]
        self.specs = [one.spec for one in experts]
        total = sum(one.nbytes for one in experts)
        self.expert_bytes = total / sum(spec.num_experts for spec in self.specs)
        self._table: ForcedRouting | None = None
        self._samples: dict[str, list[float]] = {}
        self._first_split: torch.Tensor = hybrid[0].shared.shares()
        self.dense_launches: dict[int, int] = {}

    def rows_of(self, batch: int) -> int:
        return next(rows for rows in self.runner.rows if rows >= batch)

    def prefill(self, prompt: Sequence[int]) -> tuple[Any, int]:
        slot = self.runner.claim()
        return slot, int(self.runner.prefill(slot, prompt).argmax())

    def step(self, sequences: Sequence[Any], tokens: Sequence[int]) -> Sequence[int]:
        with _decoding(self._table, len(tokens)):
            rows = list(zip(sequences, tokens, strict=True))
            return self.runner.step(rows, logits=False, ahead=True).ids

    def end(self, sequence: Any) -> None:
        self.runner.settle()  # what follows may move tables that a step reads
        self.runner.release(sequence)

    def force(self, routing: ForcedRouting | None) -> None:
        """Captures the steps anew."""
        decoder: Any = self.runner.decoder
        decoder.routing = self._table = routing
        with _decoding(self._table, 0):
            self.runner.capture(prompt=False)

    @property
    def slots(self) -> int:
        """Experts that GPU memory has room for."""
        return sum(one.slots for one in self._hybrid)

    def memory(self) -> list[torch.Tensor]:
        """Of each layer's experts in GPU memory."""
        return [one.cache.memory for one in self._hybrid]

    def set_share(self, share: float | None) -> None:
        """Which part of the experts that GPU memory lacks the GPU reads over PCIe; None: as it was at first.
        Captured steps follow."""
        shared = self._hybrid[0].shared
        if share is None:
            shared.set_split(self._first_split.tolist())
        else:
            shared.set_share(share)

    def serialise(self) -> None:
        """From the next capture on the GPU waits for the CPU before it reads its own experts, which for
        those in its memory and those over PCIe is one kernel."""
        for one in self._hybrid:
            one.port = SerialPort(one.port)
        self.force(self._table)

    def read_prompts(self, turns: bool | None, strategy: str) -> None:
        """How prompts are read from now on: whether halves of a chunk take turns, None: as the experts say;
        and where their experts are computed, of ``tiers.STRATEGIES``."""
        decoder: Any = self.runner.decoder
        decoder.turns = turns
        self._hybrid[0].shared.prefiller.strategy = strategy

    def deferral(self, count: int, prompt: Sequence[int], tokens: Sequence[int]) -> dict[str, Any]:
        """What ``count`` deferred experts do to logits, by the router's own choices. Captures steps anew."""
        from hetero.engine.effect import deferral_effect

        table = self._table
        self.force(None)
        shared = self._hybrid[0].shared
        found = deferral_effect(
            self.runner,
            lambda value: setattr(shared, "defer", value),
            count,
            prompt=prompt,
            tokens=tokens,
        )
        if table is not None:
            self.force(table)
        return found.as_dict() | {"line": found.line()}

    def dense_ms(self, rows: int, position: int) -> float:
        """Milliseconds on the GPU of a step whose experts are nothing, as a graph of its own, whose launches
        ``dense_launches`` has afterwards."""
        from hetero.engine.gpu.graphs import StepGraph

        runner = self.runner
        decoder: Any = runner.decoder
        kept = list(decoder.experts)
        decoder.experts[:] = [NoExperts(rows, spec.hidden, runner.device) for spec in self.specs]
        hook, decoder.routing = decoder.routing, None
        # Where there are more rows than sequences the others are idle, as in any step.
        slots = [runner.claim() for _ in range(min(rows, runner.slots))]
        try:
            inputs = replace(decoder.inputs(rows), pages=runner.pages.table)
            for slot in slots:
                runner.pages.grow(slot, position + 1)
            inputs.slots[: len(slots)].copy_(torch.tensor(slots))
            inputs.positions.fill_(position)
            stream = torch.cuda.Stream(runner.device)  # type: ignore[no-untyped-call]
            with torch.inference_mode(), torch.cuda.stream(stream):
                decoder.step(inputs)
                torch.cuda.synchronize(runner.device)
                pool: Any = torch.cuda.graph_pool_handle()
                graph = StepGraph(lambda: decoder.step(inputs), stream, pool)
                graph.replay()
                start, end = (
                    torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                    for _ in range(2)
                )
                start.record()
                for _ in range(_REPLAYS):
                    graph.replay()
                end.record()
                end.synchronize()
            self.dense_launches[rows] = graph.launches
            return float(start.elapsed_time(end)) / _REPLAYS
        finally:
            decoder.experts[:] = kept
            decoder.routing = hook
            for slot in slots:
                runner.release(slot)

    def counts(self) -> Counts:
        self.runner.settle()  # of whole steps, one that was launched ahead among them
        each = [one.counts() for one in self._hybrid]
        return Counts(*(sum(getattr(one, name) for one in each) for name in ("gpu", "pcie", "cpu", "moved")))

    def sample(self) -> None:
        totals = self.runner.totals
        if totals is None or not totals.layers:
            return
        for name, seconds in (
            ("cpu_work_us_a_layer", totals.work_s),
            ("handoff_us_a_layer", totals.handoff_s),
            ("cpu_waits_us_a_layer", totals.wait_s),
        ):
            self._samples.setdefault(name, []).append(1e6 * seconds / totals.layers)
        for name, seconds in self.runner.host.items():
            self._samples.setdefault(f"host_{name}_us", []).append(1e6 * seconds)

    def samples(self) -> dict[str, list[float]]:
        found, self._samples = self._samples, {}
        return found


def _decoding(table: ForcedRouting | None, rows: int) -> AbstractContextManager[None]:
    """Around a decode step of ``rows`` sequences."""
    if table is None:
        return nullcontext()
    table.live(rows)
    return table.decoding()
