"""Routed experts as a module: submit tokens, do something else, collect their sum."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import nn

from hetero.core import ExpertSpec
from hetero.formats import Format, parse_format
from hetero.model.moe_types import gate_function
from hetero.ops.reference import TorchExperts
from hetero.ops.watch import Away, ExpertUse, timed, worked
from hetero.rules.options import expected_format
from hetero.trace import Reading, clock, recorder


class Backend(Protocol):
    """What computes experts: ``hetero.cpu.CpuExperts`` or ``TorchExperts``, which describe the methods."""

    def put(self, expert: int, part: Any, tensor: torch.Tensor) -> None: ...
    def missing(self) -> Sequence[tuple[int, str]]: ...
    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor: ...
    def gate_up(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor: ...
    def down(self, h: torch.Tensor, ids: torch.Tensor) -> torch.Tensor: ...
    @property
    def nbytes(self) -> int: ...


def make_backend(spec: ExpertSpec, options: Mapping[str, Any], name: str = "", layer: int = -1) -> Backend:
    """Allocate the experts of one block from a rule's ``experts`` options.

    ``name``: of the experts module, by which ``options["slots"]`` says how many experts RAM holds where the
    rest stays on disk. ``layer``: for the trace.

    A format that the checkpoint decides ("auto", "keep") is taken as if it were not quantised, unless
    ``hetero.model.keep`` has found the one that the module has.
    """
    backend = options.get("backend", "native")
    if backend == "torch":
        return TorchExperts(spec)
    if backend == "kt_kernel":
        from hetero.ops.kt_kernel import KtExperts

        return KtExperts(
            spec,
            stated_format(options.get("format", "int8")),
            isa=options.get("isa", "auto"),
            threads=options.get("threads"),
        )
    native: dict[str, Any] = {
        "isa": options.get("isa", "auto"),
        "threads": options.get("threads"),
        "numa": options.get("numa", "off"),
    }
    fmt = stated_format(options.get("format", "f32"))
    if "down_format" in options:
        native["down_format"] = stated_format(options["down_format"])
    slots = options.get("slots", {}).get(name)
    if slots is not None:
        from hetero.store.disk import DiskExperts

        return DiskExperts(spec, fmt, slots=slots, layer=layer, **native)
    from hetero.cpu import CpuExperts  # only here, so that the torch backend needs no extension

    return CpuExperts(spec, fmt, **native)


def stated_format(text: str) -> Format:
    """The format of an option, which a checkpoint may have decided."""
    known = text.partition(" ")[0].lower()
    return expected_format(text) if known in ("auto", "keep") else parse_format(text)


class Pending:
    """Experts at work. ``collect`` may be called once; it raises what the work raised."""

    def __init__(
        self, result: torch.Tensor | Future[torch.Tensor], like: torch.Tensor, away: Away | None = None
    ) -> None:
        self._result = result
        self._like = like
        self._away = away

    def collect(self) -> torch.Tensor:
        """The weighted sum [T, hidden], on the device and in the dtype of the submitted tokens."""
        result = self._result
        if isinstance(result, Future):
            if self._away is not None:
                self._away.collecting()
            result = result.result()
        if self._away is None:
            return result.to(device=self._like.device, dtype=self._like.dtype)
        return self._away.back(result, self._like)


class _Worker:
    """One thread for all blocks: the extension has its own pool, and blocks run one after the other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def submit(self, call: Callable[[], torch.Tensor]) -> Future[torch.Tensor]:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, thread_name_prefix="hetero-experts")
            return self._pool.submit(_without_grad, call)


