"""What the page shows of the machine: figures of one engine, made when somebody looks."""

from __future__ import annotations

import os
import shutil
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hetero.hw import memory
from hetero.ops.embedding import disk_tables
from hetero.ops.experts import CpuExpertsOp
from hetero.ops.watch import dense_bytes, disk_experts, disk_reads
from hetero.server.metrics import Metrics
from hetero.server.state import AppState
from hetero.trace import DENSE, EXPERTS, LANES, Step, clock, recorder, summarise, whole_steps

# Rates are means over this, seconds.
WINDOW_S = 2.5
# Shares are means over as many steps.
MEAN_STEPS = 16
# Steps whose spans are told; more go by than anybody can see.
SHOWN_STEPS = 3
# Spans of a step that are told: a model of 100 layers has 300.
SHOWN_SPANS = 400


@dataclass(frozen=True, slots=True)
class _Sample:
    """Counters of one moment; differences of two are rates."""

    at: int
    made: int
    prompt: int
    gpu: int
    ram: int
    pcie: int
    disk: int


class Figures:
    """Of one engine that is ready, while the recorder records. Not for two threads at once."""

    def __init__(self, state: AppState) -> None:
        self._state = state
        self._model: Any = state.engine.runnable.model
        found = (module for module in self._model.modules() if isinstance(module, CpuExpertsOp))
        self._experts = sorted(found, key=lambda op: op.layer)
        self._dense = dense_bytes(self._model)
        self._tiered = disk_experts(self._model)
        self._tables = disk_tables(self._model)
        # In RAM.
        self._weights = {
            "experts": sum(op.backend.nbytes for op in self._experts),
            "dense weights": sum(w.nbytes for w in self._model.parameters() if w.device.type == "cpu"),
        }
        self._since = recorder.next_number() + 1
        self._moved = {"gpu": 0, "ram": 0, "pcie": 0}
        self._samples: deque[_Sample] = deque()
        self._steps: list[Step] = []
        self._shown = self._counted = -1
        self._first_tokens = (0.0, 0.0)
        self._ttft_s: float | None = None

    def fixed(self) -> dict[str, Any]:
        """What does not change."""
        return {
            "model": self._state.name,
            "context": self._state.engine.runnable.context,
            "lanes": LANES[1:] if self._tiered or self._tables else LANES[1:-1],
            "gpu": "cuda" in self._dense,
            "layers": len(self._experts),
            "cores": len(os.sched_getaffinity(0)),
        }

    def now(self) -> dict[str, Any]:
        """All that does, besides spans and the experts' use."""
        new = self._new_steps()
        self._steps = [*self._steps, *new][-MEAN_STEPS:]
        status = self._state.engine.status()
        rates = self._rates(status.completion_tokens, status.prompt_tokens)
        shares = summarise(self._steps)
        return {
            "phase": self._state.phase,
            "tokens_s": rates["made"],
            "prompt_tokens_s": rates["prompt"],
            "ttft_s": self._latest_ttft(),
            "running": status.running,
            "waiting": status.waiting,
            "slots": status.slots,
            "kv": {"used": status.kv_tokens_used, "total": status.kv_tokens_total},
            "prefix": {"hits": status.prefix_hit_tokens, "prompt": status.prompt_tokens},
            "hit_rate": self._hit_rate(),
            "bytes_s": {
                "gpu": rates["gpu"] if "cuda" in self._dense else None,
                "ram": rates["ram"],
                "pcie": rates["pcie"] if "cuda" in self._dense else None,
                "disk": rates["disk"],
            },
            "memory": self._memory(),
            "shares": {
                "step_ms": shares.seconds / shares.steps * 1e3 if shares.steps else None,
                "experts": shares.share(shares.experts_s),
                "dense": shares.share(shares.dense_s),
                "pcie": shares.share(shares.pcie_s),
            },
        }

    def steps(self) -> dict[str, Any] | None:
        """Spans of the last steps that ``now`` has found; None when they are the same as before."""
        shown = self._steps[-SHOWN_STEPS:]
        if not shown or shown[-1].span.number == self._shown:
            return None
        self._shown = shown[-1].span.number
        return {"steps": [_told(step) for step in shown]}

    def heat(self) -> dict[str, Any] | None:
        """Use of each expert since the start, 1000 being an even share of its layer; None when unchanged."""
        runner = self._state.engine.runnable.runner
        uses: Mapping[int, Sequence[int]]
        if runner is None:
            uses = {op.layer: op.use.snapshot().counts for op in self._experts}
        else:
            uses = runner.uses()
        counted = sum(map(sum, uses.values()))
        if counted == self._counted:
            return None
        self._counted = counted
        rows = []
        for layer, counts in uses.items():
            total = sum(counts)
            even = total / len(counts)
            shares = [round(1000 * count / even) if total else 0 for count in counts]
            rows.append({"layer": layer, "total": total, "use": shares})
        return {"rows": rows}

    def _hit_rate(self) -> float | None:
        """Share of the experts that were found where they are read fastest: of fused layers in GPU memory,
        of the disk tier in main memory; None where there is nothing to miss."""
        runner = self._state.engine.runnable.runner
        if runner is not None:
            counts = {tier: count for tier, (count, _) in runner.reads().items()}
            total = sum(counts.values())
            return counts["gpu"] / total if total else None
        return disk_reads(self._tiered).cache.hit_rate if self._tiered else None

    def _new_steps(self) -> list[Step]:
        spans = recorder.spans(self._since)
        steps = whole_steps(spans, self._since)
        ends = [span.number for span in spans if span.lane == "step"]
        if ends:
            self._since = ends[-1] + 1
        made = summarise(steps)
        self._moved["gpu"] += len(steps) * self._dense.get("cuda", 0)
        self._moved["ram"] += len(steps) * self._dense.get("cpu", 0) + made.expert_bytes
        self._moved["pcie"] += made.pcie_bytes
        return steps

    def _rates(self, made: int, prompt: int) -> dict[str, float]:
        """A second, over the window."""
        now = _Sample(clock(), made, prompt, **self._moved, disk=disk_read())
        self._samples.append(now)
        while len(self._samples) > 2 and now.at - self._samples[1].at >= WINDOW_S * 1e9:
            self._samples.popleft()
        first = self._samples[0]
        seconds = (now.at - first.at) / 1e9
        names = ("made", "prompt", "gpu", "ram", "pcie", "disk")
        return {
            name: (getattr(now, name) - getattr(first, name)) / seconds if seconds else 0.0 for name in names
        }

    def _latest_ttft(self) -> float | None:
        """Mean of the answers that began since the last time that any had; None before the first."""
        before, now = self._first_tokens, first_tokens(self._state.metrics)
        if now[1] > before[1]:
            self._ttft_s = (now[0] - before[0]) / (now[1] - before[1])
            self._first_tokens = now
        return self._ttft_s

    def _memory(self) -> list[dict[str, Any]]:
        """Tiers that there are, with what holds their bytes."""
        resident, free = resident_bytes(), memory.available().bytes
        parts = self._weights | {"rest": max(0, resident - sum(self._weights.values()))}
        tiers = [{"tier": "RAM", "parts": parts, "free": free}]
        if "cuda" in self._dense:
            free, total = torch.cuda.mem_get_info()
            own = torch.cuda.memory_allocated()
            held = {"dense weights": self._dense["cuda"], "rest": max(0, own - self._dense["cuda"])}
            tiers.append({"tier": "GPU", "parts": held | {"others": total - free - own}, "free": free})
        on_disk: dict[str, int] = {}
        if self._tables:
            on_disk["tables"] = sum(table.disk_nbytes for table in self._tables)
        if self._tiered:
            on_disk["experts"] = sum(experts.disk_nbytes for experts in self._tiered)
        if on_disk:
            path = self._tiered[0].path if self._tiered else self._tables[0].path
            tiers.append({"tier": "disk", "parts": on_disk, "free": _free(path)})
        return tiers


