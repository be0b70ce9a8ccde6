"""What runs take beside reading bytes. Steps of fused layers are from runs of three models on H200s with 14
threads of a 16-core Xeon, torch's products on the CPU from a core of a Xeon with AMX (docs/perf.md). Times in
microseconds unless they say otherwise.

Kernels, their cost and prompts: ``hetero bench synthetic:MODEL --vram 24GiB --threads 14 --routing
local,uniform --plan``, 2026-11-30, one run of each of qwen3.8-flash-next-125b, qwen3-next-80b-a3b and
qwen3-30b-a3b (benchmarks/results/bench-*-h200-2026-11-30*.json): three points for a kernel, four for
prompts."""

LEAD_US = 19.0
"""Of the CPU in a layer whose experts it computes: flags, quantising, barriers. From its work under two
routings: 62.6 us for 1.26 experts, 179 us for 4.65."""

OWN_US = 25.0
"""Of the GPU in a layer, besides reading experts: its kernels for them, once the bytes are there."""

LAYER_US = 12.0
"""Of a layer, that neither side explains: the later one's tail and the add behind it."""

MOVE_US = 13.0
"""By which an expert that is moved into GPU memory delays the layer after it: 75 us beside a dense part of
62."""

MOVED = 0.47
"""Experts that are moved, of those that local routing misses; at most one a layer."""

MODULE_KERNEL_US = 2.5
"""A kernel of transformers' modules in a graph: qwen3_moe on an H200, 8.8 ms for 3,243 and their weights."""

LINEAR_KERNELS, ATTENTION_KERNELS, HYPER_KERNELS, HEAD_KERNELS = 13, 8, 3, 3
"""Kernels of a fused layer's dense half: with a recurrence, with attention, and besides with
hyper-connections; and of the head. Counted in graphs: 387 of qwen3_moe (48 layers), 567 of qwen3_next, 704
of qwen4_exp."""

KERNEL = 2.0
"""A kernel of the dense half takes so many times what an empty one takes in a graph, besides its bytes: 1.71
(qwen3_moe), 1.96 (qwen3_next) and 2.34 (qwen4_exp), on an H200 where that is 1.2 us."""

ALL_HERE_US = 6.0
"""Of a layer whose experts all lie in GPU memory: telling the CPU, and the answer that waits already. 6.3 by
one run (qwen3_moe of 30B)."""

MISSED = 1.2
"""Misses of the cache's policy under local routing, of those of one that keeps what was used last: 1.13 to
1.30."""

EXPERT_SHARE = 0.82
"""Of plain reads beside PCIe, that the CPU's experts reach: 0.79, 0.84 and 0.96 on three hosts."""

PROMPT_LAYER_MS, PROMPT_TOKEN_US = 3.3, 0.65
"""Of a layer and a chunk of a prompt by fused layers, and of each of its tokens there: launches, the division
of experts and their order, which nothing overlaps. From 3.6 ms with 512 tokens (qwen4_exp) and 5.8 and 6.4
with 4096 (qwen3_next, qwen4_exp)."""

PROMPT_ALL_HERE = 0.7
"""Of that, where all experts lie in GPU memory: 4.2 ms with 4096 tokens, by one run (qwen3_moe of 30B)."""

DENSE_SHARE = 0.85
"""Of plain reads, that a product of one row by a matrix in float32 reaches: 0.62 to 0.99, by its size."""

PACKED_GB_S = 12.0
"""Of a core, that multiplies one row by a matrix of 16 bits which lies in its cache: each product packs or
widens the matrix anew, which memory waits for."""

MANY_ROWS_TILES_16, MANY_ROWS_BF16, MANY_ROWS_16 = 4.7, 0.73, 0.15
"""Products of many rows in bfloat16, of the same in float32: by tiles, by ``avx512_bf16``, and without
instructions for them, where torch gives 0.12 to 0.24. The first two on a core of a Xeon."""

ATTENTION, ATTENTION_TILES_16 = 0.75, 2.2
"""Attention of a prompt, of products of many rows in float32: without tiles, and in 16 bits with them."""

KEPT_COPY = 2.2
KEPT_READ = 0.55
"""Of the time that plain reads of keys and values take, on the CPU: the copy that a cache of transformers
makes of all of them to add a token, and each query head that reads them in its turn."""
