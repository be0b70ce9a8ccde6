"""Models that the tests of the official clients share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.serving import Served


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    from tests.server.clients import model

    with model() as running:
        yield running


@pytest.fixture(scope="module")
def blunt() -> Iterator[Served]:
    """A model that does not think: a random one would never stop."""
    from tests.server.clients import TEMPLATE, model

    with model(TEMPLATE.replace("<think>", "")) as running:
        yield running
