"""From a model's folder and a rule file to something that the engine can run.

Everything that can be wrong is found before the first weight is read: configuration, tokenizer, rules, names
and shapes of the checkpoint, instruction set, memory.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hetero import inject, jsonfile
from hetero.config import ISAS, settings
from hetero.core import InputError, ModuleInfo
from hetero.engine.experts import ExpertsOnTiers, Ready, StoreOptions, early_reads, pack_experts
from hetero.engine.generate import Runnable
from hetero.engine.gpu.loading import FUSED_DTYPE, GpuOptions, Graphs
from hetero.engine.packing import Packed
from hetero.engine.tables import place_tables, speed_notes
from hetero.engine.tiers import with_tier
from hetero.model.build import build_meta, describe
from hetero.model.config import load_config
from hetero.model.gguf_file import locate
from hetero.model.keep import resolve_formats
from hetero.model.loader import LoadReport, load, plan_load
from hetero.model.moe_types import WHOLE_PROMPT
from hetero.model.shapes import resolve_model
from hetero.model.sources import open_source
from hetero.model.tables import resolve_tables
from hetero.model.tokenizer import Tokenizer, load_tokenizer
from hetero.ops.guess import guess_ahead
from hetero.ops.hops import connect
from hetero.ops.watch import expert_uses, watch_steps
from hetero.registry import op_names
from hetero.rules import Assignment, Placement, load_rules, match
from hetero.rules.defaults import default_rules_for, for_dense
from hetero.rules.options import schemas_for
from hetero.stats import Recorder
from hetero.store.bulk import EarlyReads

log = logging.getLogger("hetero.load")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that is ready, and what was decided on the way."""

    runnable: Runnable
    name: str  # the folder's name; how the server calls the model
    folder: Path
    model_type: str
    dtype: str  # of dense layers
    placement: Placement
    expert_bytes: int  # held by the experts, packed
    notes: tuple[str, ...]  # for the user, one sentence each
    synthetic: bool = False  # random weights, of a shape alone

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.runnable.tokenizer

    @property
    def rules(self) -> str:
        """The rule file."""
        return self.placement.ruleset.file


def load_model(
    folder: str | Path,
    *,
    rules: str | Path | None = None,
    overrides: Mapping[str, str] | None = None,
    dtype: str | None = None,
    isa: str = "auto",
    threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    store: StoreOptions | None = None,
    gpu: GpuOptions | None = None,
    tell: Callable[[str], None] = log.info,
) -> Loaded:
    """Load a checkpoint folder or a GGUF file under a rule file (None: the shipped one of its family); of a
    config.json alone, a model of random weights (``engine.synthetic``).

    ``overrides`` are the rule file's variables; ``dtype`` is of dense layers, None: bfloat16 where the rules
    fuse layers, else float32; ``isa`` other than "auto" wins over the rules'. ``progress`` is called with
    bytes read and all bytes, ``tell`` with what takes long before it begins. ``gpu``: for the memory of GPUs,
    and for fused layers.

    Raises InputError for what is wrong with folder, rules or options, MachineError for a missing instruction
    set or too little memory.
    """
    began = time.perf_counter()
    store = store or StoreOptions()
    folder = Path(folder)
    if folder.is_file() and folder.suffix == ".json":
        from hetero.engine.synthetic import load_synthetic

        return load_synthetic(
            folder,
            rules=rules,
            overrides=overrides,
            dtype=dtype,
            isa=isa,
            threads=threads,
            tier=store.tier,
            progress=progress,
            gpu=gpu,
        )
    set_threads(threads)
    with early_reads(folder, store) as early:
        ready = prepare(folder, rules=rules, overrides=overrides, dtype=dtype, isa=isa, tier=store.tier)
        return _fill(ready, store, gpu=gpu, progress=progress, tell=tell, early=early, began=began)


