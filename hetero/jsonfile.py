"""JSON from files that come from strangers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any


def parse(text: str | bytes, object_hook: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    """``json.loads`` that raises ValueError for whatever is wrong, also for what is nested so deeply that
    Python gives up."""
    try:
        return json.loads(text, object_hook=object_hook)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
