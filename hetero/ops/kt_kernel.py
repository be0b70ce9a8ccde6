"""Experts by the ``kt-kernel`` package, where it is installed: rule option ``backend: kt_kernel``.

docs/backends.md says how to install it and what it can serve.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import itertools
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch

from hetero.core import Activation, ExpertSpec, InputError, MachineError
from hetero.formats import Format, parse_format
from hetero.hw import cpu as hw_cpu
from hetero.hw import memory
from hetero.ops.reference import expert_parts

INSTALL = "pip install --no-deps kt-kernel==0.7.2"

# Formats -> its classes, the first that its build for this processor has.
_CLASSES = {
    parse_format("bf16"): ("AMXBF16_MOE", "AVX2BF16_MOE"),
    parse_format("int8"): ("AMXInt8_MOE",),
    parse_format("int4"): ("AMXInt4_MOE",),
}
_MULTIPLE = 128  # of hidden and intermediate sizes: a step of its int4 kernels along k
_MOST_TOKENS = 1024  # of one call; it sizes its buffers by this when it is made
_pools: dict[int, Any] = {}
_layers = itertools.count()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Within it, what the package prints goes to stderr: stdout is for answers and JSON."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _quiet_exit() -> None:
    """The package says goodbye when its threads end, after all of ours is printed."""
    sys.stdout.flush()
    os.dup2(2, 1)


def check_spec(spec: ExpertSpec, fmt: Format) -> None:
    """Raises InputError, naming the property, for experts that the package cannot compute as they are."""
    reasons = {
        f"format '{fmt}' (it has bf16, and int8 and int4 with a scale of its own for each row)": fmt
        not in _CLASSES,
        "experts with biases": spec.has_bias,
        "experts without a gate": not spec.has_gate,
        "an activation other than plain silu": spec.staged or spec.activation != Activation(),
        f"sizes that are no multiples of {_MULTIPLE} ({spec.hidden} x {spec.intermediate})": bool(
            spec.hidden % _MULTIPLE or spec.intermediate % _MULTIPLE
        ),
    }
    for reason, holds in reasons.items():
        if holds:
            raise InputError(f"backend 'kt_kernel' does not serve {reason}; use backend 'native'")


def load_package() -> Any:
    """The package. Raises MachineError saying how to install it, or why it does not start here."""
    try:
        return importlib.import_module("kt_kernel")
    except ModuleNotFoundError as error:
        if error.name != "kt_kernel":
            raise MachineError(f"backend 'kt_kernel': the package needs {error.name}") from None
        raise MachineError(f"backend 'kt_kernel': the package is not installed; {INSTALL}") from None
    except (ImportError, OSError, RuntimeError) as error:
        raise MachineError(f"backend 'kt_kernel': the package does not start here: {error}") from None


class KtExperts:
    """The interface of ``hetero.cpu.CpuExperts`` over one layer of kt-kernel.

    Weights gather in bfloat16 until the last has arrived; then the package packs them, and they are freed.
    ``isa`` must be "auto": the package chooses its build by itself.
    """

    def __init__(
        self, spec: ExpertSpec, fmt: Format, *, isa: str = "auto", threads: int | None = None
    ) -> None:
        check_spec(spec, fmt)
        if isa != "auto":
            raise InputError(f"backend 'kt_kernel' chooses its instruction set by itself: no isa '{isa}'")
        kt = load_package()
        self._ext = kt.kt_kernel_ext
        self.isa = str(kt.__cpu_variant__)
        self.spec = spec
        self.format = fmt
        self._class = next(
            (found for name in _CLASSES[fmt] if (found := getattr(self._ext.moe, name, None)) is not None),
            None,
        )
        if self._class is None:
            raise MachineError(
                f"backend 'kt_kernel': its build for this processor ({self.isa}) has no {fmt.name} kernels"
            )
        staging = spec.params * 2
        memory.require(
            staging + self.nbytes, f"{spec.num_experts} experts for kt_kernel, in bfloat16 and in {fmt.name},"
        )
        self._pool = _pool(self._ext, threads or hw_cpu.usable_threads())
        self._staged = {
            part: torch.empty(spec.num_experts, *shape, dtype=torch.bfloat16)
            for part, shape in expert_parts(spec).items()
        }
        self._missing = {(e, part) for e in range(spec.num_experts) for part in self._staged}
        self._moe: Any = None

    @property
    def nbytes(self) -> int:
        """Bytes of the weights as the package packs them, its scales left out."""
        return self.spec.params * {"bf16": 16, "int8": 8, "int4": 4}[self.format.name] // 8

    def put(self, expert: int, part: str, tensor: torch.Tensor) -> None:
        """Take one part of one expert, once, rounded to bfloat16; the last one starts the packing."""
        shape = expert_parts(self.spec).get(part)
        if shape is None or not 0 <= expert < self.spec.num_experts:
            raise InputError(f"no part {part!r} of expert {expert} here")
        if tuple(tensor.shape) != shape:
            raise InputError(f"{part} of expert {expert} has shape {list(tensor.shape)}, not {list(shape)}")
        if (expert, part) not in self._missing:
            raise InputError(f"{part} of expert {expert} arrived twice")
        self._staged[part][expert] = tensor.detach().to("cpu")
        self._missing.remove((expert, part))
        if not self._missing:
            self._pack()

    def missing(self) -> list[tuple[int, str]]:
        return sorted(self._missing)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x [T, hidden], ids [T, k], weights [T, k] -> [T, hidden] float32, computed from bfloat16 input.

        Ids outside [0, experts) contribute zero.
        """
        if self._moe is None:
            raise RuntimeError(f"experts are incomplete: {self.missing()[:4]} ... have not been put")
        used = (ids >= 0) & (ids < self.spec.num_experts)
        safe_ids = torch.where(used, ids, 0).to(torch.int64).contiguous()
        safe_weights = torch.where(used, weights, 0.0).to(torch.float32).contiguous()
        x = x.to(torch.bfloat16).contiguous()
        out = torch.empty(x.shape[0], self.spec.hidden, dtype=torch.bfloat16)
        for begin in range(0, x.shape[0], _MOST_TOKENS):
            end = min(begin + _MOST_TOKENS, x.shape[0])
            count = torch.tensor([end - begin], dtype=torch.int32)
            task = self._moe.forward_task(
                count.data_ptr(),
                ids.shape[1],
                safe_ids[begin:].data_ptr(),
                safe_weights[begin:].data_ptr(),
                x[begin:].data_ptr(),
                out[begin:].data_ptr(),
                False,
            )
            self._pool.submit(task)
            self._pool.sync()
        return out.float()

    def gate_up(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("kt_kernel computes whole experts; staged ones are refused when they are made")

    def down(self, h: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("kt_kernel computes whole experts; staged ones are refused when they are made")

    def _pack(self) -> None:
        spec = self.spec
        config = self._ext.moe.MOEConfig(spec.num_experts, spec.top_k, spec.hidden, spec.intermediate, 0)
        config.layer_idx = next(_layers)
        config.max_len = _MOST_TOKENS
        config.pool = self._pool.backend_
        for part, tensor in self._staged.items():
            setattr(config, f"{part}_proj", tensor.data_ptr())
            setattr(config, f"{part}_scale", 0)
        assert self._class is not None
        order = torch.arange(spec.num_experts, dtype=torch.int64)
        with _quiet():
            moe = self._class(config)
            self._pool.submit(moe.load_weights_task(order.data_ptr()))
            self._pool.sync()
        self._moe = moe
        self._staged.clear()


def _pool(ext: Any, threads: int) -> Any:
    """The package's threads, one set for the process and count; they spin, so more sets would compete."""
    if threads not in _pools:
        config = ext.WorkerPoolConfig()
        config.subpool_count = 1
        config.subpool_numa_map = [0]
        config.subpool_thread_count = [threads]
        with _quiet():
            _pools[threads] = ext.CPUInfer(config)
        if len(_pools) == 1:
            atexit.register(_quiet_exit)
    return _pools[threads]
