"""From a benchmark's options to a model that runs, and what its parts take; then all that is measured."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hetero import cpu
from hetero.core import InputError
from hetero.cpu import CpuExperts
from hetero.engine.gpu.loading import CHUNK, ROWS, GpuOptions
from hetero.engine.load import Loaded, load_model
from hetero.engine.synthetic import load_synthetic
from hetero.formats import Format
from hetero.hw.cpu import identity
from hetero.hw.nvml import free_bytes
from hetero.plan.inventory import Inventory
from hetero.plan.planner import as_dict, make_plan
from hetero.plan.tiers import Request
from hetero.report.bandwidth import CpuReads, GpuReads, Rates, measure, threads_within
from hetero.report.bench import VERSION, Bench, Series, cpu_facts, spread
from hetero.report.bench_runs import FusedRun, ModulesRun
from hetero.report.bench_trace import traced
from hetero.report.bound import Bound, hardware_of
from hetero.rules import load_rules

if TYPE_CHECKING:
    from hetero.model.shapes import ModelRef

GPU = "cuda:0"
DENSE_GPU = ("bfloat16", "int8", "int4")
DENSE_CPU = ("float32", "bfloat16", "float16")
_PACKED = {"bfloat16": "bf16"}  # as a rule calls it
_DTYPES = {word: word for word in DENSE_CPU}  # of tensors that no operator packs
_POLL_S = 1.0  # torch gives back little of what it takes, and asking takes time from the experts
_FORCED = 32  # tokens of a prompt, and behind it, by which two logits are compared


@dataclass(frozen=True, slots=True)
class Options:
    """What is loaded, and where. ``config`` is that of ``model``, cut to ``layers`` where these are given."""

    model: ModelRef
    config: Mapping[str, Any]
    fmt: Format
    dense: str
    gpu: bool
    rules: str  # a path, or the name of a shipped file
    vram: int | None = None
    cache: str = "auto"
    shares: tuple[float | None, ...] = (None,)  # None: as the rules' "auto" decides
    handoff: str = "auto"
    threads: int | None = None
    cpu_gb_s: float | None = None  # fewer threads, until they read no more than this
    isa: str = "auto"
    layers: int | None = None
    serial: bool = False
    wait: str = "nap"
    chunk: int | None = None
    defer: int = 0  # of a token's experts, added one layer later
    turns: bool | None = None  # whether halves of a prompt's chunk take turns; None: as the experts say
    prefill_by: str = "auto"  # of tiers.STRATEGIES
    trace: Path | None = None  # steps and prompts once more, recorded
    overrides: Mapping[str, str] | None = None


def free_memory() -> int | None:
    """Of the GPU, by the driver's management library, which makes no context."""
    return free_bytes(0)


