"""Compiles the kernels of a fused step for a GPU as far as Triton's own language goes, without a GPU.

Run by test_compiles.py in a process of its own, since elsewhere kernels are interpreted. The calls are those
of benchmarks/gpu_kernels.py and of the decoders, on tensors without memory.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction

from hetero.core import ExpertSpec
from hetero.cpu import CpuExperts
from hetero.decode.decoder import Decoder
from hetero.decode.experts import Done
from hetero.decode.matrix import decoded
from hetero.formats import GPU_FORMATS, parse_format
from hetero.model.build import find_moe
from hetero.ops.gpu import ahead, fused, hybrid_kernels, launch, overlap
from hetero.ops.gpu.ahead import fetch_ahead
from hetero.ops.gpu.feed import feed
from hetero.ops.gpu.hybrid import DirectPayload, HybridExperts
from hetero.ops.gpu.hybrid_shared import HybridShared
from hetero.ops.gpu.launch import TILINGS, ExpertLaunch, Sorted
from hetero.ops.gpu.matrix import PackedMatrix
from hetero.ops.gpu.pinned import PinnedArena
from hetero.ops.gpu.read import plain_read
from tests.decode.tiny import tiny

ROOT = Path(__file__).resolve().parents[2]
TYPES = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int64: "*i64",
    torch.int32: "*i32", torch.int8: "*i8", torch.uint8: "*u8",
}  # fmt: skip
OPTIONS = {"num_warps", "num_stages", "launch_pdl"}
done: set[str] = set()
target = GPUTarget("cuda", 90, 32)
texts: list[str] = []  # of what was compiled for an older one


def kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def compile_only(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    options = {key: kwargs.pop(key) for key in OPTIONS & kwargs.keys()}
    given = dict(zip(self.arg_names, args, strict=False)) | kwargs
    constants = {p.name: given[p.name] for p in self.params if p.is_constexpr}
    signature = {p.name: "constexpr" if p.is_constexpr else kind(given[p.name]) for p in self.params}
    name = f"{self.__name__} {sorted(map(str, signature.items()))} {sorted(map(str, constants.items()))}"
    if name in done:
        return
    done.add(name)
    backend = make_backend(target)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    parsed = backend.parse_options(options)
    source = ASTSource(self, signature, constants)
    functions, modules = backend.get_codegen_implementation(parsed), backend.get_module_map()
    made = source.make_ir(target, parsed, functions, modules, context)
    if target.arch < 90:
        texts.append(str(made))


class Nobody:
    """A port without anybody behind it."""

    def __init__(self, rows: int, spec: ExpertSpec) -> None:
        self._payload = DirectPayload(
            torch.empty(rows, spec.hidden, dtype=torch.bfloat16, device="meta"),
            torch.empty(rows, spec.top_k, dtype=torch.int64, device="meta"),
            torch.empty(rows, spec.top_k, device="meta"),
            torch.empty(rows, spec.hidden, device="meta"),
        )

    def payload(self, layer: int) -> DirectPayload:
        return self._payload

    def record_submit(self, layer: int) -> None:
        pass

    def record_collect(self, layer: int) -> None:
        pass


class Nothing:
    """Experts that are not there."""

    def __init__(self, hidden: int) -> None:
        self._hidden, self._rows = hidden, 0

    def submit(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
        self._rows = len(x)

    def collect(self) -> torch.Tensor:
        return torch.empty(self._rows, self._hidden, device="meta")

    def prefill(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return torch.empty(x.shape, device="meta")

    def prefill_submit(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Done:
        return Done(self.prefill(x, ids, weights))

    def takes_turns(self, rows: int) -> bool:
        return False


def all_tiers() -> None:
    """A step's experts in GPU memory and in host memory, and what keeps them there."""
    spec = ExpertSpec(32, 2560, 640, 10)
    for fmt, early in (("int4", True), ("int4", False), ("bf16", True)):
        experts = CpuExperts(spec, parse_format(fmt))
        shared = HybridShared("meta", share=0.5, defer=2, early=early, soon=early)
        arena = PinnedArena(experts, "meta")
        for slots in (16, 32):
            hybrid = HybridExperts(experts, 0, Nobody(16, spec), shared, slots=slots, arena=arena)
            for rows in (1, 16):
                x, ids, weights, _ = (part[:rows] for part in hybrid.port.payload(0))
                hybrid.submit(x, ids, weights)
                hybrid.collect(x)
        assert hybrid.launch is not None
        x, _, weights, out = hybrid.port.payload(0)
        numbers = torch.empty(160, dtype=torch.int32, device="meta")
        pairs = Sorted(numbers, numbers, numbers.view(-1, 2), numbers.long())
        for shape in TILINGS:
            hybrid.launch.many(
                hybrid.cache.memory, x, weights, pairs, rows=(0, 160), tiles=(0, 80), out=out,
                room=hybrid.launch.rooms(160), shape=shape, first=True,
            )  # fmt: skip
        fetch_ahead([hybrid.cache.memory])
        hybrid_kernels.pull[(1,)](pairs.addresses, pairs.addresses, 160, WIDTH=1024)
        plain_read(arena.view, torch.device("meta"))
    for rows in (1, 16):
        feed(*torch.empty(2, rows, dtype=torch.int64, device="meta"))
    packed = torch.empty(0, dtype=torch.uint8, device="meta")
    decoded(PackedMatrix(packed, parse_format("int8"), 64, 64), 0, 64)