def _without_grad(call: Callable[[], torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():  # a mode of the thread, so the worker enters it itself
        return call()


_worker = _Worker()


class CpuExpertsOp(nn.Module):
    """Takes the place of a transformers experts module, with its call: ``(x [T, H], ids [T, k], weights)``.

    The weights are in ``backend`` and are no torch parameters. ``overlap`` runs the experts on a thread of
    their own between ``submit`` and ``collect``; the result is the same. ``layer``: index of the layer that
    holds it, -1 where unknown; ``use``: which experts were chosen.
    """

    def __init__(
        self,
        spec: ExpertSpec,
        backend: Backend,
        original: nn.Module | None = None,
        *,
        overlap: bool = False,
        layer: int = -1,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.backend = backend
        self.overlap = overlap
        self.layer = layer
        self.use = ExpertUse(spec.num_experts)
        # Who takes the tokens instead, while a step is recorded: gives something to ``collect``.
        self.handed: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any] | None = None
        self._gate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
        if spec.staged:
            if original is None:
                raise ValueError("staged experts need the module whose gate they use")
            norm = getattr(original, "post_expert_norm", None)
            if norm is not None:
                self.post_expert_norm = norm
            self._gate = gate_function(_weightless(original))

    # Part of the loader's ExpertSink.
    def put(self, expert: int, part: str, tensor: torch.Tensor) -> None:
        self.backend.put(expert, part, tensor)

    def missing(self) -> list[tuple[int, str]]:
        return list(self.backend.missing())

    def bring(self, expert: int) -> None:
        """Have the memory of an expert that is put soon, where the backend can say which that is."""
        bring = getattr(self.backend, "bring", None)
        if bring is not None:
            bring(expert)

    # Part of the loader's CodeSink.
    def format_of(self, part: str) -> Format | None:
        """The packed format of a matrix; None where the backend takes floats alone."""
        backend: Any = self.backend
        if not hasattr(backend, "put_codes"):
            return None
        fmt: Format = backend.format_of(part)
        return fmt

    def put_codes(
        self, expert: int, part: str, codes: torch.Tensor, scales: torch.Tensor, extra: torch.Tensor | None
    ) -> None:
        backend: Any = self.backend
        backend.put_codes(expert, part, codes, scales, extra)

    def put_ggml(self, expert: int, part: str, type_name: str, data: torch.Tensor) -> None:
        backend: Any = self.backend
        backend.put_ggml(expert, part, type_name, data)

    def submit(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Pending:
        """Start on x [T, hidden] with ids and weights [T, k]. x must not change before ``collect``."""
        if self.handed is not None:
            return self.handed(x, ids, weights)  # type: ignore[no-any-return]
        watched = recorder.active
        leaves = self.overlap or x.device.type != "cpu"
        away = Away(self.layer, x) if watched and leaves else None
        # Routers may hand over a column of a larger tensor; the backend reads plain rows.
        host = x.detach().to("cpu").contiguous()
        host_ids = ids.detach().to("cpu", torch.int64).contiguous()
        host_weights = weights.detach().to("cpu", torch.float32).contiguous()
        if away is not None:
            away.moved(host, host_ids, host_weights)
        self.use.note(host_ids)
        compute = self._staged if self._gate is not None else self.backend.forward
        if self.overlap:

            def call() -> torch.Tensor:
                return compute(host, host_ids, host_weights)

            job = timed(call, self.layer, host_ids, self._reading) if watched else call
            return Pending(_worker.submit(job), x, away)
        start = clock() if watched else 0
        out = compute(host, host_ids, host_weights)
        if watched:
            worked(self.layer, start, host_ids, self._reading)
        return Pending(out, x, away)

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert's packed weights."""
        own: int | None = getattr(self.backend, "expert_bytes", None)
        return self.backend.nbytes // self.spec.num_experts if own is None else own

    @cached_property
    def _reading(self) -> Reading:
        return Reading(self.spec.num_experts, self.expert_bytes)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Submit and collect at once, for blocks whose order of work is not known here."""
        return self.submit(x, ids, weights).collect()

    def _staged(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The projections by the backend; gate and norm by the model's own code between them."""
        assert self._gate is not None
        projected = self.backend.gate_up(x, ids)
        gate, up = projected.chunk(2, dim=-1) if self.spec.has_gate else (projected, projected)
        y = self.backend.down(self._gate(gate, up).float().contiguous(), ids)
        if hasattr(self, "post_expert_norm"):
            device = next(self.post_expert_norm.parameters(), y).device
            y = self.post_expert_norm(y.to(device)).to("cpu", torch.float32)
        used = ((ids >= 0) & (ids < self.spec.num_experts)).unsqueeze(-1)
        return torch.where(used, y * weights.unsqueeze(-1), 0.0).sum(dim=1)

    def extra_repr(self) -> str:
        s = self.spec
        return (
            f"{s.num_experts} x ({s.hidden} -> {s.intermediate}), staged={s.staged}, overlap={self.overlap}"
        )


def _weightless(experts: nn.Module) -> nn.Module:
    """A copy of an experts module that has its gate but not its projections."""
    bare = experts.__class__.__new__(experts.__class__)
    bare.__dict__.update(experts.__dict__)
    bare._parameters = {}
    return bare
