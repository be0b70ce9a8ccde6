"""What tests with tiny models of transformers share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import transformers

from hetero import cpu


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    """One thread, no progress bars, and no advice about the tokens of tiny configurations."""
    torch_threads, threads = torch.get_num_threads(), cpu.threads()
    level = transformers.logging.get_verbosity()
    torch.set_num_threads(1)
    cpu.set_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    yield
    transformers.utils.logging.enable_progress_bar()
    transformers.logging.set_verbosity(level)
    cpu.set_threads(threads)
    torch.set_num_threads(torch_threads)