def formats() -> None:
    """Experts in every format, of which gate and up lie before down in another one."""
    spec = ExpertSpec(8, 1024, 640, 2)
    x, weights = (torch.empty(20, wide, device="meta") for wide in (1024, 2))
    base, numbers = torch.empty(0, dtype=torch.uint8, device="meta"), x.new_empty(40, dtype=torch.int32)
    pairs = Sorted(numbers, numbers, numbers.view(-1, 2), numbers.long())
    kinds = [*zip(GPU_FORMATS, (*GPU_FORMATS[5:], *GPU_FORMATS[:5]), strict=True)]
    for up, down in (*kinds, ("int4 g64 ordered", "int8z ordered")):
        made = ExpertLaunch(spec, parse_format(up), torch.device("meta"), parse_format(down))
        rows = made.rows(x[:1].bfloat16())
        made.few(base, rows, numbers[:2].long().view(1, 2), weights[:1])
        made.many(
            base, x.bfloat16(), weights, pairs, rows=(0, 40), tiles=(0, 20), out=torch.empty_like(x),
            room=made.rooms(40), shape=TILINGS[0], first=True,
        )  # fmt: skip


def families() -> None:
    """Whole steps, and prompts where nothing of them is read by the host."""
    without_ngrams = {"ple_layer_ids": []}
    for family, changes in (("qwen4_exp_text", {}), ("qwen4_exp_text", without_ngrams), ("qwen3_next", {})):
        model = tiny(family, torch.Generator(), **changes).bfloat16()
        known = dict(model.named_buffers())
        model.to("meta")
        for name, buffer in known.items():  # tables of n-grams are for the host
            if not buffer.is_floating_point():
                path, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(path), leaf, buffer)
        experts = [Nothing(model.config.hidden_size) for _ in find_moe(model)]
        decoder = Decoder(model, experts, slots=16, context=64, device="meta")
        for rows in (1, 16):
            decoder.step(decoder.inputs(rows))
        if family == "qwen3_next" or changes:
            tokens = torch.empty(20, dtype=torch.int64, device="meta")
            decoder.prefill(tokens, 0, 16, decoder.inputs(1).pages)


def older() -> None:
    """What GPUs before Hopper have no instructions for: memory is not asked for ahead."""
    global target  # noqa: PLW0603
    target = GPUTarget("cuda", 89, 32)
    overlap._able = lambda device: False  # type: ignore[assignment]
    for module in (fused, launch, ahead):
        module.capability = lambda device: 89  # type: ignore[attr-defined]
    packed = torch.empty(0, dtype=torch.uint8, device="meta")
    x = torch.empty(1, 8192, dtype=torch.bfloat16, device="meta")
    for name in ("int8", "fp8"):
        matrix = PackedMatrix(packed, parse_format(name), 64, 8192)
        fused.project(fused.plain_rows(matrix.format, x), matrix)
    made = ExpertLaunch(ExpertSpec(512, 2560, 640, 10), parse_format("int4"), torch.device("meta"))
    at, weights = (torch.empty(1, 10, dtype=d, device="meta") for d in (torch.int64, torch.float32))
    made.few(packed, made.rows(x[:, :2560]), at, weights, later=launch.Later(at, at, lambda: None))
    fetch_ahead([torch.empty(64, device="meta")])
    assert len(texts) > 4
    assert any("dp4a" in text for text in texts)
    assert not [text for text in texts if "cp.async.bulk" in text or "griddepcontrol" in text]


def main() -> None:
    import gpu_kernels

    JITFunction.run = compile_only  # type: ignore[method-assign]
    torch.Tensor.is_cuda = True  # type: ignore[assignment,misc]
    gpu_kernels.DEVICE = "meta"
    overlap.ENABLED, overlap._able = True, lambda device: True  # type: ignore[assignment]
    shape = ROOT / "hetero" / "data" / "shapes" / "qwen3.8-flash-next-125b.json"
    sizes = json.loads(shape.read_text())["text_config"]
    for rows in (1, 8, 16):
        for case in gpu_kernels.cases(sizes, rows, 1024, {}):
            case.make()()
        for fmt in ("bf16", "int8 g128"):
            gpu_kernels.experts_case(sizes, rows, parse_format(fmt)).make()()
    # Experts that come from host memory on the way.
    made = ExpertLaunch(ExpertSpec(512, 2560, 640, 10), parse_format("int4"), torch.device("meta"))
    rows = made.rows(torch.empty(1, 2560, dtype=torch.bfloat16, device="meta"))
    at, weights = (torch.empty(1, 10, dtype=d, device="meta") for d in (torch.int64, torch.float32))
    made.few(torch.empty(1, dtype=torch.uint8, device="meta"), rows, at, weights, sources=at)
    all_tiers()
    formats()
    families()
    older()
    names = sorted({name.split()[0] for name in done})
    sys.stdout.write(f"{triton.__version__} {len(done)} {' '.join(names)}\n")


if __name__ == "__main__":
    main()
