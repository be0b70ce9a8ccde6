"""What runs take beside reading bytes. Steps of fused layers are from runs of a 125B model on an H200 with 14
threads of a 16-core Xeon, torch's products on the CPU from a core of a Xeon with AMX (docs/perf.md). Times in
microseconds unless they say otherwise."""

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

BETWEEN_MS = 0.75
"""Between the end of a step and the beginning of the next: the host reads a token, fills and launches."""

KERNEL = 1.2
"""A kernel of the dense half takes so many times what an empty one takes in a graph."""

MISSED = 1.2
"""Misses of the cache's policy under local routing, of those of one that keeps what was used last: 1.13 to
1.30."""

EXPERT_SHARE = 0.82
"""Of plain reads beside PCIe, that the CPU's experts reach: 0.79, 0.84 and 0.96 on three hosts."""

PROMPT_LAYER_MS = 5.8
"""Of a layer and a chunk of a prompt, by fused layers: launches and the division of experts, which nothing
overlaps. 6.5 ms with chunks of 512 tokens, 5.2 with 4096."""

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
