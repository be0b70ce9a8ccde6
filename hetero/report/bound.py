"""What the planner's bound says with bandwidths that the run itself has measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from hetero.cpu import threads
from hetero.formats import Format
from hetero.plan.hardware import Both, Figure, Gpu, Hardware, Pcie, Ram
from hetero.plan.inventory import Inventory
from hetero.plan.machine import gpu_named, this_machine
from hetero.plan.prefill import Prefill, prefill
from hetero.plan.roofline import Decode, decode
from hetero.plan.routing import Routing
from hetero.plan.tiers import Layout, Request, Tier, all_expert_bytes
from hetero.plan.workspace import CHUNK
from hetero.report.bandwidth import Rates

_HERE = "measured in this run"
_HANDOFF_US = 7.6
"""Of a layer, where the profile of this machine has none: memory operations in a graph, docs/handoff.md."""


@dataclass(frozen=True, slots=True)
class MeasuredRouting(Routing):
    """Hits as they were counted, in place of a model of them."""

    rate: float = 0.0

    def hit_rate(self, share: float, experts: int, top_k: int, streams: int = 1) -> float:
        return self.rate if share > 0 else 0.0


def hardware_of(rates: Rates, gpu_name: str | None, gpu_bytes: int = 0) -> Hardware:
    """This machine with the rates of this run. The bound is that of plain reads, so that the experts'
    operator counts as perfect."""
    base = this_machine()
    read = median(rates.cpu)
    perfect = Figure(measured=1.0, source="plain reads are the bound")
    # Rates are of the threads of this run, which may be fewer than the cores.
    cpu = base.cpu.model_copy(update={"expert_share": perfect, "cores": threads()})
    gpu: Gpu | None = None
    pcie: Pcie | None = None
    handoff: Figure | None = None
    if gpu_name is not None:
        known = base.gpu or gpu_named(gpu_name, gpu_bytes)
        gpu = known.model_copy(
            update={
                "read_gb_s": _figure(rates.gpu, known.read_gb_s),
                "launch_us": _figure(rates.launch_us, known.launch_us),
            }
        )
        both = None
        if rates.cpu_of_both and rates.pcie_of_both:
            both = Both(
                cpu_gb_s=median(rates.cpu_of_both), pcie_gb_s=median(rates.pcie_of_both), source=_HERE
            )
        other = Figure(estimate=11.0, source="not measured")
        pcie = Pcie(copy_gb_s=_figure(rates.copy, other), read_gb_s=_figure(rates.pcie, other), both=both)
        handoff = base.handoff_us
        if handoff is None or handoff.basis == "estimate":
            handoff = Figure(estimate=_HANDOFF_US, source="docs/handoff.md")
    return Hardware(
        name="this run",
        cpu=cpu,
        ram=Ram(bytes=base.ram.bytes, read_gb_s=Figure(measured=read, source=_HERE), nodes=base.ram.nodes),
        gpu=gpu,
        pcie=pcie,
        handoff_us=handoff,
    )


def _figure(rounds: Sequence[float], other: Figure) -> Figure:
    return Figure(measured=median(rounds), source=_HERE) if rounds else other


@dataclass(frozen=True, slots=True)
class Bound:
    """Bounds for one loaded model. ``dense``: dtype of dense layers, or int8; ``slots``: experts in GPU
    memory; ``shared``: whether PCIe may take a share of the others."""

    inventory: Inventory
    hardware: Hardware
    fmt: Format
    dense: str
    slots: int
    vram: int | None = None
    shared: bool = True
    fused: bool = False
    chunk: int = CHUNK  # tokens of a prompt that the GPU reads at once

    def decode(self, routing: str, streams: int, context: int, hits: float | None = None) -> Decode:
        """The bound of a step. ``routing``: a kind of table; a router of random weights chooses like
        ``uniform``. ``hits``: the hit rate that was counted, in place of the best that the table allows."""
        known: Routing = Routing("local" if routing == "local" else "uniform")
        if hits is not None:
            known = MeasuredRouting(known.name, rate=hits)
        request = self._request(streams, context)
        return decode(self.inventory, self._hardware(), request, self._layout(), known)

    def prefill(self, tokens: int) -> Prefill:
        """The fastest way to read a prompt."""
        return prefill(self.inventory, self.hardware, self._request(1, tokens), self._layout(), tokens)[0]

    def _hardware(self) -> Hardware:
        """Without a share of PCIe the CPU has its memory for itself."""
        hardware, pcie = self.hardware, self.hardware.pcie
        if pcie is None or self.shared:
            return hardware
        alone = Both(cpu_gb_s=hardware.ram.read_gb_s.value, pcie_gb_s=1e-9, source="no share of PCIe")
        return hardware.model_copy(update={"pcie": pcie.model_copy(update={"both": alone})})

    def _request(self, streams: int, context: int) -> Request:
        return Request(self.fmt, vram=self.vram, context=context, concurrency=streams, dense=self.dense)

    def _layout(self) -> Layout:
        count = sum(site.spec.num_experts for site in self.inventory.sites)
        return Layout(
            gpu=None if self.hardware.gpu is None else Tier("GPU memory", self.vram),
            ram=Tier("main memory", None),
            disk=Tier("disk", None),
            dense=self.dense,
            expert_bytes=all_expert_bytes(self.inventory, self.fmt),
            on_gpu=self.slots / count if count else 0.0,
            in_ram=1.0,
            copies=True,
            slots=self.slots,
            table="",
            fused=self.fused,
            chunk=self.chunk,
        )
