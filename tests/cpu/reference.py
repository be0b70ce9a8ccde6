"""The operator in torch and float64, from the packed bytes as the layout describes them."""

from __future__ import annotations

import ctypes
import math

import numpy as np
import torch
from torch import Tensor

from hetero.core import Activation, ActKind, ExpertSpec
from hetero.cpu import CpuExperts
from hetero.formats import BLOCK_ROWS, FIXED_GROUPS, Format, block_bytes, padded_k
from hetero.quant.pack import Codes, dequantise, pack_codes
from tests.cpu.kernel_runner import random_codes, random_scales

Weights = dict[tuple[int, str], Tensor]


def random_weights(spec: ExpertSpec, generator: torch.Generator, scale: float = 1.0) -> Weights:
    """Gaussian float32 parts; matrices divided by sqrt(inputs), so that values stay near one."""
    weights: Weights = {}
    for e in range(spec.num_experts):
        for part in (["gate"] if spec.has_gate else []) + ["up", "down"]:
            n, k = (spec.hidden, spec.intermediate) if part == "down" else (spec.intermediate, spec.hidden)
            weights[e, part] = torch.randn(n, k, generator=generator) * (scale / math.sqrt(k))
            if spec.has_bias:
                weights[e, f"{part}_bias"] = torch.randn(n, generator=generator)
    return weights


def fill(experts: CpuExperts, weights: Weights) -> CpuExperts:
    """Put every part; returns the operator. A format that only keeps values gets random codes instead, with
    scales that make values as large as ``random_weights``."""
    for number, ((expert, part), tensor) in enumerate(weights.items()):
        fmt = experts.format_of(part)  # type: ignore[arg-type]
        if fmt.kept_only:
            codes = random_kept(fmt, *tensor.shape, torch.Generator().manual_seed(number))
            experts.put_codes(expert, part, *codes)  # type: ignore[arg-type]
        else:
            experts.put(expert, part, tensor)  # type: ignore[arg-type]
    assert experts.missing() == []
    return experts


def random_kept(fmt: Format, n: int, k: int, generator: torch.Generator) -> Codes:
    """Codes of a format that only keeps values; the values are about as large as 1 / sqrt(k)."""
    codes = random_codes(fmt, n, k, generator)
    scales, extra = random_scales(fmt, n, k, generator)
    size = dequantise(fmt, pack_codes(fmt, codes, scales, extra), n, k).std() * math.sqrt(k)
    scaled = [
        part / size.half() if part is not None and part.dtype == torch.float16 else part
        for part in (scales, extra)
    ]
    return Codes(codes, scaled[0] if scaled[0] is not None else scales, scaled[1])


