"""Compiles the kernels of a fused step for a GPU as far as Triton's own language goes, without a GPU.

Run by test_compiles.py in a process of its own, since elsewhere kernels are interpreted. The calls are those
of benchmarks/gpu_kernels.py, on tensors without memory.
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

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

TYPES = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int64: "*i64",
    torch.int32: "*i32", torch.int8: "*i8", torch.uint8: "*u8",
}  # fmt: skip
OPTIONS = {"num_warps", "num_stages", "launch_pdl"}
done: set[str] = set()


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
    target = GPUTarget("cuda", 90, 32)
    backend = make_backend(target)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    parsed = backend.parse_options(options)
    source = ASTSource(self, signature, constants)
    functions, modules = backend.get_codegen_implementation(parsed), backend.get_module_map()
    source.make_ir(target, parsed, functions, modules, context)


def main() -> None:
    import gpu_kernels

    from hetero.core import ExpertSpec
    from hetero.formats import parse_format
    from hetero.ops.gpu import overlap
    from hetero.ops.gpu.launch import ExpertLaunch

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
    made.few(torch.empty(1, dtype=torch.uint8, device="meta"), rows, at, weights, at)
    names = sorted({name.split()[0] for name in done})
    sys.stdout.write(f"{triton.__version__} {len(done)} {' '.join(names)}\n")


if __name__ == "__main__":
    main()
