"""kt-kernel's expert operator over the layers of a comparison, through its compiled extension."""

from __future__ import annotations

import common
import kt_kernel
import torch
from kt_kernel import kt_kernel_ext as ext

spec = common.job()
torch.set_num_threads(spec.threads)
CLASS = {"bf16": "AMXBF16_MOE", "int8": "AMXInt8_MOE", "int4": "AMXInt4_MOE", "int4_1": "AMXInt4_1_MOE"}[
    spec.format
]
BITS = {"bf16": 16, "int8": 8, "int4": 4, "int4_1": 4}[spec.format]
pool_config = ext.WorkerPoolConfig()
pool_config.subpool_count = 1
pool_config.subpool_numa_map = [0]
pool_config.subpool_thread_count = [spec.threads]
pool = ext.CPUInfer(pool_config)
base = common.weights(spec)
stacked = {
    part: torch.stack([torch.from_numpy(w[part]).bfloat16() for w in base])
    .repeat(-(-spec.experts // common.DISTINCT), 1, 1)[: spec.experts]
    .contiguous()
    for part in ("gate", "up", "down")
}
order = torch.arange(spec.experts)
layers = []
for number in range(spec.layers):
    config = ext.moe.MOEConfig(spec.experts, spec.top_k, spec.hidden, spec.intermediate, 0)
    config.layer_idx = number
    config.max_len = max(1024, spec.tokens)
    config.pool = pool.backend_
    for part, tensor in stacked.items():
        setattr(config, f"{part}_proj", tensor.data_ptr())
        setattr(config, f"{part}_scale", 0)
    layer = getattr(ext.moe, CLASS)(config)
    pool.submit(layer.load_weights_task(order.data_ptr()))
    pool.sync()
    layers.append(layer)
stacked.clear()


class Step:
    """One call's tensors; they must live while it runs."""

    def __init__(self, tokens: int, seed: int) -> None:
        x, ids, share = common.step(spec, tokens, seed)
        self.x = torch.from_numpy(x).bfloat16()
        self.ids, self.share = torch.from_numpy(ids), torch.from_numpy(share)
        self.out = torch.full((tokens, spec.hidden), float("nan"), dtype=torch.bfloat16)
        self.count = torch.tensor([tokens], dtype=torch.int32)

    def run(self, layer: object) -> None:
        pointers = (t.data_ptr() for t in (self.ids, self.share, self.x, self.out))
        task = layer.forward_task(self.count.data_ptr(), spec.top_k, *pointers, False)  # type: ignore[attr-defined]
        pool.submit(task)
        pool.sync()


check = Step(2, 7)
check.run(layers[0])
wrong = common.error(check.out.double().numpy(), common.exact(base, *common.step(spec, 2, 7)))
one = [Step(1, i) for i in range(common.STEPS)]
many = [Step(spec.tokens, i) for i in range(2)]


def decode(n: int) -> int:
    for i, layer in enumerate(layers):
        one[(n * len(layers) + i) % len(one)].run(layer)
    return len(layers)


def prefill(n: int) -> int:
    many[n % len(many)].run(layers[n % len(layers)])
    return 1


common.serve(
    {
        "isa": kt_kernel.__cpu_variant__,
        "error": wrong,
        "expert_bytes": 3 * spec.hidden * spec.intermediate * BITS / 8,
    },
    decode,
    prefill,
    spec,
)