class Memory:
    """What this process takes of a GPU, looked at again and again: what is free by the driver's management
    library, less what was free before. Make it before the process uses the device; where the library is
    missing, CUDA tells what is free, and the context counts as there before."""

    def __init__(self, cap: int | None, free: Callable[[], int | None] = free_memory) -> None:
        self.cap, self._free = cap, free
        found = free()
        self.source = "NVML" if found is not None else "CUDA"
        self.free_before = self._cuda_free() if found is None else found
        self.peak = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hetero-vram", daemon=True)

    @staticmethod
    def _cuda_free() -> int:
        return int(torch.cuda.mem_get_info(GPU)[0])

    def _watch(self) -> None:
        while not self._over.wait(_POLL_S):
            self.look()

    def look(self) -> int:
        """Bytes now."""
        free = self._free() if self.source == "NVML" else None
        used = max(0, self.free_before - (self._cuda_free() if free is None else free))
        self.peak = max(self.peak, used)
        return used

    @contextmanager
    def watched(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._over.set()
            self._thread.join()
            self.look()

    def as_dict(self) -> dict[str, Any]:
        total = int(torch.cuda.mem_get_info(GPU)[1])
        return {
            "source": self.source,
            "cap": self.cap,
            "peak": self.peak,
            "now": self.look(),
            "used_by_others_before": max(0, total - self.free_before),
            "device_total": total,
            "torch_reserved_peak": torch.cuda.max_memory_reserved(GPU),
            "torch_allocated_peak": torch.cuda.max_memory_allocated(GPU),
            "under_cap": None if self.cap is None else self.peak <= self.cap,
        }


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
        self.result: dict[str, Any] = {}
        self.rates = Rates()
        self.began = time.perf_counter()
        self.notes: list[str] = []

    def run(self) -> dict[str, Any]:
        options = self.options
        self.memory = Memory(options.vram) if options.gpu else None
        with nullcontext() if self.memory is None else self.memory.watched():
            loaded = self._load()
            runner = loaded.runnable.runner
            run = ModulesRun(loaded.runnable.model) if runner is None else FusedRun(runner)
            self._measure(run, loaded)
        self._keep(complete=True)
        return self.result

    def _keep(self, **more: Any) -> None:
        """Add to the result, and let it be saved as it is."""
        self.result |= {
            "rates": {name: spread(rounds) for name, rounds in vars(self.rates).items() if rounds},
            "cpu": cpu_facts(),
            "notes": self.notes,
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
            self.notes.append(
                f"the CPU is held to {found} threads, which read {options.cpu_gb_s:g} GB/s at most"
            )
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
        }

    def _bound(self, run: ModulesRun | FusedRun) -> Bound:
        gpu = torch.cuda.get_device_name(GPU) if self.options.gpu else None
        size = torch.cuda.get_device_properties(GPU).total_memory if self.options.gpu else 0
        return Bound(
            inventory=self.inventory,
            hardware=hardware_of(self.rates, gpu, size),
            fmt=self.options.fmt,
            dense=self.options.dense,
            slots=self._slots(run),
            vram=self.options.vram,
            shared=self.options.shares != (0.0,),
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


def predicted(
    name: str, plan_for: Any, inventory: Inventory, options: Options, series: Series
) -> dict[str, Any]:
    """What the plan says of another machine with the same request. ``plan_for``: its profile."""
    asked = Request(
        options.fmt,
        vram=options.vram,
        context=series.context,
        concurrency=series.batches[0],
        dense=options.dense,
    )
    made = make_plan(name, inventory, plan_for, asked, alternatives=False)
    told = as_dict(made)
    return {key: told[key] for key in ("hardware", "decode", "prefill", "experts", "dense")}


def _experts(model: Any) -> list[CpuExperts]:
    """The experts that the CPU has, layer by layer."""
    found = (getattr(module, "backend", None) for module in model.modules())
    return [one for one in found if isinstance(one, CpuExperts)]


def fuses(rules: str) -> bool:
    """Whether a rule file makes steps of fused layers, with variables for what the options say of them."""
    return {"dense", "cache", "share"} <= load_rules(rules).variables.keys()


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


def check_options(options: Options) -> None:
    """Raises InputError for options that do not go together."""
    given = {
        "--cache": options.cache != "auto",
        "--share": options.shares != (None,),
        "--serial": options.serial,
        "--defer": options.defer > 0,
        "--turns": options.turns is not None,
        "--prefill-by": options.prefill_by != "auto",
    }
    named = [name for name, is_given in given.items() if is_given]
    if not options.gpu and (named or options.vram):
        raise InputError(f"{', '.join(named or ['--vram'])}: of a GPU, and there is none")
    variables = load_rules(options.rules).variables
    if named and not fuses(options.rules):
        raise InputError(f"{', '.join(named)}: of fused layers, and {options.rules} says nothing of such")
    if options.defer and "defer" not in variables:
        raise InputError(f"--defer: {options.rules} has no variable for it (experts: {{defer: N}})")
    known = DENSE_CPU if not options.gpu else DENSE_GPU if fuses(options.rules) else DENSE_GPU[:1]
    if options.dense not in known:
        where = "without a GPU" if not options.gpu else f"with {options.rules}"
        raise InputError(f"--dense {options.dense}: must be one of {', '.join(known)} {where}")
