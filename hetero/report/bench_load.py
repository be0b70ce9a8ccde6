"""From a benchmark's options to a model that runs, and what its parts take; then all that is measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from hetero import cpu
from hetero.cpu import CpuExperts
from hetero.engine.gpu.loading import ROWS, GpuOptions
from hetero.engine.load import Loaded, load_model
from hetero.engine.synthetic import load_synthetic
from hetero.hw.cpu import identity
from hetero.plan.hardware import Hardware
from hetero.plan.inventory import Inventory
from hetero.plan.workspace import CHUNK
from hetero.report.bandwidth import CpuReads, GpuReads, Rates, measure, threads_within
from hetero.report.bench import VERSION, Bench, Series, cpu_facts, spread
from hetero.report.bench_memory import HostMemory, Memory, require_memory
from hetero.report.bench_options import DENSE_CPU, GPU, Options
from hetero.report.bench_plan import against_plan
from hetero.report.bench_runs import FusedRun, ModulesRun
from hetero.report.bench_trace import traced
from hetero.report.bound import Bound, hardware_of
from hetero.rules import load_rules

_PACKED = {"bfloat16": "bf16"}  # as a rule calls it
_DTYPES = {word: word for word in DENSE_CPU}  # of tensors that no operator packs
_FORCED = 32  # tokens of a prompt, and behind it, by which two logits are compared


def bench(
    options: Options,
    series: Series,
    inventory: Inventory,
    say: Callable[[str], None],
    save: Callable[[dict[str, Any]], None] = lambda result: None,
) -> dict[str, Any]:
    """Load once, measure all of ``series``; JSON (docs/bench.md). ``save`` is given what there is after each
    part, since a later one may fail. Raises what loading raises."""
    return _Benching(options, series, inventory, say, save).run()


class _Benching:
    def __init__(
        self,
        options: Options,
        series: Series,
        inventory: Inventory,
        say: Callable[[str], None],
        save: Callable[[dict[str, Any]], None],
    ) -> None:
        self.options, self.series, self.inventory = options, series, inventory
        self.say, self.save = say, save
        self.memory: Memory | None = None
        self.host = HostMemory()
        self.result: dict[str, Any] = {}
        self.rates = Rates()
        self.began = time.perf_counter()
        self.notes: list[str] = []

    def run(self) -> dict[str, Any]:
        options = self.options
        self.memory = Memory(options.vram) if options.gpu else None
        require_memory(options, self.series, self.inventory)
        with nullcontext() if self.memory is None else self.memory.watched():
            loaded = self._load()
            runner = loaded.runnable.runner
            run = ModulesRun(loaded.runnable.model) if runner is None else FusedRun(runner)
            self._measure(run, loaded)
        self._keep()
        if options.plan:
            self._keep(plan=against_plan(self.result, options, self.series, self.inventory, self._rates()))
        self._keep(complete=True)
        return self.result

    def _keep(self, **more: Any) -> None:
        """Add to the result, and let it be saved as it is."""
        self.result |= {
            "rates": {name: spread(rounds) for name, rounds in vars(self.rates).items() if rounds},
            "cpu": cpu_facts(),
            "notes": self.notes,
            "host_memory": self.host.as_dict(),
            **({} if self.memory is None else {"gpu_memory": self.memory.as_dict()}),
            **more,
        }
        self.save(self.result)

    # -- loading

    def _load(self) -> Loaded:
        options = self.options
        self.say(f"loading {options.model.name}")
        common: dict[str, Any] = {
            "rules": options.rules,
            "overrides": self._overrides(),
            "dtype": _DTYPES.get(options.dense, "bfloat16"),
            "isa": options.isa,
            "threads": options.threads,
            "gpu": self._gpu_options(),
        }
        if options.model.kind in ("synthetic", "config"):
            loaded = load_synthetic(options.config, name=options.model.name, **common)
        else:
            loaded = load_model(options.model.path, **common)
        self.notes += [note for note in loaded.notes if "matched 0 modules" not in note]
        self.load_s = time.perf_counter() - self.began
        if options.cpu_gb_s is not None:
            reads = CpuReads(_experts(loaded.runnable.model))
            found = threads_within(options.cpu_gb_s, reads, cpu.threads())
            self.notes.append(_held(found, options.cpu_gb_s, reads))
        return loaded

    def _overrides(self) -> dict[str, str]:
        """Of what the options say, that for which the rule file has a variable; the user's own win."""
        options = self.options
        share = next((share for share in options.shares if share is not None), None)
        asked = {
            "experts": str(options.fmt),
            "dense": _PACKED.get(options.dense, options.dense),
            "cache": options.cache,
            "defer": str(options.defer),
            "share": "auto" if share is None or None in options.shares else f"{share:g}",
        }
        known = load_rules(options.rules).variables
        return {name: value for name, value in asked.items() if name in known} | dict(options.overrides or {})

    def _gpu_options(self) -> GpuOptions | None:
        options, series = self.options, self.series
        if not options.gpu:
            return None
        sizes = {next(n for n in ROWS if n >= batch) for batch in series.batches}
        return GpuOptions(
            vram=options.vram,
            slots=max(series.batches),
            context=max(series.context, *series.prefills, 2 * _FORCED if options.defer else 0),
            handoff=options.handoff,
            rows=tuple(sorted(sizes)),
            wait=options.wait,
            chunk=options.chunk or CHUNK,
        )

    # -- measuring

    def _measure(self, run: ModulesRun | FusedRun, loaded: Loaded) -> None:
        options, series = self.options, self.series
        experts = _experts(loaded.runnable.model)
        reads = CpuReads(experts) if experts else None
        gpu = GpuReads(_largest(loaded.runnable.model, run)) if options.gpu and reads is not None else None
        if reads is not None:
            self.say("reading memory" if gpu is None else "reading memory, PCIe and both")
            measure(reads, gpu, self.rates)
        self._keep(**self._identity(run, loaded))
        bench = Bench(
            run,
            series,
            loaded.runnable.vocabulary,
            bound=self._bound(run) if reads is not None else None,
            device=torch.device(GPU) if isinstance(run, FusedRun) else torch.device("cpu"),
            extra=_extra(run),
            say=self.say,
        )
        cpu.reset_kernel_counts()
        found: list[dict[str, Any]] = []
        for share in options.shares:
            if isinstance(run, FusedRun):
                run.set_share(share)
            for one in bench.decode_all():
                found.append({**one, "share": share})
                self._keep(decode=found, tables=bench.tables)
        if isinstance(run, FusedRun):
            run.set_share(options.shares[0])
        if isinstance(run, FusedRun):
            run.read_prompts(options.turns, options.prefill_by)
        prefills: list[dict[str, Any]] = []
        for prefill in bench.prefill_all():
            prefills.append(prefill)
            self._keep(prefill=prefills)
        if options.trace is not None:
            self.say(f"once more, recorded to {options.trace}")
            self._keep(traced=traced(bench, options.trace))
        if options.defer and isinstance(run, FusedRun):
            self.say("with deferred experts and without: logits")
            prompt, tokens = bench.prompt(_FORCED), bench.prompt(_FORCED)
            self._keep(deferral=run.deferral(options.defer, prompt, tokens))
        if options.serial:
            assert isinstance(run, FusedRun)
            self.say("one after the other: CPU, then PCIe and GPU")
            run.serialise()
            serial: list[dict[str, Any]] = []
            for one in bench.decode_all():
                serial.append(one)
                self._keep(serial=serial)
        if reads is not None:
            measure(reads, gpu, self.rates, rounds=2)
        if isinstance(run, FusedRun) and not run.runner.eager:
            self.say("the dense half alone")
            position = series.prompt_tokens
            self._keep(dense_ms={str(rows): run.dense_ms(rows, position) for rows in run.runner.rows})
            self._keep(dense_launches={str(rows): count for rows, count in run.dense_launches.items()})

    def _identity(self, run: ModulesRun | FusedRun, loaded: Loaded) -> dict[str, Any]:
        """What was measured on what."""
        options = self.options
        return {
            "kind": "hetero-bench",
            "version": VERSION,
            "complete": False,
            "model": options.model.name,
            "model_type": loaded.model_type,
            "synthetic": loaded.synthetic,
            "layers": options.layers,
            "hardware": _hardware(options.gpu),
            "options": self._told(),
            "load_s": self.load_s,
            "engine": run.engine,
            "parameters": {"total": self.inventory.params, "active": self.inventory.active_params},
            "expert_bytes": {"one": run.expert_bytes, "all": loaded.expert_bytes},
            "slots_on_gpu": self._slots(run),
            "tables": {},
            "decode": [],
            "serial": [],
            "prefill": [],
            "dense_ms": {},
            "dense_launches": {},
        }

    def _rates(self) -> Hardware:
        """This machine as the run has measured it."""
        gpu = torch.cuda.get_device_name(GPU) if self.options.gpu else None
        size = torch.cuda.get_device_properties(GPU).total_memory if self.options.gpu else 0
        return hardware_of(self.rates, gpu, size)

    def _bound(self, run: ModulesRun | FusedRun) -> Bound:
        return Bound(
            inventory=self.inventory,
            hardware=self._rates(),
            fmt=self.options.fmt,
            dense=self.options.dense,
            slots=self._slots(run),
            vram=self.options.vram,
            shared=self.options.shares != (0.0,),
            fused=isinstance(run, FusedRun),
            chunk=self.options.chunk or CHUNK,
        )

    @staticmethod
    def _slots(run: ModulesRun | FusedRun) -> int:
        return run.slots if isinstance(run, FusedRun) else 0

    def _told(self) -> dict[str, Any]:
        options, series = self.options, self.series
        return {
            "format": str(options.fmt),
            "dense": options.dense,
            "rules": options.rules,
            "isa": options.isa,
            "vram": options.vram,
            "cache": options.cache,
            "shares": list(options.shares),
            "handoff": options.handoff,
            "wait": options.wait,
            "chunk": options.chunk,
            "threads": options.threads,
            "cpu_gb_s": options.cpu_gb_s,
            "defer": options.defer,
            "turns": options.turns,
            "prefill_by": options.prefill_by,
            "context": series.context,
            "prompt": series.prompt_tokens,
            "tokens": series.tokens,
            "runs": series.runs,
            "seed": series.seed,
        }


