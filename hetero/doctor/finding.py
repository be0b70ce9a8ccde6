"""What the doctor finds, one line each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["ok", "warning", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. ``advice``: what to do, empty where nothing is to be done."""

    what: str
    status: Status
    value: str
    advice: str = ""
    figures: dict[str, Any] = field(default_factory=dict)  # measured numbers, by name

    def as_dict(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "status": self.status,
            "value": self.value,
            "advice": self.advice,
            "figures": self.figures,
        }


def ok(what: str, value: str, **figures: Any) -> Finding:
    return Finding(what, "ok", value, figures=figures)


def warning(what: str, value: str, advice: str, **figures: Any) -> Finding:
    return Finding(what, "warning", value, advice, figures)


def problem(what: str, value: str, advice: str, **figures: Any) -> Finding:
    return Finding(what, "problem", value, advice, figures)


Check = Callable[[], Finding | Iterable[Finding]]


def examine(what: str, check: Check) -> Iterator[Finding]:
    """What a check finds. One that fails in a way that it does not know is a warning, so that an odd machine
    still gets all the others."""
    try:
        found = check()
        yield from (found,) if isinstance(found, Finding) else found
    except Exception as error:
        reason = " ".join(str(error).split()) or "no message"
        yield warning(what, f"could not be checked: {type(error).__name__}: {reason}", "")
