"""Makes Triton's interpreter quicker without a change to what it computes.

It patches its language for every launch, and again for every call of a function within a kernel; and for
every sum and product of integers it works out an assertion that is off. Both took more than half of the
time of tests of kernels.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any


def quicken(interpreter: Any) -> None:
    """Patch the language once, for good, and leave the assertions out where they are off."""
    # What launches and functions within kernels see: kernels name the one module, Triton's own the other.
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": interpreter.tl, "core": interpreter.tl.core}))
    patched = SimpleNamespace(restore=lambda: None)
    interpreter._patch_lang = lambda fn: patched
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)
