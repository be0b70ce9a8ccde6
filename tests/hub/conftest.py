from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest

from hetero import transfer
from tests.hub.small_hub import Hub, running


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub of our own, an empty cache, and no waiting between attempts."""
    for name in ("HF_TOKEN", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf-home"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    monkeypatch.setattr(transfer, "WAIT_S", 0.0)
    with running() as small:
        monkeypatch.setenv("HF_ENDPOINT", small.url)
        yield small


@pytest.fixture(scope="module", autouse=True)
def _session() -> Iterator[None]:
    """The library keeps its client, whose making takes a quarter of a second."""
    yield
    huggingface_hub.close_session()
