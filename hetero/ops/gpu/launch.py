"""The launches of an expert's matrices in GPU kernels, wherever its bytes lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from hetero.core import ActKind, ExpertSpec, InputError
from hetero.formats import ACT_GROUP, BLOCK_ROWS, GPU_FORMATS, Format, block_bytes, on_gpu
from hetero.ops.gpu import expert_kernels, grouped_kernels, hybrid_kernels
from hetero.ops.gpu.codings import BY_UNITS, CODINGS, UNIT
from hetero.ops.gpu.overlap import overlap
from hetero.ops.gpu.packed import capability, matrix_sizes, padded_rows, quantised_rows
from hetero.ops.gpu.tuning import STEPS_OF_WARP, UNITS_OF_WARP, Cut, cut_down, cut_up

INTEGERS_BY_UNITS = False
"""Whether few rows read int4 and int8 by units of 32 inputs, as other formats, and not by words: fewer
instructions, and larger pieces. Which is faster has not been measured."""

_KINDS = (ActKind.SILU, ActKind.GELU, ActKind.GELU_TANH, ActKind.RELU, ActKind.RELU2, ActKind.IDENTITY)
_WORDS_OF_WARP = 1024  # that a program brings at a time
_COMBINED = 1024  # columns of a program that adds pairs


class Tiling(NamedTuple):
    """Of a program over many rows: rows, blocks of 16 outputs, inputs at a time, and how it is compiled."""

    rows: int
    blocks: int
    depth: int
    warps: int
    stages: int


TILINGS = (
    Tiling(16, 4, 64, 4, 3),
    Tiling(32, 4, 64, 4, 3),
    Tiling(64, 4, 64, 4, 3),
    Tiling(128, 4, 64, 8, 3),
)
"""By ascending rows."""


def tiling(rows_per_expert: float) -> Tiling:
    """The smallest that holds the rows of most experts in one tile, else the largest."""
    return next((one for one in TILINGS if one.rows >= rows_per_expert), TILINGS[-1])


class Sorted(NamedTuple):
    """Pairs of many rows in the order of their experts, on the device."""

    order: Tensor  # int32 [pairs]: the pair at each sorted row
    places: Tensor  # int32 [pairs]: the sorted row of each pair
    tiles: Tensor  # int32 [tiles, 2]: first and last + 1 of a tile's sorted rows
    addresses: Tensor  # int64 [tiles]


def sorted_places(keys: Tensor) -> tuple[Tensor, Tensor]:
    """(order, places), both int32 [pairs], of pairs by ascending ``keys`` [pairs], which are below 2^15."""
    # A sort by digits takes time by the width of its keys.
    order = torch.argsort(keys.short(), stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return order.int(), places.int()


def check_format(spec: ExpertSpec, fmt: Format, device: object, down_format: Format | None = None) -> None:
    """Raises InputError for experts that the GPU's kernels cannot compute. ``down_format``: of down, if
    another."""
    for one in (fmt, down_format or fmt):
        if not on_gpu(one):
            raise InputError(
                f"experts on {device}: format {one} is not read there; valid: {', '.join(GPU_FORMATS)}"
            )
    if spec.staged:
        raise InputError(f"experts on {device}: this model's experts need steps between their projections")


class Later(NamedTuple):
    """Experts of a step that are not there yet, by pair: their ``addresses``, ``every`` one of the step, and
    what makes the current stream wait for them."""

    addresses: Tensor
    every: Tensor
    wait: Callable[[], None]


class ExpertLaunch:
    """Constants of the experts of one block, and the kernels over them. ``base``: any tensor of bytes on the
    device; experts come by address. ``down_format``: of down, if another."""

    def __init__(
        self, spec: ExpertSpec, fmt: Format, device: torch.device, down_format: Format | None = None
    ) -> None:
        self.spec, self.format, self.device = spec, fmt, device
        self.down_format = down = down_format or fmt
        mats, hidden, wide = 2 if spec.has_gate else 1, spec.hidden, spec.intermediate
        self.blocks_up, self.blocks_down = -(-wide // BLOCK_ROWS), -(-hidden // BLOCK_ROWS)
        down_at = mats * self.blocks_up * block_bytes(fmt, hidden)
        bias_at = down_at + self.blocks_down * block_bytes(down, wide)
        act, bias = spec.activation, {"HAS_BIAS": spec.has_bias}
        self.act = {"KIND": _KINDS.index(act.kind), "HAS_GATE": spec.has_gate}
        self.limits = (act.alpha, act.gate_max, act.up_limit, act.act_max, act.up_offset)
        after_up = bias_at + 4 * mats * wide
        self.up = matrix_sizes(fmt, wide, hidden) | bias | {"BIAS_AT": bias_at}
        self.down = matrix_sizes(down, hidden, wide) | bias | {"BIAS_AT": after_up, "BEGIN": down_at}
        behind = after_up + 4 * hidden if spec.has_bias else bias_at
        self.order_at = behind if fmt.ordered else 0
        self.takes_codes = fmt.rounds_activations and not fmt.ordered
        """Of ``few``: whether its rows are codes. Values are those of float formats, and those that each
        expert brings into an order of its own."""
        # The kernels' interpreter runs them where there is no GPU, and has neither dp4a nor bf16 products.
        self.twin = device.type == "cpu"

    def rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [T, hidden], contiguous, as ``few`` takes them."""
        if self.takes_codes:
            return quantised_rows(self.format, x, self.up["K"])
        values = padded_rows(x, self.up["K"])
        return values, values

    def few(
        self,
        base: Tensor,
        rows: tuple[Tensor, Tensor],
        addresses: Tensor,
        weights: Tensor,
        *,
        sources: Tensor | None = None,
        later: Later | None = None,
    ) -> Tensor:
        """Every pair by itself, at the speed of memory: float32 [T, hidden], the weighted sum of the pairs
        that have an address (``addresses`` int64 and ``weights`` float32 [T, k], contiguous). ``sources``:
        host addresses from which experts are brought to theirs on the way, see ``hybrid_kernels.gate_up``.
        ``later``: experts that come after these.
        """
        tokens, slots = addresses.shape
        asm, of_up, of_down = {"ASM": capability(self.device)}, self.format, self.down_format
        (code_up, unit_up), (code_down, unit_down) = _reading(of_up), _reading(of_down)
        cut = cut_up(self.up["K"], of_up.code_bits, unit_up)
        up: dict[str, Any] = self.act | self.up | asm | code_up | _cut(cut, unit_up)
        cut = cut_down(self.down["K"], of_down.code_bits, unit_down, slots)
        down: dict[str, Any] = self.down | asm | code_down | _cut(cut, unit_down)
        by_pairs = 1 if self.order_at else slots  # of whose rows each has one
        # Rows that nobody computes are read by nobody, but numpy, which interprets kernels, warns of them.
        empty = torch.zeros if self.twin else torch.empty
        h = empty(tokens * slots, self.spec.intermediate, device=self.device)
        out = torch.empty(tokens, self.spec.hidden, device=self.device)
        grid_up, grid_down = (self.blocks_up, tokens * slots), (self.blocks_down, tokens)
        # What is read in place in host memory is read once and no sooner than it is needed. A single row's
        # experts are all brought, but for those beyond the slots that are kept free.
        near = (sources is not None or later is not None) and tokens == 1
        if sources is None or later is not None:
            for given in (addresses,) if later is None else (addresses, later.addresses):
                if later is not None and given is later.addresses:
                    later.wait()
                mine = self._in_order(base, rows[0], given) if self.order_at else rows
                expert_kernels.gate_up[grid_up](
                    base, *mine, given, h, by_pairs, *self.limits, NEAR=near, **up
                )
        else:
            if self.order_at:  # it lies apart from what a program brings
                raise ValueError("experts with an order of their own are not brought on the way")
            hybrid_kernels.gate_up[grid_up](
                base, *rows, addresses, sources, h, slots, *self.limits, **up,
                BEGIN=self.down["BEGIN"], REST=self.blocks_down * self.down["BLOCK_BYTES"],
                WORDS=_WORDS_OF_WARP * up["num_warps"], NEAR=near,
            )  # fmt: skip
        hq = quantised_rows(self.down_format, h, self.down["K"])
        down |= overlap(self.device) | {"NEAR": near}
        every = addresses if later is None else later.every
        expert_kernels.down[grid_down](base, *hq, every, weights, out, slots, **down)
        return out

    def _in_order(self, base: Tensor, x: Tensor, addresses: Tensor) -> tuple[Tensor, Tensor]:
        """Of every pair the codes and scales of its token's values, in the order of its expert."""
        pairs, k_pad = addresses.numel(), self.up["K"]
        empty = torch.zeros if self.twin else torch.empty
        q = empty(pairs, k_pad, dtype=torch.int8, device=self.device)
        scales = empty(pairs, k_pad // ACT_GROUP, dtype=torch.float32, device=self.device)
        expert_kernels.quantise_pairs[(pairs, -(-k_pad // ACT_GROUP // 4))](
            base, x, addresses, q, scales, addresses.shape[1], x.stride(0),
            INPUTS=self.spec.hidden, K=k_pad, ORDER_AT=self.order_at, GROUPS=4,
        )  # fmt: skip
        return q.view(torch.int32), scales

    def many(
        self,
        base: Tensor,
        x: Tensor,
        weights: Tensor,
        pairs: Sorted,
        *,
        rows: tuple[int, int],
        tiles: tuple[int, int],
        out: Tensor,
        room: tuple[Tensor, Tensor],
        shape: Tiling,
        first: bool,
    ) -> None:
        """Pairs of the sorted rows from ``rows[0]`` to ``rows[1]``, whose tiles ``pairs`` has, by tensor
        cores on decoded weights: added to ``out`` float32 [T, hidden], which ``first`` overwrites. x bf16 [T,
        hidden], weights float32 [T, k], both contiguous. ``room``: h bf16 and y float32 of so many rows at
        least, see ``rooms``."""
        (tokens, slots), (h, y), (begin, end) = weights.shape, room, rows
        common: dict[str, Any] = {
            "TILE": shape.rows, "BLOCKS": shape.blocks, "DEPTH": shape.depth, "TWIN": self.twin,
            "num_warps": shape.warps,
        }  # fmt: skip
        count = tiles[1] - tiles[0]
        if count:
            grouped_kernels.gate_up_rows[(-(-self.blocks_up // shape.blocks), count)](
                base, x, pairs.order, pairs.tiles, pairs.addresses, h, slots, begin, tiles[0], *self.limits,
                INPUTS=self.spec.hidden, ORDER_AT=self.order_at, num_stages=_stages(self.format, shape),
                **self.act, **self.up, **common,
            )  # fmt: skip
            grouped_kernels.down_rows[(-(-self.blocks_down // shape.blocks), count)](
                base, h, pairs.order, pairs.tiles, pairs.addresses, weights, y, begin, tiles[0],
                INPUTS=self.spec.intermediate, num_stages=_stages(self.down_format, shape),
                **self.down, **common,
            )  # fmt: skip
        elif not first:
            return
        width = min(_COMBINED, triton.next_power_of_2(self.spec.hidden))
        grouped_kernels.combine[(tokens, -(-self.spec.hidden // width))](
            y, pairs.places, out, slots, begin, end if count else begin,
            N=self.spec.hidden, WIDTH=width, FIRST=first,
        )  # fmt: skip

    def rooms(self, rows: int) -> tuple[Tensor, Tensor]:
        """What ``many`` needs for so many sorted rows at a time."""
        return (
            torch.empty(rows, self.spec.intermediate, dtype=torch.bfloat16, device=self.device),
            torch.empty(rows, self.spec.hidden, dtype=torch.float32, device=self.device),
        )


def _stages(fmt: Format, shape: Tiling) -> int:
    """With more on its way than codes and one scale, a third stage would not fit the shared memory of GPUs
    that have 100 KB of it."""
    return shape.stages if fmt.name in ("bf16", "int8", "int4") else min(shape.stages, 2)


def _reading(fmt: Format) -> tuple[dict[str, int], int]:
    """By which number kernels for few rows know a format, and how many inputs they read at once."""
    if INTEGERS_BY_UNITS and fmt.name in BY_UNITS:
        return {"FORMAT": BY_UNITS[fmt.name]}, UNIT
    return {"FORMAT": fmt.code}, CODINGS[fmt.name].unit


def _cut(cut: Cut, unit: int) -> dict[str, int]:
    each = UNITS_OF_WARP if unit == UNIT else STEPS_OF_WARP
    return {"STEPS": each * cut.warps, "TILES": cut.tiles, "num_warps": cut.warps}
