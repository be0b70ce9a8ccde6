"""Every uninitialised torch tensor is filled with NaN, so that an output nobody writes shows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hetero import cpu


@pytest.fixture(autouse=True)
def poisoned_outputs() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def same_pool() -> Iterator[None]:
    threads = cpu.threads()
    yield
    cpu.set_threads(threads)
