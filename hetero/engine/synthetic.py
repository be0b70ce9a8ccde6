"""Models of random weights: a shape's tree under a rule file, filled at the speed of memory, nothing read."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hetero import inject
from hetero.core import ExpertSpec, InputError
from hetero.cpu import pack_matrix
from hetero.engine.answer import Runnable
from hetero.engine.gpu.loading import GpuOptions, Graphs
from hetero.engine.load import DTYPES, Loaded, context_limit, kernels, place, set_threads
from hetero.engine.tables import speed_notes
from hetero.formats import Format, block_bytes, packed_bytes
from hetero.model.config import load_config
from hetero.model.moe_types import WHOLE_PROMPT
from hetero.model.shapes import read_config
from hetero.model.synthetic import cut_layers, fill_dense
from hetero.model.tables import random_tables
from hetero.ops.hops import connect
from hetero.ops.watch import watch_steps

SOURCES = 8
"""Experts that are really packed, once for all layers of one kind; the others are made of their bytes."""

_ROWS = 512  # of a linear layer that are really packed
_STD = 0.02


def load_synthetic(
    source: Path | Mapping[str, Any],
    *,
    name: str | None = None,
    layers: int | None = None,
    rules: str | Path | None = None,
    overrides: Mapping[str, str] | None = None,
    dtype: str | None = None,
    isa: str = "auto",
    threads: int | None = None,
    tier: str | None = None,
    progress: Callable[[int, int], None] | None = None,
    seed: int = 0,
    gpu: GpuOptions | None = None,
) -> Loaded:
    """A model of a config.json's shape, or of a configuration, with random weights; ``layers``: at most so
    many. The other arguments are those of ``engine.load.load_model``, and so are the errors."""
    began = time.perf_counter()
    if tier == "disk":
        raise InputError("--tier disk: random weights have no file to be read from")
    set_threads(threads)
    data = dict(source) if isinstance(source, Mapping) else read_config(source)
    folder = Path(name or "config.json") if isinstance(source, Mapping) else source
    if layers is not None:
        if layers < 1:
            raise InputError(f"--layers {layers}: must be at least 1")
        data = cut_layers(data, layers)
    config = load_config(data)
    model, _, placement, dtype = place(
        config, folder, rules=rules, overrides=overrides, dtype=dtype, isa=isa, tier=tier
    )
    graphs = Graphs(model, placement, dtype, gpu)
    with random_tables(placement, model) as placement:
        injected = inject.apply(model, placement)
    fill_experts(injected.sinks, progress, seed)

    def device(tensor: str) -> str:
        return placement.device_of(tensor.rpartition(".")[0]) or "cpu"

    on_gpu = any(str(one.device).startswith("cuda") for one in placement.assignments)
    with graphs.enough_memory():
        _fill_linears(model, seed)
        notes = fill_dense(model, dtype=DTYPES[dtype], device=device, pin=on_gpu, seed=seed)
        inject.finish(model)
    notes += speed_notes(model)
    connect(model, placement)
    watch_steps(model)
    text: Any = config.get_text_config(decoder=True)
    runner = graphs.fuse(context_limit(text))
    runnable = Runnable(
        model=model,
        vocabulary=int(text.vocab_size),
        context=context_limit(text) if runner is None else runner.context,
        whole_prompt=config.model_type in WHOLE_PROMPT,
        kernels=kernels,
        load_s=time.perf_counter() - began,
        runner=runner,
    )
    return Loaded(
        runnable=runnable,
        name=name or folder.stem,
        folder=folder,
        model_type=config.model_type,
        dtype=dtype,
        placement=placement,
        expert_bytes=injected.expert_bytes,
        notes=(*placement.notes, *notes, *graphs.notes),
        synthetic=True,
    )


def fill_experts(
    sinks: Mapping[str, Any], progress: Callable[[int, int], None] | None = None, seed: int = 0
) -> None:
    """Random experts for every sink of a tree (``inject.apply``)."""
    generator = torch.Generator().manual_seed(seed)
    made: dict[tuple[ExpertSpec, Format, Format], list[bytearray]] = {}
    total, done = sum(sink.backend.nbytes for sink in sinks.values()), 0
    for sink in sinks.values():
        backend, spec = sink.backend, sink.spec
        if hasattr(backend, "replicate"):
            kind = (spec, backend.format, backend.down_format)
            count = min(SOURCES, spec.num_experts)
            if kind in made:
                for expert, packed in enumerate(made[kind]):
                    backend.restore(expert, memoryview(packed))
                backend.filled(range(count))
            else:
                for expert in range(count):
                    _put_expert(sink, spec, expert, generator)
                made[kind] = [bytearray(backend.whole_bytes) for _ in range(count)]
                for expert, packed in enumerate(made[kind]):
                    backend.save(expert, memoryview(packed))
            backend.replicate(count)
        else:
            for expert in range(spec.num_experts):
                _put_expert(sink, spec, expert, generator)
        done += backend.nbytes
        if progress is not None:
            progress(done, total)


def _put_expert(sink: Any, spec: ExpertSpec, expert: int, generator: torch.Generator) -> None:
    for part in ("gate", "up", "down"):
        n, k = (spec.hidden, spec.intermediate) if part == "down" else (spec.intermediate, spec.hidden)
        if part == "gate" and not spec.has_gate:
            continue
        sink.put(expert, part, torch.randn(n, k, generator=generator) / k**0.5)
        if spec.has_bias:
            sink.put(expert, f"{part}_bias", torch.randn(n, generator=generator) * 0.1)


def _fill_linears(model: Any, seed: int) -> None:
    """Packed weights of the linear layers that hold such, made on their device."""
    try:
        from hetero.ops.gpu.linear import PackedLinear
    except ModuleNotFoundError:  # without Triton nothing of the tree is one
        return
    generator = torch.Generator().manual_seed(seed)
    made: dict[tuple[Format, int], Tensor] = {}
    for module in list(model.modules()):
        if isinstance(module, PackedLinear) and module.source is not None:
            n, k = module.out_features, module.in_features
            bias = None if module.source.bias is None else torch.zeros(n)
            if not module.format.quantised:
                weight = torch.empty(n, k, dtype=torch.bfloat16, device=module.device)
                module.take(weight.normal_(std=_STD), bias)
                continue
            kind = (module.format, k)
            if kind not in made:
                rows = torch.randn(_ROWS, k, generator=generator) * _STD
                made[kind] = pack_matrix(module.format, rows).to(module.device)
            packed = repeated_rows(made[kind], module.format, n, k, generator)
            module.take(packed, bias)


def repeated_rows(some: Tensor, fmt: Format, n: int, k: int, generator: torch.Generator) -> Tensor:
    """A packed matrix of n outputs and k inputs from ``some`` packed rows (whole blocks of 16), in random
    order, on the device of ``some`` and with nothing larger on the way."""
    blocks = some.view(-1, block_bytes(fmt, k))
    count = packed_bytes(fmt, n, k) // blocks.shape[1]
    order = torch.randint(len(blocks), (count,), generator=generator)
    return blocks.index_select(0, order.to(some.device)).view(-1)
