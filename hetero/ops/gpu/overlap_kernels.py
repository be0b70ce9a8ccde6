"""The two halves of a kernel that begins while the one before it ends; see ``overlap``."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def let_next(PDL: tl.constexpr):
    """First of all: the next kernel may begin when every program of this one has."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def await_last(PDL: tl.constexpr):
    """What kernels before this one wrote can be read after it, and not before. Loads that stand before it are
    not put off beyond it."""
    tl.debug_barrier()
    if PDL:
        gdc_wait()