def random_routing(
    spec: ExpertSpec, tokens: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, hidden], ids [T, top_k] without repeats in a token, weights [T, top_k]."""
    x = torch.randn(tokens, spec.hidden, generator=generator)
    scores = torch.rand(tokens, spec.num_experts, generator=generator)
    ids = scores.topk(spec.top_k, dim=-1).indices
    return x, ids, torch.rand(tokens, spec.top_k, generator=generator) + 0.1


def decoded(experts: CpuExperts) -> Weights:
    """Float64 parts read back from the arena by the layout of cpu_ext/kernels.h."""
    spec, raw = experts.spec, experts._experts
    fmt, down_format = experts.format, experts.down_format
    memory = np.ctypeslib.as_array(
        (ctypes.c_uint8 * (spec.num_experts * raw.stride)).from_address(raw.address)
    )
    weights: Weights = {}
    mats = 2 if spec.has_gate else 1
    up_block, down_block = block_bytes(fmt, spec.hidden), block_bytes(down_format, spec.intermediate)
    up_blocks, down_blocks = -(-spec.intermediate // BLOCK_ROWS), -(-spec.hidden // BLOCK_ROWS)
    for e in range(spec.num_experts):
        expert = memory[e * raw.stride : (e + 1) * raw.stride]
        front = expert[: mats * up_blocks * up_block].reshape(up_blocks, mats, up_block)
        rest = expert[mats * up_blocks * up_block :]
        for i, part in enumerate(["gate", "up"][2 - mats :]):
            weights[e, part] = _matrix(fmt, front[:, i], spec.intermediate, spec.hidden)
        down = rest[: down_blocks * down_block].reshape(down_blocks, down_block)
        weights[e, "down"] = _matrix(down_format, down, spec.hidden, spec.intermediate)
        if spec.has_bias:
            at = down_blocks * down_block
            for part in ["gate", "up", "down"][2 - mats :]:
                n = spec.hidden if part == "down" else spec.intermediate
                values = rest[at : at + 4 * n].view(np.float32).astype(np.float64)
                weights[e, f"{part}_bias"] = torch.from_numpy(values)
                at += 4 * n
    return weights


def _matrix(fmt: Format, blocks: np.ndarray, n: int, k: int) -> Tensor:
    """Decode packed blocks [blocks, bytes] to float64 [n, k]."""
    count, k_pad = blocks.shape[0], padded_k(fmt, k)
    blocks = np.ascontiguousarray(blocks)
    if fmt.kept_only:  # tests/cpu/test_pack.py computes these values apart
        return dequantise(fmt, torch.from_numpy(blocks.reshape(-1)), n, k).double()
    if fmt.name == "f32":
        values = blocks.view(np.float32)[:, : k_pad * 16].reshape(count, k_pad, 16).transpose(0, 2, 1)
    elif fmt.name == "bf16":
        wide = blocks.view(np.uint16)[:, : k_pad * 16].astype(np.uint32) << 16
        values = wide.view(np.float32).reshape(count, k_pad // 2, 16, 2).transpose(0, 2, 1, 3)
    else:
        values = _codes(fmt, blocks, count, k_pad)
    return torch.from_numpy(values.reshape(count * 16, k_pad).astype(np.float64)[:n, :k].copy())


def _codes(fmt: Format, blocks: np.ndarray, count: int, k_pad: int) -> np.ndarray:
    """Values [count * 16, k_pad] of blocks of codes."""
    size = k_pad * 16 if fmt.name in {"int8", "fp8"} else k_pad * 8
    raw = blocks[:, :size]
    if fmt.name in {"int8", "fp8"}:
        codes = raw.reshape(count, k_pad // 4, 16, 4).transpose(0, 2, 1, 3)
    else:
        steps = raw.reshape(count, k_pad // 8, 16, 4).transpose(0, 2, 1, 3)
        codes = np.concatenate([steps & 15, steps >> 4], axis=-1)
    groups = k_pad // fmt.group
    if fmt.name in FIXED_GROUPS:
        return _small_floats(fmt, blocks, codes, size)
    scales = blocks[:, size : size + groups * 32].copy().view(np.float16).reshape(count, groups, 16)
    scale = scales.astype(np.float64).transpose(0, 2, 1)[..., None]
    grouped = codes.reshape(count, 16, groups, fmt.group).astype(np.float64)
    if fmt.name == "int4a":
        at = size + groups * 32
        minima = blocks[:, at : at + groups * 32].copy().view(np.float16).reshape(count, groups, 16)
        return grouped * scale + minima.astype(np.float64).transpose(0, 2, 1)[..., None]
    return (grouped - (128 if fmt.name == "int8" else 8)) * scale


def _small_floats(fmt: Format, blocks: np.ndarray, codes: np.ndarray, size: int) -> np.ndarray:
    """fp8, mxfp4 and nvfp4: codes [count, 16, steps, ...], scales from byte ``size`` of each block on."""
    count = blocks.shape[0]
    grouped = torch.from_numpy(codes.reshape(count, 16, -1, fmt.group).copy())
    groups = grouped.shape[2]
    if fmt.name == "fp8":
        scale = blocks[:, size : size + 4 * groups].copy().view(np.float32).astype(np.float64)
        return grouped.view(torch.float8_e4m3fn).double().numpy() * scale[:, None, :, None]
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    numbers = np.concatenate([table, -table])[grouped.numpy()]
    end = size + 16 * groups
    raw = blocks[:, size:end].reshape(count, groups, 16).transpose(0, 2, 1)
    if fmt.name == "mxfp4":
        return numbers * np.ldexp(1.0, raw.astype(int) - 127)[..., None]
    matrix = blocks[:, end : end + 4].copy().view(np.float32).astype(np.float64)
    scales = torch.from_numpy(raw.copy()).view(torch.float8_e4m3fn).double().numpy()
    return numbers * (scales * matrix[:, :, None])[..., None]


def quantised_rows(x: Tensor) -> Tensor:
    """float64 values of rows [..., K] after int8 quantisation in groups of 32, rounded in float32."""
    k = x.shape[-1]
    padded = torch.nn.functional.pad(x.float(), (0, -k % 32)).unflatten(-1, (-1, 32))
    amax = padded.abs().amax(-1, keepdim=True)
    codes = torch.where(amax > 0, torch.round(padded * (127 / amax)), 0)
    return (codes.double() * (amax / 127).double()).flatten(-2)[..., :k]


def activate(act: Activation, gate: Tensor, up: Tensor, has_gate: bool) -> Tensor:
    """h of cpu_ext/kernels.h in the tensors' own precision."""
    g = (gate if has_gate else up).clamp(max=act.gate_max)
    value = {
        ActKind.SILU: lambda: g * torch.sigmoid(act.alpha * g),
        ActKind.GELU: lambda: torch.nn.functional.gelu(g),
        ActKind.GELU_TANH: lambda: torch.nn.functional.gelu(g, approximate="tanh"),
        ActKind.RELU: g.relu,
        ActKind.RELU2: lambda: g.relu() ** 2,
        ActKind.IDENTITY: lambda: g,
    }[act.kind]().clamp(max=act.act_max)
    return value * (up.clamp(-act.up_limit, act.up_limit) + act.up_offset) if has_gate else value


def operator(
    spec: ExpertSpec,
    weights: Weights,
    x: Tensor,
    ids: Tensor,
    w: Tensor,
    *,
    quantised: bool,
    down_quantised: bool | None = None,
) -> Tensor:
    """float64 [T, hidden]; ``quantised`` rounds x and h to int8 as the operator does; ``down_quantised``: h,
    where that differs."""
    round_rows = quantised_rows if quantised else torch.Tensor.double
    down_quantised = quantised if down_quantised is None else down_quantised
    round_hidden = quantised_rows if down_quantised else torch.Tensor.double
    rows = round_rows(x)
    out = torch.zeros(x.shape[0], spec.hidden, dtype=torch.float64)
    for e in range(spec.num_experts):
        token, slot = (ids == e).nonzero(as_tuple=True)
        if token.numel() == 0:
            continue

        def linear(part: str, rows: Tensor, e: int = e) -> Tensor:
            y = rows @ weights[e, part].double().T
            return y + weights[e, f"{part}_bias"].double() if spec.has_bias else y

        up = linear("up", rows[token])
        gate = linear("gate", rows[token]) if spec.has_gate else up
        h = round_hidden(activate(spec.activation, gate, up, spec.has_gate))
        out.index_add_(0, token, w[token, slot].double()[:, None] * linear("down", h))
    return out


def relative(got: Tensor, want: Tensor) -> float:
    """Norm of the difference over the norm of the reference."""
    return float((got.double() - want.double()).norm() / want.double().norm())