def _told(step: Step) -> dict[str, Any]:
    """Times in microseconds from the start of the step: [lane, kind, layer, start, duration]."""
    origin = step.span.start
    spans = [
        (
            LANES.index(part.lane) - 1,
            _kind(part.name),
            part.layer,
            (part.start - origin) // 1000,
            part.duration // 1000,
        )
        for part in step.parts[:SHOWN_SPANS]
    ]
    return {
        "step": step.span.step,
        "tokens": step.span.tokens,
        "us": step.span.duration // 1000,
        "spans": spans,
    }


def _kind(name: str) -> int:
    """0 experts, 1 dense, 2 the rest."""
    return {EXPERTS: 0, DENSE: 1}.get(name, 2)


def _free(path: Path) -> int:
    """Bytes free where a file lies; 0 where it is gone."""
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return 0


def first_tokens(metrics: Metrics) -> tuple[float, float]:
    """(seconds to the first token of all answers so far, how many answers)."""
    name = "hetero:time_to_first_token_seconds"
    wanted = (f"{name}_sum", f"{name}_count")
    found = {
        sample.name: sample.value
        for metric in metrics.registry.restricted_registry(wanted).collect()
        for sample in metric.samples
    }
    return found.get(wanted[0], 0.0), found.get(wanted[1], 0.0)


def resident_bytes(root: Path = Path("/")) -> int:
    """Memory that this process holds, as the kernel tells; 0 where it does not."""
    return _field(root / "proc/self/status", "VmRSS:") * 1024


def disk_read(root: Path = Path("/")) -> int:
    """Bytes that this process has read from disks, page cache left out; 0 where the kernel does not tell."""
    return _field(root / "proc/self/io", "read_bytes:")


def _field(path: Path, key: str) -> int:
    try:
        lines: Sequence[str] = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(key)), 0)
