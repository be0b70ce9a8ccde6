"""The backend of the kt-kernel package: refusals everywhere, its numbers where the package is installed."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from hetero.core import Activation, ActKind, ExpertSpec, InputError, MachineError
from hetero.formats import parse_format
from hetero.ops.experts import make_backend
from hetero.ops.kt_kernel import INSTALL, KtExperts, check_spec, load_package
from hetero.ops.reference import TorchExperts, expert_parts

SPEC = ExpertSpec(num_experts=8, hidden=512, intermediate=256, top_k=2)
HERE = find_spec("kt_kernel") is not None
needs_package = pytest.mark.skipif(not HERE, reason=f"kt-kernel is not installed ({INSTALL})")

# Measured relative errors are 0.004, 0.02 and 0.25 on Gaussian weights; its int4 has one scale a row.
LIMITS = {"bf16": 0.01, "int8": 0.05, "int4": 0.4}


@pytest.mark.parametrize(
    ("spec", "fmt", "told"),
    [
        (SPEC, "f32", "format 'f32'"),
        (SPEC, "int4 g64", "format 'int4 g64'"),
        (SPEC, "int4a", "format 'int4a g32'"),
        (replace(SPEC, has_bias=True), "int8", "biases"),
        (replace(SPEC, has_gate=False), "int8", "without a gate"),
        (replace(SPEC, staged=True), "int8", "activation"),
        (replace(SPEC, activation=Activation(ActKind.GELU)), "int8", "activation"),
        (replace(SPEC, activation=Activation(up_limit=7.0)), "int8", "activation"),
        (replace(SPEC, intermediate=200), "int8", "512 x 200"),
    ],
)
def test_what_it_cannot_serve_is_refused_by_name(spec: ExpertSpec, fmt: str, told: str) -> None:
    with pytest.raises(InputError, match="backend 'kt_kernel' does not serve") as caught:
        make_backend(spec, {"backend": "kt_kernel", "format": fmt})
    assert told in str(caught.value)


def test_what_it_serves_passes_the_check() -> None:
    for fmt in LIMITS:
        check_spec(SPEC, parse_format(fmt))


def test_an_instruction_set_is_refused() -> None:
    with pytest.raises(InputError, match="no isa 'avx2'"):
        make_backend(SPEC, {"backend": "kt_kernel", "format": "int8", "isa": "avx2"})


def test_an_absent_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kt_kernel", None)
    with pytest.raises(MachineError, match="not installed") as caught:
        load_package()
    assert INSTALL in str(caught.value)
    assert caught.value.exit_code == 3


def test_a_package_that_does_not_start_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("broken")
    (folder / "kt_kernel.py").write_text("raise ImportError('libnuma.so.1: no such file')")
    monkeypatch.delitem(sys.modules, "kt_kernel", raising=False)
    monkeypatch.syspath_prepend(folder)
    with pytest.raises(MachineError, match="does not start here: libnuma"):
        load_package()


def filled(backends: list[KtExperts | TorchExperts], spec: ExpertSpec) -> None:
    generator = torch.Generator().manual_seed(3)
    for e in range(spec.num_experts):
        for part, shape in expert_parts(spec).items():
            weight = torch.randn(shape, generator=generator) / shape[-1] ** 0.5
            for backend in backends:
                backend.put(e, part, weight)


@needs_package
@pytest.mark.parametrize("fmt", LIMITS)
@pytest.mark.parametrize("tokens", [1, 5, 64, 1100])
def test_it_agrees_with_the_reference(fmt: str, tokens: int) -> None:
    ours, theirs = TorchExperts(SPEC), make_backend(SPEC, {"backend": "kt_kernel", "format": fmt})
    assert isinstance(theirs, KtExperts)
    with pytest.raises(RuntimeError, match="incomplete"):
        theirs.forward(torch.zeros(1, 512), torch.zeros(1, 2, dtype=torch.int64), torch.ones(1, 2))
    assert len(theirs.missing()) == 24
    filled([ours, theirs], SPEC)
    assert theirs.missing() == []
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, SPEC.hidden, generator=generator)
    ids = torch.rand(tokens, 8, generator=generator).topk(2).indices
    weights = torch.rand(tokens, 2, generator=generator)
    want, got = ours.forward(x, ids, weights), theirs.forward(x, ids, weights)
    error = float((got - want).norm() / want.norm())
    print(f"kt_kernel ({theirs.isa}) {fmt}, {tokens} tokens: relative error {error:.4f}")  # noqa: T201
    assert got.dtype == torch.float32
    assert error < LIMITS[fmt]


@needs_package
def test_skipped_ids_contribute_zero() -> None:
    ours, theirs = TorchExperts(SPEC), KtExperts(SPEC, parse_format("bf16"))
    filled([ours, theirs], SPEC)
    x = torch.randn(3, SPEC.hidden, generator=torch.Generator().manual_seed(5))
    ids = torch.tensor([[0, -1], [8, 3], [-1, 8]])
    weights = torch.full((3, 2), 0.5)
    want, got = ours.forward(x, ids, weights), theirs.forward(x, ids, weights)
    assert float((got - want).norm() / want.norm()) < LIMITS["bf16"]
    assert bool((got[2] == 0).all())


@needs_package
def test_parts_arrive_once_and_fit() -> None:
    theirs = KtExperts(SPEC, parse_format("int8"))
    theirs.put(0, "up", torch.zeros(256, 512))
    with pytest.raises(InputError, match="arrived twice"):
        theirs.put(0, "up", torch.zeros(256, 512))
    with pytest.raises(InputError, match="has shape"):
        theirs.put(0, "down", torch.zeros(256, 512))
    with pytest.raises(InputError, match="no part"):
        theirs.put(8, "up", torch.zeros(256, 512))