def _fill(
    ready: Ready,
    store: StoreOptions,
    *,
    gpu: GpuOptions | None,
    progress: Callable[[int, int], None] | None,
    tell: Callable[[str], None],
    early: EarlyReads | None,
    began: float,
) -> Loaded:
    """What comes after ``prepare``; ``early``: reads of a file that may be that of the experts."""
    folder, ready = ready.folder, place_tables(ready)
    config, model, placement, dtype = ready.config, ready.model, ready.placement, ready.dtype
    graphs = Graphs(model, placement, dtype, gpu)
    checkpoint, plan = ready.checkpoint, ready.plan
    experts = ExpertsOnTiers(ready, store, progress, tell, early)
    placement, found = experts.placement, experts.has_file
    tokenizer = None if found else load_tokenizer(folder)
    experts.pack(ready)
    with experts.memory:
        injected = inject.apply(model, placement)
    homes = {name: str(one.loads_on) for name, one in model.named_modules() if hasattr(one, "loads_on")}

    linears: Any = {
        f"{name}.weight": one for name, one in model.named_modules() if hasattr(one, "take_codes")
    }

    def home(tensor: str) -> str:
        module = tensor.rpartition(".")[0]
        return homes.get(module) or placement.device_of(module) or "cpu"

    def read(sinks: set[str], **options: Any) -> LoadReport:
        return load(
            model,
            checkpoint,
            {name: injected.sinks[name] for name in sinks},
            dtype=DTYPES[dtype],
            device=home,
            plan=plan,
            linears=linears,
            **options,
        )

    with graphs.enough_memory(), experts.reading(injected.sinks) as reading:
        # All else is read while the experts come from their file.
        tokenizer = load_tokenizer(folder) if found else tokenizer
        known = reading.names | experts.attached
        rest = injected.sinks.keys() - known
        report = read(rest, filled=known, progress=None if reading.names else progress)
        damaged = reading.names - experts.finish(reading)
        if damaged:
            read(damaged, experts_only=True, progress=progress)
        experts.keep(injected.sinks)
        inject.finish(model)
    tables = speed_notes(model)
    connect(model, placement)
    guess_ahead(model)
    watch_steps(model)
    text: Any = config.get_text_config(decoder=True)
    runner = graphs.fuse(context_limit(text), resolve_model(str(folder)).config)
    runnable = Runnable(
        model=model,
        vocabulary=int(text.vocab_size),
        tokenizer=tokenizer,
        context=context_limit(text) if runner is None else runner.context,
        eos=eos_ids(folder, text, tokenizer),
        whole_prompt=config.model_type in WHOLE_PROMPT,
        kernels=kernels,
        load_s=time.perf_counter() - began,
        runner=runner,
    )
    return Loaded(
        runnable=runnable,
        name=folder.resolve().name,
        folder=folder,
        model_type=config.model_type,
        dtype=dtype,
        placement=placement,
        expert_bytes=injected.expert_bytes,
        notes=(*placement.notes, *report.lines(), *experts.notes, *tables, *graphs.notes),
    )


def with_context(loaded: Loaded, context: int | None) -> Loaded:
    """With at most ``context`` tokens of prompt and answer. Raises InputError for more than the model has."""
    runnable = loaded.runnable
    if context is None:
        return loaded
    if runnable.context is not None and context > runnable.context:
        raise InputError(f"--ctx {context}: the context of this model holds {runnable.context} tokens")
    return replace(loaded, runnable=replace(runnable, context=context))


def stats_recorder(loaded: Loaded, say: Callable[[str], None]) -> Recorder:
    """What adds the use of the model's experts to the statistics of all its runs."""
    # The configuration as it is named and planned with, which is that of the folder's file.
    ref = replace(resolve_model(str(loaded.folder)), name=loaded.name)
    runner = loaded.runnable.runner
    return Recorder(ref, lambda: expert_uses(loaded.runnable.model) if runner is None else runner.uses(), say)


def prepare(
    folder: Path,
    *,
    rules: str | Path | None = None,
    overrides: Mapping[str, str] | None = None,
    dtype: str | None = None,
    isa: str = "auto",
    tier: str | None = None,
) -> Ready:
    """Everything of ``load_model`` that comes before weights and memory. Raises InputError."""
    config = load_config(folder)
    model, modules, placement, dtype = place(
        config, folder, rules=rules, overrides=overrides, dtype=dtype, isa=isa, tier=tier
    )
    checkpoint = open_source(folder)
    plan = plan_load(model, checkpoint)
    placement, kept = resolve_formats(placement, plan, checkpoint)
    placement = resolve_tables(placement, model, plan, checkpoint)
    notes = (*placement.notes, *kept, *getattr(checkpoint, "notes", ()))
    placement = replace(placement, notes=notes)
    return Ready(folder, config, model, modules, placement, checkpoint, plan, dtype)