def _held(threads: int, cap: float, reads: CpuReads) -> str:
    """What the cap has come to, by one more read."""
    rate = reads.gb_s()
    within = f"the CPU is held to {threads} threads, which read {rate:.0f} GB/s now"
    if threads == 1 and rate > cap:
        return f"{within}: more than --cpu-gbps-cap {cap:g}, but there are no fewer threads than one"
    return f"{within} (--cpu-gbps-cap {cap:g})"


def _experts(model: Any) -> list[CpuExperts]:
    """The experts that the CPU has, layer by layer."""
    found = (getattr(module, "backend", None) for module in model.modules())
    return [one for one in found if isinstance(one, CpuExperts)]


def _extra(run: ModulesRun | FusedRun) -> Callable[[int], dict[str, Any]]:
    """Of each decode series: how many launches its graph has."""
    if not isinstance(run, FusedRun):
        return lambda rows: {}

    def told(rows: int) -> dict[str, Any]:
        launches = run.runner.launches
        size = min((n for n in launches if n >= rows), default=None)
        return {
            "launches": None if size is None else launches[size],
            "eager": run.runner.why_eager or None,
        }

    return told


def _largest(model: Any, run: ModulesRun | FusedRun) -> torch.Tensor:
    """The largest piece of GPU memory that the model has, to be read by its bytes."""
    held = [*model.parameters(), *model.buffers()]
    if isinstance(run, FusedRun):
        held += run.memory()
    on_gpu = [one for one in held if one.device.type == "cuda" and one.is_contiguous()]
    largest: torch.Tensor = max(on_gpu, key=lambda one: one.nbytes)
    return largest.detach().flatten().view(torch.uint8)


def _hardware(gpu: bool) -> dict[str, Any]:
    found = {**identity(), "torch": torch.__version__}
    if gpu:
        properties = torch.cuda.get_device_properties(GPU)
        found |= {
            "gpu": properties.name,
            "gpu_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
        }
        try:
            from hetero.hw.cuda_driver import driver

            found["driver_cuda"] = driver().version()
        except Exception as error:  # an identity without it is one all the same
            found["driver_cuda"] = str(error)
    return found
