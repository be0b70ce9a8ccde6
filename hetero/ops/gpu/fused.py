"""Building blocks of dense decode steps: prologues that make rows, and the projection that takes them.

All are for few rows T (16 at most, though nothing breaks beyond), are one kernel each, allocate only by
shapes and never wait for the device: they can be captured. Tensors may be slices: the last dimension must be
contiguous, rows may be any distance apart.

A prologue is told the format of the matrix that its rows go to. For int8 and int4 rows are int8 codes in
groups of 32, as experts take them; for bf16, f32 and fp8 they are values.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from hetero.formats import ACT_GROUP, Format, padded_k
from hetero.ops.gpu import expert_kernels, fused_kernels, linear_kernels
from hetero.ops.gpu.matrix import PackedMatrix
from hetero.ops.gpu.overlap import overlap
from hetero.ops.gpu.packed import capability, is_roomy
from hetero.ops.gpu.tuning import DEPTH_OF_WARP, STEPS_OF_WARP, Cut, cut_of

_MOST_ROWS = 4

__all__ = [
    "Normed", "PackedMatrix", "Rows", "empty_rows", "gated_norm_rows", "norm_rows", "plain_rows", "project",
    "sigmoid_gated_rows", "swiglu_rows",
]  # fmt: skip


class Rows(NamedTuple):
    """Rows of activations as kernels read them; of use to every matrix of the same kind and k."""

    q: Tensor
    """int8 codes [T, k_pad], zeros beyond k, or the values [T, k]."""
    scales: Tensor
    """Of codes: float32 [T, k_pad / 32]. Else the values once more."""


class Normed(NamedTuple):
    """What ``norm_rows`` gives."""

    rows: Rows
    x: Tensor
    """The normed values [T, k] in the dtype of its x, of which ``rows`` are made."""
    residual: Tensor
    """x plus what was added, in the same dtype; x itself where nothing was."""


def plain_rows(fmt: Format, x: Tensor) -> Rows:
    """Rows of x [T, k] as it is; no kernel where values are taken."""
    if not fmt.rounds_activations:
        return Rows(x, x)
    rows, k = x.shape
    made, k_pad = empty_rows(fmt, rows, k, x.dtype, x.device)
    expert_kernels.quantise_rows[(rows, -(-k_pad // ACT_GROUP // 4))](
        x, made.q, made.scales, k, k_pad, x.stride(0), GROUPS=4, num_warps=1, **overlap(x.device)
    )
    return made


def norm_rows(  # noqa: PLR0917
    fmt: Format,
    x: Tensor,
    weight: Tensor,
    eps: float,
    offset: float = 0.0,
    add: Tensor | None = None,
    *,
    shared: Tensor | None = None,
    gate: Tensor | None = None,
) -> Normed:
    """The root mean square norm of x + add + shared * sigmoid(gate), times ``offset + weight``.

    x, add, shared [T, k], each of any float dtype; gate [T] or [T, 1], of ``shared`` alone, which counts
    whole without it. The sum is rounded to the dtype of x, and is the new residual.
    """
    rows, k = x.shape
    made, k_pad = empty_rows(fmt, rows, k, x.dtype, x.device)
    normed = torch.empty(rows, k, dtype=x.dtype, device=x.device)
    sums = add is not None or shared is not None
    residual = torch.empty_like(normed) if sums else x
    groups = triton.next_power_of_2(-(-k_pad // ACT_GROUP))
    parts = [x if part is None else part for part in (add, shared, gate)]
    fused_kernels.norm_rows[(rows,)](
        x, *parts, weight, residual, normed, made.q, made.scales, eps, offset,
        x.stride(0), *(part.stride(0) for part in parts),
        K=k, K_PAD=k_pad, GROUPS=groups, HAS_ADD=add is not None, HAS_SHARED=shared is not None,
        HAS_GATE=gate is not None, QUANTISED=fmt.rounds_activations, num_warps=_warps(groups),
        **overlap(x.device),
    )  # fmt: skip
    return Normed(made if fmt.rounds_activations else Rows(normed, normed), normed, residual)


def swiglu_rows(fmt: Format, gate_up: Tensor, kind: int = expert_kernels.SILU.value) -> Rows:
    """Rows [T, I] of act(gate) * up, of gate_up [T, 2 * I]; ``kind``: a number of ``expert_kernels``."""
    rows, k = gate_up.shape[0], gate_up.shape[1] // 2
    made, k_pad = empty_rows(fmt, rows, k, gate_up.dtype, gate_up.device)
    fused_kernels.swiglu_rows[(rows, -(-k_pad // ACT_GROUP // 4))](
        gate_up, made.q, made.q, made.scales, gate_up.stride(0),
        K=k, K_PAD=k_pad, GROUPS=4, KIND=kind, QUANTISED=fmt.rounds_activations, num_warps=1,
        **overlap(gate_up.device),
    )  # fmt: skip
    return made


def gated_norm_rows(
    fmt: Format, y: Tensor, z: Tensor, weight: Tensor, eps: float, *, silu: bool = True
) -> Rows:
    """Rows [T, heads * dim] of y [T, heads, dim], normed by the root mean square of each head, times
    ``weight`` [dim], times silu(z), z [T, heads * dim]; not ``silu``: times sigmoid(z)."""
    heads = torch.unflatten(z, 1, y.shape[1:])
    return _gated(fmt, y, heads, silu=silu, weight=weight, eps=eps)


def sigmoid_gated_rows(fmt: Format, y: Tensor, gate: Tensor) -> Rows:
    """Rows [T, heads * dim] of y times sigmoid(gate), both [T, heads, dim]; of the gate heads may be any
    distance apart, too."""
    return _gated(fmt, y, gate, silu=False)


def _gated(
    fmt: Format, y: Tensor, gate: Tensor, *, silu: bool, weight: Tensor | None = None, eps: float = 0.0
) -> Rows:
    rows, heads, dim = y.shape
    # Where a head does not end with a group its rows are quantised in a second kernel.
    whole = fmt.rounds_activations and dim % ACT_GROUP == 0
    k_pad = padded_k(fmt, heads * dim)
    made = (
        empty_rows(fmt, rows, heads * dim, y.dtype, y.device)[0]
        if whole or not fmt.rounds_activations
        else None
    )
    values = torch.empty(rows, heads * dim, dtype=y.dtype, device=y.device) if made is None else made.q
    extra = -(-(k_pad - heads * dim) // dim) if whole else 0
    width = triton.next_power_of_2(max(dim, ACT_GROUP))
    target = Rows(values, values) if made is None else made
    fused_kernels.gated_rows[(heads + extra, rows)](
        y, gate, y if weight is None else weight, values, *target, eps,
        y.stride(0), gate.stride(0), gate.stride(1),
        HEADS=heads, DIM=dim, WIDTH=width, K_PAD=k_pad, NORM=weight is not None, SILU=silu, QUANTISED=whole,
        num_warps=_warps(width // ACT_GROUP), **overlap(y.device),
    )  # fmt: skip
    return plain_rows(fmt, values) if made is None else made


def project(
    rows: Rows, m: PackedMatrix, out_dtype: torch.dtype = torch.bfloat16, *, cut: Cut | None = None
) -> Tensor:
    """[T, n] in ``out_dtype``: the products of rows and a matrix, plus its bias; sums are float32, the
    same in every run, and up to their order for whatever other rows there are. ``cut``: how, for
    measurements.

    Raises ValueError where the rows were not made for this matrix.
    """
    count, sizes = rows.q.shape[0], m.sizes
    codes = m.format.rounds_activations
    if rows.q.shape[1] != (sizes["K"] if codes else m.k) or (rows.q.dtype == torch.int8) != codes:
        given = f"rows {list(rows.q.shape)} {rows.q.dtype}"
        raise ValueError(f"{given} for a matrix of {m.k} inputs in {m.format}")
    out = torch.empty(count, m.n, dtype=out_dtype, device=rows.q.device)
    bias = out if m.bias is None else m.bias
    asm = capability(out.device)
    if cut is None:
        in_bf16 = rows.q.dtype == torch.bfloat16 and m.format.name in ("bf16", "fp8")
        products = codes or in_bf16
        cut = cut_of(m.n, sizes["K"], m.format.code_bits, rows=count, products=products, roomy=is_roomy(asm))
        if not (out.is_cuda or m.format.quantised or cut.stages):
            cut = Cut(1, 1, 64)  # the interpreter takes long for each program
    few = (8 if count <= 8 else 16) if cut.stages else min(triton.next_power_of_2(count), _MOST_ROWS)
    grid = (-(-m.n // cut.outputs), -(-count // few))
    common: dict[str, Any] = {"HAS_BIAS": m.bias is not None, "COUNT": few, "num_warps": cut.warps, **sizes}
    common |= overlap(out.device)
    values: dict[str, Any] = {"INPUTS": m.k, "ASM": asm}
    if m.format.quantised and not codes and cut.stages:
        linear_kernels.project_fp8_rows[grid](
            m.packed, rows.q, bias, out, count, rows.q.stride(0),
            PARTS=max(cut.tiles * ACT_GROUP // m.format.group, 1), STAGES=cut.stages, **values, **common,
        )  # fmt: skip
    elif m.format.quantised and not codes:
        linear_kernels.project_fp8[grid](
            m.packed, rows.q, bias, out, count, rows.q.stride(0),
            STEPS=STEPS_OF_WARP * cut.warps, TILES=cut.tiles, **values, **common,
        )  # fmt: skip
    elif m.format.quantised and cut.stages:
        linear_kernels.project_packed_rows[grid](
            m.packed, rows.q, rows.scales, bias, out, count, GROUPS=cut.tiles, STAGES=cut.stages,
            ASM=out.is_cuda, **common,
        )  # fmt: skip
    elif m.format.quantised:
        linear_kernels.project_packed[grid](
            m.packed, rows.q.view(torch.int32), rows.scales, bias, out, count,
            STEPS=STEPS_OF_WARP * cut.warps, TILES=cut.tiles, ASM=asm, **common,
        )  # fmt: skip
    elif cut.stages:
        linear_kernels.project_plain_rows[grid](
            m.packed, rows.q, bias, out, count, rows.q.stride(0), PARTS=cut.tiles, STAGES=cut.stages,
            TWIN=not out.is_cuda, **common,
        )  # fmt: skip
    else:
        linear_kernels.project_plain[grid](
            m.packed, rows.q, bias, out, count, rows.q.stride(0), OUTPUTS=cut.outputs,
            DEPTH=DEPTH_OF_WARP * cut.warps, TILES=cut.tiles, **common,
        )  # fmt: skip
    return out


def empty_rows(fmt: Format, rows: int, k: int, dtype: torch.dtype, device: torch.device) -> tuple[Rows, int]:
    """(room for rows of k inputs, k_pad); ``dtype``: of values."""
    if not fmt.rounds_activations:
        values = torch.empty(rows, k, dtype=dtype, device=device)
        return Rows(values, values), k
    k_pad = padded_k(fmt, k)
    q = torch.empty(rows, k_pad, dtype=torch.int8, device=device)
    return Rows(q, torch.empty(rows, k_pad // ACT_GROUP, dtype=torch.float32, device=device)), k_pad


def _warps(groups: int) -> int:
    """Warps of a program over so many groups of 32."""
    return min(max(groups // 8, 1), 16)