def place(
    config: Any,
    folder: Path,
    *,
    rules: str | Path | None,
    overrides: Mapping[str, str] | None,
    dtype: str | None,
    isa: str,
    tier: str | None,
) -> tuple[Any, Sequence[ModuleInfo], Placement, str]:
    """The tree of a configuration without weights, its modules, what rules make of them, and the type of
    dense layers. ``folder`` is where the configuration is from. Raises InputError."""
    if dtype is None:
        found = place(config, folder, rules=rules, overrides=overrides, dtype="float32", isa=isa, tier=tier)
        if not any(one.op == "fused" for one in found[2].assignments):
            return found
        dtype = FUSED_DTYPE
    if dtype not in DTYPES:
        raise InputError(f"--dtype {dtype}: must be one of {', '.join(DTYPES)}")
    if isa not in ISAS:
        raise InputError(f"--isa {isa}: must be one of {', '.join(ISAS)}")
    devices = ("cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count())))
    ruleset = load_rules(rules or default_rules_for(config.model_type, len(devices) > 1), overrides)
    model = build_meta(config, DTYPES[dtype])
    modules = describe(model)
    if rules is None and not any(module.experts for module in modules):
        if locate(folder) is None:
            raise InputError(
                f"{folder}: {config.model_type} has no routed experts; hetero runs Mixture-of-Experts models "
                "(a rule file of your own, given by --rules, may place others)"
            )
        ruleset = for_dense(ruleset)
    placement = match(
        ruleset, modules, devices=devices, ops=schemas_for(op_names()), model_type=config.model_type
    )
    placement = with_tier(_with_isa(placement, isa), tier)
    return model, modules, placement, dtype


def context_limit(text_config: Any) -> int | None:
    """Most tokens that the model can attend to; None where the configuration sets no limit."""
    for field in ("max_position_embeddings", "n_positions", "max_sequence_length"):
        value = getattr(text_config, field, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def eos_ids(folder: Path, text_config: Any, tokenizer: Tokenizer | None) -> frozenset[int]:
    """Tokens that end an answer: those of generation_config.json, else of the configuration; always with the
    tokenizer's own, which in chat models ends a turn. Raises InputError for a broken generation_config.json.
    """
    path = folder / "generation_config.json"
    listed: Any = None
    if path.is_file():
        try:
            listed = jsonfile.parse(path.read_bytes()).get("eos_token_id")
        except (OSError, ValueError, AttributeError) as error:
            raise InputError(f"{path}: cannot be read as JSON: {error}") from None
    if listed is None:
        listed = getattr(text_config, "eos_token_id", None)
        path = folder / "config.json"
    ids = list(listed) if isinstance(listed, list | tuple) else [] if listed is None else [listed]
    if any(not isinstance(token, int) or isinstance(token, bool) for token in ids):
        raise InputError(f"{path}: field 'eos_token_id' is {listed!r}, must be an id or a list of ids")
    if tokenizer is not None and tokenizer.eos_id is not None:
        ids.append(tokenizer.eos_id)
    return frozenset(ids)


def set_threads(threads: int | None) -> None:
    """One number for the pool of the experts and for torch, which take turns."""
    count = threads if threads is not None else settings().threads
    if count is None:
        return
    if count < 1:
        raise InputError(f"--threads {count}: must be at least 1")
    from hetero import cpu

    cpu.set_threads(count)
    torch.set_num_threads(count)


def _with_isa(placement: Placement, isa: str) -> Placement:
    """The placement with every CPU expert on ``isa``."""
    if isa == "auto":
        return placement

    def change(assignment: Assignment) -> Assignment:
        experts = assignment.options.get("experts")
        if assignment.op != "moe" or not isinstance(experts, Mapping):
            return assignment
        return replace(assignment, options={**assignment.options, "experts": {**experts, "isa": isa}})

    return replace(placement, assignments=tuple(map(change, placement.assignments)))


def kernels() -> dict[str, int]:
    """Executed kernels so far: name -> calls."""
    from hetero.cpu import kernel_counts

    return kernel_counts()


def pack_model(
    folder: str | Path,
    output: Path,
    *,
    rules: str | Path | None = None,
    overrides: Mapping[str, str] | None = None,
    threads: int | None = None,
    force: bool = False,
    progress: Callable[[int, int], None] | None = None,
    tell: Callable[[str], None] = log.info,
) -> Packed:
    """Write the packed experts of a checkpoint to a file in the folder ``output``, unless it is there."""
    set_threads(threads)
    ready = prepare(Path(folder), rules=rules, overrides=overrides)
    return pack_experts(ready, output, force=force, progress=progress, tell=tell)
