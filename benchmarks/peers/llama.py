"""ik_llama.cpp or llama.cpp, whichever this interpreter has, on a whole synthetic model of the shape.

Time is of the whole model, divided by its layers: make_gguf.py makes its dense half as small as it can be.
In a prefill both engines run the last layer's experts only for the tokens whose logits are asked for, one
here, so a prefill counts a layer less (with 1, 2, 3, 4 layers ik_llama.cpp took 13, 219, 412, 606 ms).
The error is that of the weights alone, in float64: the engines give no access to one layer.
"""

from __future__ import annotations

from typing import Any

import common
import gguf
import numpy as np

spec = common.job()
prompt = [(i * 37) % 500 for i in range(spec.tokens)]
position = 0

try:
    from ik_llama_cpp import IkLlama
    from ik_llama_cpp._internals import make_batch_single
except ImportError:
    import llama_cpp
    from llama_cpp import Llama

    defaults = llama_cpp.llama_model_default_params

    def make(repack: bool) -> Llama:
        """The engine with or without weights repacked for this processor, which it does by default."""

        def parameters() -> Any:
            chosen = defaults()
            chosen.use_extra_bufts = repack
            return chosen

        llama_cpp.llama_cpp.llama_model_default_params = parameters
        return Llama(
            model_path=spec.model,
            n_ctx=2048,
            n_threads=spec.threads,
            n_threads_batch=spec.threads,
            n_batch=spec.tokens,
            n_ubatch=spec.tokens,
            n_gpu_layers=0,
            verbose=False,
        )

    # 0.3.36 built by gcc 12 dies of an invalid instruction (tileloadd) in a prefill of repacked weights on a
    # processor with AMX. Decode is faster with them.
    has_amx = b"AMX_INT8 = 1" in llama_cpp.llama_print_system_info()
    engine = make(repack=True)
    other = make(repack=False) if has_amx else engine

    def decode(n: int) -> int:
        global position  # noqa: PLW0603 (one engine a process)
        if n % 256 == 0 or position > 1000:
            engine.reset()
            position = 0
        engine.eval([(n * 53) % 500])
        position += 1
        return spec.layers

    def prefill(n: int) -> int:
        global position  # noqa: PLW0603 (one engine a process)
        other.reset()
        position = 2000
        other.eval(prompt)
        return spec.layers - 1

else:
    engine = IkLlama(spec.model, n_ctx=2048, n_threads=spec.threads, verbose=False)

    def decode(n: int) -> int:
        global position  # noqa: PLW0603 (one engine a process)
        if n % 256 == 0 or position > 1000:
            engine._context.kv_cache_clear()
            position = 0
        if engine._context.decode(make_batch_single((n * 53) % 500, position)):
            raise RuntimeError("llama_decode failed")
        position += 1
        return spec.layers

    def prefill(n: int) -> int:
        global position  # noqa: PLW0603 (one engine a process)
        position = 2000
        engine.generate(prompt, max_tokens=0)
        return spec.layers - 1


kind = {"q4_0": gguf.GGMLQuantizationType.Q4_0, "q8_0": gguf.GGMLQuantizationType.Q8_0}.get(
    spec.format, gguf.GGMLQuantizationType.BF16
)
base = common.weights(spec)
step = common.step(spec, 2, 7)
used = {int(e) % common.DISTINCT for e in step[1].flat}
decoded = [
    {
        p: gguf.quants.dequantize(gguf.quants.quantize(w, kind), kind).astype(np.float32)
        for p, w in parts.items()
    }
    if e in used
    else parts
    for e, parts in enumerate(base)
]
wrong = common.error(common.exact(decoded, *step), common.exact(base, *step))
for warm in range(32):  # the file's pages are mapped at their first use, and a step touches few experts
    decode(warm)
prefill(0)
bits = {"q4_0": 4.5, "q8_0": 8.5}.get(spec.format, 16)
common.serve(
    {"isa": "its own", "error": wrong, "expert_bytes": 3 * spec.hidden * spec.intermediate * bits / 8},
    decode,
    prefill,
    spec,
)
