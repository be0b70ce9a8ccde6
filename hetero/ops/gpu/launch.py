"""The launches of an expert's matrices in GPU kernels, wherever its bytes lie."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hetero.core import ActKind, ExpertSpec, InputError
from hetero.formats import BLOCK_ROWS, GPU_FORMATS, Format, block_bytes
from hetero.ops.gpu import expert_kernels, hybrid_kernels
from hetero.ops.gpu.packed import STEPS, matrix_sizes, quantised_rows

_KINDS = (ActKind.SILU, ActKind.GELU, ActKind.GELU_TANH, ActKind.RELU, ActKind.RELU2, ActKind.IDENTITY)
_WORDS = 4096  # that a program brings at a time


def check_format(spec: ExpertSpec, fmt: Format, device: object) -> None:
    """Raises InputError for experts that the GPU's kernels cannot compute."""
    if fmt.name not in GPU_FORMATS or fmt.blocks:
        raise InputError(
            f"experts on {device}: format {fmt} is not read there; valid: {', '.join(GPU_FORMATS)}"
        )
    if spec.staged:
        raise InputError(f"experts on {device}: this model's experts need steps between their projections")


class ExpertLaunch:
    """Constants of the experts of one block, and the kernels over them. ``base``: any tensor of bytes on the
    device; experts come by address."""

    def __init__(self, spec: ExpertSpec, fmt: Format, device: torch.device) -> None:
        self.spec, self.format, self.device = spec, fmt, device
        mats, hidden, wide = 2 if spec.has_gate else 1, spec.hidden, spec.intermediate
        self.blocks_up, self.blocks_down = -(-wide // BLOCK_ROWS), -(-hidden // BLOCK_ROWS)
        down_at = mats * self.blocks_up * block_bytes(fmt, hidden)
        bias_at = down_at + self.blocks_down * block_bytes(fmt, wide)
        act, bias = spec.activation, {"HAS_BIAS": spec.has_bias}
        self.act = {"KIND": _KINDS.index(act.kind), "HAS_GATE": spec.has_gate}
        self.limits = (act.alpha, act.gate_max, act.up_limit, act.act_max, act.up_offset)
        after_up = bias_at + 4 * mats * wide
        self.up = matrix_sizes(fmt, wide, hidden) | bias | {"BIAS_AT": bias_at}
        self.down = matrix_sizes(fmt, hidden, wide) | bias | {"BIAS_AT": after_up, "BEGIN": down_at}
        # The kernels' interpreter runs them where there is no GPU, and has neither dp4a nor bf16 products.
        self.twin = device.type == "cpu"

    def rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [T, hidden], contiguous, as ``few`` takes them."""
        return quantised_rows(self.format, x, self.up["K"])

    def few(
        self,
        base: Tensor,
        rows: tuple[Tensor, Tensor],
        addresses: Tensor,
        weights: Tensor,
        sources: Tensor | None = None,
    ) -> Tensor:
        """Every pair by itself, at the speed of memory: float32 [T, hidden], the weighted sum of the pairs
        that have an address (``addresses`` int64 and ``weights`` float32 [T, k], contiguous). ``sources``:
        host addresses from which experts are brought to theirs on the way, see ``hybrid_kernels.gate_up``.
        """
        tokens, slots = addresses.shape
        common: dict[str, Any] = {"STEPS": STEPS, "ASM": not self.twin}
        h = torch.empty(tokens * slots, self.spec.intermediate, device=self.device)
        out = torch.empty(tokens, self.spec.hidden, device=self.device)
        grid_up, grid_down = (self.blocks_up, tokens * slots), (self.blocks_down, tokens)
        if sources is None:
            expert_kernels.gate_up[grid_up](
                base, *rows, addresses, h, slots, *self.limits, **self.act, **self.up, **common
            )
            hq = quantised_rows(self.format, h, self.down["K"])
            expert_kernels.down[grid_down](base, *hq, addresses, weights, out, slots, **self.down, **common)
            return out
        common["WORDS"] = _WORDS
        hybrid_kernels.gate_up[grid_up](
            base, *rows, addresses, sources, h, slots, *self.limits, **self.act, **self.up, **common
        )
        hq = quantised_rows(self.format, h, self.down["K"])
        hybrid_kernels.down[grid_down](
            base, *hq, addresses, sources, weights, out, slots, **self.down, **common
        )
        return out
