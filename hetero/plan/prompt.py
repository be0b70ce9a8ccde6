"""How long a prompt is expected to take by the rules of a plan, where ``prefill`` tells how long it takes at
least."""

from __future__ import annotations

from hetero.plan import constants
from hetero.plan.hardware import Hardware
from hetero.plan.inventory import Inventory
from hetero.plan.prefill import Prefill, chunks_of, cpu_experts, disk_experts, merged, prefill, work_of
from hetero.plan.products import attention_tflops, many_tflops, passes
from hetero.plan.roofline import Term, eager_operations
from hetero.plan.tiers import PREFILL_CHUNK, Layout, Request, value_width


def expected_prefill(
    inventory: Inventory,
    hardware: Hardware,
    request: Request,
    layout: Layout,
    tokens: int,
    *,
    fused: bool,
    gpu_share: float = 0.0,
) -> Prefill:
    """A prompt of ``tokens``. ``fused``: by fused layers, else by transformers' modules, with ``gpu_share``
    of the experts on the GPU."""
    if fused:
        best = prefill(inventory, hardware, request, layout, tokens)[0]
        count = len(chunks_of(tokens, layout.chunk)) * inventory.layers
        each = count * constants.PROMPT_LAYER_MS + inventory.layers * tokens * constants.PROMPT_TOKEN_US / 1e3
        each *= constants.PROMPT_ALL_HERE if layout.on_gpu >= 1.0 else 1.0
        host = Term(f"{count} layers of chunks, host", each)
        return Prefill(tokens, best.way, (*best.terms, host))
    chunks, done = [], 0
    for count in chunks_of(tokens, PREFILL_CHUNK):
        chunks.append(
            _by_modules(inventory, hardware, request, layout, tokens=count, before=done, gpu_share=gpu_share)
        )
        done += count
    return merged(tokens, "transformers' modules, experts on the CPU" if layout.gpu else "CPU", chunks)


def _by_modules(
    inventory: Inventory,
    hardware: Hardware,
    request: Request,
    layout: Layout,
    *,
    tokens: int,
    before: int,
    gpu_share: float,
) -> list[Term]:
    """A chunk after ``before`` tokens: one operation after the other."""
    work = work_of(inventory, request, tokens)
    width = value_width(layout.dense)
    gpu = hardware.gpu if layout.gpu is not None else None
    tflops = many_tflops(hardware, width) if gpu is None else gpu.bf16_tflops.value
    attention = attention_tflops(hardware, width) if gpu is None else tflops
    where = "CPU" if gpu is None else "GPU"
    seen = tokens * (before + tokens / 2)  # pairs of tokens that attend to each other
    attending = sum(2.0 * state.per_token * state.readers for state in inventory.states) * seen
    reading = hardware.ram.read_gb_s.value if gpu is None else gpu.read_gb_s.value
    kept = sum(
        s.read_bytes(before + tokens, width) * min(passes(s), constants.KEPT_COPY) for s in inventory.states
    )
    cold = 1.0 - gpu_share
    terms = [
        Term(f"dense layers, {where}", work.dense_ops / tflops / 1e9),
        Term(f"attention, {where}", attending / attention / 1e9),
        Term("keys and values, copied", kept / reading / 1e6, int(kept), reading),
        cpu_experts(hardware, work.touched * cold, work.expert_ops * cold, hardware.ram.read_gb_s.value),
        Term("eager operations", eager_operations(inventory) * hardware.cpu.op_us.value / 1e3),
    ]
    if gpu is not None and gpu_share:
        terms.append(Term("experts, GPU memory", work.expert_ops * gpu_share / tflops / 1e9))
    return terms + disk_experts(hardware, layout, work)
